"""Records of rollouts and attempts, shared by all operations on the queue, and their changes of state, which are only
the moves of `gateway.model.rollout`."""

from __future__ import annotations

from typing import Any

from penstock.gateway.model.rollout import (
    ACTIVE,
    FINAL,
    LIVE,
    WAITING,
    Attempt,
    AttemptStatus,
    Outcome,
    Rollout,
    RolloutStatus,
    after_attempt,
    attempt_deadline,
    move_attempt,
    move_rollout,
)
from penstock.gateway.tape.store import keys, records
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.tables import DORMANT
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.queue.reader import MemoryQueue
from penstock.gateway.work.queue.results import queue_key

GRACE_NS = 30 * 10**9
"""Length of the lease, in ns, that a worker gets back when an attempt that was given up shows a sign of life."""


class AttemptRecords:
    """The records of rollouts and attempts, as one transaction sees and changes them."""

    def __init__(self, transaction: Transaction) -> None:
        self._tape = transaction
        self._waiting = transaction.follower(MemoryQueue)

    # -- moves ------------------------------------------------------------------------------------------------

    def sign_of_life(self, live: CachedAttempt, now: int, lease_ns: int = GRACE_NS) -> None:
        """Make a `preparing` attempt `running`; also an `unresponsive` one, with a new lease, while no other attempt
        has its rollout; and one that ended because it was quiet."""
        status = status_of(live)
        if ended_quietly(live):
            put(live, status=move_attempt(status, AttemptStatus.RUNNING), ended_ns=None)
            self._tape.touch_and_log(live)
            self.begin_unclaimed(live, now)
        if status not in (AttemptStatus.PREPARING, AttemptStatus.UNRESPONSIVE):
            return
        rollout = self._rollout(live.name[0])
        if rollout.attempt != live.name[1] or rollout.status not in (RolloutStatus.PREPARING, RolloutStatus.REQUEUING):
            return
        if status == AttemptStatus.UNRESPONSIVE:
            if not self._may_revive(rollout, live, now, now + lease_ns):
                return
            self._leave_queue(rollout)
            self._tape.put("live", live.key, b"")
            put(live, ended_ns=None, outcome=None)
        put(live, status=move_attempt(status, AttemptStatus.RUNNING))
        self._tape.touch_and_log(live)
        self._move(rollout, RolloutStatus.RUNNING, now)

    def begin_unclaimed(self, live: CachedAttempt, now: int) -> None:
        """Watch the quiet time of an attempt that no worker has claimed, when it begins or shows a new sign of life. A
        rollout that has ended runs again, unless an outcome was reported for one of its attempts."""
        self._tape.put("unclaimed", live.record_key, b"")
        self._waiting.unclaimed.append(live.name)
        rollout = self._rollout(live.name[0])
        ended = rollout.status == RolloutStatus.SUCCEEDED and rollout.origin != "queued"
        if ended and all(get(other, "outcome") is None for other in self._lives(rollout.id)):
            self._move(rollout, RolloutStatus.RUNNING, now)

    def _end_quietly(self, live: CachedAttempt, rollout: Rollout) -> None:
        """End an attempt as of its last sign of life, without an outcome, because nobody reported one."""
        seen = get(live, "last_seen_ns")
        put(live, status=move_attempt(status_of(live), AttemptStatus.SUCCEEDED), ended_ns=seen)
        self._forget(live)
        self._tape.touch_and_log(live)
        runs = rollout.status in ACTIVE and rollout.origin != "queued"
        if runs and not any(status_of(other) in LIVE for other in self._lives(rollout.id)):
            self._move(rollout, RolloutStatus.SUCCEEDED, seen)

    def _lives(self, rollout: str) -> list[CachedAttempt]:
        return [self._tape.attempt(SpanEntry(rollout, attempt)) for attempt in self._attempts(rollout)]

    def _may_revive(self, rollout: Rollout, live: CachedAttempt, now: int, lease: int) -> bool:
        """True if a sign of life revives the attempt, which gets the lease; False where it would be given up again at
        once, because the agent itself has been silent too long. A lease that its worker relies on is never
        shortened."""
        lease = max(get(live, "lease_ns") or 0, lease)
        due = attempt_deadline(rollout.config, get(live, "created_ns"), get(live, "last_seen_ns"), lease)
        if due is not None and due[0] <= now:
            return False
        put(live, lease_ns=lease)
        return True

    def _follow(self, rollout: Rollout, live: CachedAttempt, end: AttemptStatus, now: int) -> None:
        """Move the rollout to the state that follows from the end of its attempt. The end of an older attempt, or of
        one whose rollout has ended, changes nothing."""
        if decides(rollout, live):
            self._move(rollout, after_attempt(end, rollout.tries, rollout.config), now)
            self._queue_again(rollout, live, now)

    def _queue_again(self, rollout: Rollout, live: CachedAttempt, now: int) -> None:
        """Put a `requeuing` rollout into the queue, now or when the lease of its last attempt is over."""
        if rollout.status == RolloutStatus.REQUEUING:
            lease = get(live, "lease_ns")
            if lease is not None and lease > now:
                self._tape.put("live", live.key, b"")
            else:
                self._join_queue(rollout)

    def _move(self, rollout: Rollout, status: RolloutStatus, now: int) -> None:
        rollout.status = move_rollout(rollout.status, status)
        rollout.ended_ns = now if status in FINAL else None
        self._write_rollout(rollout)

    def _write_rollout(self, rollout: Rollout) -> None:
        self._tape.put_rollout(rollout)
        self._tape.append(b"r" + keys.rollout_key(rollout.id))

    def _end_attempt(self, live: CachedAttempt, status: AttemptStatus, now: int, outcome: Outcome) -> None:
        moved = move_attempt(status_of(live), status)
        put(live, status=moved, ended_ns=now, outcome=records.outcome_values(outcome))
        self._forget(live)
        self._tape.touch_and_log(live)

    def _join_queue(self, rollout: Rollout) -> None:
        key = queue_key(rollout)
        self._tape.put("queue", key, keys.rollout_key(rollout.id))
        self._waiting.add(key, rollout.id)

    def _leave_queue(self, rollout: Rollout) -> None:
        if rollout.status in WAITING:
            key = queue_key(rollout)
            self._tape.delete("queue", key)
            self._waiting.remove(key)

    def _release(self, live: CachedAttempt) -> None:
        """Release an attempt that its worker has let go of: the next attempt may be handed out."""
        self._forget(live)
        put(live, lease_ns=None)
        self._tape.touch(live)
        rollout = self._rollout(live.name[0])
        if rollout.status == RolloutStatus.REQUEUING and rollout.attempt == live.name[1]:
            self._join_queue(rollout)
            # The rollout's record is unchanged, but other processes must find it in the queue (`MemoryQueue.follow`).
            self._tape.append(b"r" + keys.rollout_key(rollout.id))

    def _forget(self, live: CachedAttempt) -> None:
        self._tape.delete(*(("live", live.key) if get(live, "worker") else ("unclaimed", live.record_key)))

    # -- records -----------------------------------------------------------------------------------------------------

    def _known(self, name: str) -> Rollout | None:
        known = self._tape.rollout(name)
        return None if known is None else known.rollout

    def _rollout(self, name: str) -> Rollout:
        found = self._known(name)
        if found is None:
            raise OperationRefusedError(
                "not_found", f"there is no rollout {name!r}; `penstock rollouts` lists them", "rid", name
            )
        return found

    def _attempts(self, rollout: str) -> list[str]:
        known = self._tape.rollout(rollout)
        return [] if known is None else known.attempts

    def _live(self, rollout: str, attempt: str) -> CachedAttempt | None:
        if attempt not in self._attempts(rollout):
            return None
        return self._tape.attempt(SpanEntry(rollout, attempt))

    def _attempt(self, name: tuple[str, str]) -> CachedAttempt:
        live = self._live(*name)
        if live is None:
            self._rollout(name[0])
            hint = f"`penstock show {name[0]}` shows them"
            raise OperationRefusedError(
                "not_found", f"rollout {name[0]!r} has no attempt {name[1]!r}; {hint}", "aid", name[1]
            )
        return live


def deadline(rollout: Rollout, live: CachedAttempt) -> tuple[int, AttemptStatus] | None:
    """The time at which a live attempt ends by itself (ns since the epoch), and the state that it ends in; None if it
    does not."""
    seen, lease = get(live, "last_seen_ns"), get(live, "lease_ns")
    return attempt_deadline(rollout.config, get(live, "created_ns"), seen, lease)


_PLACES = {name: place for place, name in enumerate(records.ATTEMPT)}


def get(live: CachedAttempt, name: str) -> Any:
    return live.values[_PLACES[name]]


def put(live: CachedAttempt, **values: Any) -> None:
    for name, value in values.items():
        live.values[_PLACES[name]] = value


def status_of(live: CachedAttempt) -> AttemptStatus:
    return AttemptStatus(get(live, "status"))


def decides(rollout: Rollout, live: CachedAttempt) -> bool:
    """True if the rollout's state follows from the end of this attempt."""
    return rollout.status in ACTIVE and rollout.attempt in (None, live.name[1])


def ended_quietly(live: CachedAttempt) -> bool:
    """True if the attempt ended because it was quiet: every other end has an outcome."""
    return status_of(live) == AttemptStatus.SUCCEEDED and get(live, "outcome") is None


def attempt_of(live: CachedAttempt) -> Attempt:
    return records.attempt_of(*live.name, live.values)


def record_sign_of_life(transaction: Transaction, live: CachedAttempt, now: int) -> None:
    """Note a sign of life of a dormant attempt, or the first one of an attempt that nobody has claimed."""
    attempts = AttemptRecords(transaction)
    if status_of(live) in DORMANT and now:
        attempts.sign_of_life(live, now)
    else:
        attempts.begin_unclaimed(live, now)
