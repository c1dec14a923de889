"""What is shown is of the gateway that is asked: not of the one before it, nor of a tape that it had before."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import StartGateway
from fakes import process
from fakes.ports import steady_ports
from fakes.screens import app_of, options, running, until
from fakes.tui_world import World

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.tui.settings import Context

pytestmark = pytest.mark.slow


async def enqueued(url: str, *ids: str) -> None:
    """Tasks on a gateway."""
    async with Client(url) as client:
        await client.enqueue([RolloutSpec(id=id, input="x") for id in ids])


async def test_another_context_shows_its_own_rows(world: World, start_gateway: StartGateway) -> None:
    other = await start_gateway("")
    await enqueued(other.url, "elsewhere")
    both = {"here": Context(gateway=world.url), "there": Context(gateway=other.url)}
    async with running(replace(options(world.url), contexts=both, context="here")) as pilot:
        await until(pilot, lambda text: world.rollouts[0] in text)
        await pilot.press("space", "colon", *"ctx there", "enter")
        text = await until(pilot, lambda text: "elsewhere" in text)
        assert world.rollouts[0] not in text
        await pilot.press("minus")
        await until(pilot, lambda text: "There was no screen before this one." in text)
        assert not app_of(pilot).main.marked


async def test_a_gateway_that_comes_back_with_another_tape(tmp_path: Path) -> None:
    async with process.running(tmp_path, "", port=steady_ports(1)[0]) as made:
        await enqueued(made.url, *(f"old{number}" for number in range(20)))
        async with running(options(made.url)) as pilot:
            await until(pilot, lambda text: "old19" in text and "live" in text)
            await pilot.press("j", "enter")
            await until(pilot, lambda text: "Rollout old18" in text and "queuing" in text)
            await made.kill()
            shutil.rmtree(made.data)
            await made.restart()
            await enqueued(made.url, "new0", "new1")
            await pilot.press("escape", "escape")
            text = await until(pilot, lambda text: "new1" in text and "new0" in text)
            assert "old" not in text
