"""The keeper of adapters, and those who wait for it: it outlives each, and none of them waits when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from penstock.gateway.app import open_store
from penstock.gateway.releases.adapter_keeper import AdapterKeeper

PATIENCE = 60.0


def no_session() -> aiohttp.ClientSession:
    raise AssertionError("no server is asked")


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncGenerator[AdapterKeeper]:
    with open_store(tmp_path) as store:
        made = AdapterKeeper(store, {}, no_session, lambda: 1)
        made.start()
        yield made
        await made.stop()


async def test_who_waits_may_leave(keeper: AdapterKeeper) -> None:
    """A worker that has asked dies: what it waits for is cancelled."""
    assert keeper.repaired().cancel()
    async with asyncio.timeout(PATIENCE):
        await keeper.repaired()
        await keeper.repaired()


async def test_nobody_waits_when_it_has_stopped(keeper: AdapterKeeper) -> None:
    """Calls that are served to their end by a process that has handed over."""
    queued = keeper.repaired()
    await keeper.stop()
    assert queued.done()
    assert keeper.repaired().done()


async def test_who_waits_while_servers_are_looked_at_goes_on_too(
    keeper: AdapterKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = asyncio.Event()

    async def settle(lost: bool) -> None:
        looking.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(keeper, "settle", settle)
    waiting = keeper.repaired()
    async with asyncio.timeout(PATIENCE):
        await looking.wait()
    await keeper.stop()
    assert waiting.done()


async def test_a_fault_does_not_end_it(
    keeper: AdapterKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def settle(lost: bool) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "penstock.releases"):
        patch.setattr(keeper, "settle", settle)
        async with asyncio.timeout(PATIENCE):
            await keeper.repaired()
    assert "adapters are not looked after for now" in caplog.text
    async with asyncio.timeout(PATIENCE):
        await keeper.repaired()
