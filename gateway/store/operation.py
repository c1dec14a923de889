"""An operation on its way to the tape, its result, and why it may be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from penstock.gateway.store.transaction import Transaction

T = TypeVar("T")


class Refused(Exception):
    """An operation that cannot be done; nothing of it was written."""

    def __init__(
        self,
        kind: Literal["not_found", "conflict", "invalid"],
        message: str,
        field: str | None = None,
        value: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind, self.field, self.value = kind, field, value


class Task(Generic[T]):
    """An operation on its way to the tape; `run` may be called again when the transaction was."""

    def __init__(self, do: Callable[[Transaction], T]) -> None:
        self._do = do
        self.result: T | None = None
        self.refusal: Refused | None = None
        self.failure = ""
        """Why it was given up: what it read makes no sense, or it has a bug."""

    def run(self, transaction: Transaction) -> None:
        """Does it, or notes why it cannot be done."""
        self.result = self.refusal = None
        try:
            self.result = self._do(transaction)
        except Refused as refusal:
            self.refusal = refusal
