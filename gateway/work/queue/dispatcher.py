"""Hands out work, and runs the operations of the control API and of the clock on the queue.

Every change is an operation on the tape (`gateway.work.queue.operations`). The recorder's thread runs the operations
and records the calls in the order in which they came: when the end of an attempt is answered, all its calls are
durable. This module does the part that needs an event loop. Claims that find nothing wait in a line, without touching
the tape, and as many are woken as there is work. `Deadlines` ends attempts by the clock.

The clock is the tape's: it starts with the machine's and then runs evenly, so setting the machine's clock cannot end
anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

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
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.work.queue.deadlines import Deadlines
from penstock.gateway.work.queue.operations import QueueOperations, SpanOperations
from penstock.gateway.work.queue.reader import MemoryQueue, QueueReader
from penstock.gateway.work.queue.results import MODES, ClaimedAttempt, DeadlineCheck, FinishResult

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
        self.deadlines = Deadlines(self._do, self.reader, self.queue, now_ns, quiet_s, self._looked)
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

    def _do(self, operation: Callable[[Transaction], T]) -> asyncio.Future[T]:
        return self._recorder.submit(operation)

    # -- giving work -------------------------------------------------------------------------------------------------

    async def enqueue(self, specs: Sequence[RolloutSpec]) -> list[EnqueueResult]:
        """Queue tasks, all or none; raises `OperationRefusedError`."""
        named = [(spec.id or f"ro-{secrets.token_hex(8)}", spec) for spec in specs]
        now = self.now_ns()
        made = await self._do(lambda transaction: QueueOperations(transaction).enqueue(named, now))
        self._wake_for(Counter(spec.mode for (_, spec), one in zip(named, made, strict=True) if one.created))
        return made

    async def cancel(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> Rollout:
        """End a rollout; raises `OperationRefusedError`."""
        now = self.now_ns()
        return await self._do(lambda transaction: QueueOperations(transaction).cancel(rollout, said, now))

    async def requeue(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> Rollout:
        """Queue a rollout that has ended; raises `OperationRefusedError`."""
        now = self.now_ns()
        found = await self._do(lambda transaction: QueueOperations(transaction).requeue(rollout, said, now))
        if found.attempt is not None:
            # Its last worker may still have to kill the agent.
            self.deadlines.watch(found.id, found.attempt, now)
        self._wake_for({found.mode: 1})
        return found

    async def set_state(self, state: QueueState, said: ActionRequest = EMPTY_ACTION) -> None:
        """Open, pause or drain the queue."""
        now = self.now_ns()
        await self._do(lambda transaction: QueueOperations(transaction).set_state(state, said, now))
        # Waiting claims must learn that there is work, or that there will be none.
        self._wake()

    async def note(self, name: str, value: bytes) -> None:
        """Keep a small value that `StoreReader.note` finds again."""
        await self._do(lambda transaction: QueueOperations(transaction).note(name, value))

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
        taking = self._do(
            lambda transaction: QueueOperations(transaction).claim(asked.worker, asked.limit, modes, lease, now, reward)
        )
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
        made = await self._do(
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
            self._do(
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
            answers = await self._do(
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
            done = await self._do(
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

    async def wait_until_recorded(self) -> None:
        """Wait until every call that has ended is on the tape, whichever worker served it; raises `TapeError`."""
        _ = await self._recorder.flush_other_workers()
        await self._do(lambda _: None)

    async def _do_of_calls(self, operation: Callable[[Transaction], T]) -> T:
        """Run an operation that may refer to a call that another worker has just served: it is refused only when such
        calls are written."""
        try:
            return await self._do(operation)
        except OperationRefusedError:
            _ = await self._recorder.flush_other_workers()
            return await self._do(operation)

    # -- the clock ---------------------------------------------------------------------------------------------------

    def _looked(self, looked: Sequence[DeadlineCheck]) -> None:
        """Called with the results of a check of deadlines: counts ends and rewards, and wakes claims."""
        for one in looked:
            self._count(one.ended, [one.rewarded] if one.rewarded else [])
        self._wake_for(Counter(one.requeued for one in looked if one.requeued is not None))
