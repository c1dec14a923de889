"""The queue against a plain model (`fakes.queue_model`): any order of giving, taking, judging, dying and coming back.

Every operation is a task in a write transaction of the real store, several of them in one now and then; a transaction
may fail as a whole, which must leave no trace, and the store is closed and opened in between. After every step the tape
says what the model says, the queue in memory is the queue on the tape, and nobody has been handed out twice.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fakes.entries import call
from fakes.queue_model import MODES, QUIET_S, SECOND, Model, Name, No
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.model.base import EMPTY_ACTION, Mode
from penstock.gateway.model.queue import AttemptEnd, HeartbeatRequest, HeldAttempt, QueueState, RolloutSpec
from penstock.gateway.model.rollout import FINAL, AttemptStatus, Judgement, Outcome, RolloutConfig, RolloutStatus
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction
from penstock.gateway.work.operations import DeadlineOperations, QueueOperations, SpanOperations
from penstock.gateway.work.queue import MemoryQueue, QueueReader

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Thousands of commits: what a disk takes for each would be all that this test does."""
GRACE = 15 * SECOND
CONFIGS = (
    RolloutConfig(),
    RolloutConfig(max_attempts=1),
    RolloutConfig(timeout_s=30, retry_on=["failed", "timeout", "unresponsive"], max_attempts=2),
    RolloutConfig(unresponsive_s=10, max_attempts=4),
    RolloutConfig(timeout_s=30, reward_on_failure=-1.0, max_attempts=2),
)
SPECS = (
    RolloutSpec(id="q1", mode="train", input={"text": "q"}),
    RolloutSpec(id="q2", mode="train", priority=-1, config=CONFIGS[1]),
    RolloutSpec(id="q.3", mode="val", config=CONFIGS[2]),
    RolloutSpec(id="q4", mode="train", priority=5, config=CONFIGS[3]),
    RolloutSpec(id="q5", mode="train", priority=5, config=CONFIGS[4]),
)
OTHER = RolloutSpec(id="q1", mode="val")
"""The same name for something else."""
specs = st.lists(st.sampled_from([*SPECS, *SPECS, OTHER]), min_size=1, max_size=4)
picks = st.integers(0, 9)
"""Which of the rollouts or attempts that there are; 9 is none of them."""
seldom = st.integers(0, 30)
workers = st.sampled_from(["w1", "w1", "w2"])
leases = st.sampled_from([5 * SECOND, 20 * SECOND, 100 * SECOND])
modes: st.SearchStrategy[tuple[Mode, ...]] = st.sampled_from([MODES, MODES, ("train",), ("val", "test")])
ends: st.SearchStrategy[AttemptEnd] = st.sampled_from(
    ["succeeded", "failed", "failed", "timeout", "cancelled", "environment"]
)
rewards = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, "k1", "k2"])), max_size=2)


class Boom(Exception):
    """The transaction fails."""


@dataclass
class Step:
    """One operation: how the store does it, and what the model says to it."""

    item: QueuedOperation[Any] | SpanEntry
    predict: Callable[[], Any]
    outcome: Callable[[Any], Any]


class QueueMachine(RuleBasedStateMachine):
    """Rules are what the control API, the clock and agents do to the queue."""

    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=MEMORY))
        self.store = self.opened()
        self.model = Model()
        self.now = 1_800_000_000 * SECOND
        self.held: list[Step] | None = None
        self.doomed = False
        self.steps = 0
        self.requeued: set[str] = set()
        self.before: dict[str, RolloutStatus] = {}
        self.enqueue(list(SPECS[1:]))

    def opened(self) -> Store:
        # A little memory, so that attempts are read back from the tape all the time.
        return open_store(self.path, map_bytes=1 << 20, memory_bytes=10_000)

    def rollout(self, pick: int) -> str:
        there = sorted(self.model.tasks)
        return there[pick % len(there)] if there and pick < 9 else "unknown"

    def attempt(self, pick: int) -> Name:
        """The newest ones first."""
        there = sorted(self.model.names(), key=lambda name: (-self.model.attempt(name).created, name))
        return there[pick % len(there)] if there and pick < 9 else (self.rollout(pick % 9), "own")

    # -- transactions --------------------------------------------------------------------------------------------------

    def do(
        self,
        operation: Callable[[Transaction], Any],
        predict: Callable[[], Any],
        outcome: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        """Compares what the store answers (`outcome` of it) with what the model predicts."""
        self.step(Step(QueuedOperation(operation), predict, outcome))

    def step(self, step: Step) -> None:
        if self.held is not None:
            self.held.append(step)
            return
        self.commit([step])

    def commit(self, steps: Sequence[Step]) -> None:
        items = [step.item for step in steps]
        if self.doomed:
            self.doomed = False
            with pytest.raises(Boom):
                self.store.write([*items, QueuedOperation(fail)])
            return
        self.store.write(items)
        for step in steps:
            self.compare(step)

    def compare(self, step: Step) -> None:
        task = step.item
        refusal = task.refusal if isinstance(task, QueuedOperation) else None
        expected: Any = None
        try:
            expected, wrong = step.predict(), None
        except No as no:
            wrong = str(no)
        assert (None if refusal is None else refusal.kind) == wrong, refusal
        if isinstance(task, QueuedOperation) and refusal is None:
            assert step.outcome(task.result) == expected

    @precondition(lambda self: self.held is None)
    @rule()
    def gather(self) -> None:
        """What follows goes into one transaction."""
        self.held = []

    @precondition(lambda self: bool(self.held))
    @rule()
    def write(self) -> None:
        steps, self.held = self.held or [], None
        self.commit(steps)

    @rule()
    def doom(self) -> None:
        """The next transaction fails at its end."""
        self.doomed = True

    @precondition(lambda self: not self.held)
    @rule(seconds=st.sampled_from([0, 20, 100]))
    def restart(self, seconds: int) -> None:
        self.held, self.doomed = None, False
        self.store.close()
        self.now += seconds * SECOND
        self.store = self.opened()
        now = self.now
        self.model.take_up(now, GRACE)
        expected = {(*name, self.look_at(name)) for name in self.model.live()}
        names = QueueReader(self.store).live()
        task = QueuedOperation(lambda transaction: DeadlineOperations(transaction).adopt(names, now, GRACE))
        self.store.write([task])
        assert set(task.result or []) == expected

    def look_at(self, name: Name) -> int | None:
        """When the clock has to look at an attempt after a start."""
        due = self.model.due(name)
        return self.now if not self.model.claimed(name) else None if due is None else due[0]

    # -- giving work ---------------------------------------------------------------------------------------------------

    @rule(given=specs)
    def enqueue(self, given: list[RolloutSpec]) -> None:
        named, now = [(spec.id or "", spec) for spec in given], self.now
        self.do(
            lambda transaction: QueueOperations(transaction).enqueue(named, now),
            lambda: self.model.enqueue(given),
            lambda made: [(one.id, one.created) for one in made],
        )

    @rule(pick=seldom)
    def cancel(self, pick: int) -> None:
        rollout, now = self.rollout(pick), self.now
        self.do(
            lambda transaction: QueueOperations(transaction).cancel(rollout, EMPTY_ACTION, now),
            lambda: self.model.cancel(rollout, now),
            lambda made: None,
        )

    @rule(pick=picks)
    def requeue(self, pick: int) -> None:
        rollout, now = self.rollout(pick), self.now
        self.requeued.add(rollout)
        self.do(
            lambda transaction: QueueOperations(transaction).requeue(rollout, EMPTY_ACTION, now),
            lambda: self.model.requeue(rollout, now),
            lambda made: None,
        )

    @rule(state=st.sampled_from(["open", "open", "open", "open", "paused", "draining"]))
    def set_state(self, state: QueueState) -> None:
        self.do(
            lambda transaction: QueueOperations(transaction).set_state(state, EMPTY_ACTION, 0),
            lambda: setattr(self.model, "state", state),
        )

    # -- doing it ------------------------------------------------------------------------------------------------------

    @rule(
        worker=workers, limit=st.integers(1, 3), wanted=modes, lease=leases, reward=st.sampled_from([None, None, 0.25])
    )
    def claim(self, worker: str, limit: int, wanted: tuple[Mode, ...], lease: int, reward: float | None = None) -> None:
        now = self.now
        self.do(
            lambda transaction: QueueOperations(transaction).claim(worker, limit, wanted, lease, now, reward),
            lambda: self.model.claim(worker, limit, wanted, lease, now, reward),
            lambda made: [(one.rollout.id, one.attempt.id) for one in made],
        )

    @rule(worker=workers, picked=st.lists(st.tuples(picks, st.booleans()), max_size=3), lease=leases)
    def heartbeat(self, worker: str, picked: list[tuple[int, bool]], lease: int) -> None:
        held = [(self.attempt(pick), running) for pick, running in picked]
        asked = [HeldAttempt(rollout=name[0], attempt=name[1], running=running) for name, running in held]
        now = self.now
        self.do(
            lambda transaction: QueueOperations(transaction).heartbeat(
                worker, HeartbeatRequest(attempts=asked), lease, now
            ),
            lambda: self.model.heartbeat(worker, held, lease, now),
            lambda made: [one.held for one in made],
        )

    @rule(picked=st.lists(picks, max_size=2))
    def give_back(self, picked: list[int]) -> None:
        wanted, now = [name for name in map(self.attempt, picked) if self.model.there(name)], self.now
        if self.held is None:
            self.do(
                lambda transaction: QueueOperations(transaction).give_back(wanted, now),
                lambda: self.model.give_back(wanted, now),
            )

    @rule(pick=picks, worker=st.sampled_from(["w1", "w2", None, "own"]), end=ends, given=rewards)
    def finish(self, pick: int, worker: str | None, end: AttemptEnd, given: list[tuple[float, str | None]]) -> None:
        name = self.attempt(pick)
        if worker == "own":
            worker = self.model.attempt(name).worker if self.model.there(name) else None
        self.end(name, worker, end, given)

    def end(self, name: Name, worker: str | None, end: AttemptEnd, given: list[tuple[float, str | None]]) -> None:
        said = [(Judgement(value=value, key=key, source="runner"), True) for value, key in given]
        now, status = self.now, AttemptStatus(end)
        if end == "environment":
            self.requeued.add(name[0])
        self.do(
            lambda transaction: QueueOperations(transaction).finish(
                name, worker, status, Outcome(exit_code=0), said, now
            ),
            lambda: self.model.finish(name, worker, status, given, now),
            lambda made: made.attempt.status,
        )

    @rule(picked=st.lists(picks, max_size=3), seconds=st.sampled_from([1, 9, 16, 31]))
    def expire(self, picked: list[int], seconds: int) -> None:
        """Time goes by, and the clock asks for all that is live, and for what is not."""
        self.now += seconds * SECOND
        watched = sorted(self.model.live() | self.model.unclaimed())
        wanted, now = [*watched, *map(self.attempt, picked)], self.now
        self.do(
            lambda transaction: DeadlineOperations(transaction).expire(wanted, now, QUIET_S),
            lambda: [self.model.expire(name, now) for name in wanted],
            lambda made: [(one.again_ns, one.requeued, one.rewarded) for one in made],
        )

    @rule(pick=picks, fails=st.booleans())
    def agent_calls(self, pick: int, fails: bool = False) -> None:
        self.called(self.attempt(pick), fails)

    def called(self, name: Name, fails: bool = False) -> None:
        entry, now = call(*name), self.now
        entry.start_ns = entry.end_ns = now
        entry.status = "error" if fails else "ok"
        self.step(Step(entry, lambda: self.model.call(name, now, fails), lambda made: None))

    @rule(pick=picks, given=rewards, trusted=st.booleans())
    def judge(self, pick: int, given: list[tuple[float, str | None]], trusted: bool) -> None:
        name, now = self.attempt(pick), self.now
        for value, key in given:
            said = Judgement(value=value, key=key)
            self.do(
                lambda transaction, said=said: SpanOperations(transaction).reward(name, said, trusted, now),
                lambda value=value, key=key: self.model.reward(name, value, key, trusted),
                lambda made: None,
            )

    # -- stories that chance would seldom tell ----------------------------------------------------------------------

    @rule(lease=leases, seconds=st.sampled_from([9, 31, 101]), how=st.sampled_from(["call", "beat", "finish", "other"]))
    def somebody_is_lost_and_comes_back(self, lease: int, seconds: int, how: str) -> None:
        """A worker claims something, is not heard of, and is there again: before another one, or after it."""
        self.claim("w1", 1, MODES, lease)
        self.expire([], seconds)
        if how == "other":
            self.claim("w2", 1, MODES, lease)
        if how == "beat":
            self.heartbeat("w1", [(0, True)], lease)
        elif how == "finish":
            self.finish(0, "w1", "succeeded", [(1.0, None)])
        else:
            self.agent_calls(0)

    @rule(lease=leases, reward=st.sampled_from([None, 0.25]), end=ends)
    def somebody_fails_and_hands_it_back(self, lease: int, reward: float | None, end: AttemptEnd) -> None:
        """What has failed, and what it was rewarded with, was no try; another end of it is refused then."""
        self.claim("w1", 1, MODES, lease, reward)
        self.finish(0, "w1", "failed", [])
        self.finish(0, "w1", "environment", [])
        self.finish(0, "w1", end, [])

    @rule(
        pick=picks,
        seconds=st.sampled_from([16, 31]),
        how=st.sampled_from(["call", "other", "finish", "reward"]),
        fails=st.booleans(),
    )
    def somebody_nobody_has_claimed_is_quiet(self, pick: int, seconds: int, how: str, fails: bool) -> None:
        """It calls, says nothing, and is there again: itself, another attempt of its rollout, or somebody about it."""
        name = f"by-hand-{pick % 2}", "0"
        self.called(name, fails)
        self.expire([], seconds)
        if how == "call":
            self.called(name)
        elif how == "other":
            self.called((name[0], "1"))
        elif how == "finish":
            self.end(name, None, "failed", [(0.5, None)])
        else:
            now = self.now
            said = Judgement(value=1.0)
            self.do(
                lambda transaction: SpanOperations(transaction).reward(name, said, True, now),
                lambda: self.model.reward(name, 1.0, None, True),
                lambda made: None,
            )

    @rule(pick=picks, end=ends, lease=leases)
    def an_agent_has_an_attempt_of_its_own(self, pick: int, end: AttemptEnd, lease: int) -> None:
        """It addresses an attempt that nobody has claimed; its end is not the rollout's while that is claimed."""
        name = self.rollout(pick), "own"
        self.claim("w1", 1, MODES, lease)
        self.called(name)
        self.end(name, None, end, [(0.5, None)])

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    @precondition(lambda self: self.held is None)
    def the_tape_agrees(self) -> None:
        told = {rollout.id: rollout for _, rollout in self.store.rollouts()}
        assert set(told) == set(self.model.tasks)
        for name, task in self.model.tasks.items():
            found = told[name]
            assert (found.status, found.tries, found.attempt) == (task.status, task.tries, task.attempt)
            assert (found.ended_ns is not None) == (found.status in FINAL)
            stored = {one.id: one for one in self.store.attempts(name)}
            assert list(stored) == list(task.attempts)
            for attempt, one in task.attempts.items():
                known = stored[attempt]
                assert (known.status, known.worker, known.lease_ns) == (one.status, one.worker, one.lease)
                assert (known.spans, known.reward, known.ended_ns) == (one.spans, one.reward, one.ended)
                assert (known.created_ns, known.last_seen_ns) == (one.created, one.seen)

    @invariant()
    @precondition(lambda self: self.held is None)
    def the_queue_holds_who_waits(self) -> None:
        stored = list(self.store.records("queue"))
        waiting: dict[Mode, list[bytes]] = {}
        for key, name in stored:
            waiting.setdefault(MODES[key[0]], []).append(name)
        for mode, found in waiting.items():
            assert found == [keys.rollout_key(name) for name in self.model.queue([mode])]
        counts = {mode: len(found) for mode, found in waiting.items()}
        assert sum(counts.values()) == len(self.model.queue())
        remembered = self.store.follower(MemoryQueue)
        state, known = remembered.state, remembered.counts()
        assert (state, known) == (self.model.state, counts)
        told = QueueReader(self.store).queue()
        assert told.waiting == counts
        assert told.claimed == len(self.model.live())

    @invariant()
    @precondition(lambda self: self.held is None)
    def live_holds_who_is_claimed_and_nobody_twice(self) -> None:
        live = QueueReader(self.store).live()
        assert set(live) == self.model.live()
        assert len({rollout for rollout, _ in live}) == len(live)
        assert set(chain.from_iterable(QueueReader(self.store).unclaimed(2))) == self.model.unclaimed()

    @invariant()
    @precondition(lambda self: self.held is None)
    def final_states_stay(self) -> None:
        now = {rollout.id: rollout.status for _, rollout in self.store.rollouts()}
        for name, status in self.before.items():
            if status in FINAL and now[name] != status:
                quiet = self.model.tasks[name].spec is None and status in (RolloutStatus.ENDED, RolloutStatus.FAILED)
                assert name in self.requeued or quiet
        self.before = now
        self.requeued.clear()

    @invariant()
    @precondition(lambda self: self.held is None)
    def workers_agree(self) -> None:
        told = {worker.id: set(worker.attempts) for worker in QueueReader(self.store).workers()}
        assert told == {name: {"/".join(one) for one in held} for name, held in self.model.workers.items()}

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.steps += 1
        if not self.steps % 8:
            assert list(problems(self.store)) == []

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        assert list(problems(self.store)) == []
        self.store.close()
        shutil.rmtree(self.path)


def fail(transaction: Transaction) -> None:
    raise Boom


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
