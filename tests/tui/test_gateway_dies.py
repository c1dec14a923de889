"""The gateway is killed and comes back while keys are pressed: nothing crashes, a selection stays on its row, and what
is shown is of the gateway and of the tape that are asked."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
from fakes import process
from fakes.ports import steady_ports
from fakes.process import PATIENCE, Gateway
from fakes.screens import LARGE, app_of, options, running, until
from fakes.tui_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.tui.keys import KEYS
from penstock.tui.main_screen import MainScreen
from penstock.tui.settings import GatewayContext

pytestmark = pytest.mark.slow

DIES, RETURNS = "DIES", "RETURNS"
PRESSED = sorted({key for row in KEYS if row.id not in ("quit", "suspend") for key in row.keys})
STEPS = st.one_of(st.sampled_from([DIES, RETURNS]), st.sampled_from(PRESSED), st.sampled_from("rols:x"))


@asynccontextmanager
async def gateway(home: Path) -> AsyncGenerator[Gateway]:
    """One with tasks on it, on a port that it keeps."""
    async with process.running(home, "", port=steady_ports(1)[0]) as made:
        await enqueue(made, range(12))
        yield made


async def enqueue(made: Gateway, numbers: range) -> None:
    """Tasks `t00`, `t01` ..."""
    async with Client(made.url) as client:
        await client.enqueue([RolloutSpec(id=f"t{number:02}", input=number, group="t") for number in numbers])


def main_of(pilot: Pilot[None]) -> MainScreen:
    """The screen of the app."""
    return app_of(pilot).main


async def step(pilot: Pilot[None], made: Gateway, what: str) -> None:
    """One thing that happens."""
    if what == DIES:
        await made.kill()
    elif what == RETURNS:
        await made.restart()
    else:
        await pilot.press(what)


async def survives(home: Path, steps: list[str]) -> None:
    """Whatever happens, the app is there at the end and shows what the gateway has."""
    async with gateway(home) as made, running(options(made.url, "rollouts", read_only=True), LARGE) as pilot:
        await until(pilot, lambda text: "t11" in text)
        for what in steps:
            await step(pilot, made, what)
        await made.restart()
        # Whatever was open is left, by as many keys as there can be dialogs and lines, and the list looked at anew.
        await pilot.press("escape", "escape", "escape", "escape")
        main_of(pilot).penstock.loader.paused = False
        main_of(pilot).penstock.go(["workers"])
        main_of(pilot).penstock.go(["rollouts"])
        await until(pilot, lambda text: "live" in text.splitlines()[0] and "t11" in text)
        chosen = main_of(pilot).shown.chosen
        assert chosen is not None
        assert chosen in main_of(pilot).ids


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=14))
def test_no_keys_crash_it_while_the_gateway_dies_and_returns(tmp_path: Path, steps: list[str]) -> None:
    asyncio.run(survives(Path(mkdtemp(dir=tmp_path)), steps))


async def test_a_selection_stays_on_its_row_when_the_gateway_returns_with_more(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made, running(options(made.url, "rollouts"), LARGE) as pilot:
        await until(pilot, lambda text: "t11" in text)
        await pilot.press("j", "j", "j")
        await until(pilot, lambda text: "▶ t08" in text)
        await made.kill()
        await until(pilot, lambda text: "lost for" in text.splitlines()[0])
        await pilot.press("j")
        text = await until(pilot, lambda text: "▶ t07" in text)
        assert "t11" in text, "what was seen stays"
        await made.restart()
        await enqueue(made, range(12, 20))
        await until(pilot, lambda text: "t19" in text and "live" in text.splitlines()[0])
        await until(pilot, lambda text: "▶ t07" in text)
        assert main_of(pilot).shown.chosen == "t07"


async def test_the_feed_is_followed_again_when_the_gateway_returns_with_another_tape(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made, running(options(made.url, "rollouts"), LARGE) as pilot:
        await until(pilot, lambda text: "t11" in text)
        await made.kill()
        await until(pilot, lambda text: "lost for" in text.splitlines()[0])
        shutil.rmtree(made.data)
        await made.restart()
        await until(pilot, lambda text: "live" in text.splitlines()[0])
        app = app_of(pilot)
        told, number = app.traffic.rate_series(lambda _: 1).now, 12
        async with asyncio.timeout(PATIENCE):
            while app.traffic.rate_series(lambda _: 1).now <= told:
                await enqueue(made, range(number, number + 1))
                number += 1
                await pilot.pause(0.2)
        await until(pilot, lambda text: f"t{number - 1}" in text)


async def test_what_is_shown_is_of_the_tape_that_the_gateway_returns_with(tmp_path: Path) -> None:
    """Also where that has more changes already: the place that was reached is one of it, too."""
    async with gateway(tmp_path / "other") as other:
        await enqueue(other, range(50, 90))
    async with gateway(tmp_path / "one") as made, running(options(made.url, "rollouts"), LARGE) as pilot:
        await until(pilot, lambda text: "t11" in text)
        await made.kill()
        await until(pilot, lambda text: "lost for" in text.splitlines()[0])
        shutil.rmtree(made.data)
        shutil.copytree(other.data, made.data)
        await made.restart()
        text = await until(pilot, lambda text: "t89" in text and "live" in text.splitlines()[0])
        assert "t11" not in text


async def test_a_screen_that_was_left_open_is_forgotten_with_the_tape(tmp_path: Path) -> None:
    async with gateway(tmp_path) as made, running(options(made.url)) as pilot:
        await until(pilot, lambda text: "t11" in text and "live" in text)
        await pilot.press("j", "enter")
        await until(pilot, lambda text: "Rollout t10" in text and "queuing" in text)
        await made.kill()
        shutil.rmtree(made.data)
        await made.restart()
        await enqueue(made, range(50, 52))
        await pilot.press("escape", "escape")
        text = await until(pilot, lambda text: "t51" in text and "t50" in text)
        assert not re.search(r"t[01]\d", text)


async def test_another_context_shows_its_own_rows(world: World, tmp_path: Path) -> None:
    async with gateway(tmp_path) as other:
        both = {"here": GatewayContext(gateway=world.url), "there": GatewayContext(gateway=other.url)}
        async with running(replace(options(world.url), contexts=both, context="here")) as pilot:
            await until(pilot, lambda text: world.rollouts[0] in text)
            await pilot.press("space", "colon", *"ctx there", "enter")
            text = await until(pilot, lambda text: "t11" in text)
            assert world.rollouts[0] not in text
            await pilot.press("minus")
            await until(pilot, lambda text: "There was no screen before this one." in text)
            assert not main_of(pilot).marked
