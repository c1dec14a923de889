"""Hands out work, and runs the operations of the control API and of the clock on the queue.

Every change is an operation on the tape (`gateway.work.operations`). The recorder's thread runs the operations and
records the calls in the order in which they came: when the end of an attempt is answered, all its calls are durable.
This module does the part that needs an event loop. Claims that find nothing wait in a line, without touching the tape,
and as many are woken as there is work. `Deadlines` ends attempts by the clock.

The clock is the tape's: it starts with the machine's and then runs evenly, so setting the machine's clock cannot end
anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from itertools import chain
from typing import Final, TypeVar

from penstock.gateway.model.base import EMPTY_ACTION, ActionRequest, Mode
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.queue import (
    ClaimRequest,
    EnqueueResult,
    FinishRequest,
    HeartbeatRequest,
    LeaseAnswer,
    QueueState,
    RewardAnswer,
    RolloutSpec,
)
from penstock.gateway.model.rollout import AttemptStatus, Judgement, RewardSource, Rollout, attempt_deadline
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.work.operations import DeadlineOperations, QueueOperations, SpanOperations
from penstock.gateway.work.queue import (
    MODES,
    ClaimedAttempt,
    DeadlineCheck,
    FinishResult,
    MemoryQueue,
    QueueChange,
    QueueReader,
)

_log = logging.getLogger("penstock.queue")
T = TypeVar("T")


class Dispatcher:
    """Hands out work. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        recorder: Recorder,
        metrics: Metrics,
        now_ns: Callable[[], int],
        trust_agent: bool = False,
        quiet_s: float = 1800.0,
    ) -> None:
        """`now_ns` is the clock of the tape; `trust_agent`: True if rewards that an agent reports on itself are trained
        on; `quiet_s`: seconds of silence after which an attempt that nobody has claimed has ended."""
        self._recorder = recorder
        self.queue = recorder.store.follower(MemoryQueue)
        self.reader = QueueReader(recorder.store)
        self._metrics = metrics
        self.now_ns = now_ns
        self._trust_agent = trust_agent
        self.deadlines = Deadlines(recorder, self.reader, self.queue, now_ns, quiet_s, self._looked)
        self._finished: Counter[str] = Counter()
        """Number of attempts that each worker has finished since its last heartbeat."""
        self._line: dict[asyncio.Future[None], frozenset[Mode]] = {}
        self._wakes = 0
        """Times that claims in the line were woken, or would have been."""
        self._stopped = False

    async def start(self) -> None:
        """Watch the attempts that an earlier process has handed out."""
        await self.deadlines.start()

    async def stop(self) -> None:
        """Stop the clock, and answer all waiting claims."""
        self._stopped = True
        await self.deadlines.stop()
        self._wake()

    # -- giving work -------------------------------------------------------------------------------------------------

    async def enqueue(self, specs: Sequence[RolloutSpec]) -> list[EnqueueResult]:
        """Queue tasks, all or none; raises `OperationRefusedError`."""
        named = [(spec.id or f"ro-{secrets.token_hex(8)}", spec) for spec in specs]
        now = self.now_ns()
        made = await self._recorder.submit(lambda transaction: QueueOperations(transaction).enqueue(named, now))
        self._wake_for(Counter(spec.mode for (_, spec), one in zip(named, made, strict=True) if one.created))
        return made

    async def cancel(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> Rollout:
        """End a rollout; raises `OperationRefusedError`."""
        now = self.now_ns()
        return await self._recorder.submit(lambda transaction: QueueOperations(transaction).cancel(rollout, said, now))

    async def requeue(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> Rollout:
        """Queue a rollout that has ended; raises `OperationRefusedError`."""
        now = self.now_ns()
        found = await self._recorder.submit(
            lambda transaction: QueueOperations(transaction).requeue(rollout, said, now)
        )
        if found.attempt is not None:
            # Its last worker may still have to kill the agent.
            self.deadlines.watch(found.id, found.attempt, now)
        self._wake_for({found.mode: 1})
        return found

    async def set_state(self, state: QueueState, said: ActionRequest = EMPTY_ACTION) -> None:
        """Open, pause or drain the queue."""
        now = self.now_ns()
        await self._recorder.submit(lambda transaction: QueueOperations(transaction).set_state(state, said, now))
        # Waiting claims must learn that there is work, or that there will be none.
        self._wake()

    async def note(self, name: str, value: bytes) -> None:
        """Keep a small value that `StoreReader.note` finds again."""
        await self._recorder.submit(lambda transaction: QueueOperations(transaction).note(name, value))

    # -- doing it ----------------------------------------------------------------------------------------------------

    async def claim(self, asked: ClaimRequest) -> list[ClaimedAttempt]:
        """Claim work for a worker, waiting for it if need be. Returns nothing when there is none in time, when the
        queue is not open, and once another process hands out work, which would end the lease by its own clock."""
        modes = frozenset(asked.modes or MODES)
        until = asyncio.get_running_loop().time() + asked.wait_s
        while not self._stopped:
            wakes, state, waiting = self._wakes, self.queue.state, self.queue.counts()
            if state == "open" and modes & waiting.keys() and (claimed := await self._take(asked, modes)):
                return claimed
            # Work that came while the tape was asked has woken nobody: this claim was not in the line yet.
            if state == "draining" or (wakes == self._wakes and not await self._wait(modes, until)):
                break
        return []

    async def _take(self, asked: ClaimRequest, modes: frozenset[Mode]) -> list[ClaimedAttempt]:
        now, lease = self.now_ns(), int(asked.lease_s * 1e9)
        reward = asked.reward_on_failure
        return await self.take(
            lambda transaction: QueueOperations(transaction).claim(
                asked.worker, asked.limit, modes, lease, now, reward
            ),
            now,
        )

    async def take(self, claim: Callable[[Transaction], list[ClaimedAttempt]], now: int) -> list[ClaimedAttempt]:
        """Run an operation that hands out work, since `now`; work whose client has left is given back."""
        taking = self._recorder.submit(claim)
        try:
            claimed = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back)
            raise
        for one in claimed:
            self._watch_claimed(one)
        if claimed:
            self._metrics.claim_seconds.observe((self.now_ns() - now) / 1e9)
            self._pass_on()
        return claimed

    async def hand_out(self, name: str, spec: RolloutSpec, asked: ClaimRequest) -> ClaimedAttempt:
        """Hand out one task that does not wait in the queue, again if it has ended; raises `OperationRefusedError`."""
        now, lease = self.now_ns(), int(asked.lease_s * 1e9)
        made = await self._recorder.submit(
            lambda transaction: QueueOperations(transaction).hand_out(name, spec, asked.worker, lease, now)
        )
        self._watch_claimed(made)
        return made

    def _watch_claimed(self, claimed: ClaimedAttempt) -> None:
        attempt = claimed.attempt
        due = attempt_deadline(claimed.rollout.config, attempt.created_ns, attempt.last_seen_ns, attempt.lease_ns)
        self.deadlines.watch(attempt.rollout, attempt.id, None if due is None else due[0])

    def _give_back(self, taking: asyncio.Future[list[ClaimedAttempt]]) -> None:
        """Give work back whose client left before it was answered: another worker gets it."""
        if taking.cancelled() or taking.exception() is not None:
            return
        names = [(one.rollout.id, one.attempt.id) for one in taking.result()]
        if names and not self._stopped:
            self._recorder.submit(
                lambda transaction: QueueOperations(transaction).give_back(names, self.now_ns())
            ).add_done_callback(self._gave_back)

    def _gave_back(self, giving: asyncio.Future[None]) -> None:
        if not giving.cancelled() and (error := giving.exception()) is not None:
            _log.error("the claim of a client that has gone waits for its lease to end: %s", error)
        self._pass_on()

    async def _wait(self, modes: frozenset[Mode], until: float) -> bool:
        """True when there may be work; False when the time is over."""
        loop = asyncio.get_running_loop()
        if until <= loop.time():
            return False
        woken: asyncio.Future[None] = loop.create_future()
        self._line[woken] = modes
        try:
            async with asyncio.timeout_at(until):
                await woken
        except TimeoutError:
            # The claim may have been woken in the very moment in which its time was over.
            return woken.done() and not woken.cancelled()
        except asyncio.CancelledError:
            if woken.done() and not woken.cancelled():
                self._pass_on()
            raise
        finally:
            self._line.pop(woken, None)
        return True

    def _pass_on(self) -> None:
        """Wake another waiting claim as long as there is work for it, because the one that was woken may have left."""
        self._wakes += 1
        if self._line:
            state, waiting = self.queue.state, self.queue.counts()
            if state == "open":
                self._wake_for(dict.fromkeys(waiting, 1))

    def _wake_for(self, counts: Mapping[Mode, int]) -> None:
        """Wake as many waiting claims as there is new work for them, the longest waiting first."""
        self._wakes += 1
        left = {mode: count for mode, count in counts.items() if count > 0}
        for woken, modes in list(self._line.items()):
            if not left:
                return
            mode = next((mode for mode in left if mode in modes), None)
            if mode is not None and not woken.done():
                left[mode] -= 1
                if not left[mode]:
                    del left[mode]
                self._wake_one(woken)

    def _wake(self) -> None:
        self._wakes += 1
        for woken in list(self._line):
            self._wake_one(woken)

    def _wake_one(self, woken: asyncio.Future[None]) -> None:
        del self._line[woken]
        if not woken.done():
            woken.set_result(None)

    def other_writer_committed(self) -> None:
        """Wake claims after another process has written the tape: there may be work, or there will be none."""
        if self.queue.state == "open":
            self._pass_on()
        else:
            self._wake()

    async def heartbeat(self, worker: str, asked: HeartbeatRequest) -> list[LeaseAnswer]:
        now, lease = self.now_ns(), int(asked.lease_s * 1e9)
        finished = self._finished.pop(worker, 0)
        try:
            answers = await self._recorder.submit(
                lambda transaction: QueueOperations(transaction).heartbeat(worker, asked, lease, now, finished)
            )
        except TapeError:
            self._finished[worker] += finished
            raise
        for answer in answers:
            # The new lease may be shorter than the last one, or revive an attempt.
            if answer.held:
                self.deadlines.watch(answer.rollout, answer.attempt, now + lease)
        # The heartbeat may have released an attempt whose rollout another worker waits for.
        self._pass_on()
        return answers

    async def finish(
        self, rollout: str, attempt: str, asked: FinishRequest, events: Sequence[SpanEntry] = ()
    ) -> FinishResult:
        """End an attempt; `events`: those of the request, as spans. Raises `OperationRefusedError`."""
        name, now = (rollout, attempt), self.now_ns()
        rewards = [(judgement, self._trusts(judgement)) for judgement in asked.rewards]
        end = AttemptStatus(asked.status)
        # Where the tape cannot be written, the operation below reports it.
        _ = await self._recorder.flush_other_workers()
        try:
            done = await self._recorder.submit(
                lambda transaction: QueueOperations(transaction).finish(
                    name, asked.worker, end, asked.outcome, rewards, now, events
                )
            )
            self.deadlines.unwatch(name)
            self._count(done.ended, done.rewarded)
            if done.by is not None:
                self._finished[done.by] += 1
            return done
        finally:
            # Done also when the request is refused: its rollout may have waited for this worker to let go of it.
            self._pass_on()

    # -- judging it --------------------------------------------------------------------------------------------------

    async def flush_calls(self) -> str | None:
        """Wait until every call that has ended is on the tape. Returns None, or the reason where the tape cannot be
        written."""
        return await self._recorder.flush_all()

    async def reward(self, rollout: str, attempt: str, judgement: Judgement) -> RewardAnswer:
        """Keep a reward; raises `OperationRefusedError`."""
        name, trusted, now = (rollout, attempt), self._trusts(judgement), self.now_ns()
        kept, new = await self._do_of_calls(
            lambda transaction: SpanOperations(transaction).reward(name, judgement, trusted, now)
        )
        self._count(None, [judgement.source] if new else [])
        return kept

    def _count(self, ended: AttemptStatus | None, rewarded: Sequence[RewardSource]) -> None:
        if ended is not None:
            self._metrics.attempts[(ended,)] += 1
        for source in rewarded:
            self._metrics.rewards[(source,)] += 1

    def _trusts(self, judgement: Judgement) -> bool:
        return judgement.source != "agent" or self._trust_agent

    async def add(self, entries: Sequence[SpanEntry], known: bool = False) -> list[int]:
        """Add spans that are no calls; returns their sequences. `known`: refuse spans of attempts that do not exist."""
        now = self.now_ns()
        return await self._do_of_calls(lambda transaction: SpanOperations(transaction).add(entries, now, known))

    async def change(self, operation: Callable[[Transaction], QueueChange[T]]) -> T:
        """Run an operation that changes rollouts; then watch, count and wake as it says. Raises
        `OperationRefusedError`."""
        done = await self._recorder.submit(operation)
        for one in done.watched:
            self._watch_claimed(one)
        self._count(done.ended, done.rewarded)
        if done.waiting:
            self._wake_for(Counter(done.waiting))
        return done.answer

    async def run(self, operation: Callable[[Transaction], T]) -> T:
        """Run an operation on the tape; raises `TapeError`."""
        return await self._recorder.submit(operation)

    async def wait_until_recorded(self) -> None:
        """Wait until every call that has ended is on the tape, whichever worker served it; raises `TapeError`."""
        _ = await self._recorder.flush_other_workers()
        await self._recorder.submit(lambda _: None)

    async def _do_of_calls(self, operation: Callable[[Transaction], T]) -> T:
        """Run an operation that may refer to a call that another worker has just served: it is refused only when such
        calls are written."""
        try:
            return await self._recorder.submit(operation)
        except OperationRefusedError:
            _ = await self._recorder.flush_other_workers()
            return await self._recorder.submit(operation)

    def _looked(self, looked: Sequence[DeadlineCheck]) -> None:
        """Called with the results of a check of deadlines: counts ends and rewards, and wakes claims."""
        for one in looked:
            self._count(one.ended, [one.rewarded] if one.rewarded else [])
        self._wake_for(Counter(one.requeued for one in looked if one.requeued is not None))


# -- the clock --------------------------------------------------------------------------------------------------------
#
# Live attempts are in a heap of deadlines. When one is due, the tape decides whether the deadline still holds, so
# that a sign of life costs nothing here. An attempt that was ended by the clock or by request stays in the heap until
# its worker has let go of it: before that no other attempt at its rollout is handed out. An attempt that nobody has
# claimed ends when it has been silent for the quiet time; `UnclaimedAttempts` holds these until shortly before. Each
# check is one operation; several share a transaction.
#
# Times that an earlier process of the gateway has written are used as they are, but workers have `GRACE_S` after a
# start to report.

GRACE_S = 15.0
NEVER_NS = 1 << 63
AT_ONCE, TURNS = 20, 50
"""Most attempts that one transaction checks: `AT_ONCE`, which take as long as a batch of calls, or one in `TURNS` of
the watched ones if that is more."""
_RETRY_NS, _DAMAGED_NS, _SWEEP_NS = 10**9, 60 * 10**9, 5 * 10**9
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


class Deadlines:
    """The deadlines of all live attempts. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        recorder: Recorder,
        reader: QueueReader,
        waiting: MemoryQueue,
        now_ns: Callable[[], int],
        quiet_s: float,
        looked: Callable[[Sequence[DeadlineCheck]], None],
    ) -> None:
        """`quiet_s`: seconds that an attempt that nobody has claimed may be silent; `looked` is called with the results
        of each check."""
        self._recorder, self._reader, self._waiting = recorder, reader, waiting
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
            return await self._recorder.submit(
                lambda transaction: DeadlineOperations(transaction).adopt(names, now, grace_ns)
            )
        except DamagedRecordError as error:
            if len(names) > 1:
                # The gateway starts all the same: the attempts are taken up one by one.
                found = await asyncio.gather(*(self._taken_up([name], now) for name in names))
                return list(chain.from_iterable(found))
            _log.error("attempt %s cannot be taken up: %s", "/".join(names[0]), error)
            return []

    async def _look(self, due: Sequence[tuple[str, str]], now: int) -> list[DeadlineCheck]:
        try:
            looked = await self._recorder.submit(
                lambda transaction: DeadlineOperations(transaction).expire(due, now, self._quiet_s)
            )
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
