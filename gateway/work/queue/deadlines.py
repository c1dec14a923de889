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

from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.queue.deadline_operations import DeadlineOperations
from penstock.gateway.work.queue.memory_queue import MemoryQueue
from penstock.gateway.work.queue.reader import QueueReader
from penstock.gateway.work.queue.results import DeadlineCheck

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
