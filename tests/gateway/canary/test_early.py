"""What is known of a rollout long before its outcome, whenever one looks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.canary.early import early_deadline, look_early
from penstock.gateway.model.policy import Policy
from penstock.gateway.model.release import Assignment, Early, Pin, Release
from penstock.gateway.model.rollout import Attempt, Reward, Rollout, RolloutStatus
from penstock.gateway.model.span import Span

S = 10**9
BEGAN = 1_000 * S
DUE = BEGAN + 5 * S
ASSIGNED = Assignment(number=7, rollout="r1", arm="candidate", probability=0.5, stage="50%", assigned_ns=BEGAN)


class Rolled:
    """A tape with one rollout, or none."""

    def __init__(self, spans: list[Span], **rollout: Any) -> None:
        self.spans_of = spans
        self.one: Rollout | None = Rollout(id="r1", **rollout)

    def rollout(self, rollout: str, /) -> Rollout | None:
        return self.one

    def attempts(self, rollout: str, /) -> list[Attempt]:
        return []

    def spans(self, rollout: str, attempt: str | None = None, /) -> list[Span]:
        return self.spans_of


def call(after_s: float, status: str = "ok") -> Span:
    """A call that ended then; it began with the assignment."""
    end = None if status == "open" else BEGAN + int(after_s * S)
    return Span(rollout="r1", attempt="a1", sequence=1, kind="llm", status=status, start_ns=BEGAN, end_ns=end)  # type: ignore[arg-type]


def reward(after_s: float) -> Span:
    at = BEGAN + int(after_s * S)
    spoken = Reward(value=1.0).attributes()
    return Span(rollout="r1", attempt="a1", sequence=2, kind="reward", start_ns=at, end_ns=at, attributes=spoken)


def look(tape: Rolled, after_s: float, pins: tuple[Pin, ...] = (), **policy: Any) -> float | str | None:
    """The early look so many seconds after the assignment; `awaited` where there is none yet."""
    release = made(**policy)
    found = look_early(tape, pins, release, ASSIGNED, BEGAN + int(after_s * S))  # type: ignore[arg-type]
    return "awaited" if found is None else found.good


def made(**policy: Any) -> Release:
    how = Policy.model_validate({"guards": {"early_error": {"deadline_s": 5.0}}} | policy)
    return Release(id="x-1", resource="x", kind="prompt", stable="v1", candidate="v2", counted=3, policy=how)


@pytest.mark.parametrize("status", ["error", "interrupted"])
def test_a_failed_call_is_seen_at_once(status: str) -> None:
    assert look(Rolled([call(1, "ok"), call(2, status)]), 2) == 0.0


@pytest.mark.parametrize("status", ["ok", "cancelled", "open"])
def test_without_a_failed_call_it_is_awaited_until_the_deadline(status: str) -> None:
    tape = Rolled([call(1, status)])
    assert [look(tape, after) for after in (1, 4.9, 5, 60)] == ["awaited", "awaited", 1.0, 1.0]


def test_a_call_that_fails_later_is_left_to_the_other_guard() -> None:
    assert look(Rolled([call(5.1, "error")]), 60) == 1.0
    assert look(Rolled([call(5, "error")]), 60) == 0.0


def test_its_end_and_its_reward_are_its_turn() -> None:
    assert look(Rolled([call(1), reward(2)]), 2) == 1.0
    ended = {"origin": "queued", "status": RolloutStatus.SUCCEEDED, "ended_ns": BEGAN + 2 * S}
    assert look(Rolled([call(1)], **ended), 2) == 1.0
    assert look(Rolled([call(1)], **ended | {"status": RolloutStatus.FAILED}), 2) == 0.0
    # What came from the queue says itself when it has ended.
    assert look(Rolled([reward(2)], origin="queued", status=RolloutStatus.RUNNING), 3) == "awaited"


def test_what_was_never_seen_was_cancelled_or_has_seen_both_versions_is_left_out() -> None:
    gone = Rolled([])
    gone.one = None
    assert [look(gone, after) for after in (4, 5)] == ["awaited", None]
    assert look(Rolled([call(1, "error")], status=RolloutStatus.CANCELLED), 2) is None
    mixed = Pin(resource="x", version="v1", release="x-1", arm="candidate", mixed=True)
    assert look(Rolled([call(1, "error")]), 2, (mixed,)) is None


def test_it_says_how_many_outcomes_had_been_counted() -> None:
    found = look_early(Rolled([call(1, "error")]), (), made(), ASSIGNED, DUE)  # type: ignore[arg-type]
    assert found == Early(seen_ns=DUE, good=0.0, counted=3)


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
        return look(Rolled(there), tenths / 10)

    early, late = sorted((first, second))
    assert at(early) in ("awaited", at(late))
