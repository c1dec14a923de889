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
from pathlib import Path
from typing import Any

import pytest
from fakes.entries import call
from fakes.queue_model import MODES, SECOND, Model, Name, No
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway import keys
from gateway.lifecycle import FINAL, LIVE
from gateway.model import AttemptStatus, Figures, Judgement, Mode, Outcome, RolloutConfig, RolloutStatus
from gateway.store import Entry, Refused, Store, Task, Work
from gateway.work import End, Held, QueueState, RolloutSpec

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Thousands of commits: what a disk takes for each would be all that this test does."""
GRACE = 15 * SECOND
CONFIGS = (
    RolloutConfig(),
    RolloutConfig(max_attempts=1),
    RolloutConfig(timeout_s=30, retry_on=["failed", "timeout", "unresponsive"], max_attempts=2),
    RolloutConfig(unresponsive_s=10, max_attempts=4),
)
rollouts = st.sampled_from(["q1", "q2", "q.3", "q4", "unknown"])
attempts = st.sampled_from(["a1", "a1", "a2", "a3", "own"])
names = st.tuples(rollouts, attempts)
workers = st.sampled_from(["w1", "w2"])
leases = st.sampled_from([5 * SECOND, 20 * SECOND, 100 * SECOND])
specs = st.builds(
    RolloutSpec,
    id=st.sampled_from(["q1", "q2", "q.3", "q4"]),
    input=st.sampled_from([None, None, {"text": "q"}]),
    mode=st.sampled_from(["train", "train", "val"]),
    priority=st.sampled_from([0, 0, 5, -1]),
    config=st.sampled_from(CONFIGS),
)
modes = st.lists(st.sampled_from(MODES), min_size=1, unique=True)
ends: st.SearchStrategy[End] = st.sampled_from(["succeeded", "failed", "timeout", "cancelled"])
rewards = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, "k1", "k2"])), max_size=2)


class Boom(Exception):
    """The transaction fails."""


@dataclass
class Step:
    """One operation: how the store does it, and what the model says to it."""

    item: Task[Any] | Entry
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

    def opened(self) -> Store:
        # A little memory, so that attempts are read back from the tape all the time.
        return Store(self.path, map_bytes=1 << 20, memory_bytes=10_000)

    # -- transactions --------------------------------------------------------------------------------------------------

    def do(
        self, operation: Callable[[Work], Any], predict: Callable[[], Any], outcome: Callable[[Any], Any] = lambda x: x
    ) -> None:
        """Compares what the store answers (`outcome` of it) with what the model predicts."""
        self.step(Step(Task(operation), predict, outcome))

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
                self.store.write([*items, Task(fail)])
            return
        self.store.write(items)
        for step in steps:
            self.compare(step)

    def compare(self, step: Step) -> None:
        task = step.item
        refusal = task.refusal if isinstance(task, Task) else None
        try:
            expected = step.predict()
        except No as no:
            assert refusal is not None, f"it should be refused: {no}"
            assert refusal.kind == str(no)
        else:
            assert refusal is None, f"it was refused: {refusal}"
            if isinstance(task, Task):
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
        task = Task(lambda work: work.take_up(now, GRACE))
        self.store.write([task])
        assert set(task.result or []) == expected

    def look_at(self, name: Name) -> int | None:
        """When the clock has to look at an attempt after a start."""
        due = self.model.due(name)
        return self.now if not self.model.claimed(name) else None if due is None else due[0]

    @rule(seconds=st.sampled_from([1, 9, 16, 31]))
    def time_goes_by(self, seconds: int) -> None:
        self.now += seconds * SECOND

    # -- giving work ---------------------------------------------------------------------------------------------------

    @rule(given=st.lists(specs, min_size=1, max_size=4))
    def enqueue(self, given: list[RolloutSpec]) -> None:
        named, now = [(spec.id or "", spec) for spec in given], self.now
        self.do(
            lambda work: work.enqueue(named, now),
            lambda: self.model.enqueue(given),
            lambda made: [(one.id, one.created) for one in made],
        )

    @rule(rollout=rollouts)
    def cancel(self, rollout: str) -> None:
        now = self.now
        self.do(
            lambda work: work.cancel(rollout, now), lambda: self.model.cancel(rollout, now), lambda made: None
        )

    @rule(rollout=rollouts)
    def requeue(self, rollout: str) -> None:
        now = self.now
        self.requeued.add(rollout)
        self.do(lambda work: work.requeue(rollout, now), lambda: self.model.requeue(rollout, now), lambda made: None)

    @rule(state=st.sampled_from(["open", "open", "paused", "draining"]))
    def set_state(self, state: QueueState) -> None:
        self.do(lambda work: work.set_state(state), lambda: setattr(self.model, "state", state))

    # -- doing it ------------------------------------------------------------------------------------------------------

    @rule(worker=workers, limit=st.integers(1, 3), wanted=modes, lease=leases)
    def claim(self, worker: str, limit: int, wanted: list[Mode], lease: int) -> None:
        now = self.now
        self.do(
            lambda work: work.claim(worker, limit, wanted, lease, now),
            lambda: self.model.claim(worker, limit, wanted, lease, now),
            lambda made: [(one.rollout.id, one.attempt.id) for one in made],
        )

    @rule(worker=workers, held=st.lists(st.tuples(names, st.booleans()), max_size=3), lease=leases)
    def heartbeat(self, worker: str, held: list[tuple[Name, bool]], lease: int) -> None:
        asked = [Held(rollout=name[0], attempt=name[1], running=running) for name, running in held]
        now = self.now
        self.do(
            lambda work: work.heartbeat(worker, asked, lease, Figures(), now),
            lambda: self.model.heartbeat(worker, held, lease, now),
            lambda made: [one.held for one in made],
        )

    @rule(given=st.lists(names, max_size=2))
    def give_back(self, given: list[Name]) -> None:
        wanted, now = [name for name in given if self.model.there(name)], self.now
        if self.held is None:
            self.do(lambda work: work.give_back(wanted, now), lambda: self.model.give_back(wanted, now))

    @rule(name=names, worker=st.sampled_from(["w1", "w2", None]), end=ends, given=rewards)
    def finish(self, name: Name, worker: str | None, end: End, given: list[tuple[float, str | None]]) -> None:
        said = [(Judgement(value=value, key=key, source="runner"), True) for value, key in given]
        now, status = self.now, AttemptStatus(end)
        self.do(
            lambda work: work.finish(name, worker, status, Outcome(exit_code=0), said, now),
            lambda: self.model.finish(name, worker, status, given, now),
            lambda made: made.attempt.status,
        )

    @rule(given=st.lists(names, max_size=3))
    def expire(self, given: list[Name]) -> None:
        """The clock asks for all that is live, and for what is not."""
        wanted, now = [*sorted(self.model.live()), *given], self.now
        self.do(
            lambda work: work.expire(wanted, now),
            lambda: [self.model.expire(name, now) for name in wanted],
            lambda made: [(one.again_ns, one.requeued) for one in made],
        )

    @rule(name=names)
    def agent_calls(self, name: Name) -> None:
        entry, now = call(*name), self.now
        entry.start_ns = entry.end_ns = now
        self.step(Step(entry, lambda: self.model.call(name, now), lambda made: None))

    @rule(name=names, given=rewards, trusted=st.booleans())
    def judge(self, name: Name, given: list[tuple[float, str | None]], trusted: bool) -> None:
        now = self.now
        for value, key in given:
            said = Judgement(value=value, key=key)
            self.do(
                lambda work, said=said: work.reward(name, said, trusted, now),
                lambda value=value, key=key: self.model.reward(name, value, key, trusted),
                lambda made: None,
            )

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
        stored = list(self.store.slices("queue"))
        waiting = {mode: [name for key, name in stored if key[0] == at] for at, mode in enumerate(MODES)}
        for mode, found in waiting.items():
            assert found == [keys.rollout_key(name) for name in self.model.queue([mode])]
        counts = {mode: len(found) for mode, found in waiting.items() if found}
        state, known = self.store.queue_state()
        assert (state, {mode: count for mode, count in known.items() if count}) == (self.model.state, counts)
        told = self.store.queue()
        assert told.waiting == counts
        assert told.claimed == len(self.model.live())

    @invariant()
    @precondition(lambda self: self.held is None)
    def live_holds_who_is_claimed_and_nobody_twice(self) -> None:
        live = self.store.live()
        assert set(live) == self.model.live()
        assert len({rollout for rollout, _ in live}) == len(live)

    @invariant()
    @precondition(lambda self: self.held is None)
    def final_states_stay(self) -> None:
        now = {rollout.id: rollout.status for _, rollout in self.store.rollouts()}
        for name, status in self.before.items():
            if status in FINAL and now[name] != status:
                assert name in self.requeued
        self.before = now
        self.requeued.clear()

    @invariant()
    @precondition(lambda self: self.held is None)
    def workers_agree(self) -> None:
        told = {worker.id: set(worker.attempts) for worker in self.store.workers()}
        assert told == {name: {"/".join(one) for one in held} for name, held in self.model.workers.items()}

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.steps += 1
        if not self.steps % 8:
            assert list(self.store.check()) == []

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        assert list(self.store.check()) == []
        self.store.close()
        shutil.rmtree(self.path)


def fail(work: Work) -> None:
    raise Boom


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, phases=[Phase.generate])
