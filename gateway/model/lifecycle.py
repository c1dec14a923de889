"""Rollout and attempt states as tables of legal moves, and the state that follows from an event. Pure: the caller
supplies the time and writes the result.

    a rollout is enqueued     queuing
    a worker claims it        preparing        a new attempt: preparing, with a lease
    its agent is heard of     running          the attempt: running (a first call, a heartbeat that says so)
    the attempt ends          the attempt: succeeded, failed, timeout, unresponsive or cancelled; the rollout follows:
                              succeeded; cancelled; requeuing if `retry_on` names the end and attempts are left; failed
    it is handed back         the attempt: environment, also after it had failed; the rollout: requeuing. No try at the
                              task was made: the agent could not work where it was run

An attempt that is `unresponsive` while its rollout waits for another one is revived by a sign of life: the rollout
leaves the queue again and nothing runs twice. Once another worker has claimed the rollout the old attempt is superseded
for good. A queued rollout leaves its final state only by `requeue`, which must be requested, or when it is handed back.

An attempt that no worker has claimed (an agent that was given an address by hand, a client without an address) has no
worker that reports its end. It has succeeded when it was silent for a *quiet time*, and its rollout with the last of
its attempts. The next call or event makes both run again. A reported end stays.
"""

from __future__ import annotations

from typing import Final

from penstock.gateway.model.base import LONGEST_S, Origin
from penstock.gateway.model.rollout import AttemptStatus, Retry, RolloutConfig, RolloutStatus

ROLLOUT_MOVES: Final[dict[RolloutStatus, dict[RolloutStatus, str]]] = {
    RolloutStatus.QUEUING: {RolloutStatus.PREPARING: "claim", RolloutStatus.CANCELLED: "cancel"},
    RolloutStatus.PREPARING: {
        RolloutStatus.RUNNING: "first sign of the agent",
        RolloutStatus.SUCCEEDED: "finish",
        RolloutStatus.FAILED: "finish, timeout, lost",
        RolloutStatus.REQUEUING: "finish, timeout, lost, hand back",
        RolloutStatus.CANCELLED: "cancel",
    },
    RolloutStatus.RUNNING: {
        RolloutStatus.SUCCEEDED: "finish, quiet",
        RolloutStatus.FAILED: "finish, timeout, lost",
        RolloutStatus.REQUEUING: "finish, timeout, lost, hand back",
        RolloutStatus.CANCELLED: "cancel",
    },
    RolloutStatus.REQUEUING: {
        RolloutStatus.PREPARING: "claim",
        RolloutStatus.RUNNING: "revive",
        RolloutStatus.CANCELLED: "cancel",
    },
    RolloutStatus.SUCCEEDED: {RolloutStatus.REQUEUING: "requeue", RolloutStatus.RUNNING: "heard of after quiet"},
    RolloutStatus.FAILED: {RolloutStatus.REQUEUING: "requeue, hand back"},
    RolloutStatus.CANCELLED: {RolloutStatus.REQUEUING: "requeue"},
}
"""From -> to -> the event. Every change of a rollout's status is one of these."""

ATTEMPT_MOVES: Final[dict[AttemptStatus, dict[AttemptStatus, str]]] = {
    AttemptStatus.PREPARING: {
        AttemptStatus.RUNNING: "first sign of the agent",
        AttemptStatus.SUCCEEDED: "finish",
        AttemptStatus.FAILED: "finish",
        AttemptStatus.TIMEOUT: "timeout",
        AttemptStatus.UNRESPONSIVE: "lost",
        AttemptStatus.CANCELLED: "cancel",
        AttemptStatus.ENVIRONMENT: "hand back",
    },
    AttemptStatus.RUNNING: {
        AttemptStatus.SUCCEEDED: "finish, quiet",
        AttemptStatus.FAILED: "finish",
        AttemptStatus.TIMEOUT: "timeout",
        AttemptStatus.UNRESPONSIVE: "lost",
        AttemptStatus.CANCELLED: "cancel",
        AttemptStatus.ENVIRONMENT: "hand back",
    },
    AttemptStatus.UNRESPONSIVE: {AttemptStatus.RUNNING: "revive"},
    AttemptStatus.SUCCEEDED: {AttemptStatus.RUNNING: "heard of after quiet"},
    AttemptStatus.FAILED: {AttemptStatus.ENVIRONMENT: "hand back"},
    AttemptStatus.TIMEOUT: {},
    AttemptStatus.CANCELLED: {},
    AttemptStatus.ENVIRONMENT: {},
}
"""From -> to -> the event. Every change of an attempt's status is one of these."""

WAITING: Final = frozenset({RolloutStatus.QUEUING, RolloutStatus.REQUEUING})
"""States of a rollout in the queue."""
ACTIVE: Final = frozenset({RolloutStatus.PREPARING, RolloutStatus.RUNNING})
"""States of a rollout that neither waits nor has ended. A rollout from the queue is then held by a worker."""
FINAL: Final = frozenset({RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED})
"""States of a rollout that has ended."""
LIVE: Final = frozenset({AttemptStatus.PREPARING, AttemptStatus.RUNNING})
"""States of an attempt that has not ended."""

_RETRIES: Final[dict[AttemptStatus, Retry]] = {
    AttemptStatus.FAILED: "failed",
    AttemptStatus.TIMEOUT: "timeout",
    AttemptStatus.UNRESPONSIVE: "unresponsive",
}


class IllegalMove(Exception):
    """A change of status that the tables do not have: a bug of the caller, which must check first."""


def move_rollout(before: RolloutStatus, after: RolloutStatus) -> RolloutStatus:
    """Return `after`; raises `IllegalMove` unless the table has the move."""
    if after not in ROLLOUT_MOVES[before]:
        raise IllegalMove(f"a rollout cannot go from {before} to {after}")
    return after


def move_attempt(before: AttemptStatus, after: AttemptStatus) -> AttemptStatus:
    """Return `after`; raises `IllegalMove` unless the table has the move."""
    if after not in ATTEMPT_MOVES[before]:
        raise IllegalMove(f"an attempt cannot go from {before} to {after}")
    return after


def after_attempt(end: AttemptStatus, tries: int, config: RolloutConfig) -> RolloutStatus:
    """The state of the rollout after its attempt, the `tries`-th, has ended like this."""
    if end == AttemptStatus.SUCCEEDED:
        return RolloutStatus.SUCCEEDED
    if end == AttemptStatus.CANCELLED:
        return RolloutStatus.CANCELLED
    if end == AttemptStatus.ENVIRONMENT:
        return RolloutStatus.REQUEUING
    again = _RETRIES[end] in config.retry_on and tries < config.max_attempts
    return RolloutStatus.REQUEUING if again else RolloutStatus.FAILED


def deadline(
    config: RolloutConfig, created_ns: int, seen_ns: int, lease_ns: int | None
) -> tuple[int, AttemptStatus] | None:
    """(time, state) of the end of a live attempt without a further sign of life; ns since the epoch. None if it never
    ends so. `created_ns`: when it was claimed. `seen_ns`: its newest sign of life. `lease_ns`: when its worker loses
    it."""
    ends: list[tuple[int, AttemptStatus]] = []
    if config.timeout_s is not None:
        ends.append((created_ns + _ns(config.timeout_s), AttemptStatus.TIMEOUT))
    if config.unresponsive_s is not None:
        ends.append((seen_ns + _ns(config.unresponsive_s), AttemptStatus.UNRESPONSIVE))
    if lease_ns is not None:
        ends.append((lease_ns, AttemptStatus.UNRESPONSIVE))
    return min(ends, default=None)


def is_claimed(origin: Origin, status: RolloutStatus) -> bool:
    """True if a worker holds the rollout; always False for one that did not come from the queue."""
    return origin == "queued" and status in ACTIVE


def quiet_deadline(seen_ns: int, quiet_s: float) -> tuple[int, AttemptStatus]:
    """(time, state) of the end of an attempt that nobody has claimed, without a further sign of life; ns since the
    epoch."""
    return seen_ns + _ns(quiet_s), AttemptStatus.SUCCEEDED


def _ns(seconds: float) -> int:
    return int(min(seconds, LONGEST_S) * 1e9)
