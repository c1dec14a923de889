"""What became of a rollout that takes part in a release: when it is its turn, and what is seen of it."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.judged import FakeTape
from fakes.some import some

from penstock.gateway.canary.outcomes import deadline, look
from penstock.gateway.model.attributes import POLICY_HARD
from penstock.gateway.model.policy import Policy
from penstock.gateway.model.release import Assignment, Pin, Release, Seen
from penstock.gateway.model.rollout import Attempt, Rollout, RolloutStatus, Totals
from penstock.gateway.model.span import POLICY_VIOLATION

S = 10**9
BEGAN = 1_000 * S
LONG = 60.0
"""The deadline of outcomes; seconds."""
NOW, LATE = BEGAN + 10 * S, BEGAN + 60 * S


@pytest.fixture
def tape() -> FakeTape:
    """One rollout that came from nowhere and has called twice."""
    attempt = Attempt(
        rollout="r1", id="a1", created_ns=BEGAN, last_seen_ns=BEGAN + 4 * S,
        totals=Totals(calls=2, input_tokens=300, output_tokens=100),
    )  # fmt: skip
    return FakeTape({"r1": Rollout(id="r1", group="task")}, [attempt])


def release(**policy: Any) -> Release:
    given: dict[str, Any] = {"outcome_deadline_s": LONG, "margin_absolute": 0.1} | policy
    return Release(
        id="x-1", resource="x", kind="prompt", stable="v1", candidate="v2", policy=Policy.model_validate(given)
    )


ASSIGNED = Assignment(number=7, rollout="r1", arm="candidate", probability=0.5, stage="50%", assigned_ns=BEGAN)


def seen(tape: FakeTape, now: int = NOW, **policy: Any) -> Seen | None:
    return look(tape, tape.pins(ASSIGNED.rollout), release(**policy), ASSIGNED, now)


def test_its_reward_is_its_turn(tape: FakeTape) -> None:
    assert seen(tape) is None
    tape.reward(0.25)
    one = some(seen(tape))
    assert (one.number, one.rollout, one.seen_ns, one.group) == (7, "r1", NOW, "task")
    assert (one.reward, one.raw_reward, one.span, one.left_out) == (0.25, 0.25, "a1#1", None)


def test_at_its_deadline_it_counts_as_it_is_and_not_before(tape: FakeTape) -> None:
    assert deadline(release(), ASSIGNED) == LATE
    assert seen(tape, LATE - 1) is None
    one = some(seen(tape, LATE))
    assert (one.reward, one.span) == (None, None)


def test_what_was_never_seen_is_missing_at_its_deadline(tape: FakeTape) -> None:
    tape.rollouts.clear()
    assert seen(tape, LATE - 1) is None
    assert seen(tape, LATE) == Seen(number=7, rollout="r1", seen_ns=LATE)


def test_what_came_from_the_queue_must_have_ended(tape: FakeTape) -> None:
    tape.reward(1.0)
    tape.rollouts["r1"] = Rollout(id="r1", origin="queued", status=RolloutStatus.RUNNING)
    assert seen(tape) is None
    late = some(seen(tape, LATE))
    assert late.reward == 1.0
    tape.rollouts["r1"] = Rollout(id="r1", origin="queued", status=RolloutStatus.SUCCEEDED)
    assert seen(tape) is not None


def test_a_tool_call_that_a_policy_did_not_let_run_is_a_violation(tape: FakeTape) -> None:
    tape.reward(1.0)
    told: tuple[dict[str, Any], ...] = ({}, {POLICY_HARD: True})
    for attributes in told:
        tape.add("tool", "tools/call pay", **attributes)
        tape.said["r1"][-1].error = POLICY_VIOLATION
    one = some(seen(tape))
    assert (one.guards["violation"], one.violations) == (0.0, 1)
    tape.said["r1"] = [span for span in tape.said["r1"] if span.error is None]
    one = some(seen(tape))
    assert (one.guards["violation"], one.violations) == (1.0, 0)


def test_a_failure_without_a_reward_is_one(tape: FakeTape) -> None:
    tape.rollouts["r1"] = Rollout(id="r1", origin="queued", status=RolloutStatus.FAILED)
    one = some(seen(tape))
    assert (one.reward, one.raw_reward, one.span, one.guards["error"]) == (0.0, None, None, 0.0)
    tape.reward(0.5)
    rewarded = some(seen(tape))
    assert rewarded.reward == 0.5


@pytest.mark.parametrize("now", [NOW, LATE])
def test_what_was_cancelled_is_left_out(tape: FakeTape, now: int) -> None:
    tape.rollouts["r1"] = Rollout(id="r1", status=RolloutStatus.CANCELLED)
    tape.reward(1.0)
    one = some(seen(tape, now))
    assert (one.left_out, one.reward) == ("it was cancelled", None)


def test_what_has_seen_both_versions_is_left_out_of_its_own_release_only(tape: FakeTape) -> None:
    pin = Pin(resource="x", version="v1", release="x-1", arm="candidate", mixed=True)
    tape.reward(1.0)
    tape.given = [pin.model_copy(update={"release": "y-1"}), pin.model_copy(update={"mixed": False})]
    whole = some(seen(tape))
    assert (whole.left_out, whole.reward) == (None, 1.0)
    tape.given.append(pin)
    one = some(seen(tape))
    assert (one.left_out, one.reward) == ("it fell back to the stable version", None)


def test_what_is_not_trusted_is_no_reward(tape: FakeTape) -> None:
    tape.reward(1.0, trusted=False)
    assert seen(tape) is None
    tape.reward(0.25)
    tape.reward(1.0, trusted=False)
    one = some(seen(tape))
    assert (one.reward, one.span) == (0.25, "a1#2")


def test_the_newest_reward_of_the_wanted_dimension_counts_as_the_policy_maps_it(tape: FakeTape) -> None:
    tape.reward(None, dimensions={"quality": 4.0})
    tape.reward(None, attempt="a2", dimensions={"quality": 2.0})
    tape.reward(1.0, dimensions={"speed": 9.0})
    one = some(seen(tape, reward="quality", reward_range=(0.0, 8.0)))
    assert (one.raw_reward, one.reward, one.span) == (2.0, 0.25, "a2#2")


def test_the_guards_see_the_last_attempt(tape: FakeTape) -> None:
    tape.reward(1.0)
    guards: Any = {"guards": {"latency": {"slo_s": 5}, "cost": {"cap": 1000}}}
    good = some(seen(tape, **guards))
    assert good.guards == {"error": 1.0, "violation": 1.0, "latency": 1.0, "cost": 0.6}
    slow = Attempt(
        rollout="r1", id="a2", sequence=2, created_ns=BEGAN, last_seen_ns=BEGAN + S, ended_ns=BEGAN + 6 * S,
        totals=Totals(calls=1, errors=1, input_tokens=1000, output_tokens=500),
    )  # fmt: skip
    tape.tries.append(slow)
    bad = some(seen(tape, **guards))
    assert bad.guards == {"error": 0.0, "violation": 1.0, "latency": 0.0, "cost": 0.0}
    bare = some(seen(tape))
    assert bare.guards.keys() == {"error", "violation"}


def test_a_cost_that_somebody_gives_replaces_tokens_when_it_is_trusted(tape: FakeTape) -> None:
    tape.reward(1.0, dimensions={"cost": 250.0})
    tape.reward(None, dimensions={"cost": 1.0}, trusted=False)
    one = some(seen(tape, guards={"cost": {"cap": 1000}}))
    assert one.guards["cost"] == 0.75


def test_violations_and_hard_ones_are_told_apart(tape: FakeTape) -> None:
    tape.reward(1.0)
    tape.add("event", "violation")
    soft = some(seen(tape))
    assert (soft.guards["violation"], soft.violations) == (0.0, 0)
    tape.add("event", "violation", hard=True)
    tape.add("event", "note", hard=True)
    hard = some(seen(tape))
    assert (hard.guards["violation"], hard.violations) == (0.0, 1)
