"""Calls that wait while an upstream's weights are changed: in order, with a bound, each told exactly once; and, at the
socket, served when it is over."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from time import monotonic

import pytest
from fakes.odd import Step, abort, close, gone, request, send, wait
from fakes.raw import body_of, chunk, events_head, reply
from fakes.rig import Inside, Within
from fakes.two_upstreams import Two
from fakes.waiting import News, until
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.traffic.upstreams.pool import UpstreamGate
from penstock.gateway.wire.http.request import Refusal, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection


class Log(list["Waiting"]):
    """Who was told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._news = News()

    def add(self, one: Waiting) -> None:
        self.append(one)
        self._news.tell()

    async def until(self, count: int) -> None:
        """Until so many were told."""
        await self._news.until(lambda: len(self) >= count)


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


def queued(gate: UpstreamGate, count: int, log: Log) -> list[Waiting]:
    made = [Waiting(number, log) for number in range(count)]
    for one in made:
        gate.wait(one)
    return made


async def test_calls_wait_and_go_in_order() -> None:
    gate, log = UpstreamGate("up"), Log()
    assert not gate.must_wait
    gate.pause(60)
    calls = queued(gate, 1000, log)
    assert (gate.must_wait, gate.paused, gate.waiting, log) == (True, True, 1000, [])
    gate.open()
    assert not gate.paused
    await log.until(1000)
    assert log == calls
    assert {one.opened for one in calls} == {1}
    assert (gate.stats.calls, gate.stats.refused, gate.waiting) == (1000, 0, 0)
    assert gate.stats.seconds > 0


async def test_others_are_served_while_many_go_and_nobody_overtakes() -> None:
    gate, log = UpstreamGate("up"), Log()
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
    gate, log = UpstreamGate("up"), Log()
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
    bound = r"upstream 'up' .* \d+\.\d s .* bound of 0\.05 s; POST /api/upstreams/up/open "
    assert re.match(bound, refusal.message), refusal.message
    # What comes later does not wait in vain.
    (late,) = queued(gate, 1, log)
    assert (gate.must_wait, gate.paused, len(late.refusals)) == (True, True, 1)
    assert gate.stats.refused == 41
    # Held anew, calls wait again; opened, they go.
    gate.pause(60)
    (third,) = queued(gate, 1, log)
    assert third.told == 0
    gate.open()
    assert (third.opened, gate.must_wait) == (1, False)


async def test_pausing_again_moves_the_deadline_and_not_the_beginning() -> None:
    gate, log = UpstreamGate("up"), Log()
    gate.pause(0.03)
    since = gate.paused_since
    (call,) = queued(gate, 1, log)
    gate.pause(60)
    await asyncio.sleep(0.06)  # the first deadline passes
    assert (call.told, gate.paused_since, gate.bound_s) == (0, since, 60)
    gate.open()
    assert call.opened == 1


async def test_one_that_makes_another_leave_while_they_are_told() -> None:
    """As a call that ends may close what else its client waits for."""
    gate, log = UpstreamGate("up"), Log()

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
    gate, log = UpstreamGate("up"), Log()

    class Broken(Waiting):
        def on_open(self) -> None:
            raise ZeroDivisionError("planted")

    gate.pause(60)
    gate.wait(Broken(0, log))
    (call,) = queued(gate, 1, log)
    gate.open()
    assert call.opened == 1
    assert "waited for upstream 'up' could not go on" in caplog.text


async def test_paused_again_while_they_go_the_rest_waits() -> None:
    gate, log = UpstreamGate("up"), Log()
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
    gate, log = UpstreamGate("up"), Log()

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
    gate = UpstreamGate("up")
    with pytest.raises(ValueError, match=r"bound_s must be above 0 and at most 3600 seconds \(found"):
        gate.pause(bound)
    assert not gate.must_wait


STEPS = st.lists(st.sampled_from(["pause", "open", "wait", "leave", "turn"]), max_size=60)


@given(STEPS)
def test_whatever_happens_each_is_told_once_and_in_order(steps: list[str]) -> None:
    async def play() -> None:
        gate, log, calls, left = UpstreamGate("up"), Log(), list[Waiting](), set[Waiting]()
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
        assert gate.stats.calls == len(calls)

    asyncio.run(play())


# -- at the socket -----------------------------------------------------------------------------------------------------

OK = reply(200, b'{"fine":1}')
EVENT = chunk(b"data: 1\n\n")


@pytest.fixture
async def rig(within: Within) -> AsyncGenerator[Inside]:
    async with within() as made:
        yield made


def gate_of(rig: Inside) -> UpstreamGate:
    return rig.gateway.pools["up"].gate


async def waiting(rig: Inside, calls: int) -> None:
    """Until so many calls wait at the gate."""
    await until(lambda: gate_of(rig).waiting == calls)


async def test_calls_wait_at_the_socket_and_are_served_in_order(rig: Inside) -> None:
    """For as long as it takes: they are announced, and nobody takes them for lost."""
    async with rig.upstream([request(), send(OK)]) as upstream, rig.client() as first, rig.client() as second:
        gate_of(rig).pause(60)
        for number, client in enumerate((first, second), 1):
            client.send(rig.call(json.dumps({"model": f"m{number}"}).encode()))
            await waiting(rig, number)
        await rig.tape.when(rig.rollout, "a1", lambda heads: [one.status for one in heads] == ["open", "open"])
        assert not upstream.connections
        gate_of(rig).open()
        assert [await client.message() for client in (first, second)] == [OK, OK]
        seen = [(await upstream.connection(n)).requests[0] for n in (0, 1)]
        assert [json.loads(body_of(one))["model"] for one in seen] == ["m1", "m2"]
    spans = await rig.tape.spans(rig.rollout, 2)
    assert [(span.status, span.upstream) for span in spans] == [("ok", "up")] * 2


async def test_a_stream_that_has_begun_goes_on(rig: Inside) -> None:
    end = EVENT + b"0\r\n\r\n"
    script = [request(), send(events_head() + EVENT), wait("on"), send(end)]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.until(EVENT)
        gate_of(rig).pause(60)
        upstream.go("on")
        assert (await client.message()).endswith(end)


async def test_what_waits_for_too_long_gets_a_clear_answer(rig: Inside) -> None:
    async with rig.upstream([gone()]) as upstream, rig.client() as client:
        gate_of(rig).pause(0.05)
        client.send(rig.call())
        answer = await client.message()
        assert answer.startswith(b"HTTP/1.1 504 ")
        error = json.loads(body_of(answer))["error"]
        assert error["code"] == "paused"
        assert "POST /api/upstreams/up/open" in error["message"]
        # The connection lives on, and the next call does not wait in vain.
        client.send(rig.call())
        assert (await client.message()).startswith(b"HTTP/1.1 504 ")
        assert not upstream.connections
    assert [span.error for span in await rig.tape.spans(rig.rollout, 2)] == ["paused", "paused"]


async def test_then_the_next_upstream_is_asked(two: Two) -> None:
    async with two([], [request(), send(OK)]) as it:
        gate_of(it.rig).pause(0.05)
        assert await it.ask() == OK
        assert (await it.span()).upstream == "spare"


async def test_a_client_that_leaves_while_it_waits(rig: Inside) -> None:
    async with rig.upstream([gone()]) as upstream:
        gate_of(rig).pause(60)
        async with rig.client() as client:
            client.send(rig.call())
            await waiting(rig, 1)
            client.abort()
        span = await rig.span()
        assert (span.status, span.error, gate_of(rig).waiting) == ("cancelled", "client_gone", 0)
        gate_of(rig).open()
        assert not upstream.connections


@pytest.mark.parametrize("end", [close(), abort()])
async def test_a_call_that_was_not_answered_when_the_engine_stopped_is_asked_again(rig: Inside, end: Step) -> None:
    async with rig.upstream([request(), wait("stop"), end], [request(), send(OK)]) as upstream, rig.client() as client:
        client.send(rig.call())
        await (await upstream.connection(0)).when(lambda: len(upstream.connections[0].requests) == 1)
        gate_of(rig).pause(60)
        upstream.go("stop")
        await waiting(rig, 1)
        gate_of(rig).open()
        assert await client.message() == OK
    assert (await rig.span()).status == "ok"


async def test_a_connection_that_fails_while_the_engine_starts_again(
    rig: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, fails = asyncio.Event(), asyncio.Event()

    async def refused(_: UpstreamConnection) -> None:
        began.set()
        await fails.wait()
        raise ConnectionRefusedError("planted")

    async with rig.upstream([request(), send(OK)]), rig.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(rig.gateway.pools["up"], "open", refused)
            client.send(rig.call())
            await began.wait()
            gate_of(rig).pause(60)
            fails.set()
            await waiting(rig, 1)
        gate_of(rig).open()
        assert await client.message() == OK


async def test_a_gateway_that_stops_does_not_wait_for_the_gate(within: Within) -> None:
    async with AsyncExitStack() as stack:
        async with within(limits={"drain_seconds": 0}) as rig:
            client = await stack.enter_async_context(rig.client())
            gate_of(rig).pause(60)
            client.send(rig.call())
            await waiting(rig, 1)
        assert await client.gone() in ("eof", "reset")
        assert gate_of(rig).waiting == 0
