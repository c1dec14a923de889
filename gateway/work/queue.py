"""The queue and its attempts: the results of operations on them, reads, the queue in memory, and the records that all
operations share, with their changes of state, which are only the moves of `gateway.model.rollout`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeVar, get_args

from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import QueueState, QueueStatus
from penstock.gateway.model.rollout import (
    ACTIVE,
    FINAL,
    LIVE,
    UNFAILED,
    WAITING,
    Attempt,
    AttemptStatus,
    Outcome,
    RewardSource,
    Rollout,
    RolloutStatus,
    Worker,
    after_attempt,
    attempt_deadline,
    missing_rollout,
    move_attempt,
    move_rollout,
)
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.tape.store import keys, records
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.directory import DAMAGE_ERRORS
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.tables import DORMANT
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.wire.dialects import by_name

T = TypeVar("T")
MODES: tuple[Mode, ...] = get_args(Mode)
"""The index of a mode is its byte in the queue's keys: append, never reorder."""


def queue_key(rollout: Rollout) -> bytes:
    """The key of a rollout in the database `queue`."""
    return keys.queue_key(MODES.index(rollout.mode), rollout.priority, rollout.place or 0)


@dataclass(slots=True)
class ClaimedAttempt:
    """An attempt that was handed out."""

    rollout: Rollout
    attempt: Attempt


@dataclass(slots=True)
class FinishResult:
    """An attempt that has ended."""

    rollout: Rollout
    attempt: Attempt
    ended: AttemptStatus | None
    """The state in which it ended; None when it had ended before."""
    rewarded: list[RewardSource]
    """Sources of the rewards that were kept."""
    by: str | None = None
    """The worker that finished it by this request; None if none did."""


@dataclass(slots=True)
class QueueChange(Generic[T]):
    """What an operation has changed, besides its answer."""

    answer: T
    watched: list[ClaimedAttempt] = field(default_factory=list[ClaimedAttempt])
    """Attempts whose deadlines may have changed."""
    ended: AttemptStatus | None = None
    """The state in which it has ended an attempt."""
    rewarded: list[RewardSource] = field(default_factory=list[RewardSource])
    """Sources of the rewards that were kept."""
    waiting: list[Mode] = field(default_factory=list[Mode])
    """Modes of rollouts that may wait now."""


class DeadlineCheck(NamedTuple):
    """The result of a check of an attempt at its deadline."""

    rollout: str
    attempt: str
    again_ns: int | None
    """The time of the next check; None when none is needed."""
    requeued: Mode | None = None
    """The mode of its rollout, if that waits for another attempt now."""
    ended: AttemptStatus | None = None
    """The state in which the check has ended it."""
    rewarded: RewardSource | None = None
    """Source of the reward that its end has brought."""
    unclaimed: bool = False
    """True if it lives and nobody has claimed it."""


class QueueReader:
    """Reads the queue of a tape: waiting rollouts, running attempts, and workers."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

    def live(self) -> list[tuple[str, str]]:
        """(rollout, attempt) of attempts that were claimed and have not ended."""
        return [keys.split_attempt_key(key) for key, _ in self._tape.records("live")]

    def unclaimed(self, at_once: int) -> Iterator[list[tuple[str, str]]]:
        """(rollout, attempt) of running attempts that nobody has claimed, in lists of at most `at_once`. Reads all of
        them: for a start."""
        places = (key for key, _ in self._tape.records("unclaimed"))
        while piece := list(islice(places, at_once)):
            with self._tape.view() as view:
                # Some may have ended, or been removed, by now.
                left = [key for key in piece if view.get("unclaimed", key) is not None]
                names = [(view.name(keys.to_number(key)), keys.attempt_of_record_key(key)) for key in left]
            yield names

    def queue(self) -> QueueStatus:
        """The state and the length of the queue, by mode. Walks through the queue: for people and scrapes, not for
        claims."""
        with self._tape.view() as view:
            state, claimed = view.queue_state(), view.count("live")
        waiting: dict[Mode, int] = {}
        oldest: tuple[int, str] | None = None
        for key, name in self._tape.records("queue"):
            mode = MODES[key[0]]
            waiting[mode] = waiting.get(mode, 0) + 1
            made = keys.to_number(key[-8:]), name[:-1].decode("ascii")
            oldest = made if oldest is None else min(oldest, made)
        found = None if oldest is None else self._tape.rollout(oldest[1])
        return QueueStatus(
            state=state, waiting=waiting, claimed=claimed, oldest_ns=None if found is None else found.created_ns
        )

    def workers(self) -> list[Worker]:
        """All workers that are remembered, by name."""
        return [Worker.model_validate_json(record) for _, record in self._tape.records("workers")]


_SPARSE: Final = 4
"""A heap may be this many times as long as needed."""


class MemoryQueue:
    """Keys of the queue (`keys.queue_key`) with the names of their rollouts, equal to the database `queue`.

    A claim must not read the tape, because every read would release the interpreter and wait for it again."""

    def __init__(self) -> None:
        self.state: QueueState = "open"
        self.unclaimed: deque[tuple[str, str]] = deque()
        """Unclaimed attempts that have begun since the last call of `newly_unclaimed`; some may be there twice."""
        self._names: dict[bytes, str] = {}
        self._counts: dict[int, int] = {}
        self._heaps: defaultdict[int, list[bytes]] = defaultdict(list)

    def counts(self) -> dict[Mode, int]:
        """Number of waiting rollouts by mode; modes without any are left out."""
        return {MODES[mode]: count for mode, count in self._counts.copy().items() if count}

    def newly_unclaimed(self) -> list[tuple[str, str]]:
        """Attempts that nobody has claimed and that began since the last call; some may come twice."""
        return [self.unclaimed.popleft() for _ in range(len(self.unclaimed))]

    def recall(self, view: TapeView) -> None:
        """Start anew from the tape."""
        self.state = view.queue_state()
        self._names = {key: name[:-1].decode("ascii") for key, name in view.scan("queue")}
        self._heaps.clear()
        for key in self._names:
            self._heaps[key[0]].append(key)
        self._counts = {mode: len(heap) for mode, heap in self._heaps.items()}
        for heap in self._heaps.values():
            heapify(heap)

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Apply changes: a rollout that joins or leaves the queue has a change in the log."""
        if any(record.startswith(b"f") for record in changes):
            return self.recall(view)  # The place of a rollout that is gone is only in its record.
        self.state = view.queue_state()
        if self._names or view.has("queue", b""):
            for name in {record[1:] for record in changes if record.startswith(b"r")}:
                self._follow(view, name)

    def _follow(self, view: TapeView, rollout: bytes) -> None:
        stored, name = view.get("rollouts", rollout), rollout[:-1].decode("ascii")
        assert stored is not None, name
        key = queue_key(records.rollout_from(name, stored, None)[1])
        if view.get("queue", key) == rollout:
            self.add(key, name)
        elif self._names.get(key) == name:
            self.remove(key)

    def add(self, key: bytes, name: str) -> None:
        """Add a waiting rollout under its key."""
        if key in self._names:
            return
        # A key that was removed and comes back may be in the heap twice, which does no harm.
        self._names[key] = name
        self._counts[key[0]] = self._counts.get(key[0], 0) + 1
        heappush(self._heaps[key[0]], key)

    def remove(self, key: bytes) -> None:
        """Remove the rollout under a key."""
        if self._names.pop(key, None) is not None:
            mode = key[0]
            self._counts[mode] -= 1
            if len(self._heaps[mode]) > _SPARSE * (self._counts[mode] + _SPARSE):
                # Where nobody claims work, removed keys are never popped.
                self._heaps[mode] = [it for it in self._names if it[0] == mode]
                heapify(self._heaps[mode])

    def next(self, modes: Iterable[int]) -> tuple[bytes, str] | None:
        """The most urgent rollout of these modes, as (key, name); it stays in the queue. None if none waits."""
        heads = [head for mode in modes if (head := self._head(mode)) is not None]
        found = min(heads, key=lambda key: key[1:], default=None)
        return None if found is None else (found, self._names[found])

    def _head(self, mode: int) -> bytes | None:
        heap = self._heaps.get(mode)
        while heap and heap[0] not in self._names:
            heappop(heap)
        return heap[0] if heap else None


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
        ended = rollout.status in (*UNFAILED, RolloutStatus.FAILED) and rollout.origin != "queued"
        if ended and all(get(other, "outcome") is None for other in self._lives(rollout.id)):
            self._move(rollout, RolloutStatus.RUNNING, now)

    def _end_quietly(self, live: CachedAttempt, rollout: Rollout) -> AttemptStatus:
        """End an attempt as of its last sign of life, without an outcome, because nobody reported one. Returns its
        end."""
        sums, end = dict(zip(records.TOTALS, get(live, "totals"), strict=True)), AttemptStatus.ENDED
        if sums["errors"] or sums["calls"] < get(live, "spans"):  # else reading spans would take ten times as long
            with suppress(*DAMAGE_ERRORS):  # `penstock check` reports it
                end = quiet_end(islice(self._tape.newest_spans(live), LOOKED_AT))
        put(live, status=move_attempt(status_of(live), end), ended_ns=get(live, "last_seen_ns"))
        self._forget(live)
        self._tape.touch_and_log(live)
        lives = self._lives(rollout.id) if rollout.status in ACTIVE and rollout.origin != "queued" else ()
        if lives and not any(status_of(one) in LIVE for one in lives):
            last = max(lives, key=lambda one: get(one, "last_seen_ns"))
            failed = status_of(last) == AttemptStatus.FAILED
            self._move(rollout, RolloutStatus.FAILED if failed else RolloutStatus.ENDED, get(last, "last_seen_ns"))
        return end

    def _lives(self, rollout: str) -> list[CachedAttempt]:
        return [self._tape.attempt(SpanEntry(rollout, attempt)) for attempt in self._attempts(rollout)]

    def _may_revive(self, rollout: Rollout, live: CachedAttempt, now: int, lease: int) -> bool:
        """True if a sign of life revives the attempt, which gets the lease; False where it would be given up again at
        once, because the agent itself has been silent too long. A lease that its worker relies on is never
        shortened."""
        leased = self._tape.get("lightning", keys.LIGHTNING_ATTEMPT + live.key) is None  # else nothing would renew it
        until = max(get(live, "lease_ns") or 0, lease) if leased else None
        due = attempt_deadline(rollout.config, get(live, "created_ns"), get(live, "last_seen_ns"), until)
        if due is not None and due[0] <= now:
            return False
        put(live, lease_ns=until)
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
            said = missing_rollout(name, lambda other: self._known(other) is not None)
            raise OperationRefusedError("not_found", said, "rid", name)
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


QUIET_ENDS: Final = (AttemptStatus.ENDED, AttemptStatus.FAILED, AttemptStatus.SUCCEEDED)
"""States of an attempt that went quiet; `succeeded` on a tape of an earlier version only."""
LOOKED_AT: Final = 64
"""Number of its newest spans that are searched for the last call of an attempt that went quiet."""


def ended_quietly(live: CachedAttempt) -> bool:
    """True if the attempt ended because it was quiet: every other end has an outcome."""
    return status_of(live) in QUIET_ENDS and get(live, "outcome") is None


def quiet_end(newest_first: Iterable[Span]) -> AttemptStatus:
    """The state in which an attempt ends that went quiet, by its spans that have ended: `failed` if its last call of a
    model or a tool, by start, has failed. A call that its client has cancelled has not failed, and what a call in an
    unknown format does to its agent is not known."""
    last: Span | None = None
    for span in newest_first:
        if last is not None and (span.end_ns or 0) <= last.start_ns:
            break  # A span has its sequence by the time it has ended, so those before it began earlier, too.
        known = span.kind == "tool" or (span.kind == "llm" and by_name(span.dialect).uses_tokens)
        if known and (last is None or span.start_ns > last.start_ns):
            last = span
    failed = last is not None and last.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
    return AttemptStatus.FAILED if failed else AttemptStatus.ENDED


def attempt_of(live: CachedAttempt) -> Attempt:
    return records.attempt_of(*live.name, live.values)


def record_sign_of_life(transaction: Transaction, live: CachedAttempt, now: int) -> None:
    """Note a sign of life of a dormant attempt, or the first one of an attempt that nobody has claimed."""
    attempts = AttemptRecords(transaction)
    if status_of(live) in DORMANT and now:
        attempts.sign_of_life(live, now)
    else:
        attempts.begin_unclaimed(live, now)
