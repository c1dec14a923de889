"""What clients did and what they were answered: one JSON line for each operation, on disk before the next one begins.

An operation is *ok* (it was answered as asked), *refused* (it was answered, and nothing was done), or *unknown*: the
connection broke, so it may have been done or not. Times are seconds of the monotonic clock of the machine, which no
fault touches. Faults, and what followers of the feed were told, are lines of the same file.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from penstock.gateway.client.client import ClientError

Result = Literal["ok", "refused", "unknown"]


@dataclass(slots=True)
class Operation:
    """One line."""

    kind: str
    actor: str
    begin: float
    end: float = 0.0
    result: Result = "unknown"
    asked: dict[str, Any] = field(default_factory=dict[str, Any])
    answer: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{self.kind} by {self.actor} at {self.begin:.3f} to {self.end:.3f} ({self.result}): {self.asked}"


class History:
    """The file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    @contextmanager
    def doing(self, kind: str, actor: str, **asked: Any) -> Generator[Operation]:
        """An operation, from here to the end of the block. A `ClientError` is its answer, and goes no further."""
        made = Operation(kind, actor, monotonic(), asked=asked)
        try:
            yield made
            made.result = "ok"
        except ClientError as error:
            made.result = "unknown" if error.status is None else "refused"
            made.answer |= {"status": error.status, "error": str(error)}
        finally:
            made.end = monotonic()
            self._write(made)

    def note(self, kind: str, actor: str, **asked: Any) -> None:
        """Something that took no time."""
        now = monotonic()
        self._write(Operation(kind, actor, now, now, "ok", asked))

    def _write(self, made: Operation) -> None:
        _ = self._file.write(json.dumps(asdict(made)).encode() + b"\n")

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()


def read(path: Path) -> list[Operation]:
    """All of a file, in the order in which operations ended; a line that was cut off has not been written."""
    lines = path.read_text().split("\n")[:-1]
    return [Operation(**json.loads(line)) for line in lines]


def of(history: Iterable[Operation], *kinds: str) -> list[Operation]:
    """The operations of these kinds, in the order in which they began."""
    return sorted((one for one in history if one.kind in kinds), key=lambda one: one.begin)
