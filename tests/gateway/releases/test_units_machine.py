"""Units under everything that happens to a release, on a real store: one unit, one arm, one observation."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from fakes.experiment import policy, prompt
from fakes.some import some
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.gateway.app import open_store
from penstock.gateway.canary.assignment import Asker, share
from penstock.gateway.canary.unit import MOST, hashed
from penstock.gateway.cli.check import problems
from penstock.gateway.model.release import Entry, Pin, Release
from penstock.gateway.model.unit import Unit
from penstock.gateway.releases.operations import ReleaseOperations, Wanted
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.releases.unit_operations import DATABASE
from penstock.gateway.store.operation import Task
from penstock.gateway.store.transaction import Transaction

T = TypeVar("T")
S = 10**9
PEOPLE = [f"person-{number}@example.com" for number in range(5)]
ROLLOUTS = [f"r{number}" for number in range(25)]
WINDOW = 60
SPLITS = (0.2, 0.5, 0.8)


def entry(action: str) -> Entry:
    return Entry(number=0, at_ns=0, who="test", action=action, before=None, after="draft")


class Units(RuleBasedStateMachine):
    """A release by user. A rollout is one person's, or nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.store = open_store(self.path, map_bytes=1 << 20)
        self.now = 1_000 * S
        self.of: dict[str, str | None] = {}
        """Whom the first call of a rollout has named."""
        self.took_part: set[str] = set()
        self.do(self._begin)

    def _begin(self, transaction: Transaction) -> None:
        for text in ("one", "two"):
            ReleaseOperations(transaction).add_version("travel", prompt(f"Text {text}"), 1)
        how = policy(*SPLITS, unit="user.id", outcome_deadline_s=float(WINDOW))
        made = Release(id="new", resource="travel", kind="prompt", stable="v1", candidate="v2", policy=how, salt="s")
        ReleaseOperations(transaction).start(made, entry("start"), 2)
        for stage in ("checked", "replayed", "shadowed"):
            ReleaseOperations(transaction).change("travel-1", None, {"stage": stage}, entry("x"), 3)
        self.move(transaction, stage="canary", split=SPLITS[0])

    def move(self, transaction: Transaction, **update: Any) -> None:
        ReleaseOperations(transaction).change("travel-1", None, update, entry("x"), self.now)

    def do(self, operation: Callable[[Transaction], T]) -> T:
        task = Task(operation)
        self.store.write([task])
        if task.refusal is not None:
            raise task.refusal
        return cast(T, task.result)

    @property
    def release(self) -> Release:
        found = some(ReleaseReader(self.store).release("travel-1"))
        return found

    @rule(rollout=st.sampled_from(ROLLOUTS), person=st.sampled_from([None, *PEOPLE]), agent=st.sampled_from(["", "b"]))
    def call(self, rollout: str, person: str | None, agent: str) -> None:
        baggage = "color=blue" if person is None else f"color=blue, user.id={person};p=1"
        asker = Asker(agent, "m", "online", {}, baggage)
        pins = self.do(
            lambda transaction: ReleaseOperations(transaction).pin(Wanted(rollout, asker, ("travel",)), self.now)
        )
        if rollout not in self.of:
            self.of[rollout] = person
            if person in self.took_part:
                assert pins[0].release == "travel-1", "who has an arm keeps it in every new rollout"
        if pins[0].release is not None and (mine := self.of[rollout]) is not None:
            self.took_part.add(mine)

    @rule(seconds=st.integers(1, WINDOW))
    def wait(self, seconds: int) -> None:
        self.now += seconds * S

    @precondition(lambda self: self.release.stage == "canary" and self.release.step < 2)
    @rule()
    def advance(self) -> None:
        step = self.release.step + 1
        self.do(lambda transaction: self.move(transaction, step=step, split=SPLITS[step]))

    @precondition(lambda self: self.release.stage == "canary")
    @rule()
    def hold(self) -> None:
        self.do(lambda transaction: self.move(transaction, stage="held", held_in="canary"))

    @precondition(lambda self: self.release.stage == "held")
    @rule()
    def resume(self) -> None:
        self.do(lambda transaction: self.move(transaction, stage="canary", held_in=None))

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = open_store(self.path, map_bytes=1 << 20)

    @invariant()
    def a_unit_is_on_one_arm(self) -> None:
        reader, arms = ReleaseReader(self.store), defaultdict[str, set[Any]](set)
        for rollout, person in self.of.items():
            pins: list[Pin] = reader.pins(rollout)
            for pin in pins:
                if person is not None and pin.release is not None:
                    assert pin.unit == hashed("s", person)
                    arms[person].add((pin.arm, pin.number, pin.probability, pin.version))
        assert {person: found for person, found in arms.items() if len(found) > 1} == {}

    @invariant()
    def a_unit_is_assigned_once_by_its_share(self) -> None:
        release = self.release
        assigned, _ = ReleaseReader(self.store).assignments("travel-1")
        units = [one.unit for one in assigned if one.unit is not None]
        assert len(set(units)) == len(units)
        assert (release.assigned, release.unnamed) == (len(assigned), len(assigned) - len(units))
        pinned = [pins for name in self.of if (pins := ReleaseReader(self.store).pins(name)) and pins[0].release]
        assert release.assigned + release.joined == len(pinned)
        for one in assigned:
            assert (one.arm == "candidate") == (share("s", one.unit or one.rollout) < one.probability)

    @invariant()
    def rollouts_of_the_window_are_kept(self) -> None:
        reader = ReleaseReader(self.store)
        for one in reader.assignments("travel-1")[0]:
            members = reader.members("travel-1", one)
            assert (members[0].rollout, members[0].assigned_ns) == (one.rollout, one.assigned_ns)
            assert all(member.assigned_ns < one.assigned_ns + WINDOW * S for member in members)
            assert len({member.rollout for member in members}) == len(members)

    def teardown(self) -> None:
        assert list(problems(self.store)) == []
        for database in ("units", "pins", "assigned", "releases", "audit"):
            for key, value in self.store.slices(database):
                assert not any(person.encode() in key + value for person in PEOPLE)
        self.store.close()
        shutil.rmtree(self.path)


TestUnits = Units.TestCase
TestUnits.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


def test_a_unit_counts_a_bounded_number_of_rollouts_and_pins_all(tmp_path: Path) -> None:
    machine = Units()
    for number in range(MOST + 5):
        asker = Asker("", "m", "online", {}, "user.id=tenant-7")
        wanted = Wanted(f"r{number}", asker, ("travel",))
        (pin,) = machine.do(lambda transaction, wanted=wanted: ReleaseOperations(transaction).pin(wanted, machine.now))
        assert (pin.number, pin.unit) == (1, hashed("s", "tenant-7"))
    ((_, record),) = machine.store.slices(DATABASE)
    assert [one.rollout for one in Unit.model_validate_json(record).members] == [f"r{at}" for at in range(MOST)]
    assert (machine.release.assigned, machine.release.joined) == (1, MOST + 4)
    machine.teardown()
