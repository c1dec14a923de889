"""Takes trainers' reports: operations on the tape, and the parts that reading them needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.gateway.model.run import NewRun, PointsRequest, Run, RunChange, RunEnd, RunEvent, RunHead
from penstock.gateway.runs.operations import RunOperations
from penstock.gateway.runs.reader import RunReader
from penstock.gateway.store import Store
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.store.transaction import Transaction

T = TypeVar("T")


class RunService:
    """The training runs of a gateway. What changes one is durable when it is answered; all raise `Refused`."""

    def __init__(self, tape: Store, recorder: Recorder, now_ns: Callable[[], int]) -> None:
        self.reader = RunReader(tape)
        self.now_ns = now_ns
        self._recorder = recorder

    async def start(self, new: NewRun) -> Run:
        """Starts a run."""
        return await self._do(lambda transaction, now: RunOperations(transaction).start(new, now))

    async def change(self, run: str, said: RunChange) -> RunHead:
        """Keeps what its trainer says of it."""
        return await self._do(lambda transaction, now: RunOperations(transaction).change(run, said, now))

    async def finish(self, run: str, end: RunEnd) -> RunHead:
        """Ends it."""
        return await self._do(lambda transaction, now: RunOperations(transaction).finish(run, end, now))

    async def add_points(self, run: str, asked: PointsRequest) -> RunHead:
        """Keeps points."""
        return await self._do(lambda transaction, now: RunOperations(transaction).add_points(run, asked, now))

    async def add_events(self, run: str, events: Iterable[RunEvent]) -> int:
        """Keeps events; how many were new."""
        return await self._do(lambda transaction, now: RunOperations(transaction).add_events(run, events, now))

    async def _do(self, operation: Callable[[Transaction, int], T]) -> T:
        now = self.now_ns()
        return await self._recorder.submit(lambda transaction: operation(transaction, now))
