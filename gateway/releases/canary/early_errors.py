"""Early errors: whether a rollout began with an error is known long before its reward.

A rollout's turn comes when one of its calls has failed, when it has ended or has a reward, or at the guard's deadline,
whichever is first. Later events do not change it, so the answer is the same whenever it is looked at. Rollouts are
counted in the order of their assignment here as well: the deadline is what bounds the wait for the slowest. It is at
most the deadline of outcomes, so no outcome is counted before its early look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.gateway.model.release import Assignment, EarlyEvidence, Pin, Release
from penstock.gateway.model.release_policy import EARLY
from penstock.gateway.model.rollout import Reward, Rollout, RolloutStatus
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.releases.canary.outcomes import RolloutReader, deadline

FAILED = (SpanStatus.ERROR, SpanStatus.INTERRUPTED)


def has_early_guard(release: Release) -> bool:
    """True if the release's policy has the early guard."""
    return EARLY in release.policy.guard_alphas


def early_deadline(release: Release, assignment: Assignment) -> int:
    """The time at which an assignment is judged by what is known by then; ns since the epoch."""
    own = assignment.assigned_ns + int(release.policy.guards.early_error.deadline_s * 1e9)
    return min(own, deadline(release, assignment))


def early_outcome(
    tape: RolloutReader, pins: Iterable[Pin], release: Release, assignment: Assignment, now: int
) -> EarlyEvidence | None:
    """The early look at an assignment; None while it is awaited. `pins`: the versions that its rollout was given."""
    due = early_deadline(release, assignment)
    seen = EarlyEvidence(seen_ns=now, good=None, counted=release.counted)
    rollout = tape.rollout(assignment.rollout)
    if rollout is None:
        return seen if now >= due else None
    mixed = any(pin.mixed and pin.release == release.id for pin in pins)
    if mixed or rollout.status == RolloutStatus.CANCELLED:
        return seen
    return _judged(seen, rollout, list(tape.spans(rollout.id)), due, now)


def _judged(seen: EarlyEvidence, rollout: Rollout, spans: Sequence[Span], due: int, now: int) -> EarlyEvidence | None:
    over = min([due, *_ends(rollout, spans)])
    if any(span.kind == "llm" and span.status in FAILED and _at(span) <= over for span in spans):
        return seen.model_copy(update={"good": 0.0})
    if over > now:
        return None
    failed = rollout.status == RolloutStatus.FAILED and rollout.ended_ns is not None and rollout.ended_ns <= over
    return seen.model_copy(update={"good": 0.0 if failed else 1.0})


def _ends(rollout: Rollout, spans: Iterable[Span]) -> Iterator[int]:
    """The times at which the rollout was over: its end, and, if nobody reports the end of such a rollout, its trusted
    rewards."""
    if rollout.ended_ns is not None:
        yield rollout.ended_ns
    if rollout.origin != "queued":
        yield from (_at(span) for span in spans if span.kind == "reward" and Reward.of(span).trusted)


def _at(span: Span) -> int:
    return span.start_ns if span.end_ns is None else span.end_ns


def as_of(release: Release, assigned: Iterable[Assignment]) -> list[Assignment]:
    """The assignments as they were when the release had this state: without early looks that came later."""
    return [
        one.model_copy(update={"early": None}) if one.early is not None and one.number > release.early else one
        for one in assigned
    ]
