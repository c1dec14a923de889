"""Ends of attempts by the clock, as operations inside a write transaction.

They end attempts whose deadline has passed. A rollout joins the queue again when none of its attempts can run any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.gateway.model.lifecycle import LIVE, quiet_deadline
from penstock.gateway.model.rollout import AttemptStatus, Outcome, Rollout, RolloutStatus
from penstock.gateway.tape.store import records
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.queue.attempts import AttemptRecords, deadline, get, put, status_of
from penstock.gateway.work.queue.results import DeadlineCheck
from penstock.gateway.work.queue.span_operations import SpanOperations

_STATUS, _SEEN, _WORKER = map(records.ATTEMPT.index, ("status", "last_seen_ns", "worker"))
_REASONS = {
    AttemptStatus.TIMEOUT: "it took longer than config.timeout_s",
    AttemptStatus.UNRESPONSIVE: "nothing was heard of it in time",
}


class DeadlineOperations(AttemptRecords):
    """The operations of the clock in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction)
        self._spans = SpanOperations(transaction)

    def expire(self, names: Iterable[tuple[str, str]], now: int, quiet_s: float) -> list[DeadlineCheck]:
        """End the attempts whose deadline has passed. `quiet_s`: seconds that an attempt that nobody has claimed may be
        silent."""
        return [self._expire(name, now, quiet_s) for name in names]

    def _expire(self, name: tuple[str, str], now: int, quiet_s: float) -> DeadlineCheck:
        if (again := self._not_quiet_yet(name, now, quiet_s)) is not None:
            return DeadlineCheck(*name, again, unclaimed=True)
        live = self._live(*name)
        if live is None:
            return DeadlineCheck(*name, None)
        rollout = self._rollout(name[0])
        if status_of(live) not in LIVE:
            return self._look_at_ended(live, rollout, now)
        if self._calling(live):
            # An agent that waits for an answer is not silent.
            put(live, last_seen_ns=max(now, get(live, "last_seen_ns")))
        unclaimed = get(live, "worker") is None
        due = quiet_deadline(get(live, "last_seen_ns"), quiet_s) if unclaimed else deadline(rollout, live)
        if due is None or due[0] > now:
            return DeadlineCheck(*name, None if due is None else due[0], unclaimed=unclaimed)
        if unclaimed:
            self._end_quietly(live, rollout)
            return DeadlineCheck(*name, None, ended=due[1])
        rewarded = self._spans.reward_failure(rollout, live, due[1], now)
        self._end_attempt(live, due[1], now, Outcome(reason=_REASONS[due[1]]))
        self._follow(rollout, live, due[1], now)
        looked = self._look_at_ended(live, rollout, now)
        return looked._replace(ended=due[1], rewarded="rule" if rewarded else None)

    def _not_quiet_yet(self, name: tuple[str, str], now: int, quiet_s: float) -> int | None:
        """The time at which to check an unclaimed attempt again, if it had a sign of life meanwhile; else None. Most of
        them had one, and there may be very many, so that this costs as little as possible."""
        values = self._tape.peek(name)
        if values is None or values[_WORKER] is not None or values[_STATUS] not in LIVE:
            return None
        due, _ = quiet_deadline(values[_SEEN], quiet_s)
        return due if due > now else None

    def _calling(self, live: CachedAttempt) -> bool:
        """True while the attempt has a call in flight."""
        return self._tape.has_running_call(live.key)

    def _look_at_ended(self, live: CachedAttempt, rollout: Rollout, now: int) -> DeadlineCheck:
        """Keep the next attempt waiting until the lease is over, because the worker may still have to kill the
        agent."""
        lease = get(live, "lease_ns")
        if rollout.status != RolloutStatus.REQUEUING or rollout.attempt != live.name[1]:
            self._forget(live)
            return DeadlineCheck(*live.name, None)
        if lease is not None and lease > now:
            return DeadlineCheck(*live.name, lease)
        self._release(live)
        return DeadlineCheck(*live.name, None, requeued=rollout.mode)

    def adopt(self, names: Iterable[tuple[str, str]], now: int, grace_ns: int) -> list[tuple[str, str, int | None]]:
        """(rollout, attempt, time of the next check) of those of these attempts, handed out by an earlier process, that
        still live. Leases are extended so that workers have time to come back."""
        found: list[tuple[str, str, int | None]] = []
        for name in names:
            live = self._live(*name)
            if live is None or self._tape.get("live", live.key) is None:
                continue  # The attempt has ended since.
            lease = get(live, "lease_ns")
            if lease is not None and lease < now + grace_ns:
                put(live, lease_ns=now + grace_ns)
            # While there was no gateway, it could not notice signs of life.
            put(live, last_seen_ns=max(now, get(live, "last_seen_ns")))
            self._tape.touch(live)
            due = deadline(self._rollout(name[0]), live)
            found.append((*name, now if status_of(live) not in LIVE else None if due is None else due[0]))
        return found
