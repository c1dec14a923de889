"""A queued operation, its result, and the reason if it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from penstock.gateway.tape.store.transaction import Transaction

T = TypeVar("T")


class OperationRefusedError(Exception):
    """An operation is refused; nothing of it was written."""

    def __init__(
        self,
        kind: Literal["not_found", "conflict", "invalid"],
        message: str,
        field: str | None = None,
        value: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.field, self.value = kind, field, value


class QueuedOperation(Generic[T]):
    """A queued operation; `run` is called again when its transaction is repeated."""

    def __init__(self, do: Callable[[Transaction], T]) -> None:
        self._do = do
        self.result: T | None = None
        self.refusal: OperationRefusedError | None = None
        self.failure = ""
        """Why it was given up: a record that it read makes no sense, or it has a bug."""

    def run(self, transaction: Transaction) -> None:
        """Run the operation; keep its result, or its refusal."""
        self.result = self.refusal = None
        try:
            self.result = self._do(transaction)
        except OperationRefusedError as refusal:
            self.refusal = refusal
