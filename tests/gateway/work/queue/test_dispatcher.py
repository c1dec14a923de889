"""The desk on a real store: the clock, the line of those who wait, and what happens when somebody leaves or fails."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.desk import PATIENCE, SECOND, Call, Clock, Life, living, name_of, patient
from fakes.entries import finish, running
from fakes.rig import inside
from fakes.some import some
from fakes.waiting import until, when
from pydantic import ValidationError

from penstock.gateway.client.client import Client
from penstock.gateway.model.base import LONGEST_S
from penstock.gateway.model.queue import LONGEST_WAIT_S, ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.rollout import (
    AttemptStatus,
    Judgement,
    Outcome,
    Reward,
    RolloutConfig,
    RolloutStatus,
    attempt_deadline,
)
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.transaction import OperationRefusedError, QueuedOperation, Transaction
from penstock.gateway.work import dispatcher
from penstock.gateway.work.operations import QueueOperations
from penstock.gateway.work.queue import ClaimedAttempt, MemoryQueue


@pytest.fixture
async def life(tmp_path: Path) -> AsyncGenerator[Life]:
    async with living(tmp_path) as made:
        yield made


@pytest.fixture
async def still(tmp_path: Path) -> AsyncGenerator[Life]:
    """One whose clock goes on where the test says so."""
    async with living(tmp_path, Clock(stands=True)) as made:
        made.sweep_no_more()
        yield made


# -- the clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "end"),
    [
        (RolloutConfig(timeout_s=0.2), AttemptStatus.TIMEOUT),
        (RolloutConfig(unresponsive_s=0.2, retry_on=[]), AttemptStatus.UNRESPONSIVE),
    ],
)
async def test_an_attempt_ends_when_its_time_has_come(
    life: Life, monkeypatch: pytest.MonkeyPatch, config: RolloutConfig, end: AttemptStatus
) -> None:
    life.sweep_no_more()
    await life.enqueue("q1", config=config)
    began = time.monotonic()
    assert await life.claim() == ["q1/a1"]
    await life.when(lambda: life.status("q1") == RolloutStatus.FAILED)
    assert time.monotonic() - began >= 0.2
    attempt = life.attempt("q1/a1")
    assert attempt.status == end
    assert attempt.ended_ns is not None
    assert attempt.ended_ns - attempt.created_ns >= 0.2 * SECOND
    assert attempt.outcome is not None
    assert attempt.outcome.reason


async def test_an_attempt_that_cannot_be_read_does_not_stop_the_clock_for_others(tmp_path: Path) -> None:
    clock = Clock(stands=True)
    config = RolloutConfig(timeout_s=0.2, retry_on=[])
    life = Life(tmp_path, clock, 1800)
    life.recorder.start()
    await life.dispatcher.start()
    try:
        await life.enqueue("q1", "q2", config=config)
        assert await life.claim(limit=2) == ["q1/a1", "q2/a1"]
        life.damage("q1/a1")
        await life.later(0.2)
        await life.when(lambda: life.status("q2") == RolloutStatus.FAILED)
        await life.enqueue("q3", config=config)
        assert await life.claim() == ["q3/a1"]
    finally:
        await life.dispatcher.stop()
        await life.recorder.close()
        life.store.close()
    # Nor does it keep the next gateway from beginning.
    clock.ahead += int(dispatcher.GRACE_S * SECOND)
    life = Life(tmp_path, clock, 1800)
    life.recorder.start()
    await life.dispatcher.start()
    try:
        await life.when(lambda: life.status("q3") == RolloutStatus.FAILED)
    finally:
        await life.dispatcher.stop()
        await life.recorder.close()
        life.store.close()


async def test_an_agent_that_calls_is_not_unresponsive(still: Life) -> None:
    await still.begin("q1", config=RolloutConfig(unresponsive_s=0.3))
    for _ in range(5):
        await still.later(0.25)
        await still.agent_calls("q1/a1")
    await still.later(0.25)
    assert still.attempt("q1/a1").status == AttemptStatus.RUNNING
    await still.later(0.05)
    assert still.attempt("q1/a1").status == AttemptStatus.UNRESPONSIVE


async def test_an_agent_that_waits_for_an_answer_is_not_unresponsive(still: Life) -> None:
    await still.begin("q1", config=RolloutConfig(unresponsive_s=0.2))
    waiting = Call("q1", "a1", still.clock())
    waiting.made = running("q1", "a1")
    waiting.made.start_ns = still.clock()
    still.recorder.announce(waiting)
    assert await still.recorder.flush()
    for _ in range(5):
        await still.later(0.2)
        assert still.attempt("q1/a1").status == AttemptStatus.RUNNING
    finish(waiting.made)
    waiting.made.end_ns = ended = still.clock()
    still.recorder.put(waiting)
    assert await still.recorder.flush()
    assert still.attempt("q1/a1").last_seen_ns == ended
    await still.later(0.2)
    assert still.attempt("q1/a1").status == AttemptStatus.UNRESPONSIVE


async def test_a_worker_that_is_not_heard_of_loses_its_lease_and_another_one_gets_the_rollout(still: Life) -> None:
    await still.begin("q1", worker="w1", lease_s=1)
    other = patient(still.claim("w2", wait_s=LONGEST_WAIT_S))
    await still.waiting(1)
    await still.later(0.9)
    assert not other.done()
    await still.later(0.1)
    assert await other == ["q1/a2"]
    assert still.attempt("q1/a1").status == AttemptStatus.UNRESPONSIVE
    # The first one comes back: too late for everything.
    assert await still.beat("q1/a1", worker="w1", running=True) == [False]
    with pytest.raises(OperationRefusedError, match="has ended as unresponsive"):
        await still.finish("q1/a1", worker="w1")
    await still.agent_calls("q1/a1")
    assert still.attempt("q1/a1").status == AttemptStatus.UNRESPONSIVE
    with pytest.raises(OperationRefusedError, match="held by worker 'w2'"):
        await still.finish("q1/a2", worker="w1")
    assert await still.finish("q1/a2", worker="w2") == RolloutStatus.SUCCEEDED


async def test_heartbeats_keep_a_lease(still: Life) -> None:
    await still.begin("q1", lease_s=1)
    for _ in range(8):
        await still.later(0.9)
        assert await still.beat("q1/a1", lease_s=1) == [True]
    assert still.attempt("q1/a1").status == AttemptStatus.PREPARING


@pytest.mark.parametrize("how", ["beat", "finish", "call"])
async def test_who_is_given_up_and_comes_back_before_another_one_goes_on(still: Life, how: str) -> None:
    await still.begin("q1", lease_s=1)
    await still.later(1)
    assert still.status("q1") == RolloutStatus.REQUEUING
    if how == "beat":
        assert await still.beat("q1/a1") == [True]
    elif how == "call":
        await still.agent_calls("q1/a1")
    else:
        assert await still.finish("q1/a1") == RolloutStatus.SUCCEEDED
    assert still.status("q1") == (RolloutStatus.SUCCEEDED if how == "finish" else RolloutStatus.RUNNING)
    assert await still.claim("w2") == []
    if how != "finish":
        assert still.attempt("q1/a1").ended_ns is None
        assert await still.finish("q1/a1") == RolloutStatus.SUCCEEDED


async def test_one_that_was_revived_is_watched_again(still: Life) -> None:
    await still.begin("q1", lease_s=1)
    await still.later(1)
    assert still.status("q1") == RolloutStatus.REQUEUING
    assert await still.beat("q1/a1", lease_s=1) == [True]
    other = patient(still.claim("w2", wait_s=LONGEST_WAIT_S))
    await still.waiting(1)
    await still.later(1)
    assert await other == ["q1/a2"]


async def test_a_shorter_lease_counts_at_once(still: Life) -> None:
    await still.begin("q1", lease_s=600)
    assert await still.beat("q1/a1", lease_s=1) == [True]
    other = patient(still.claim("w2", wait_s=LONGEST_WAIT_S))
    await still.waiting(1)
    await still.later(1)
    assert await other == ["q1/a2"]


async def test_nobody_looks_at_one_that_its_worker_has_ended(still: Life) -> None:
    await still.begin("q1")
    assert await still.finish("q1/a1") == RolloutStatus.SUCCEEDED
    assert still.dispatcher.deadlines._watched == {}


async def test_a_sign_of_life_does_not_shorten_a_lease(still: Life) -> None:
    await still.begin("q1", config=RolloutConfig(unresponsive_s=0.2), lease_s=3600)
    lease = still.attempt("q1/a1").lease_ns
    await still.later(0.2)
    assert still.status("q1") == RolloutStatus.REQUEUING
    await still.agent_calls("q1/a1")
    assert still.status("q1") == RolloutStatus.RUNNING
    assert still.attempt("q1/a1").lease_ns == lease


@pytest.mark.parametrize(
    "config", [RolloutConfig(timeout_s=0.2, retry_on=["timeout"]), RolloutConfig(unresponsive_s=0.2)]
)
async def test_the_next_attempt_waits_until_the_worker_of_the_last_has_let_go(
    still: Life, config: RolloutConfig
) -> None:
    """Its agent is alive until its runner has heard that it is to be killed, and has killed it."""
    await still.begin("q1", config=config, worker="w1", lease_s=60)
    await still.beat("q1/a1")
    await still.later(0.2)
    assert still.status("q1") == RolloutStatus.REQUEUING
    other = patient(still.claim("w2", wait_s=LONGEST_WAIT_S))
    await still.waiting(1)
    assert not other.done()
    if config.timeout_s is not None:
        # The runner hears of it, kills the agent and names it no more.
        assert await still.beat("q1/a1") == [False]
        assert not other.done()
        assert await still.beat() == []
    else:
        with pytest.raises(OperationRefusedError):
            await still.finish("q1/a1", "failed")
    await still.when(other.done)
    assert other.result() == ["q1/a2"]


async def test_the_clock_ends_an_attempt_and_its_worker_says_the_same(life: Life) -> None:
    await life.begin("q1", config=RolloutConfig(timeout_s=0.2))
    await life.when(lambda: life.status("q1") == RolloutStatus.FAILED)
    outcome = Outcome(signal="SIGTERM", duration_ns=5)
    asked = FinishRequest(worker="w1", status="timeout", outcome=outcome, rewards=[Judgement(value=0.0)])
    for _ in range(2):
        done = await life.dispatcher.finish("q1", "a1", asked)
        assert done.attempt.outcome is not None
        assert (done.attempt.outcome.signal, done.attempt.reward) == ("SIGTERM", 0.0)
    assert sum(span.kind == "reward" for span in life.store.spans("q1", "a1")) == 1


async def test_a_time_that_is_longer_than_any_clock(life: Life) -> None:
    with pytest.raises(ValidationError):
        _ = RolloutConfig(timeout_s=1e300)
    longest = RolloutConfig(timeout_s=LONGEST_S, unresponsive_s=LONGEST_S)
    await life.begin("q1", config=longest)
    assert await life.finish("q1/a1") == RolloutStatus.SUCCEEDED
    # A tape that was written before there was a limit.
    far = attempt_deadline(RolloutConfig.model_construct(timeout_s=1e300), 0, 0, None)
    assert far == (LONGEST_S * SECOND, AttemptStatus.TIMEOUT)


async def test_a_clock_that_is_set_ends_nothing(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, years = time.time_ns, 10 * 365 * 86400 * SECOND
    async with inside(tmp_path, http) as rig, Client(rig.base.url) as client:
        names = ["q1", "tick"]
        configs = [RolloutConfig(timeout_s=3600), RolloutConfig(timeout_s=0.2)]
        specs = [RolloutSpec(id=name, config=config) for name, config in zip(names, configs, strict=True)]
        _ = await client.enqueue(specs)
        for jump in (years, -years):
            monkeypatch.setattr(time, "time_ns", lambda jump=jump: real() + jump)
            _ = await client.claim(ClaimRequest(worker="w1"))
        _ = await when(lambda: client.rollout("tick"), lambda found: found.status == RolloutStatus.FAILED)
        [attempt], [tick] = await client.attempts("q1"), await client.attempts("tick")
        assert attempt.status == AttemptStatus.PREPARING
        assert abs(tick.created_ns - real()) < 3600 * SECOND


# -- another life ------------------------------------------------------------------------------------------------------


async def test_a_restart_takes_leases_up_with_grace_and_forgets_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(stands=True)
    monkeypatch.setattr(dispatcher, "GRACE_S", 1.5)
    async with living(tmp_path, clock) as life:
        await life.enqueue("q1", "q2", "q3")
        assert await life.claim("w1", lease_s=5, limit=2) == ["q1/a1", "q2/a1"]
        await life.dispatcher.set_state("paused")
    clock.ahead += 3600 * SECOND
    async with living(tmp_path, clock) as life:
        assert life.store.follower(MemoryQueue).state == "paused"
        await life.dispatcher.set_state("open")
        for name in ("q1/a1", "q2/a1"):
            assert life.attempt(name).status == AttemptStatus.PREPARING
            assert 0 < (life.attempt(name).lease_ns or 0) - clock() <= 1.5 * SECOND
        # Who comes back in time goes on; who does not is given up when the grace is over.
        assert await life.beat("q1/a1", running=True, lease_s=3600) == [True]
        assert await life.claim("w2") == ["q3/a1"]
        other = patient(life.claim("w2", wait_s=LONGEST_WAIT_S))
        await life.waiting(1)
        await life.later(1.5)
        assert await other == ["q2/a2"]
        assert life.status("q1") == RolloutStatus.RUNNING


async def test_the_silence_of_a_gateway_that_was_away_is_not_the_agents(tmp_path: Path) -> None:
    clock = Clock()
    async with living(tmp_path, clock) as life:
        await life.begin("q1", config=RolloutConfig(unresponsive_s=30), worker="w1", lease_s=3600)
    clock.ahead += 600 * SECOND
    async with living(tmp_path, clock) as life:
        await life.begin("tick", config=RolloutConfig(timeout_s=0.05), worker="w2")
        await life.when(lambda: life.status("tick") == RolloutStatus.FAILED)
        assert life.attempt("q1/a1").status == AttemptStatus.PREPARING


# -- the line ----------------------------------------------------------------------------------------------------------


async def test_a_thousand_wait_and_as_many_are_given_work_as_there_is(life: Life) -> None:
    waiting = [patient(life.claim(f"w{number}", wait_s=60)) for number in range(1000)]
    await life.waiting(1000)
    await life.enqueue(*(f"q{number}" for number in range(300)))
    await life.when(lambda: sum(one.done() for one in waiting) == 300)
    claimed = [one.result() for one in waiting if one.done()]
    assert sorted(name for [name] in claimed) == sorted(f"q{number}/a1" for number in range(300))
    await life.enqueue("last")
    await life.when(lambda: sum(one.done() for one in waiting) == 301)
    await life.waiting(699)
    await life.dispatcher.set_state("draining")
    assert await asyncio.gather(*(one for one in waiting if not one.done())) == [[]] * 699


async def test_who_has_waited_longest_is_first(life: Life) -> None:
    waiting: list[asyncio.Future[Any]] = []
    for number in range(5):
        waiting.append(patient(life.claim(f"w{number}", wait_s=60)))
        await life.waiting(number + 1)
    for number in range(5):
        await life.enqueue(f"q{number}")
        await life.when(waiting[number].done)
        assert sum(one.done() for one in waiting) == number + 1


async def test_work_goes_to_those_who_take_it(life: Life) -> None:
    val = [patient(life.claim(f"v{number}", wait_s=60, modes=["val"])) for number in range(3)]
    await life.waiting(3)
    train = patient(life.claim("t", wait_s=60, modes=["train"]))
    await life.waiting(4)
    await life.enqueue("q1", mode="train")
    await life.when(train.done)
    assert train.result() == ["q1/a1"]
    assert not any(one.done() for one in val)
    await life.enqueue("q2", "q3", "q4", mode="val")
    assert sorted(await asyncio.gather(*val)) == [["q2/a1"], ["q3/a1"], ["q4/a1"]]


async def test_who_leaves_or_gives_up_does_not_take_a_wake_up_along(life: Life) -> None:
    """Behind those who leave in every possible moment stands one who stays."""
    chance = random.Random(5)
    for number in range(60):
        leaving = [
            patient(life.claim(f"w{number}", wait_s=chance.choice([60, 0.001 * chance.randrange(1, 12)])))
            for _ in range(6)
        ]
        staying = patient(life.claim("w-stays", wait_s=60))
        await asyncio.sleep(0)
        enqueued = patient(life.enqueue(f"q{number}"))
        for one in leaving:
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
            one.cancel()
        _ = await asyncio.wait(leaving)
        await enqueued
        taken = [one.result() for one in leaving if not one.cancelled() and one.result()]
        if taken:
            _ = staying.cancel()
            _ = await asyncio.wait([staying])
        else:
            await life.when(staying.done)
            taken = [staying.result()]
        [[name]] = taken
        assert await life.finish(name, worker=None) == RolloutStatus.SUCCEEDED


async def test_no_claim_sleeps_through_work_that_comes_back_while_it_looks(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, gate = life.dispatcher.take, threading.Event()

    async def late(claim: Callable[[Transaction], list[ClaimedAttempt]], now: int) -> list[ClaimedAttempt]:
        if claimed := await take(claim, now):
            return claimed
        await until(lambda: bool(life.dispatcher.queue.counts()))
        # Whoever is told that it is back has been told.
        await life.recorder.submit(lambda transaction: None)
        return []

    monkeypatch.setattr(life.dispatcher, "take", late)
    await life.enqueue("q1")
    held = patient(life.recorder.submit(lambda transaction: gate.wait(PATIENCE)))
    leaving = patient(life.claim("gone", lease_s=3600))
    other = patient(life.claim("w2", wait_s=LONGEST_WAIT_S))
    await asyncio.sleep(0)
    _ = leaving.cancel()
    gate.set()
    assert await held
    [name] = await other
    assert await life.finish(name, worker="w2") == RolloutStatus.SUCCEEDED


async def test_a_client_that_leaves_in_the_middle_of_a_claim_costs_no_try(life: Life) -> None:
    """The tape has handed it out, and there is nobody to whom it could be given."""
    gate = threading.Event()
    await life.enqueue("q1", config=RolloutConfig(max_attempts=1))
    held = patient(life.recorder.submit(lambda transaction: gate.wait(PATIENCE)))
    leaving = patient(life.claim("gone", lease_s=3600))
    await asyncio.sleep(0.02)
    _ = leaving.cancel()
    gate.set()
    assert await held
    assert await life.claim("w2", wait_s=LONGEST_WAIT_S) != []
    rollout = some(life.store.rollout("q1"))
    assert (rollout.tries, rollout.status) == (1, RolloutStatus.PREPARING)
    assert rollout.attempt is not None
    assert await life.finish(f"q1/{rollout.attempt}", worker="w2") == RolloutStatus.SUCCEEDED


async def test_a_closed_queue_hands_out_nothing(life: Life) -> None:
    await life.enqueue("q1")
    await life.dispatcher.set_state("paused")
    assert await life.claim() == []
    waiting = patient(life.claim(wait_s=60))
    await life.waiting(1)
    await life.dispatcher.set_state("open")
    assert await waiting == ["q1/a1"]
    waiting = patient(life.claim(wait_s=60))
    await life.waiting(1)
    await life.dispatcher.set_state("draining")
    assert await waiting == []
    await life.enqueue("q2")
    assert await life.claim(wait_s=60) == []


async def test_who_waits_is_sent_home_at_the_end(tmp_path: Path) -> None:
    async with living(tmp_path) as life:
        waiting = patient(life.claim(wait_s=60))
        await life.waiting(1)
    assert await waiting == []


async def test_one_that_has_stopped_hands_out_nothing(life: Life) -> None:
    """Another process does, by a clock of its own. Connections that were kept still come here."""
    waiting = patient(life.claim(wait_s=60))
    await life.waiting(1)
    await life.dispatcher.stop()
    await life.enqueue("q1")
    assert await waiting == []
    assert await life.claim(wait_s=60) == []
    assert life.status("q1") == RolloutStatus.QUEUING


# -- a tape that fails -------------------------------------------------------------------------------------------------


class Faulty:
    """The environment of a tape whose disk is full now and then: everything is done, and nothing is kept."""

    def __init__(self, life: Life) -> None:
        self.full = False
        self.refused = 0
        self._environment: Any = life.store._writer._env
        self._write = self._environment.write
        self._environment.write = self.write

    def write(self, apply: Callable[[Any], Any]) -> Any:
        if not self.full:
            return self._write(apply)
        self.refused += 1
        with self._environment._env.begin(write=True) as txn:
            _ = apply(txn)
            raise TapeError("the disk is full")


async def test_a_tape_that_fails_loses_nothing_and_starves_nobody(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    disk = Faulty(life)
    await life.enqueue("q1", "q2")
    assert await life.claim(lease_s=1) == ["q1/a1"]
    disk.full = True
    for refused in (life.claim(), life.dispatcher.set_state("paused"), life.enqueue("q3"), life.finish("q1/a1")):
        with pytest.raises(TapeError):
            await refused
    # The queue in memory is the queue on the tape again, without anybody having written in between.
    waiting = life.store.follower(MemoryQueue)
    assert (waiting.state, waiting.counts()) == ("open", {"train": 1})
    assert life.store.rollout("q3") is None
    # Its time comes while nothing can be written; it is looked at again when something can.
    await life.when(
        lambda: life.attempt("q1/a1").lease_ns is not None and life.clock() > (life.attempt("q1/a1").lease_ns or 0)
    )
    assert life.attempt("q1/a1").status == AttemptStatus.PREPARING
    before = disk.refused
    await life.when(lambda: disk.refused >= before + 2)
    assert caplog.text.count("no attempt ends by its timeout") == 1, "it is looked at each second, and said once"
    disk.full = False
    both = [await life.claim("w2", wait_s=LONGEST_WAIT_S) for _ in range(2)]
    assert sorted(both) == [["q1/a2"], ["q2/a1"]]


async def test_what_a_worker_has_finished_counts_once_though_the_tape_has_failed(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    await life.begin("q1")
    write = life.store.write

    def full(items: Sequence[Any], between: Callable[[], object]) -> int:
        def fails(_: Transaction) -> None:
            raise TapeError("the disk is full")

        # It fails as a commit does: when all is done.
        return write([*items, QueuedOperation(fails)], between)

    with monkeypatch.context() as patch:
        patch.setattr(life.store, "write", full)
        for _ in range(3):
            with pytest.raises(TapeError):
                await life.finish("q1/a1")
            with pytest.raises(TapeError):
                await life.beat()
    assert await life.finish("q1/a1") == RolloutStatus.SUCCEEDED
    for _ in range(2):
        await life.beat()
        (worker,) = life.dispatcher.reader.workers()
        assert worker.finished == 1


async def test_a_task_that_cannot_be_done_does_not_disturb_the_others(life: Life) -> None:
    await life.enqueue("q1")

    def broken(transaction: Transaction) -> None:
        QueueOperations(transaction).claim("w9", 1, None, 30 * SECOND, life.clock())
        raise ZeroDivisionError("planted")

    results = await asyncio.gather(
        life.recorder.submit(broken),
        life.claim("w1", wait_s=LONGEST_WAIT_S),
        life.finish("q9/a1"),
        return_exceptions=True,
    )
    assert isinstance(results[0], TapeError)
    assert results[1] == ["q1/a1"]
    assert isinstance(results[2], OperationRefusedError)
    assert life.attempt("q1/a1").worker == "w1"


async def test_a_tape_that_cannot_be_read_is_told_of_and_looked_at_again(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = life.dispatcher.deadlines
    await life.begin("q1")
    there._watched.clear()

    def broken() -> list[tuple[str, str]]:
        raise TapeError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(there._reader, "live", broken)
        there._sweep()
    (record,) = caplog.records
    assert "not watched: the disk is gone" in record.getMessage()
    there._sweep()
    assert list(there._watched) == [("q1", "a1")]


# -- what failed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [None, -1.0])
@pytest.mark.parametrize("how", ["failed", "timeout", "unresponsive"])
async def test_the_last_failure_of_a_rollout_has_the_reward_that_was_said_before(
    life: Life, how: AttemptStatus, own: float | None
) -> None:
    short = {"timeout": {"timeout_s": 0.2}, "unresponsive": {"unresponsive_s": 0.2}}.get(how, {})
    config = RolloutConfig(retry_on=[how], max_attempts=2, reward_on_failure=own, **short)  # pyright: ignore
    await life.enqueue("q1", config=config)
    for attempt in ("a1", "a2"):
        asked = ClaimRequest(worker="w1", wait_s=LONGEST_WAIT_S, lease_s=1 if short else 30, reward_on_failure=0.0)
        assert [name_of(one) for one in await life.dispatcher.claim(asked)] == [f"q1/{attempt}"]
        if how == "failed":
            await life.finish(f"q1/{attempt}", "failed")
    await life.when(lambda: life.status("q1") == RolloutStatus.FAILED)
    given = [Reward.of(span) for span in life.store.spans("q1") if span.kind == "reward"]
    assert [(one.source, one.value, one.trusted, one.late) for one in given] == [("rule", own or 0.0, True, False)]
    assert (life.attempt("q1/a1").reward, life.attempt("q1/a2").reward) == (None, own or 0.0)
    await life.when(lambda: life.metrics.rewards[("rule",)] == 1)


async def test_what_was_judged_is_not_judged_by_the_rule(life: Life) -> None:
    config = RolloutConfig(max_attempts=1, reward_on_failure=0.0)
    await life.enqueue("q1", "q2", "q3", config=config)
    assert len(await life.claim(limit=3)) == 3
    await life.finish("q1/a1", "failed", rewards=[Judgement(value=0.3, source="runner")])
    await life.finish("q2/a1", "cancelled")
    await life.dispatcher.reward("q3", "a1", Judgement(value=0.9, source="agent"))  # what an agent says is not trusted
    await life.finish("q3/a1", "failed")
    assert [life.attempt(f"q{number}/a1").reward for number in (1, 2, 3)] == [0.3, None, 0.0]
