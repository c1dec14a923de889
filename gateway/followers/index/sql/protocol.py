"""The input and output of a query's process: MessagePack in both directions."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

READY: Final = b"ready"
"""The first bytes that the process writes, just before it runs the query."""
Format = Literal["rows", "csv", "parquet"]


class SqlJob(msgspec.Struct, frozen=True):
    """One query with its data and limits."""

    query: str
    directory: str
    """Holds all files; nothing else can be read."""
    files: dict[str, list[str]]
    """The files of each table of the index."""
    given: dict[str, list[dict[str, Any]]]
    """The rows of tables that are in no file."""
    format: Format
    rows: int
    """Most rows of the answer."""
    bytes: int
    """Most bytes of the answer."""
    seconds: float
    """Longest run time."""
    enclosed: bool
    """True if the process must give up its rights; False only by an operator's setting."""


class SqlResult(msgspec.Struct, tag=True, frozen=True):
    """The answer to a query."""

    json: bytes
    """As `model.sql.SqlAnswer` writes it: large answers are not parsed and written again."""


class SqlFailure(msgspec.Struct, tag=True, frozen=True):
    """The reason why a query has no answer."""

    kind: Literal["query", "memory", "too_large", "no_sandbox"]
    reason: str


SqlOutcome: TypeAlias = SqlResult | SqlFailure
