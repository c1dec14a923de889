"""Groups of services: what starts ends, whoever fails, and whoever stops waiting."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fakes.waiting import until

from penstock.gateway.process import services
from penstock.gateway.process.services import ServiceGroup
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError


class Part:
    """Notes what happens to it in a list that the parts of a group share."""

    def __init__(self, name: str, log: list[str], *errors: Exception) -> None:
        self._name, self._log, self._errors = name, log, list(errors)
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def start(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self._log.append(f"{self._name} starts")

    async def stop(self) -> None:
        await self.may_end.wait()
        self._log.append(f"{self._name} ends")


async def test_a_stop_that_nobody_waits_for_goes_on() -> None:
    log = list[str]()
    last = Part("b", log)
    group = ServiceGroup({"a": Part("a", log), "b": last})
    await group.start()
    last.may_end.clear()
    stopping = asyncio.ensure_future(group.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    last.may_end.set()
    await group.stop()
    assert log == ["a starts", "b starts", "b ends", "a ends"]


async def test_those_before_one_that_fails_are_stopped() -> None:
    log = list[str]()
    group = ServiceGroup({"a": Part("a", log), "b": Part("b", log, ValueError("no"))})
    with pytest.raises(ValueError, match="no"):
        await group.start()
    assert log == ["a starts", "b ends", "a ends"]


async def test_a_patient_group_goes_on_and_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "RETRY_S", 0.01)
    log, damaged = list[str](), DamagedRecordError("a record is damaged")
    parts = {
        "a": Part("a", log, TapeError("full"), ValueError("a bug")),
        "b": Part("b", log, damaged, damaged, TapeError("full")),
    }
    group = ServiceGroup(parts, patient=True)
    await group.start()
    await until(lambda: sorted(log) == ["a starts", "b starts"])
    await group.stop()
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert [text for text in told if "damaged" in text] == [
        "a part of the gateway (b) waits for the tape: a record is damaged"
    ]
    assert any("(a) does not start" in text for text in told)
