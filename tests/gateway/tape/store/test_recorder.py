"""The recorder: nothing is lost while the tape works, everything is counted when it does not, nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import aiohttp
import pytest
from fakes.mistakes import tells
from fakes.odd import Script, request, send, wait
from fakes.process import PATIENCE, limit_files
from fakes.raw import body_of, get, post, reply
from fakes.rig import CHAT, Rig, based, inside
from fakes.some import some
from fakes.tape import Tape as TapeView
from fakes.waiting import until, when

from penstock.console.commands.check import examine, problems
from penstock.gateway.app import open_store
from penstock.gateway.config import TapeSettings
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.rollout import Totals
from penstock.gateway.tape.store import recorder as recorder_module
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.recorder import LoopYield, Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation

OK = reply(200, b'{"fine":1}')


def answering(count: int) -> Script:
    return [step for _ in range(count) for step in (request(), send(OK))]


# -- alone -------------------------------------------------------------------------------------------------------------


class Call:
    """A call that the recorder may take."""

    def __init__(self, name: str, weight: int = 100) -> None:
        self.name = name
        self.weight = weight
        self.ended = True
        self.told: list[bool] = []

    def entry(self, final: bool) -> SpanEntry | None:
        if self.name == "broken":
            raise ZeroDivisionError("planted")
        return SpanEntry(self.name, "a1", status="ok" if final else "open") if final or not self.ended else None


class FakeStore:
    """A store that fails when it is told to."""

    newest: Sequence[bytes] = ()

    def __init__(self) -> None:
        self.written: list[SpanEntry] = []
        self.error: Callable[[Sequence[SpanEntry]], BaseException | None] = lambda _: None

    def write(self, entries: Sequence[SpanEntry], between: Callable[[], object]) -> int:
        between()
        error = self.error(entries)
        if error is not None:
            raise error
        self.written += entries
        return len(self.written)


class Rack:
    """A recorder on a fake store."""

    def __init__(self, **config: Any) -> None:
        self.store = FakeStore()
        self.metrics = Metrics()
        self.cursors: list[int] = []
        store: Any = self.store
        self.committed = asyncio.Event()
        self.recorder = Recorder(store, TapeSettings(**config), self.metrics, self.commit)
        self.recorder.start()

    def commit(self, cursor: int, records: Sequence[bytes]) -> None:
        """What the recorder calls after a commit."""
        self.cursors.append(cursor)
        self.committed.set()

    def put(self, name: str, weight: int = 100) -> Call:
        call = Call(name, weight)
        self.recorder.put(call, call.told.append)
        return call

    @property
    def names(self) -> list[str]:
        return [entry.rollout for entry in self.store.written]


@pytest.fixture
async def rack() -> AsyncGenerator[Rack]:
    made = Rack()
    yield made
    await made.recorder.close()


async def test_flush_returns_when_everything_before_it_is_written(rack: Rack) -> None:
    calls = [rack.put(f"r{number}") for number in range(1000)]
    assert await rack.recorder.flush() is True
    assert rack.names == [f"r{number}" for number in range(1000)]
    assert all(call.told == [True] for call in calls)
    assert rack.cursors[-1] == 1000
    assert (rack.metrics.recorder_queue_bytes, rack.metrics.recorder_queue_calls) == (0, 0)


class Clocks:
    """The clocks that `LoopYield` reads: `now` passes for all, `loop` is the time that the loop has used of it."""

    now = loop = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def pthread_getcpuclockid(self, thread: int) -> int:
        assert thread == threading.get_ident()
        return 7

    def clock_gettime(self, clock: int) -> float:
        assert clock == 7
        return self.loop


async def test_memory_goes_back_once_when_no_call_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Queue[int]()
    monkeypatch.setattr(recorder_module, "_REST_SECONDS", 0.01)
    monkeypatch.setattr(recorder_module, "give_back_memory", lambda: given.put(len(rack.names)))
    rack = Rack()
    for count in (1, 2):
        _ = rack.put("call")
        assert await asyncio.to_thread(given.get, timeout=PATIENCE) == count
    await rack.recorder.close()
    assert given.empty(), "an idle recorder does nothing"


def test_the_library_takes_memory_back() -> None:
    recorder_module.give_back_memory()


async def test_it_gives_way_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an event loop on the same core waits for a whole commit."""
    given: list[int] = []
    monkeypatch.setattr(recorder_module, "time", Clocks())
    monkeypatch.setattr(recorder_module, "_YIELD", lambda: given.append(0))
    rack = Rack()
    for number in range(10):
        rack.put(f"few{number}")
    await rack.recorder.flush()
    assert len(given) > 10
    await rack.recorder.close()


@pytest.mark.parametrize(
    ("calls", "size", "times"),
    [
        (0, 0, 64),
        (1, (64 << 10) - 1, 64),
        (2, 0, 32),
        (0, 64 << 10, 32),
        (126, 0, 1),
        (0, 63 * (64 << 10), 1),
        (128, 0, 0),
    ],
)
def test_it_gives_way_the_less_often_the_more_waits(
    monkeypatch: pytest.MonkeyPatch, calls: int, size: int, times: int
) -> None:
    """Otherwise an event loop that is never idle fills the queue."""
    given: list[int] = []
    monkeypatch.setattr(recorder_module, "_YIELD", lambda: given.append(0))
    monkeypatch.setattr(recorder_module, "time", Clocks())
    metrics = Metrics()
    metrics.recorder_queue_bytes = size
    way = LoopYield(metrics, range(calls), threading.Event())
    way.begin()
    for _ in range(64):
        way()
    assert len(given) == times


@pytest.mark.parametrize(
    ("own", "hurry", "times"),
    [(False, False, 8), (False, True, 8), (True, False, 120), (True, True, 8)],
    ids=["to others", "to others, in a hurry", "to the loop", "to the loop, in a hurry"],
)
def test_it_gives_way_only_for_a_moment_to_others_and_where_somebody_waits(
    monkeypatch: pytest.MonkeyPatch, own: bool, hurry: bool, times: int
) -> None:
    """The kernel lets any of them go first: a call would come to the tape late by a slice of each, for every call."""
    clocks, given = Clocks(), 0

    def give() -> None:
        nonlocal given
        given += 1
        clocks.now += 0.003  # a slice
        clocks.loop += 0.003 if own else 0.0

    monkeypatch.setattr(recorder_module, "_YIELD", give)
    monkeypatch.setattr(recorder_module, "time", clocks)
    way = LoopYield(Metrics(), (), threading.Event())
    for _ in range(2):
        way.begin(hurry)
        for _ in range(60):
            way()
    assert given == times


def test_without_the_loop_s_clock_all_counts_as_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "pthread_getcpuclockid")
    given: list[int] = []

    def give() -> None:
        given.append(0)
        until = time.thread_time() + 0.003
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(recorder_module, "_YIELD", give)
    way = LoopYield(Metrics(), (), threading.Event())
    way.begin()
    for _ in range(60):
        way()
    assert len(given) <= 4


def test_a_late_batch_gives_way_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(recorder_module, "_YIELD", lambda: given.append(0))
    way = LoopYield(Metrics(), (), threading.Event())
    way.begin(until=time.monotonic() - 1)
    way()
    assert not given


async def test_the_queue_is_measured_even_when_a_call_grows_in_it(rack: Rack) -> None:
    call = Call("r", weight=100)
    call.ended = False
    rack.recorder.announce(call)
    call.weight, call.ended = 100_000, True
    rack.recorder.put(call)
    assert rack.metrics.recorder_queue_bytes == 100_100
    await rack.recorder.flush()
    assert rack.metrics.recorder_queue_bytes == 0


async def test_every_end_is_told_of_once_with_what_became_of_it() -> None:
    told: list[tuple[str, str, bool]] = []

    def tell(entry: SpanEntry, kept: bool) -> None:
        told.append((entry.rollout, entry.status, kept))
        if entry.rollout == "odd":
            raise ZeroDivisionError("planted")

    rack = Rack()
    store: Any = rack.store
    recorder = Recorder(store, TapeSettings(), rack.metrics, rack.commit, tell)
    same = SpanEntry("twice", "a1", status="ok")
    twice = Call("twice")
    twice.entry = lambda final: same
    recorder.announce(twice)
    recorder.put(twice)
    for name in ("odd", "r1"):
        recorder.put(Call(name))
    recorder.start()
    assert await recorder.flush() is True
    rack.store.error = lambda _: TapeError("full")
    recorder.put(Call("r2"))
    assert await recorder.flush() is False
    rack.store.error = lambda _: None
    await recorder.close()
    await rack.recorder.close()
    assert told == [("twice", "ok", True), ("odd", "ok", True), ("r1", "ok", True), ("r2", "ok", False)]


async def test_an_announcement_that_comes_too_late_is_dropped(rack: Rack) -> None:
    call = Call("r")
    rack.recorder.announce(call)
    rack.recorder.put(call)
    await rack.recorder.flush()
    assert rack.names == ["r"]


async def test_it_is_full_at_its_limit() -> None:
    rack = Rack(queue_bytes=1000)
    rack.put("a", weight=1000)
    assert not rack.recorder.full
    rack.put("b", weight=1)
    assert rack.recorder.full
    await rack.recorder.flush()
    assert not rack.recorder.full
    await rack.recorder.close()


async def test_it_is_full_when_an_answer_would_come_to_the_tape_late(monkeypatch: pytest.MonkeyPatch) -> None:
    rack, writes, go_on = Rack(), threading.Event(), threading.Event()

    def slow(_: Sequence[SpanEntry]) -> None:
        writes.set()
        go_on.wait(PATIENCE)

    rack.store.error = slow
    monkeypatch.setattr(recorder_module, "_LATE_SECONDS", PATIENCE)
    assert (rack.recorder.full, rack.recorder.behind) == (False, 0.0)
    rack.put("a")
    await asyncio.to_thread(writes.wait)
    rack.put("b")
    assert not rack.recorder.full
    assert rack.recorder.behind > 0
    monkeypatch.setattr(recorder_module, "_LATE_SECONDS", 0.0)
    assert rack.recorder.full
    go_on.set()
    await rack.recorder.flush()
    await until(lambda: (rack.recorder.full, rack.recorder.behind) == (False, 0.0))
    await rack.recorder.close()


async def test_a_failing_tape_is_retried_and_the_gaps_are_kept(rack: Rack) -> None:
    rack.store.error = lambda _: TapeError("disk full")
    call = rack.put("lost")
    assert await rack.recorder.flush() is False
    assert call.told == [False]
    assert rack.recorder.failing == "disk full"
    assert rack.metrics.recording_gaps == 1
    rack.store.error = lambda _: None
    assert await rack.recorder.flush() is True
    (entry,) = rack.store.written
    assert (entry.rollout, entry.gap, entry.body) == ("lost", True, None)


async def test_a_gap_reaches_the_tape_though_no_call_comes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.recorder")
    rack = Rack()
    rack.store.error = lambda _: TapeError("disk full")
    rack.put("lost")
    await rack.recorder.flush()
    rack.store.error = lambda _: None
    await rack.committed.wait()
    assert rack.names == ["lost"]
    assert rack.recorder.failing is None
    await rack.recorder.close()
    assert caplog.messages == ["recording stopped: disk full", "recording goes on"]


@pytest.mark.parametrize("name", ["broken", "poison"])
async def test_a_call_that_cannot_be_written_is_lost_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    rack = Rack()
    rack.store.error = lambda entries: TypeError("planted") if "poison" in [one.rollout for one in entries] else None
    calls = [rack.put(one) for one in ("a", name, "b")]
    await rack.recorder.flush()
    assert sorted(rack.names) == ["a", "b"]
    assert [call.told for call in calls] == [[True], [False], [True]]
    assert rack.metrics.recording_gaps == 1
    assert "planted" in caplog.text
    assert rack.recorder.alive
    await rack.recorder.close()
    assert rack.metrics.recorder_queue_bytes == 0


async def test_a_disk_that_fills_up_between_calls_that_are_tried_alone() -> None:
    """What was written by then stays as it is, and is not written once more."""
    rack, full = Rack(), True
    rack.store.error = lambda _: TapeError("disk full")
    rack.put("before")
    assert await rack.recorder.flush() is False

    def fails(entries: Sequence[SpanEntry]) -> BaseException | None:
        names = [one.rollout for one in entries]
        if "poison" in names:
            return TypeError("planted")
        return TapeError("disk full") if full and names == ["c"] else None

    rack.store.error = fails
    calls = [rack.put(name) for name in ("a", "poison", "b", "c", "d")]
    assert await rack.recorder.flush() is False
    assert rack.names == ["before", "a", "b"]
    assert [call.told for call in calls] == [[True], [False], [True], [False], [False]]
    assert rack.recorder.failing == "disk full"
    assert rack.metrics.recording_gaps == 4
    full = False
    rack.put("poison")
    assert await rack.recorder.flush() is True
    assert [(entry.rollout, entry.gap) for entry in rack.store.written[3:]] == [("c", True), ("d", True)]
    assert rack.metrics.recording_gaps == 5
    assert rack.recorder.failing is None
    await rack.recorder.close()


async def test_a_task_that_reads_what_is_damaged_is_lost_alone(rack: Rack) -> None:

    def fails(entries: Sequence[object]) -> DamagedRecordError | None:
        return (
            DamagedRecordError("body 3 is missing")
            if any(isinstance(one, QueuedOperation) for one in entries)
            else None
        )

    rack.store.error = fails
    before = rack.put("before")
    task = rack.recorder.submit(lambda tape: None)
    after = rack.put("after")
    with pytest.raises(DamagedRecordError, match="body 3 is missing"):
        await task
    await rack.recorder.flush()
    assert (before.told, after.told) == ([True], [True])
    assert rack.recorder.failing is None
    assert rack.metrics.recording_gaps == 0


async def test_a_caller_that_fails_does_not_hold_up_the_others(rack: Rack, caplog: pytest.LogCaptureFixture) -> None:

    def fail(_: bool) -> None:
        raise ZeroDivisionError("planted")

    rack.recorder.put(Call("a"), fail)
    after = rack.put("b")
    await rack.recorder.flush()
    assert after.told == [True]
    assert "planted" in caplog.text


async def test_a_thread_that_dies_is_reported_and_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    rack = Rack()
    rack.store.error = lambda _: SystemExit("planted")
    call = rack.put("lost")
    assert await rack.recorder.flush() is False
    assert call.told == [False]
    await asyncio.to_thread(rack.recorder._thread.join)
    assert not rack.recorder.alive
    assert rack.recorder.failing == "the recorder stopped; the log says why"
    assert "planted" in caplog.text
    later = rack.put("later")
    assert later.told == [False]
    assert await rack.recorder.flush() is False
    await rack.recorder.close()
    assert rack.metrics.recording_gaps == 2


async def test_closing_writes_what_is_queued() -> None:
    rack = Rack()
    calls = [rack.put(f"r{number}") for number in range(1000)]
    await rack.recorder.close()
    assert len(rack.names) == 1000
    assert all(call.told == [True] for call in calls)


async def test_closing_with_a_tape_that_fails_ends_and_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    rack = Rack()
    rack.store.error = lambda _: TapeError("disk full")
    calls = [rack.put(f"r{number}") for number in range(300)]
    async with asyncio.timeout(PATIENCE):
        await rack.recorder.close()
    assert all(call.told == [False] for call in calls)
    assert tells(caplog.text, "300 calls that were answered", "disk full")


# -- in a gateway ------------------------------------------------------------------------------------------------------


async def test_a_thread_that_dies_makes_the_gateway_unready(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with inside(tmp_path, http) as rig:

        def die(*_: object) -> int:
            raise SystemExit("planted")

        rig.gateway.store.write = die  # type: ignore[method-assign]
        async with rig.upstream(answering(3)), rig.client() as client:
            client.send(rig.call())
            assert await client.message() == OK
            await asyncio.to_thread(rig.gateway.recorder._thread.join)
            assert not rig.gateway.recorder.alive
            client.send(get("/readyz", host="127.0.0.1"))
            assert (await client.message()).startswith(b"HTTP/1.1 503 ")
            client.send(rig.call())
            assert await client.message() == OK


async def test_a_gateway_is_not_ready_while_its_tape_fails(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with inside(tmp_path, http) as rig:
        write, full = rig.gateway.store.write, TapeError("disk full")

        def fail(*_: object) -> int:
            raise full

        rig.gateway.store.write = fail  # type: ignore[method-assign]
        async with rig.upstream(answering(1)), rig.client() as client:
            client.send(rig.call())
            assert await client.message() == OK
            assert not await rig.gateway.recorder.flush()
            client.send(get("/readyz", host="127.0.0.1") + get("/healthz", host="127.0.0.1"))
            refusal = await client.message()
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"recording has stopped: disk full" in refusal
            assert (await client.message()).startswith(b"HTTP/1.1 200 ")
            rig.gateway.store.write = write  # type: ignore[method-assign]
            await rig.span()

            async def is_ready() -> bool:
                client.send(get("/readyz", host="127.0.0.1"))
                return (await client.message()).startswith(b"HTTP/1.1 200 ")

            # The recorder knows that it goes on when its commit has come back: a moment after others can read it.
            await until(is_ready)


async def test_the_end_of_a_call_waits_when_the_queue_is_full(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    """With a queue of one byte every call waits; nothing is dropped, nothing hangs."""
    async with inside(tmp_path, http, tape={"queue_bytes": 1}) as rig:
        async with rig.upstream(answering(100)):

            async def agent() -> None:
                async with rig.client() as client:
                    for _ in range(10):
                        client.send(rig.call())
                        assert await client.message() == OK

            await asyncio.gather(*(agent() for _ in range(8)))
        assert (await totals(rig, lambda found: found.calls >= 80)).calls == 80
        assert await figure(rig, "penstock_recorder_wait_seconds_total") > 0


async def test_where_the_tape_is_late_the_last_byte_of_an_answer_waits_for_it(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a kill takes no answer that its client has had for long."""
    monkeypatch.setattr(recorder_module, "_LATE_SECONDS", 0.0)
    async with inside(tmp_path, http) as rig:
        write, go_on = rig.gateway.store.write, threading.Event()

        def late(*given: Any) -> int:
            assert go_on.wait(PATIENCE)
            return write(*given)

        rig.gateway.store.write = late  # type: ignore[method-assign]
        async with rig.upstream(answering(2)), rig.client() as client:
            client.send(rig.call())
            assert await client.message() == OK
            client.send(rig.call())
            await until(lambda: len(client.received) >= 2 * len(OK) - 1)
            await until(lambda: not rig.gateway.proxy.running)
            _ = await rig.tape.get("/healthz")
            before = bytes(client.received), client.end
            go_on.set()
            assert before == (OK + OK[:-1], "open")
            assert await client.message() == OK


async def totals(rig: Rig, condition: Callable[[Totals], bool]) -> Totals:
    """The sums of the attempt, as soon as the condition holds for them."""

    async def ask() -> Totals:
        async with rig.tape.http.get(f"{rig.base.url}/api/rollouts/{rig.rollout}") as response:
            return Totals.model_validate((await response.json()).get("totals", {}))

    return await when(ask, condition)


async def figure(rig: Rig, name: str) -> float:
    """A figure of /metrics."""
    async with rig.tape.http.get(rig.base.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


@pytest.mark.slow
async def test_a_full_disk(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    with based(tmp_path) as base:
        rig = Rig(base, TapeView(base.url, http), "online")
        train = f"/proxy/rollout/train/attempt/a1/mode/train/openai{CHAT}"
        async with rig.upstream(answering(99)), rig.client() as client:
            client.send(rig.call())
            await client.message()
            await rig.tape.spans("online", 1)
            limit_files(base.pid, 8192)
            sent = 1
            # Online calls go on, and are counted.
            while not await figure(rig, "penstock_recording_gaps_total"):
                client.send(rig.call())
                assert await client.message() == OK
                sent += 1
            assert (await rig.tape.get("/api/stats"))["gaps"] > 0
            # Training calls are refused before they cost anything.
            client.send(post(train, b"{}"))
            answer = await client.message()
            assert answer.startswith(b"HTTP/1.1 503 ")
            message = json.loads(body_of(answer))["error"]["message"]
            assert tells(message, "mode 'train' refuses", "free or remount the disk")
            limit_files(base.pid, None)
            # Those that could not be written are there too, without their bytes.
            spans = await rig.tape.when("online", "a1", lambda heads: len(heads) == sent)
            gaps = [span.body is None for span in spans].count(True)
            assert gaps > 0
            assert (await totals(rig, lambda found: found.calls == sent)).gaps == gaps
            # Afterwards everything is as before.
            client.send(post(train.replace("/train/attempt", "/later/attempt"), b"{}"))
            assert await client.message() == OK
            assert (await rig.tape.spans("later", 1))[0].status == "ok"
    assert examine(base.data)[1] == []


@pytest.mark.slow
async def test_kill_9_under_load(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Whatever was running is interrupted, whatever was committed is whole, and the numbering has no holes."""
    with based(tmp_path) as base:
        rig = Rig(base, TapeView(base.url, http), "killed")
        stuck = [request(), wait("never")]
        async with rig.upstream(*[stuck] * 3, answering(10_000)) as upstream, AsyncExitStack() as stack:
            for number in range(3):
                client = await stack.enter_async_context(rig.client())
                client.send(post(f"/rollout/stuck/attempt/s{number}{CHAT}", b'{"model":"m"}'))
                await upstream.connection(number)
                await rig.tape.open_span("stuck", f"s{number}")
            await asyncio.gather(*(hammer(rig) for _ in range(8)), kill_at(rig, 100))
    assert examine(base.data)[1] == []
    with open_store(base.data) as store:
        assert list(problems(store)) == []
        for number in range(3):
            (span,) = store.spans("stuck", f"s{number}")
            assert (span.status, span.error) == ("interrupted", "gateway_died")
            exchange = some(store.exchange(span))
            assert exchange.request_body == b'{"model":"m"}'
        killed = list(store.spans("killed", "a1"))
    assert len(killed) >= 100
    assert [span.sequence for span in killed] == list(range(1, len(killed) + 1))
    assert {span.status for span in killed} <= {"ok", "interrupted"}


async def hammer(rig: Rig) -> None:
    """Calls until the gateway is gone."""
    try:
        async with rig.client() as client:
            while True:
                client.send(rig.call())
                await client.message()
    except (AssertionError, OSError):
        return


async def kill_at(rig: Rig, calls: int) -> None:
    """Kills the gateway once that many calls are on the tape."""
    await totals(rig, lambda found: found.calls >= calls)
    os.kill(rig.base.pid, signal.SIGKILL)
