"""What became of a rollout of a release: when it is its turn, what is seen of it, and what is known of it long before
its outcome, whenever one looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes.judged import FakeTape
from fakes.some import some
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.facts import POLICY_HARD
from penstock.gateway.model.release import Assignment, AssignmentEvidence, EarlyEvidence, Pin, Release
from penstock.gateway.model.release_policy import CONSTANTS, EARLY, ReleasePolicy
from penstock.gateway.model.rollout import Attempt, Outcome, Reward, Rollout, RolloutStatus, Totals
from penstock.gateway.model.span import POLICY_VIOLATION, Span
from penstock.gateway.releases.canary.outcomes import deadline, early_deadline, early_outcome, rollout_outcome

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
        id="x-1", resource="x", kind="prompt", stable="v1", candidate="v2", policy=ReleasePolicy.model_validate(given)
    )


ASSIGNED = Assignment(number=7, rollout="r1", arm="candidate", probability=0.5, stage="50%", assigned_ns=BEGAN)


def seen(tape: FakeTape, now: int = NOW, **policy: Any) -> AssignmentEvidence | None:
    return rollout_outcome(tape, release(**policy), ASSIGNED, now)


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
    assert seen(tape, LATE) == AssignmentEvidence(number=7, rollout="r1", seen_ns=LATE)


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


@pytest.mark.parametrize(("outcome", "expected"), [(None, None), (Outcome(), 0.0)])
def test_a_failure_that_nobody_has_reported_is_none(
    tape: FakeTape, outcome: Outcome | None, expected: float | None
) -> None:
    """The agent has only gone quiet after a failed call: it may go on, and may still be judged."""
    tape.rollouts["r1"] = Rollout(id="r1", status=RolloutStatus.FAILED)
    tape.tries = [one.model_copy(update={"outcome": outcome}) for one in tape.tries]
    one = some(seen(tape, deadline(release(), ASSIGNED)))
    assert (one.reward, one.guards["error"]) == (expected, 1.0 if outcome is None else 0.0)


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


# --- early looks ---

DUE = BEGAN + 5 * S


@pytest.fixture(scope="module", autouse=True)
def looked_at_after_five_seconds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONSTANTS["guards"], EARLY, {"alpha": 0.005, "deadline_s": 5.0})
        yield


def rolled(spans: list[Span], **rollout: Any) -> FakeTape:
    """A tape with one rollout."""
    return FakeTape({"r1": Rollout(id="r1", **rollout)}, said={"r1": spans})


def call(after_s: float, status: str = "ok") -> Span:
    """A call that ended then; it began with the assignment."""
    end = None if status == "open" else BEGAN + int(after_s * S)
    return Span(rollout="r1", attempt="a1", sequence=1, kind="llm", status=status, start_ns=BEGAN, end_ns=end)  # type: ignore[arg-type]


def reward(after_s: float) -> Span:
    at = BEGAN + int(after_s * S)
    spoken = Reward(value=1.0).attributes()
    return Span(rollout="r1", attempt="a1", sequence=2, kind="reward", start_ns=at, end_ns=at, attributes=spoken)


def early(tape: FakeTape, after_s: float, **policy: Any) -> float | str | None:
    """The early look so many seconds after the assignment; `awaited` where there is none yet."""
    release = made(**policy)
    found = early_outcome(tape, release, ASSIGNED, BEGAN + int(after_s * S))
    return "awaited" if found is None else found.good


def made(**policy: Any) -> Release:
    how = ReleasePolicy.model_validate(policy)
    return Release(id="x-1", resource="x", kind="prompt", stable="v1", candidate="v2", counted=3, policy=how)


@pytest.mark.parametrize("status", ["error", "interrupted"])
def test_a_failed_call_is_seen_at_once(status: str) -> None:
    assert early(rolled([call(1, "ok"), call(2, status)]), 2) == 0.0


@pytest.mark.parametrize("status", ["ok", "cancelled", "open"])
def test_without_a_failed_call_it_is_awaited_until_the_deadline(status: str) -> None:
    tape = rolled([call(1, status)])
    assert [early(tape, after) for after in (1, 4.9, 5, 60)] == ["awaited", "awaited", 1.0, 1.0]


def test_a_call_that_fails_later_is_left_to_the_other_guard() -> None:
    assert early(rolled([call(5.1, "error")]), 60) == 1.0
    assert early(rolled([call(5, "error")]), 60) == 0.0


def test_its_end_and_its_reward_are_its_turn() -> None:
    assert early(rolled([call(1), reward(2)]), 2) == 1.0
    ended = {"origin": "queued", "status": RolloutStatus.SUCCEEDED, "ended_ns": BEGAN + 2 * S}
    assert early(rolled([call(1)], **ended), 2) == 1.0
    assert early(rolled([call(1)], **ended | {"status": RolloutStatus.FAILED}), 2) == 0.0
    quiet = ended | {"status": RolloutStatus.FAILED, "origin": "header"}
    assert early(rolled([call(1)], **quiet), 2) == 1.0, "it was only quiet: its calls say how it went"
    # What came from the queue says itself when it has ended.
    assert early(rolled([reward(2)], origin="queued", status=RolloutStatus.RUNNING), 3) == "awaited"


def test_what_was_never_seen_was_cancelled_or_has_seen_both_versions_is_left_out() -> None:
    gone = FakeTape()
    assert [early(gone, after) for after in (4, 5)] == ["awaited", None]
    assert early(rolled([call(1, "error")], status=RolloutStatus.CANCELLED), 2) is None
    mixed = Pin(resource="x", version="v1", release="x-1", arm="candidate", mixed=True)
    fallen = rolled([call(1, "error")])
    fallen.given = [mixed]
    assert early(fallen, 2) is None


def test_it_says_how_many_outcomes_had_been_counted() -> None:
    found = early_outcome(rolled([call(1, "error")]), made(), ASSIGNED, DUE)
    assert found == EarlyEvidence(seen_ns=DUE, good=0.0, counted=3)


def test_its_deadline_is_never_later_than_that_of_outcomes() -> None:
    assert early_deadline(made(), ASSIGNED) == DUE
    assert early_deadline(made(outcome_deadline_s=2.0), ASSIGNED) == BEGAN + 2 * S


events = st.lists(
    st.tuples(st.sampled_from(["ok", "error", "reward"]), st.integers(0, 80)).map(
        lambda it: reward(it[1] / 10) if it[0] == "reward" else call(it[1] / 10, it[0])
    ),
    max_size=6,
)


@given(events, st.integers(0, 100), st.integers(0, 100))
def test_when_one_looks_does_not_change_what_is_seen(spans: list[Span], first: int, second: int) -> None:
    """A look at a time sees the spans up to that time."""

    def at(tenths: int) -> float | str | None:
        there = [span for span in spans if (span.end_ns or 0) <= BEGAN + tenths * S // 10]
        return early(rolled(there), tenths / 10)

    sooner, later = sorted((first, second))
    assert at(sooner) in ("awaited", at(later))
