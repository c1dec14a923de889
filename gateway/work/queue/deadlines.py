"""Ends attempts when their time has come.

Live attempts are in a heap of deadlines. When one is due, the tape decides whether the deadline still holds, so that a
sign of life costs nothing here. An attempt that was ended by the clock or by request stays in the heap until its worker
has let go of it: before that no other attempt at its rollout is handed out. An attempt that nobody has claimed ends
when it has been silent for the quiet time; `UnclaimedAttempts` holds these until shortly before. Each check is one
operation; several share a transaction.

Times that an earlier process of the gateway has written are used as they are, but workers have `GRACE_S` after a start
to report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from itertools import chain
from typing import Final, Protocol, TypeVar

from penstock.gateway.model.rollout import LIVE, AttemptStatus, Outcome, Rollout, RolloutStatus, quiet_deadline
from penstock.gateway.tape.store import records
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.queue.attempts import AttemptRecords, deadline, get, put, status_of
from penstock.gateway.work.queue.operations import SpanOperations
from penstock.gateway.work.queue.reader import MemoryQueue, QueueReader
from penstock.gateway.work.queue.results import DeadlineCheck

# Ends of attempts by the clock, as operations inside a write transaction.
#
# They end attempts whose deadline has passed. A rollout joins the queue again when none of its attempts can run any
# more.

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


STEP_NS: Final = 10**8
"""Times are rounded up to multiples of this; ns."""
PIECE: Final = 20_000
"""Number of attempts on the tape that one sweep checks: each costs a read, and then memory of its own."""


class UnclaimedAttempts:
    """Names of attempts by the time of their next check, until shortly before their quiet time is over.

    There may be a million of them: those that agents without a queue began in half an hour. So they are kept as text,
    those that are due at one time together, in a tenth of the memory that single names would need.
    """

    def __init__(self) -> None:
        self._packed: dict[int, bytearray] = {}

    def add(self, names: Iterable[tuple[str, str]], due_ns: int) -> None:
        """Add attempts, as (rollout, attempt), that are due at this time."""
        # Ids have no spaces.
        if packed := "".join(f"{rollout} {attempt} " for rollout, attempt in names):
            self._packed.setdefault(-(-due_ns // STEP_NS), bytearray()).extend(packed.encode("ascii"))

    def join(self, others: UnclaimedAttempts) -> None:
        """Add all attempts of another object."""
        for step, packed in others._packed.items():
            self._packed.setdefault(step, bytearray()).extend(packed)

    def take(self, until_ns: int) -> Iterator[tuple[str, str, int]]:
        """Remove and yield the attempts that are due until then, the earliest first, with their time; ns."""
        for step in sorted(step for step in self._packed if step * STEP_NS <= until_ns):
            words = iter(self._packed.pop(step).decode("ascii").split())
            yield from ((rollout, attempt, step * STEP_NS) for rollout, attempt in zip(words, words, strict=True))


def stagger_checks(pieces: Iterable[Iterable[tuple[str, str]]], first_ns: int, every_ns: int) -> UnclaimedAttempts:
    """The names of the first piece are due at `first_ns`, those of each next piece `every_ns` later."""
    found = UnclaimedAttempts()
    for at, names in enumerate(pieces):
        found.add(names, first_ns + at * every_ns)
    return found


GRACE_S = 15.0
NEVER_NS = 1 << 63
AT_ONCE, TURNS = 20, 50
"""Most attempts that one transaction checks: `AT_ONCE`, which take as long as a batch of calls, or one in `TURNS` of
the watched ones if that is more."""
_RETRY_NS, _DAMAGED_NS, _SWEEP_NS = 10**9, 60 * 10**9, 5 * 10**9
_log = logging.getLogger("penstock.queue")
T = TypeVar("T")


class OperationRunner(Protocol):
    """Runs an operation in a transaction on the recorder's thread."""

    def __call__(self, operation: Callable[[Transaction], T]) -> asyncio.Future[T]:
        """Return the operation's result, once it is durable."""
        ...


class Deadlines:
    """The deadlines of all live attempts. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        do: OperationRunner,
        reader: QueueReader,
        waiting: MemoryQueue,
        now_ns: Callable[[], int],
        quiet_s: float,
        looked: Callable[[Sequence[DeadlineCheck]], None],
    ) -> None:
        """`quiet_s`: seconds that an attempt that nobody has claimed may be silent; `looked` is called with the results
        of each check."""
        self._do, self._reader, self._waiting = do, reader, waiting
        self._now_ns, self._quiet_s, self._looked = now_ns, quiet_s, looked
        self._due: list[tuple[int, tuple[str, str]]] = []
        self._watched: dict[tuple[str, str], int] = {}
        self._unclaimed = UnclaimedAttempts()
        self._timer: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._failing = False
        """True if the tape failed at the last check; the failure is logged once."""
        self._stopped = False

    async def start(self) -> None:
        """Watch the attempts that an earlier process has handed out."""
        now = self._now_ns()
        # Only this process hands out work and ends attempts.
        for rollout, attempt, due in await self._taken_up(self._reader.live(), now):
            self.watch(rollout, attempt, due)
        # The tape tells for how long they have been quiet; their clients have time to come back.
        await self._take_up_unclaimed(now + int(min(GRACE_S, self._quiet_s) * 1e9))
        self._sweep()

    async def stop(self) -> None:
        self._stopped = True
        for timer in (self._timer, self._sweeper):
            if timer is not None:
                timer.cancel()
        if self._expiring is not None:
            self._expiring.cancel()
            with suppress(asyncio.CancelledError):
                await self._expiring

    async def other_writer_left(self) -> None:
        """Check the tape again after another process has died or ended, since it may not have reported all attempts
        that began there."""
        if self._sweeper is not None:
            await self._take_up_unclaimed(self._now_ns() + int(self._quiet_s * 1e9))

    async def _take_up_unclaimed(self, first_ns: int) -> None:
        """Check the unclaimed attempts on the tape from that time on."""
        pieces = self._reader.unclaimed(PIECE)
        self._unclaimed.join(await asyncio.to_thread(stagger_checks, pieces, first_ns, _SWEEP_NS))

    def watch(self, rollout: str, attempt: str, due_ns: int | None) -> None:
        """Check a live attempt at its deadline."""
        name = rollout, attempt
        if due_ns is not None and due_ns < self._watched.get(name, NEVER_NS) and not self._stopped:
            self._watched[name] = due_ns
            heappush(self._due, (due_ns, name))
            if self._due[0][1] == name:
                self._set_timer()

    def unwatch(self, name: tuple[str, str]) -> None:
        """Forget the deadline of an attempt whose worker has finished it."""
        self._watched.pop(name, None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Attempts that have ended in the meantime need no check.
        while self._due and self._watched.get(self._due[0][1]) != self._due[0][0]:
            heappop(self._due)
        if self._due and self._expiring is None and not self._stopped:
            seconds = max(0.0, (self._due[0][0] - self._now_ns()) / 1e9)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._expiring = asyncio.ensure_future(self._expire())

    async def _expire(self) -> None:
        now, due = self._now_ns(), list[tuple[str, str]]()
        most = max(AT_ONCE, len(self._due) // TURNS)
        while self._due and self._due[0][0] <= now and len(due) < most:
            at, name = heappop(self._due)
            # Only the earliest of an attempt's times counts.
            if self._watched.get(name) == at:
                del self._watched[name]
                due.append(name)
        if not due:
            self._expiring = None
            self._set_timer()
            return
        looked = await self._look(due, now)
        self._expiring = None
        for one in looked:
            if one.unclaimed and one.again_ns is not None and one.again_ns > self._now_ns() + _SWEEP_NS:
                self._unclaimed.add([(one.rollout, one.attempt)], one.again_ns)
            else:
                self.watch(one.rollout, one.attempt, one.again_ns)
        self._looked(looked)
        self._set_timer()

    async def _taken_up(self, names: Sequence[tuple[str, str]], now: int) -> list[tuple[str, str, int | None]]:
        grace_ns = int(GRACE_S * 1e9)
        try:
            return await self._do(lambda transaction: DeadlineOperations(transaction).adopt(names, now, grace_ns))
        except DamagedRecordError as error:
            if len(names) > 1:
                # The gateway starts all the same: the attempts are taken up one by one.
                found = await asyncio.gather(*(self._taken_up([name], now) for name in names))
                return list(chain.from_iterable(found))
            _log.error("attempt %s cannot be taken up: %s", "/".join(names[0]), error)
            return []

    async def _look(self, due: Sequence[tuple[str, str]], now: int) -> list[DeadlineCheck]:
        try:
            looked = await self._do(lambda transaction: DeadlineOperations(transaction).expire(due, now, self._quiet_s))
        except DamagedRecordError as error:
            if len(due) > 1:
                # The others must not wait for the one that cannot be read.
                found = await asyncio.gather(*(self._look([name], now) for name in due))
                return list(chain.from_iterable(found))
            _log.error("attempt %s could not be looked at: %s", "/".join(due[0]), error)
            return [DeadlineCheck(*due[0], now + _DAMAGED_NS)]
        except TapeError as error:
            if not self._failing:
                _log.error("no attempt ends by its timeout, its lease or quiet until the tape takes it: %s", error)
            self._failing = True
            return [DeadlineCheck(*name, now + _RETRY_NS) for name in due]
        self._failing = False
        return looked

    def _sweep(self) -> None:
        """Find attempts that were not reported to this object: those that a call has revived, and those that nobody has
        claimed."""
        self._sweeper = asyncio.get_running_loop().call_later(min(_SWEEP_NS / 1e9, self._quiet_s), self._sweep)
        now = self._now_ns()
        self._unclaimed.add(self._waiting.newly_unclaimed(), now + int(self._quiet_s * 1e9))
        for name in self._unclaimed.take(now + _SWEEP_NS):
            self.watch(*name)
        try:
            live = self._reader.live()
        except TapeError as error:
            _log.error("attempts that a call has revived are not watched: %s", error)
            return
        for name in live:
            if name not in self._watched:
                self.watch(*name, now)
