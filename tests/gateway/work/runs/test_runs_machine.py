"""A run on the tape against a plain dictionary: reports, resends, resumes, restarts; refusals; what `check` finds."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import lmdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.model.run import NewRun, Point, PointsRequest, RunEnd, RunEvent
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.environment import DATABASES
from penstock.gateway.tape.store.transaction import OperationRefusedError, QueuedOperation, Transaction
from penstock.gateway.work import runs
from penstock.gateway.work.runs import RunOperations, RunReader

T = TypeVar("T")
NEW = NewRun(id="r", kind="grpo", config={"lr": 1})
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Thousands of commits: that a commit reaches the disk is tested elsewhere."""
STEPS = st.integers(0, 30)
VALUES = st.floats(allow_nan=False) | st.none()
POINTS = st.lists(
    st.builds(
        Point,
        step=STEPS,
        time_ns=st.integers(0, 2**40),
        values=st.dictionaries(st.sampled_from(["reward", "kl", "loss/pg"]), VALUES, min_size=1),
    ),
    max_size=12,
)


def do(store: Store, operation: Callable[[RunOperations], T]) -> T:
    """An operation in a transaction of its own."""
    task = QueuedOperation(lambda transaction: operation(RunOperations(transaction)))
    store.write([task])
    if task.refusal is not None:
        raise task.refusal
    assert task.result is not None
    return task.result


class RunMachine(RuleBasedStateMachine):
    """One run."""

    def __init__(self) -> None:
        super().__init__()
        self.fold = runs.FOLD
        runs.FOLD = 7
        self.folder = Path(mkdtemp(prefix="penstock-test-", dir=MEMORY))
        self.store = open_store(self.folder)
        self.known: dict[int, dict[str, float | None]] = {}
        self.times: dict[int, int] = {}
        self.resumed = 0
        self.names: list[str] = []
        self.last: PointsRequest | None = None
        self.clock = 1

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)
        runs.FOLD = self.fold

    @initialize()
    def start(self) -> None:
        do(self.store, lambda runs: runs.start(NEW, 1))

    def send(self, asked: PointsRequest) -> None:
        self.clock += 1
        do(self.store, lambda runs: runs.add_points("r", asked, self.clock))

    def learn(self, points: list[Point]) -> None:
        for point in points:
            self.known.setdefault(point.step, {}).update(point.values)
            assert point.time_ns is not None
            self.times[point.step] = point.time_ns
            self.names += [name for name in point.values if name not in self.names]

    @rule(points=POINTS)
    def report(self, points: list[Point]) -> None:
        self.last = PointsRequest(points=points)
        self.send(self.last)
        self.learn(points)

    @rule()
    def send_again(self) -> None:
        if self.last is not None:
            self.send(self.last)

    @rule(points=POINTS, since=STEPS, counted=st.booleans())
    def resume(self, points: list[Point], since: int, counted: bool) -> None:
        self.resumed += 1
        self.last = PointsRequest(points=points, since_step=since, resumed=self.resumed)
        self.send(self.last if counted else PointsRequest(points=points, since_step=since))
        self.known = {step: values for step, values in self.known.items() if step < since}
        self.learn(points)

    @rule(points=POINTS)
    def a_trainer_that_was_replaced_reports(self, points: list[Point]) -> None:
        if self.resumed:
            with pytest.raises(OperationRefusedError, match="another trainer has taken it over"):
                self.send(PointsRequest(points=points, resumed=self.resumed - 1))

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = open_store(self.folder)

    @invariant()
    def it_is_as_it_should_be(self) -> None:
        head = RunReader(self.store).run_head("r")
        assert head is not None
        assert (head.metrics, head.resumed) == (self.names, self.resumed)
        assert head.step == max(self.known, default=None)
        rows = RunReader(self.store).run_points("r", 0, 1000)
        wanted = [(step, self.times[step], self.known[step]) for step in sorted(self.known)]
        assert [(row.step, row.time_ns, nulls(row.values)) for row in rows] == wanted
        for name, found in zip(self.names, RunReader(self.store).run_series("r", self.names), strict=True):
            steps = [step for step in sorted(self.known) if name in self.known[step]]
            assert list(found.steps) == steps
        some = RunReader(self.store).run_points("r", 10, 3)
        assert [row.step for row in some] == [step for step in sorted(self.known) if step >= 10][:3]
        assert list(problems(self.store)) == []


def nulls(values: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}


RunMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=12)
test_a_run_is_what_was_reported_of_it = RunMachine.TestCase


# -- what is refused, and what is found ------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(tmp_path)
    do(made, lambda runs: runs.start(NEW, 1))
    return made


def points(*steps: int) -> PointsRequest:
    return PointsRequest(points=[Point(step=step, values={"reward": step}) for step in steps])


def test_a_resend_of_a_resume_cuts_nothing_that_came_after_it(store: Store) -> None:
    do(store, lambda runs: runs.add_points("r", points(*range(10)), 2))
    resume = PointsRequest(points=points(5).points, since_step=5, resumed=1)
    do(store, lambda runs: runs.add_points("r", resume, 3))
    do(store, lambda runs: runs.add_points("r", points(6, 7), 4))
    do(store, lambda runs: runs.add_points("r", resume, 5))
    assert [row.step for row in RunReader(store).run_points("r", 0, 99)] == list(range(8))
    with pytest.raises(OperationRefusedError, match="resume 1 of run 'r' went on from step 5, not 6"):
        do(store, lambda runs: runs.add_points("r", PointsRequest(since_step=6, resumed=1), 6))


def test_a_run_that_has_ended_takes_points_only_when_it_resumes(store: Store) -> None:
    do(store, lambda runs: runs.add_points("r", points(0, 1), 2))
    ended = do(store, lambda runs: runs.finish("r", RunEnd(status="failed", message="out of memory"), 3))
    assert (ended.status, ended.ended_ns, ended.message) == ("failed", 3, "out of memory")
    assert do(store, lambda runs: runs.finish("r", RunEnd(status="failed"), 4)) == ended
    with pytest.raises(OperationRefusedError, match="has failed already"):
        do(store, lambda runs: runs.finish("r", RunEnd(status="succeeded"), 4))
    with pytest.raises(OperationRefusedError, match="has failed; since_step resumes it"):
        do(store, lambda runs: runs.add_points("r", points(2), 4))
    assert [row.step for row in RunReader(store).run_points("r", 0, 99)] == [0, 1]
    back = do(store, lambda runs: runs.add_points("r", PointsRequest(since_step=1), 5))
    assert (back.status, back.ended_ns, back.step, back.resumed) == ("running", None, 0, 1)
    with pytest.raises(OperationRefusedError, match="resumed 1 times, not 0"):
        do(store, lambda runs: runs.finish("r", RunEnd(status="failed", resumed=0), 6))


def test_one_metric_too_many_changes_nothing(store: Store) -> None:
    first = PointsRequest(points=[Point(step=0, values={f"m{n}": n for n in range(512)})])
    do(store, lambda runs: runs.add_points("r", first, 2))
    more = PointsRequest(points=[Point(step=1, values={"extra": 1})], since_step=0)
    with pytest.raises(OperationRefusedError, match="'extra' is one metric too many; a run has at most 512"):
        do(store, lambda runs: runs.add_points("r", more, 3))
    assert [row.step for row in RunReader(store).run_points("r", 0, 9)] == [0]


@pytest.mark.parametrize("column", [False, True], ids=["all of it", "a column"])
def test_a_damaged_block_keeps_no_others_back(store: Store, monkeypatch: pytest.MonkeyPatch, column: bool) -> None:
    monkeypatch.setattr(runs, "FOLD", 8)
    for step in range(16):
        do(store, lambda runs, step=step: runs.add_points("r", points(step), 2))
    key = keys.rollout_key("r") + keys.u32(8)

    def damage(tape: Transaction) -> None:
        stored = tape.get("run_metrics", key) or b""
        # zstd begins each frame with its magic number.
        tape.put("run_metrics", key, stored.replace(b"\x28\xb5\x2f\xfd", bytes(4)) if column else stored[:16] + b"\xc1")

    store.write([QueuedOperation[None](damage)])
    for step in range(16, 24):
        do(store, lambda runs, step=step: runs.add_points("r", points(step), 2))
    assert [row.step for row in RunReader(store).run_points("r", 0, 99)] == list(range(8, 24))
    assert RunReader(store).run_series("r", ["reward"])[0].steps == list(range(8, 24))
    do(store, lambda runs: runs.add_points("r", PointsRequest(since_step=20), 3))
    assert [row.step for row in RunReader(store).run_points("r", 0, 99)] == list(range(8, 20))


def test_a_damaged_run_keeps_no_other_from_being_listed(store: Store) -> None:
    do(store, lambda runs: runs.start(NewRun(id="s", kind="grpo"), 2))
    store.write([QueuedOperation[None](lambda tape: tape.put("runs", keys.rollout_key("r"), b"{"))])
    assert [run.id for _, run in RunReader(store).run_heads()] == ["s"]


def test_events_are_kept_once_and_read_newest_first(store: Store) -> None:
    events = [RunEvent(time_ns=n % 7, step=n, text=f"event {n}") for n in range(20)]
    assert do(store, lambda runs: runs.add_events("r", events, 9)) == 20
    assert do(store, lambda runs: runs.add_events("r", events, 9)) == 0
    found = RunReader(store).run_events("r", None, 99)
    assert sorted((event.text for _, event in found)) == sorted(event.text for event in events)
    times = [event.time_ns or 0 for _, event in found]
    assert times == sorted(times, reverse=True)
    paged, before = list[RunEvent](), None
    while page := RunReader(store).run_events("r", before, 6):
        paged += [event for _, event in page]
        before = page[-1][0]
    assert paged == [event for _, event in found]


DAMAGE = [
    ("run_metrics", keys.rollout_key("r") + keys.u32(1), None, "its highest step is 2, its points go to None"),
    ("run_metrics", keys.rollout_key("r") + keys.u32(9), "run_metrics", "a number that was not given out"),
    ("run_metrics", keys.rollout_key("r") + keys.u32(1), b"\0" * 30, "run_metrics r/"),
    ("run_metrics", keys.rollout_key("x") + keys.u32(1), "run_metrics", "its run is missing"),
    ("run_configs", keys.rollout_key("r"), None, "its configuration is missing"),
    ("run_configs", keys.rollout_key("r"), b"{", "run_configs r"),
    ("run_order", keys.number(77), b"x\0", "it names a run that is missing"),
    ("run_events", keys.rollout_key("r") + keys.number(3) + bytes(7), b'{"text":"x"}', "the record of another event"),
    ("runs", keys.rollout_key("x"), "runs", "it is the record of another run"),
]


@pytest.mark.parametrize(("database", "key", "value", "said"), DAMAGE, ids=[row[3] for row in DAMAGE])
def test_check_finds_what_is_wrong(
    store: Store, tmp_path: Path, database: str, key: bytes, value: bytes | str | None, said: str
) -> None:
    do(store, lambda runs: runs.add_points("r", points(0, 1, 2), 2))
    do(store, lambda runs: runs.add_events("r", [RunEvent(text="hello")], 3))
    assert list(problems(store)) == []
    store.close()
    with lmdb.open(str(tmp_path / "tape"), max_dbs=len(DATABASES)) as env:
        handle = env.open_db(database.encode(), create=False)
        with env.begin(write=True) as txn:
            if isinstance(value, str):
                own = keys.rollout_key("r") + (keys.u32(1) if value == "run_metrics" else b"")
                value = txn.get(own, db=handle)
            if value is None:
                txn.delete(key, db=handle)
            else:
                txn.put(key, value, db=handle)
    with Store(tmp_path, readonly=True) as damaged:
        assert any(said in problem for problem in problems(damaged)), list(problems(damaged))
