"""Takes trainers' reports: operations on the tape, and the parts that reads of them need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.work.runs.operations import RunOperations
from penstock.gateway.work.runs.reader import RunReader

T = TypeVar("T")


class RunService:
    """The training runs of a gateway. A change is durable when it is answered; a refused one raises
    `OperationRefusedError`."""

    def __init__(self, tape: Store, recorder: Recorder, now_ns: Callable[[], int]) -> None:
        self.reader = RunReader(tape)
        self.now_ns = now_ns
        self._recorder = recorder

    async def do(self, operation: Callable[[RunOperations, int], T]) -> T:
        """Run an operation, which is called with the time."""
        now = self.now_ns()
        return await self._recorder.submit(lambda transaction: operation(RunOperations(transaction), now))
