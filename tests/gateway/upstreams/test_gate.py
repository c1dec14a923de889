"""Calls that wait while weights are changed: in order, with a bound, each told exactly once."""

from __future__ import annotations

import asyncio
import re
from time import monotonic

import pytest
from fakes.waiting import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.errors import Refusal, UpstreamFault
from penstock.gateway.upstreams.gate import Gate


class Log(list["Waiting"]):
    """Who was told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def add(self, one: Waiting) -> None:
        self.append(one)
        self._news.set()

    async def until(self, count: int) -> None:
        """Until so many were told."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self) < count:
                self._news.clear()
                await self._news.wait()


class Waiting:
    """A call; what it is told goes into a log that all share."""

    def __init__(self, number: int, log: Log) -> None:
        self.number = number
        self.log = log
        self.refusals: list[Refusal] = []
        self.opened = 0

    def on_open(self) -> None:
        self.opened += 1
        self.log.add(self)

    def on_refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)
        self.log.add(self)

    @property
    def told(self) -> int:
        return self.opened + len(self.refusals)


def queued(gate: Gate, count: int, log: Log) -> list[Waiting]:
    made = [Waiting(number, log) for number in range(count)]
    for one in made:
        gate.wait(one)
    return made


async def test_calls_wait_and_go_in_order() -> None:
    gate, log = Gate("up"), Log()
    assert not gate.must_wait
    gate.pause(60)
    calls = queued(gate, 1000, log)
    assert (gate.must_wait, gate.paused, gate.waiting, log) == (True, True, 1000, [])
    gate.open()
    assert not gate.paused
    await log.until(1000)
    assert log == calls
    assert {one.opened for one in calls} == {1}
    assert (gate.figures.calls, gate.figures.refused, gate.waiting) == (1000, 0, 0)
    assert gate.figures.seconds > 0


async def test_others_are_served_while_many_go_and_nobody_overtakes() -> None:
    gate, log = Gate("up"), Log()
    gate.pause(60)
    calls = queued(gate, 1000, log)
    gate.open()
    turns = 0
    late = Waiting(1000, log)
    while gate.must_wait:
        if turns == 1:
            gate.wait(late)
        turns += 1
        await asyncio.sleep(0)
    assert log == [*calls, late]
    assert turns > 10


async def test_after_the_bound_calls_are_refused_until_somebody_acts() -> None:
    gate, log = Gate("up"), Log()
    began = monotonic()
    gate.pause(0.05)
    calls = queued(gate, 40, log)
    await log.until(40)
    assert monotonic() - began >= 0.05
    assert log == calls
    refusal = calls[0].refusals[0]
    assert isinstance(refusal, UpstreamFault)
    assert (refusal.status, refusal.kind) == (504, "paused")
    # However late the loop comes to it.
    assert re.match(r"upstream 'up' has been paused for \d+\.\d s while its weights change, ", refusal.message)
    assert "within its bound of 0.05 s; POST /api/upstreams/up/open opens it" in refusal.message
    # What comes later does not wait in vain.
    (late,) = queued(gate, 1, log)
    assert (gate.must_wait, gate.paused, len(late.refusals)) == (True, True, 1)
    assert gate.figures.refused == 41
    # Held anew, calls wait again; opened, they go.
    gate.pause(60)
    (third,) = queued(gate, 1, log)
    assert third.told == 0
    gate.open()
    assert (third.opened, gate.must_wait) == (1, False)


async def test_pausing_again_moves_the_deadline_and_not_the_beginning() -> None:
    gate, log = Gate("up"), Log()
    gate.pause(0.03)
    since = gate.paused_since
    (call,) = queued(gate, 1, log)
    gate.pause(60)
    await asyncio.sleep(0.06)  # the first deadline passes
    assert (call.told, gate.paused_since, gate.bound_s) == (0, since, 60)
    gate.open()
    assert call.opened == 1


async def test_a_client_that_goes_is_not_told() -> None:
    gate, log = Gate("up"), Log()
    gate.pause(60)
    first, gone, last = queued(gate, 3, log)
    gate.leave(gone)
    gate.leave(gone)
    assert gate.waiting == 2
    gate.open()
    assert log == [first, last]
    assert gone.told == 0


async def test_one_that_makes_another_leave_while_they_are_told() -> None:
    """As a call that ends may close what else its client waits for."""
    gate, log = Gate("up"), Log()

    class Rude(Waiting):
        def on_open(self) -> None:
            super().on_open()
            gate.leave(victim)

    gate.pause(60)
    rude, victim = Rude(0, log), Waiting(1, log)
    gate.wait(rude)
    gate.wait(victim)
    gate.open()
    assert log == [rude]
    assert not gate.must_wait


async def test_a_call_that_fails_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    gate, log = Gate("up"), Log()

    class Broken(Waiting):
        def on_open(self) -> None:
            raise ZeroDivisionError("planted")

    gate.pause(60)
    gate.wait(Broken(0, log))
    (call,) = queued(gate, 1, log)
    gate.open()
    assert call.opened == 1
    assert "a call that waited for upstream 'up' could not go on" in caplog.text


async def test_paused_again_while_they_go_the_rest_waits() -> None:
    gate, log = Gate("up"), Log()
    gate.pause(60)
    calls = queued(gate, 100, log)
    gate.open()
    gone = len(log)
    assert 0 < gone < 100
    gate.pause(60)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (len(log), gate.waiting) == (gone, 100 - gone)
    gate.open()
    await log.until(100)
    assert log == calls
    assert not gate.must_wait


async def test_one_that_holds_it_again_keeps_the_others_waiting() -> None:
    gate, log = Gate("up"), Log()

    class Holding(Waiting):
        def on_open(self) -> None:
            super().on_open()
            gate.pause(60)

    gate.pause(60)
    gate.wait(Holding(0, log))
    (call,) = queued(gate, 1, log)
    gate.open()
    assert (gate.must_wait, gate.paused, call.told) == (True, True, 0)
    gate.open()
    assert (gate.must_wait, call.opened) == (False, 1)


@pytest.mark.parametrize("bound", [0, -1, 3600.5, float("inf"), float("nan")])
async def test_a_useless_bound_is_refused(bound: float) -> None:
    gate = Gate("up")
    with pytest.raises(ValueError, match=r"bound_s must be above 0 and at most 3600 seconds \(found"):
        gate.pause(bound)
    assert not gate.must_wait


async def test_opening_what_is_open_is_nothing() -> None:
    gate = Gate("up")
    gate.open()
    assert (gate.must_wait, gate.paused, gate.figures.calls) == (False, False, 0)


STEPS = st.lists(st.sampled_from(["pause", "open", "wait", "leave", "turn"]), max_size=60)


@given(STEPS)
def test_whatever_happens_each_is_told_once_and_in_order(steps: list[str]) -> None:
    async def play() -> None:
        gate, log, calls, left = Gate("up"), Log(), list[Waiting](), set[Waiting]()
        for step in steps:
            if step == "pause":
                gate.pause(60)
            elif step == "open":
                gate.open()
            elif step == "wait" and gate.must_wait:
                for _ in range(20):
                    calls.append(Waiting(len(calls), log))
                    gate.wait(calls[-1])
            elif step == "leave" and calls:
                one = calls[len(calls) // 2]
                left |= {one} if not one.told else set()
                gate.leave(one)
            elif step == "turn":
                await asyncio.sleep(0)
            assert gate.waiting == sum(not one.told and one not in left for one in calls)
        gate.open()
        await log.until(len(calls) - len(left))
        assert [one.number for one in log] == [one.number for one in calls if one not in left]
        assert not gate.must_wait
        assert gate.figures.calls == len(calls)

    asyncio.run(play())
