"""What is shown is of the gateway that is asked: not of the one before it, nor of a tape that it had before."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.ports import steady_ports
from fakes.process import Gateway, write_config
from fakes.screens import options, running, until
from fakes.tui_world import World

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.tui.app import PenstockApp
from penstock.tui.settings import Context

pytestmark = pytest.mark.slow


async def enqueued(url: str, *ids: str) -> None:
    """Tasks on a gateway."""
    async with Client(url) as client:
        await client.enqueue([RolloutSpec(id=id, input="x") for id in ids])


async def test_another_context_shows_its_own_rows(world: World, tmp_path: Path) -> None:
    other = Gateway(write_config(tmp_path, ""), tmp_path / "data", tmp_path / "stderr")
    await other.start()
    try:
        await enqueued(other.url, "elsewhere")
        both = {"here": Context(gateway=world.url), "there": Context(gateway=other.url)}
        async with running(replace(options(world.url), contexts=both, context="here")) as pilot:
            await until(pilot, lambda text: world.rollouts[0] in text)
            await pilot.press("space", "colon", *"ctx there", "enter")
            text = await until(pilot, lambda text: "elsewhere" in text)
            assert world.rollouts[0] not in text
            await pilot.press("minus")
            await until(pilot, lambda text: "There was no screen before this one." in text)
            assert isinstance(pilot.app, PenstockApp)
            assert not pilot.app.main.marked
    finally:
        await other.terminate()


async def test_a_gateway_that_comes_back_with_another_tape(tmp_path: Path) -> None:
    made = Gateway(write_config(tmp_path, ""), tmp_path / "data", tmp_path / "stderr")
    await made.start(steady_ports(1)[0])
    try:
        await enqueued(made.url, *(f"old{number}" for number in range(20)))
        async with running(options(made.url)) as pilot:
            await until(pilot, lambda text: "old19" in text and "live" in text)
            await pilot.press("j", "enter")
            await until(pilot, lambda text: "Rollout old18" in text and "queuing" in text)
            await made.kill()
            shutil.rmtree(tmp_path / "data")
            await made.restart()
            await enqueued(made.url, "new0", "new1")
            await pilot.press("escape", "escape")
            text = await until(pilot, lambda text: "new1" in text and "new0" in text)
            assert "old" not in text
    finally:
        await made.terminate()
