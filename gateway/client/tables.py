"""Rows for other tools: rollouts, spans, conversations and runs of tools as flat tables, streamed to a sink.

The columns are the fields of the nouns. Sums and usage are spread into columns of their own; a list or an object is
JSON. Rows are read page by page and written as they come. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import IO, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from penstock.gateway.client import sinks
from penstock.gateway.client.sinks import ColumnKind, Format, Sink
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.base import Id, Noun
from penstock.gateway.model.rollout import RolloutSummary, Totals
from penstock.gateway.model.span import Estimate, Span, SpanStatus, Usage
from penstock.gateway.model.tools import ToolRow
from penstock.gateway.model.turn import Choice, Message, Tool

ExportKind = Literal["rollouts", "spans", "messages", "tools"]

SPREAD: Final[dict[Any, str]] = {Totals: "", Usage: "", Estimate: "estimated_"}
"""Nouns whose fields become columns of their own, and the prefixes of these columns' names."""
KINDS: Final[dict[Any, ColumnKind]] = {str: "text", int: "whole", float: "number", bool: "flag"}


class ConversationRow(Noun):
    """The messages of one call, sent and received: a row of an export of messages."""

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
    def of(cls, detail: SpanDetail) -> ConversationRow | None:
        """The conversation of a call; None where nothing was recorded."""
        span, turn = detail.span, detail.turn
        if span.kind != "llm" or turn is None:
            return None
        head = {name: getattr(span, name) for name in cls.model_fields if name in Span.model_fields}
        said = {name: getattr(turn, name) for name in ("messages", "choices", "tools", "sampling", "problems")}
        return cls(**(head | said))


NOUNS: Final[dict[ExportKind, type[BaseModel]]] = {
    "rollouts": RolloutSummary,
    "spans": Span,
    "messages": ConversationRow,
    "tools": ToolRow,
}


@dataclass(frozen=True, slots=True)
class ExportColumn:
    """A column of an export."""

    name: str
    kind: ColumnKind
    noun: type[BaseModel]
    """The noun that has this field."""


def columns(what: ExportKind) -> list[ExportColumn]:
    """The columns of an export, in order."""
    noun = NOUNS[what]
    return [column for name, field in noun.model_fields.items() for column in _columns(noun, name, field.annotation)]


def _columns(noun: type[BaseModel], name: str, annotation: Any) -> Iterator[ExportColumn]:
    optional = get_origin(annotation) in (UnionType, Union)
    kind = next(inner for inner in get_args(annotation) if inner is not NoneType) if optional else annotation
    if kind in SPREAD:
        for inner, field in kind.model_fields.items():
            yield from (
                replace(column, name=SPREAD[kind] + inner) for column in _columns(kind, inner, field.annotation)
            )
    elif kind in KINDS:
        yield ExportColumn(name, KINDS[kind], noun)
    else:
        named = get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum))
        yield ExportColumn(name, "text" if named else "json", noun)


def row(noun: BaseModel) -> dict[str, Any]:
    """The JSON values of a noun, by column."""
    values, found = noun.model_dump(mode="json"), dict[str, Any]()
    for name, field in type(noun).model_fields.items():
        made = list(_columns(type(noun), name, field.annotation))
        spread: dict[str, Any] = values if [column.name for column in made] == [name] else values[name] or {}
        found |= {column.name: spread.get(column.name.removeprefix(SPREAD.get(column.noun, ""))) for column in made}
    return found


def sink(file: IO[bytes], what: ExportKind, format: Format) -> Sink:
    """A sink for the rows of an export."""
    return sinks.sink(file, {column.name: column.kind for column in columns(what)}, format, _json)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


async def export(nouns: AsyncIterable[BaseModel], sink: Sink) -> int:
    """Writes all nouns to the sink, which is closed in any case; returns the number of rows."""
    count = 0
    try:
        async for noun in nouns:
            sink.write(row(noun))
            count += 1
    finally:
        sink.close()
    return count
