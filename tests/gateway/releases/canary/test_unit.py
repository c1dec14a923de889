"""Units of rollouts: whose a call is, when a unit counts, and as what."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.judged import FakeTape
from fakes.mistakes import tells
from fakes.some import some
from fakes.trials import Trial, steady

from penstock.gateway.model.release import Assignment, AssignmentEvidence, Release, UnitMember
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutStatus, Totals
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.releases.canary.decision import Canary
from penstock.gateway.releases.canary.outcomes import (
    Requester,
    assignment_outcome,
    observation,
    outcome_due,
    share,
    unit_of,
)
from penstock.gateway.releases.canary.verification import verify

S = 10**9
BEGAN = 1_000 * S
WINDOW = 60
"""Seconds of a window, and of the deadline of each outcome."""


def release(**policy: Any) -> Release:
    given: dict[str, Any] = {"unit": "user.id", "outcome_deadline_s": float(WINDOW), "margin_absolute": 0.1} | policy
    how = ReleasePolicy.model_validate(given)
    return Release(id="x-1", resource="x", kind="prompt", stable="v1", candidate="v2", policy=how, salt="s")


def asker(baggage: str = "", **metadata: Any) -> Requester:
    return Requester("", "m", "online", metadata, baggage)


ADA = unit_of(release(), asker("user.id=ada"))
ASSIGNED = Assignment(
    number=3, rollout="r1", unit=ADA, arm="candidate", probability=0.5, stage="50%", assigned_ns=BEGAN
)


def test_a_unit_is_named_by_the_metadata_or_else_by_the_baggage() -> None:
    assert ADA is not None
    assert len(ADA) == 32
    one = release()
    assert unit_of(one, Requester("", "m", "online", {"user.id": "ada"}, "user.id=eve")) == ADA
    assert unit_of(one, asker("user.id=a%64a;x=1")) == ADA
    assert unit_of(one, asker("user.id=eve")) not in (None, ADA)
    assert unit_of(one.model_copy(update={"salt": "t"}), asker("user.id=ada")) != ADA, "not the same in two releases"
    assert unit_of(one, Requester("", "m", "online", {"user.id": 7}, "")) == unit_of(one, asker("user.id=7"))
    for nobody in (asker(), asker("user=ada"), asker("user.id=%ff"), asker(**{"user.id": ""})):
        assert unit_of(one, nobody) is None
    assert unit_of(one, asker(**{"user.id": "x" * 257})) is None
    assert unit_of(release(unit="rollout"), asker("user.id=ada")) is None
    assert unit_of(release(unit="rollout"), asker("rollout=ada")) is None


@pytest.mark.parametrize("name", ["", "user id", "a,b", "a=b", "ü", "x" * 129])
def test_a_name_that_no_entry_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="policy: unit: "):
        ReleasePolicy.load(f'unit = "{name}"')


# --- when it counts, and as what ---


@pytest.fixture
def tape() -> FakeTape:
    """Three rollouts that have called, one after the other."""
    names = ("r1", "r2", "r3")
    tries = [Attempt(rollout=name, id="a1", created_ns=BEGAN, totals=Totals(calls=1)) for name in names]
    tries[1].totals.errors = 1
    return FakeTape({name: Rollout(id=name, group=f"task {name}") for name in names}, tries)


def members(*begun: int) -> list[UnitMember]:
    """Rollouts that have begun so many seconds after the first."""
    return [UnitMember(rollout=f"r{at}", assigned_ns=BEGAN + after * S) for at, after in enumerate(begun, 1)]


def look(tape: FakeTape, seconds: int, *begun: int, **policy: Any) -> AssignmentEvidence | None:
    return assignment_outcome(tape, members(*begun), release(**policy), ASSIGNED, BEGAN + seconds * S)


def test_a_unit_waits_for_its_window_and_then_for_each_of_its_rollouts(tape: FakeTape) -> None:
    for name in ("r1", "r2"):
        tape.reward(1.0, name)
    assert look(tape, WINDOW - 1, 0, 10) is None, "another rollout may begin"
    assert look(tape, WINDOW, 0, 10) is not None
    assert look(tape, WINDOW, 0, 10, 59) is None
    assert look(tape, 2 * WINDOW - 2, 0, 10, 59) is None, "the last one has as long as the first"
    late = some(look(tape, 2 * WINDOW - 1, 0, 10, 59))
    assert [part.reward for part in late.parts] == [1.0, 1.0, None]
    one = release()
    assert outcome_due(one, ASSIGNED, BEGAN) == BEGAN + WINDOW * S
    assert outcome_due(one, ASSIGNED, BEGAN + WINDOW * S) == BEGAN + 2 * WINDOW * S
    alone = ASSIGNED.model_copy(update={"unit": None})
    assert outcome_due(one, alone, BEGAN + WINDOW * S) == BEGAN + WINDOW * S


def test_a_unit_is_one_observation_with_the_means_of_its_rollouts(tape: FakeTape) -> None:
    tape.reward(1.0, "r1")
    tape.reward(0.5, "r2")
    tape.add("event", "violation", "r3", hard=True)
    tape.add("event", "violation", "r3", hard=True)
    one = some(look(tape, 3 * WINDOW, 0, 1, 2))
    assert (one.number, one.rollout, one.reward, one.raw_reward, one.group, one.span) == (
        3,
        "r1",
        0.75,
        None,
        None,
        None,
    )
    assert one.guards == {"error": 2 / 3, "violation": 2 / 3, "missing": 2 / 3}
    assert one.violations == 2
    assert [(part.rollout, part.span, part.group) for part in one.parts] == [
        ("r1", "a1#1", "task r1"),
        ("r2", "a1#1", "task r2"),
        ("r3", None, "task r3"),
    ]
    worst = some(look(tape, 3 * WINDOW, 0, 1, 2, missing="worst"))
    assert worst.reward == 0.5
    canary = Canary.of(release())
    canary.step(observation(ASSIGNED, one))
    assert canary.evidence.seen == canary.evidence.assigned[1] == 1
    assert canary.evidence.guards["missing"].arms[1].total == pytest.approx(2 / 3)


def test_a_unit_without_any_reward_is_missing_and_one_that_was_cancelled_is_left_out(tape: FakeTape) -> None:
    one = some(look(tape, 3 * WINDOW, 0, 1))
    assert (one.reward, one.guards["missing"], one.left_out) == (None, 0.0, None)
    tape.rollouts["r2"].status = RolloutStatus.CANCELLED
    tape.reward(0.25, "r1")
    one = some(look(tape, 3 * WINDOW, 0, 1))
    assert (one.reward, one.guards["missing"], one.left_out) == (0.25, 1.0, None), "the other one counts"
    tape.rollouts["r1"].status = RolloutStatus.CANCELLED
    one = some(look(tape, 3 * WINDOW, 0, 1))
    assert one.left_out == "it was cancelled"


def test_a_rollout_by_itself_counts_as_ever(tape: FakeTape) -> None:
    alone = ASSIGNED.model_copy(update={"unit": None})
    assert assignment_outcome(tape, members(0), release(), alone, BEGAN + S) is None
    tape.reward(1.0, "r1")
    one = some(assignment_outcome(tape, members(0), release(), alone, BEGAN + S))
    assert (one.reward, one.raw_reward, one.span, one.parts) == (1.0, 1.0, "a1#1", [])


# --- verification ---


def trial() -> Trial:
    """A release by user that was rolled back; each unit has two rollouts."""
    policy = ReleasePolicy(
        unit="user.id",
        stages=[CanaryStage(split=0.2, rollouts=5), CanaryStage(split=0.5, rollouts=5)],
        margin_absolute=0.1,
    )
    made = Trial.of(policy).prepare()
    made.run(3000, steady(0.7, 0.3))
    assert made.release.stage == "rolled_back"
    return made


def found(trial: Trial) -> list[str]:
    return list(verify(trial.release, trial.assigned, trial.seen, trial.audit))


def test_what_nobody_has_touched_agrees_and_says_units() -> None:
    made = trial()
    assert found(made) == []
    assert f"after {len([one for one in made.seen if one.left_out is None])} units (" in made.audit[-1].why
    assert all(len(one.parts) == 2 for one in made.seen)
    assert all((share("s", one.unit or "") < one.probability) == (one.arm == "candidate") for one in made.assigned)


def test_a_unit_that_was_changed_is_found() -> None:
    made, other = trial(), trial()
    one = made.assigned[5]
    name = next(
        unit
        for unit in (f"{number:032x}" for number in range(1000))
        if (share("s", unit) < one.probability) != (one.arm == "candidate")
    )
    made.assigned[5] = one.model_copy(update={"unit": name})
    assert found(made) == [f"assignment 6: unit {name} is on the arm {one.arm}, its share says otherwise"]
    twin = next(at for at in range(6, 100) if (made.assigned[at].arm, made.assigned[at].stage) == (one.arm, one.stage))
    other.assigned[twin] = other.assigned[twin].model_copy(update={"unit": one.unit})
    assert found(other) == [f"assignments 6 and {twin + 1} are of the same unit"]


def test_an_observation_that_its_rollouts_do_not_give_is_found() -> None:
    made = trial()
    seen = made.seen[3]
    part = seen.parts[1].model_copy(update={"reward": 0.25})
    made.seen[3] = seen.model_copy(update={"parts": [seen.parts[0], part]})
    (problem,) = found(made)
    assert tells(problem, "observation 4", "mean of the 2 rollouts")
    for parts in ([], seen.parts[::-1], [seen.parts[0]] * 2):
        made.seen[3] = seen.model_copy(update={"parts": parts})
        (problem,) = found(made)
        assert tells(problem, "observation 4", f"begin with {seen.rollout}", "100")


def test_units_where_the_release_has_none_are_found() -> None:
    made = Trial.of(ReleasePolicy(margin_absolute=0.1)).prepare()
    made.run(3, steady(1, 1))
    assert found(made) == []
    made.assigned[1] = made.assigned[1].model_copy(update={"unit": ADA})
    assert any(tells(one, "assignment 2 is of a unit", "by itself") for one in found(made))
