"""Services start in their order and end in the reverse one; one that does not end as it should keeps no other from its
end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from fakes.rig import Within
from fakes.waiting import until

from penstock.gateway.app import open_store
from penstock.gateway.process import services
from penstock.gateway.process.services import ServiceGroup
from penstock.gateway.tape.store.directory import TapeError


@dataclass
class Part:
    """A service that the tape does not let start so many times."""

    name: str
    log: list[str]
    refused: int = 0

    async def start(self) -> None:
        self.refused -= 1
        if self.refused >= 0:
            raise TapeError("the tape is full")
        self.log.append(f"{self.name} starts")

    async def stop(self) -> None:
        self.log.append(f"{self.name} ends")


async def test_a_service_that_the_tape_does_not_let_start_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()
    parts = {name: Part(name, log, refused) for name, refused in (("a", 0), ("b", 2), ("c", 0))}
    monkeypatch.setattr(services, "RETRY_S", 0.01)
    group = ServiceGroup(parts, patient=True)
    await group.start()
    assert log == ["a starts", "c starts"]
    await until(lambda: log[2:] == ["b starts"])
    await group.stop()
    await group.stop()
    assert log[3:] == ["c ends", "b ends", "a ends"]


async def test_a_service_that_waits_does_not_start_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    log = list[str]()
    monkeypatch.setattr(services, "RETRY_S", 0.01)
    group = ServiceGroup({"a": Part("a", log, 2)}, patient=True)
    await group.start()
    await group.stop()
    await asyncio.sleep(0.1)
    assert log == ["a ends"]


async def test_others_report_that_the_tape_does_not_let_them_start() -> None:
    with pytest.raises(TapeError):
        await ServiceGroup({"a": Part("a", [], 1)}).start()


@pytest.mark.parametrize("part", ["coverage", "retention", "adapter_keeper", "webhooks"])
async def test_calls_are_on_the_tape_all_the_same(within: Within, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    ended = list[str]()

    async def fails() -> None:
        raise RuntimeError(part)

    async def ends() -> None:
        ended.append("dispatcher")
        await stop()

    async with within() as rig:
        stop = rig.gateway.dispatcher.stop
        monkeypatch.setattr(rig.gateway.dispatcher, "stop", ends)
        monkeypatch.setattr(getattr(rig.gateway, part), "stop", fails)
        _ = await rig.passes()
    assert ended == ["dispatcher"]
    with open_store(rig.base.data) as store:
        assert [span.status for span in store.spans(rig.rollout)] == ["ok"]
