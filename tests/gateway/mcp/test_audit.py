"""What policing leaves behind: releases react to a hard violation when it is on the tape, and not before."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from penstock.gateway.mcp.audit import Audit
from penstock.gateway.store.records import Entry


class Around:
    """A recorder, a dispatcher and releases that note what they are told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def flush(self) -> None:
        self.told.append("flushed")

    async def violated(self, rollout: str) -> None:
        self.told.append(rollout)

    async def add(self, entries: list[Entry]) -> None:
        self.told.append([entry.name for entry in entries])
        if entries[0].name == "bad":
            raise ValueError("the tape is full")


def audit(around: Around) -> Audit:
    return Audit(cast(Any, None), cast(Any, around), cast(Any, around), cast(Any, around), lambda: 7)


async def test_a_hard_violation_is_on_the_tape_first() -> None:
    around = Around()
    made = audit(around)
    made.violated("r1")
    # The call that it is about ends in a later turn of the loop.
    waiting = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(waiting.set_result, None)
    await waiting
    around.told.append("recorded")
    await made.finish(60)
    assert around.told == ["recorded", "flushed", "r1"]


async def test_what_cannot_be_noted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    around = Around()
    made = audit(around)
    with caplog.at_level(logging.ERROR):
        for name in ("good", "bad"):
            made.tell(Entry("r1", "a1", kind="event", name=name))
        await made.finish(60)
        await asyncio.sleep(0)
    assert around.told == [["good"], ["bad"]]
    assert "could not be noted: the tape is full" in caplog.text
