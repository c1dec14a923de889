"""Pins and units under everything that can happen to releases, on a real store: one rollout, one arm, to the end, and
one unit, one arm, one observation."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fakes.experiment import policy, prompt
from fakes.some import some
from fakes.transactions import begun, done, link
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.model.release import Pin, Release, Unit
from penstock.gateway.model.resource import Audience
from penstock.gateway.releases.canary.decision import NEXT
from penstock.gateway.releases.canary.outcomes import MOST, Requester, audience_includes, share, unit_hash
from penstock.gateway.releases.operations import UNITS, PinRequest, ReleaseOperations
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store.environment import READERS
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction

T = TypeVar("T")
S = 10**9
RESOURCES = ("travel", "hotel")
AGENTS = ("", "planner", "critic")
WAYS = ("canary", "canary", "advance", "promote", "roll_back", "abort", "hold", "resume")
PEOPLE = [f"person-{number}@example.com" for number in range(5)]
ROLLOUTS = [f"r{number}" for number in range(25)]
WINDOW = 60
SPLITS = (0.2, 0.5, 0.8)


class Machine(RuleBasedStateMachine):
    """A store and its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.store = open_store(self.path, map_bytes=1 << 20)
        self.now: int = 1_000 * S

    def do(self, operation: Callable[[Transaction], T]) -> T:
        self.now += 1
        return done(self.store, operation)

    @property
    def reader(self) -> ReleaseReader:
        return ReleaseReader(self.store)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = open_store(self.path, map_bytes=1 << 20)

    def teardown(self) -> None:
        assert list(problems(self.store)) == []
        self.store.close()
        shutil.rmtree(self.path)


class Pinning(Machine):
    """Two resources, three agents, a dozen rollouts, and releases that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[tuple[str, str, str], Pin] = {}
        for name in RESOURCES:
            for text in ("one", "two"):
                self.register(name, text)

    def register(self, name: str, text: str) -> None:
        self.do(lambda transaction: ReleaseOperations(transaction).add_version(name, prompt(f"Text {text}"), self.now))

    def live(self) -> list[Release]:
        return [release for release in self.reader.releases() if release.live]

    @rule(
        name=st.sampled_from(RESOURCES),
        agents=st.sampled_from([[], ["planner"], ["critic"], ["plan*", "x"]]),
        pair=st.booleans(),
    )
    def start(self, name: str, agents: list[str], pair: bool) -> None:
        stable = self.reader.resources()[name][0].version
        other = next(one for one in RESOURCES if one != name)
        made = Release(
            id="new",
            resource=name,
            kind="prompt",
            stable=stable,
            candidate="v2" if stable == "v1" else "v1",
            companions={other: "v2"} if pair else {},
            only=Audience(agents=agents),
            policy=policy(0.2, 0.5, 0.8),
            salt=f"salt {self.now}",
        )
        try:
            self.do(lambda transaction: ReleaseOperations(transaction).start(made, link("start"), self.now))
        except OperationRefusedError as refusal:
            assert refusal.kind == "conflict"  # noqa: PT017 - the only way in which this may fail

    @precondition(lambda self: self.live())
    @rule(at=st.integers(0, 9), what=st.sampled_from(WAYS))
    def move(self, at: int, what: str) -> None:
        release = self.live()[at % len(self.live())]
        step = min(release.step + (what == "advance"), 2)
        ways: dict[str, dict[str, Any]] = {
            "canary": {"stage": NEXT.get(release.stage, "canary")},
            "advance": {"step": step},
            "promote": {"stage": "promoted"},
            "roll_back": {"stage": "rolled_back"},
            "abort": {"stage": "aborted"},
            "hold": {"stage": "held", "held_in": release.stage},
            "resume": {"stage": release.held_in or release.stage},
        }
        update = ways[what] | {"split": release.policy.stages[step].split}
        try:
            self.do(
                lambda transaction: ReleaseOperations(transaction).change(
                    release.id, release.revision, update, link(what), self.now
                )
            )
        except OperationRefusedError as refusal:
            unseen = what == "promote" and release.stage == "held" and release.held_in != "canary"
            assert ("was held in" if unseen else "cannot become") in str(refusal)  # noqa: PT017 - no other way to fail

    @rule(
        rollout=st.sampled_from(ROLLOUTS[:12]),
        agent=st.sampled_from(AGENTS),
        names=st.sets(st.sampled_from(RESOURCES), min_size=1),
    )
    def call(self, rollout: str, agent: str, names: set[str]) -> None:
        wanted = PinRequest(rollout, Requester(agent, "m", "online", {}), tuple(sorted(names)))
        pins = self.do(lambda transaction: ReleaseOperations(transaction).pin(wanted, self.now))
        assert pins == self.reader.pins(rollout)
        for pin in pins:
            if pin.agent == agent and pin.resource in names:
                self.first.setdefault((rollout, agent, pin.resource), pin)

    @invariant()
    def nothing_that_was_given_changes(self) -> None:
        releases = {release.id: release for release in self.reader.releases()}
        for (rollout, agent, resource), first in self.first.items():
            (now,) = [p for p in self.reader.pins(rollout) if (p.agent, p.resource) == (agent, resource)]
            if now.mixed:
                assert first.release is not None
                assert releases[first.release].stage == "rolled_back"
                assert now.version == releases[first.release].arm_versions("stable")[resource]
            else:
                assert now == first

    @invariant()
    def a_rollout_is_on_one_arm(self) -> None:
        for rollout in ROLLOUTS[:12]:
            arms: dict[str, set[Any]] = {}
            for pin in self.reader.pins(rollout):
                if pin.release is not None:
                    arms.setdefault(pin.release, set()).add((pin.arm, pin.number, pin.probability))
            assert all(len(found) == 1 for found in arms.values())

    @invariant()
    def an_arm_is_all_that_it_gives_together(self) -> None:
        releases = self.reader.releases()
        for rollout in ROLLOUTS[:12]:
            pins = self.reader.pins(rollout)
            for release in releases:
                mine = [pin for pin in pins if pin.release == release.id]
                for pin in mine:
                    assert pin.arm is not None
                    given = release.arm_versions("stable" if pin.mixed else pin.arm)
                    assert pin.version == given[pin.resource]
                if release.companions and mine:
                    heard = [p for p in pins if audience_includes(release.only, Requester(p.agent, "m", "online", {}))]
                    assert all(p in mine for p in heard if p.resource in release.resources)

    @invariant()
    def assignments_follow_from_salt_and_split(self) -> None:
        for release in self.reader.releases():
            assigned, _ = self.reader.assignments(release.id)
            assert [one.number for one in assigned] == list(range(1, release.assigned + 1))
            assert len({one.rollout for one in assigned}) == len(assigned)
            for one in assigned:
                assert (one.arm == "candidate") == (share(release.salt, one.rollout) < one.probability)


TestPinning = Pinning.TestCase
TestPinning.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


class Units(Machine):
    """A release by user. A rollout is one person's, or nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str | None] = {}
        """Whom the first call of a rollout has named."""
        self.took_part: set[str] = set()
        self.do(self._begin)

    def _begin(self, transaction: Transaction) -> None:
        for text in ("one", "two"):
            ReleaseOperations(transaction).add_version("travel", prompt(f"Text {text}"), 1)
        how = policy(*SPLITS, unit="user.id", outcome_deadline_s=float(WINDOW))
        made = Release(id="new", resource="travel", kind="prompt", stable="v1", candidate="v2", policy=how, salt="s")
        begun(transaction, made, SPLITS[0])

    def move(self, transaction: Transaction, **update: Any) -> None:
        ReleaseOperations(transaction).change("travel-1", None, update, link("x"), self.now)

    @property
    def release(self) -> Release:
        found = some(self.reader.release("travel-1"))
        return found

    @rule(rollout=st.sampled_from(ROLLOUTS), person=st.sampled_from([None, *PEOPLE]), agent=st.sampled_from(["", "b"]))
    def call(self, rollout: str, person: str | None, agent: str) -> None:
        baggage = "color=blue" if person is None else f"color=blue, user.id={person};p=1"
        asker = Requester(agent, "m", "online", {}, baggage)
        pins = self.do(
            lambda transaction: ReleaseOperations(transaction).pin(PinRequest(rollout, asker, ("travel",)), self.now)
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

    @invariant()
    def a_unit_is_on_one_arm(self) -> None:
        reader, arms = self.reader, defaultdict[str, set[Any]](set)
        for rollout, person in self.of.items():
            pins: list[Pin] = reader.pins(rollout)
            for pin in pins:
                if person is not None and pin.release is not None:
                    assert pin.unit == unit_hash("s", person)
                    arms[person].add((pin.arm, pin.number, pin.probability, pin.version))
        assert {person: found for person, found in arms.items() if len(found) > 1} == {}

    @invariant()
    def a_unit_is_assigned_once_by_its_share(self) -> None:
        release = self.release
        assigned, _ = self.reader.assignments("travel-1")
        units = [one.unit for one in assigned if one.unit is not None]
        assert len(set(units)) == len(units)
        assert (release.assigned, release.unnamed) == (len(assigned), len(assigned) - len(units))
        pinned = [pins for name in self.of if (pins := self.reader.pins(name)) and pins[0].release]
        assert release.assigned + release.joined == len(pinned)
        for one in assigned:
            assert (one.arm == "candidate") == (share("s", one.unit or one.rollout) < one.probability)

    @invariant()
    def rollouts_of_the_window_are_kept(self) -> None:
        reader = self.reader
        for one in reader.assignments("travel-1")[0]:
            members = reader.members("travel-1", one)
            assert (members[0].rollout, members[0].assigned_ns) == (one.rollout, one.assigned_ns)
            assert all(member.assigned_ns < one.assigned_ns + WINDOW * S for member in members)
            assert len({member.rollout for member in members}) == len(members)

    def teardown(self) -> None:
        for database in ("units", "pins", "assigned", "releases", "audit"):
            for key, value in self.store.records(database):
                assert not any(person.encode() in key + value for person in PEOPLE)
        super().teardown()


TestUnits = Units.TestCase
TestUnits.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


def test_a_unit_counts_a_bounded_number_of_rollouts_and_pins_all() -> None:
    machine = Units()
    for number in range(MOST + 5):
        asker = Requester("", "m", "online", {}, "user.id=tenant-7")
        wanted = PinRequest(f"r{number}", asker, ("travel",))
        (pin,) = machine.do(lambda transaction, wanted=wanted: ReleaseOperations(transaction).pin(wanted, machine.now))
        assert (pin.number, pin.unit) == (1, unit_hash("s", "tenant-7"))
    ((_, record),) = machine.store.records(UNITS)
    assert [one.rollout for one in Unit.model_validate_json(record).members] == [f"r{at}" for at in range(MOST)]
    assert (machine.release.assigned, machine.release.joined) == (1, MOST + 4)
    machine.teardown()


def test_a_reader_that_is_done_holds_no_transaction(tmp_path: Path) -> None:
    """Also before garbage is collected: LMDB has room for `READERS`."""
    gc.disable()
    try:
        with open_store(tmp_path) as store:
            for _ in range(READERS + 1):
                with ReleaseReader(store).canary() as tape:
                    assert tape.pins("r1") == []
    finally:
        gc.enable()
