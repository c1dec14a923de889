"""Rows for other tools: rollouts, spans and conversations as flat tables, streamed to JSON lines or Parquet.

The columns are the fields of the nouns. Sums and usage are spread into columns of their own; what is a list or an
object is a JSON value in JSON lines and JSON text in Parquet. Memory is bounded: rows come page by page and leave as
they come, or by row groups. A file appears under its name when it is whole and not before.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import NoneType, UnionType
from typing import IO, Any, Final, Literal, Protocol, Union, get_args, get_origin

from pydantic import BaseModel

from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.base import Id, Noun
from penstock.gateway.model.rollout import RolloutSummary, Totals
from penstock.gateway.model.span import Estimate, Span, SpanStatus, Usage
from penstock.gateway.model.turn import Choice, Message, Tool

What = Literal["rollouts", "spans", "messages"]
Kind = Literal["text", "whole", "number", "flag", "json"]

SPREAD: Final[dict[Any, str]] = {Totals: "", Usage: "", Estimate: "estimated_"}
"""Nouns whose fields are columns, and what their names begin with."""
KINDS: Final[dict[Any, Kind]] = {str: "text", int: "whole", float: "number", bool: "flag"}
ARROW: Final[dict[Kind, str]] = {
    "text": "string",
    "whole": "int64",
    "number": "double",
    "flag": "bool",
    "json": "string",
}
GROUP_ROWS, GROUP_BYTES = 10_000, 32 << 20
"""A row group ends when it has so many rows, or so much JSON text."""


class Conversation(Noun):
    """What was said in a call: a row of an export of messages."""

    rollout: Id
    """The rollout it belongs to."""
    attempt: Id
    """The attempt it belongs to."""
    sequence: int
    """The call's span within the attempt."""
    start_ns: int
    """When the call began; ns since the epoch."""
    dialect: str
    """Wire format spoken."""
    model: str | None
    """Model asked for."""
    status: SpanStatus
    """How the call ended."""
    messages: list[Message]
    """The conversation that was sent, system text first."""
    choices: list[Choice]
    """What came back."""
    tools: list[Tool]
    """Tools on offer."""
    sampling: dict[str, Any]
    """Everything the request set besides messages, tools, model and stream."""
    problems: list[str]
    """What could not be read and why."""

    @classmethod
    def of(cls, detail: SpanDetail) -> Conversation | None:
        """The conversation of a call; None where nothing was recorded."""
        span, turn = detail.span, detail.turn
        if span.kind != "llm" or turn is None:
            return None
        head = {name: getattr(span, name) for name in cls.model_fields if name in Span.model_fields}
        said = {name: getattr(turn, name) for name in ("messages", "choices", "tools", "sampling", "problems")}
        return cls(**(head | said))


NOUNS: Final[dict[What, type[BaseModel]]] = {"rollouts": RolloutSummary, "spans": Span, "messages": Conversation}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an export."""

    name: str
    kind: Kind
    noun: type[BaseModel]
    """Whose field it is."""


def columns(what: What) -> list[Column]:
    """The columns of an export, in order."""
    noun = NOUNS[what]
    return [column for name, field in noun.model_fields.items() for column in _columns(noun, name, field.annotation)]


def _columns(noun: type[BaseModel], name: str, annotation: Any) -> Iterator[Column]:
    optional = get_origin(annotation) in (UnionType, Union)
    kind = next(inner for inner in get_args(annotation) if inner is not NoneType) if optional else annotation
    if kind in SPREAD:
        yield from (Column(SPREAD[kind] + inner, "whole", kind) for inner in kind.model_fields)
    elif kind in KINDS:
        yield Column(name, KINDS[kind], noun)
    else:
        named = get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum))
        yield Column(name, "text" if named else "json", noun)


def row(noun: BaseModel) -> dict[str, Any]:
    """A noun as JSON values by column."""
    values, found = noun.model_dump(mode="json"), dict[str, Any]()
    for name, field in type(noun).model_fields.items():
        made = list(_columns(type(noun), name, field.annotation))
        spread: dict[str, Any] = values if [column.name for column in made] == [name] else values[name] or {}
        found |= {column.name: spread.get(column.name.removeprefix(SPREAD.get(column.noun, ""))) for column in made}
    return found


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: dict[str, Any]) -> None:
        """Take a row."""
        ...

    def close(self) -> None:
        """Everything has been taken."""
        ...


class Lines:
    """JSON lines."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, row: dict[str, Any]) -> None:
        """A line."""
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        """Nothing is held back."""


class Parquet:
    """Parquet, a row group at a time; raises ImportError where pyarrow is not installed."""

    def __init__(self, file: IO[bytes], what: What) -> None:
        self._columns = columns(what)
        self._arrow = import_module("pyarrow")
        types = {name: self._arrow.type_for_alias(alias) for name, alias in ARROW.items()}
        self._schema = self._arrow.schema([(column.name, types[column.kind]) for column in self._columns])
        self._writer = import_module("pyarrow.parquet").ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, row: dict[str, Any]) -> None:
        """Hold the row until its group is large enough."""
        for column in self._columns:
            if column.kind == "json" and row[column.name] is not None:
                row[column.name] = json.dumps(row[column.name], ensure_ascii=False)
                self._bytes += len(row[column.name])
        self._rows.append(row)
        if len(self._rows) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is held, and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_batch(self._arrow.RecordBatch.from_pylist(self._rows, schema=self._schema))
        self._rows, self._bytes = [], 0


async def export(nouns: AsyncIterable[BaseModel], sink: Sink) -> int:
    """Everything into the sink, which is closed whatever happens; how many rows it was."""
    count = 0
    try:
        async for noun in nouns:
            sink.write(row(noun))
            count += 1
    finally:
        sink.close()
    return count
