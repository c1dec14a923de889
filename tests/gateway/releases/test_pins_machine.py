"""Pins under everything that can happen to releases, on a real store: one rollout, one arm, to the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from fakes.experiment import policy, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.gateway.app import open_store
from penstock.gateway.canary.assignment import Asker, share, speaks_to
from penstock.gateway.canary.stages import NEXT
from penstock.gateway.cli.check import problems
from penstock.gateway.model.release import Entry, Pin, Release
from penstock.gateway.model.resource import Audience
from penstock.gateway.releases.operations import ReleaseOperations, Wanted
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.store.operation import Refused, Task
from penstock.gateway.store.transaction import Transaction

T = TypeVar("T")
RESOURCES = ("travel", "hotel")
AGENTS = ("", "planner", "critic")
WAYS = ("canary", "canary", "advance", "promote", "roll_back", "abort", "hold", "resume")
ROLLOUTS = [f"r{number}" for number in range(12)]


class Pinning(RuleBasedStateMachine):
    """Two resources, three agents, a dozen rollouts, and releases that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.store = open_store(self.path, map_bytes=1 << 20)
        self.now = 1_000
        self.first: dict[tuple[str, str, str], Pin] = {}
        for name in RESOURCES:
            for text in ("one", "two"):
                self.register(name, text)

    def register(self, name: str, text: str) -> None:
        self.do(lambda transaction: ReleaseOperations(transaction).add_version(name, prompt(f"Text {text}"), self.now))

    def do(self, operation: Callable[[Transaction], T]) -> T:
        task = Task(operation)
        self.now += 1
        self.store.write([task])
        if task.refusal is not None:
            raise task.refusal
        return cast(T, task.result)

    def live(self) -> list[Release]:
        return [release for release in ReleaseReader(self.store).releases() if release.live]

    @rule(
        name=st.sampled_from(RESOURCES),
        agents=st.sampled_from([[], ["planner"], ["critic"], ["plan*", "x"]]),
        pair=st.booleans(),
    )
    def start(self, name: str, agents: list[str], pair: bool) -> None:
        stable = ReleaseReader(self.store).resources()[name][0].version
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
            self.do(lambda transaction: ReleaseOperations(transaction).start(made, entry("start"), self.now))
        except Refused as refusal:
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
                    release.id, release.revision, update, entry(what), self.now
                )
            )
        except Refused as refusal:
            unseen = what == "promote" and release.stage == "held" and release.held_in != "canary"
            assert ("was held in" if unseen else "cannot become") in str(refusal)  # noqa: PT017 - no other way to fail

    @rule(
        rollout=st.sampled_from(ROLLOUTS),
        agent=st.sampled_from(AGENTS),
        names=st.sets(st.sampled_from(RESOURCES), min_size=1),
    )
    def call(self, rollout: str, agent: str, names: set[str]) -> None:
        wanted = Wanted(rollout, Asker(agent, "m", "online", {}), tuple(sorted(names)))
        pins = self.do(lambda transaction: ReleaseOperations(transaction).pin(wanted, self.now))
        assert pins == ReleaseReader(self.store).pins(rollout)
        for pin in pins:
            if pin.agent == agent and pin.resource in names:
                self.first.setdefault((rollout, agent, pin.resource), pin)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = open_store(self.path, map_bytes=1 << 20)

    @invariant()
    def nothing_that_was_given_changes(self) -> None:
        releases = {release.id: release for release in ReleaseReader(self.store).releases()}
        for (rollout, agent, resource), first in self.first.items():
            (now,) = [p for p in ReleaseReader(self.store).pins(rollout) if (p.agent, p.resource) == (agent, resource)]
            if now.mixed:
                assert first.release is not None
                assert releases[first.release].stage == "rolled_back"
                assert now.version == releases[first.release].given("stable")[resource]
            else:
                assert now == first

    @invariant()
    def a_rollout_is_on_one_arm(self) -> None:
        for rollout in ROLLOUTS:
            arms: dict[str, set[Any]] = {}
            for pin in ReleaseReader(self.store).pins(rollout):
                if pin.release is not None:
                    arms.setdefault(pin.release, set()).add((pin.arm, pin.number, pin.probability))
            assert all(len(found) == 1 for found in arms.values())

    @invariant()
    def an_arm_is_all_that_it_gives_together(self) -> None:
        releases = ReleaseReader(self.store).releases()
        for rollout in ROLLOUTS:
            pins = ReleaseReader(self.store).pins(rollout)
            for release in releases:
                mine = [pin for pin in pins if pin.release == release.id]
                for pin in mine:
                    assert pin.arm is not None
                    given = release.given("stable" if pin.mixed else pin.arm)
                    assert pin.version == given[pin.resource]
                if release.companions and mine:
                    heard = [p for p in pins if speaks_to(release.only, Asker(p.agent, "m", "online", {}))]
                    assert all(p in mine for p in heard if p.resource in release.resources)

    @invariant()
    def assignments_follow_from_salt_and_split(self) -> None:
        for release in ReleaseReader(self.store).releases():
            assigned, _ = ReleaseReader(self.store).assignments(release.id)
            assert [one.number for one in assigned] == list(range(1, release.assigned + 1))
            assert len({one.rollout for one in assigned}) == len(assigned)
            for one in assigned:
                assert (one.arm == "candidate") == (share(release.salt, one.rollout) < one.probability)

    def teardown(self) -> None:
        assert list(problems(self.store)) == []
        self.store.close()
        shutil.rmtree(self.path)


def entry(action: str) -> Entry:
    return Entry(number=0, at_ns=0, who="test", action=action, before=None, after="draft")


TestPinning = Pinning.TestCase
TestPinning.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


def test_a_rollout_that_began_before_a_release_takes_no_part(tmp_path: Path) -> None:
    def pin(transaction: Transaction, agent: str) -> list[Pin]:
        return ReleaseOperations(transaction).pin(Wanted("r1", Asker(agent, "m", "online", {}), ("travel",)), 5)

    with open_store(tmp_path) as store:
        made = Release(
            id="new", resource="travel", kind="prompt", stable="v1", candidate="v2", policy=policy(0.99), salt="s"
        )
        canary = {"stage": "canary", "split": 0.99}

        def begin(transaction: Transaction) -> None:
            for text in ("one", "two"):
                ReleaseOperations(transaction).add_version("travel", prompt(f"Text {text}"), 1)
            pin(transaction, "planner")
            release = ReleaseOperations(transaction).start(made, entry("start"), 2)
            for stage in ("checked", "replayed", "shadowed"):
                ReleaseOperations(transaction).change(release.id, None, {"stage": stage}, entry("x"), 3)
            ReleaseOperations(transaction).change(release.id, None, canary, entry("canary"), 4)

        store.write([Task(begin)])
        task = Task(lambda transaction: pin(transaction, "critic"))
        store.write([task])
        assert task.result is not None
        assert [(one.agent, one.version, one.release) for one in task.result] == [
            ("planner", "v1", None),
            ("critic", "v1", None),
        ]
