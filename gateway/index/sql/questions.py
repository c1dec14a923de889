"""What the process of a query is given, and what it answers: MessagePack in both directions."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

READY: Final = b"ready"
"""What the process says first, once it is about to run the query."""
Format = Literal["rows", "csv", "parquet"]


class Work(msgspec.Struct, frozen=True):
    """One query."""

    query: str
    directory: str
    """All files are in it, and nothing else can be read."""
    files: dict[str, list[str]]
    """Of each table of the index."""
    given: dict[str, list[dict[str, Any]]]
    """The rows of tables that are in no file."""
    format: Format
    rows: int
    """At most so many."""
    bytes: int
    """And no larger than this together."""
    seconds: float
    """How long it may take."""
    enclosed: bool
    """Whether it must give up its rights; false where an operator has asked for that."""


class Result(msgspec.Struct, tag=True, frozen=True):
    """The answer."""

    json: bytes
    """As `model.sql.SqlAnswer` writes it: large answers are not read and written again."""


class Failure(msgspec.Struct, tag=True, frozen=True):
    """There is none."""

    kind: Literal["query", "memory", "too_large", "no_sandbox"]
    reason: str


Outcome: TypeAlias = Result | Failure
