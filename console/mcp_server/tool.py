"""A tool for coding agents: its name, a description for models, its arguments, and the function that answers.

An answer is given twice, as fields and as text, because clients differ in which of them they show a model. Both are
limited, and both tell how to get the rest. A tool that cannot answer raises `ToolError` in plain words, with the way
out.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console, RenderableType

from penstock.console.views.table import ENDLESS, clean, compact
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Page
from penstock.gateway.model.base import Noun
from penstock.gateway.model.toml import sentence
from penstock.gateway.model.turn import Message, Part

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

A = TypeVar("A", bound=Noun)
MOST_TEXT = 20_000
"""Most characters of an answer's text."""
Characters = Annotated[int, Field(ge=500, le=MOST_TEXT)]
Cursor = Annotated[str | None, Field(max_length=1000)]


class ToolError(Exception):
    """A tool cannot answer; the message says why, and what to do."""


class ToolArguments(Noun):
    """Arguments of a tool; docstrings of the fields are what a model is told of them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ToolAnswer(Noun):
    """The base of a tool's answer as fields; models are told the docstrings of the fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ToolResult(NamedTuple):
    """An answer, as fields and as text."""

    answer: ToolAnswer
    text: str


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The client of the gateway, and the caller."""

    client: Client
    who: str
    """The calling program, for entries that are kept under a name."""


@dataclass(frozen=True, slots=True)
class ToolDefinition(Generic[A]):
    name: str
    title: str
    description: str
    arguments: type[A]
    answer: type[ToolAnswer]
    act: Callable[[ToolContext, A], Awaitable[ToolResult]]
    writes: bool = False
    """True if it changes anything: it is then offered only by a server that was started with `--write`."""
    idempotent: bool = True
    """True if two equal calls leave the same as one."""


AnyTool = ToolDefinition[Any]


# -- arguments and answers: JSON schemas as short as possible for models, errors in plain words ----


SEVERAL = 5
"""Most errors that are reported at once."""
NULL = {"type": "null"}
Schema = dict[str, Any]


def schema(model: type[BaseModel]) -> Schema:
    """The schema without titles and the docstrings of classes. A nullable member is not required, and has only its
    other type."""
    made = _object(model.model_json_schema())
    return {name: value for name, value in made.items() if name != "description"}


def _object(given: Schema) -> Schema:
    fields: dict[str, Schema] = given.get("properties", {})
    needed = [name for name in given.get("required", []) if NULL not in fields[name].get("anyOf", [])]
    made = {name: value for name, value in given.items() if name not in ("title", "required", "properties", "$defs")}
    made |= {"properties": {name: _field(field) for name, field in fields.items()}}
    made |= {"required": needed} if needed else {}
    parts = cast("dict[str, Schema]", given.get("$defs", {}))
    return made | ({"$defs": {name: _part(part) for name, part in parts.items()}} if parts else {})


def _part(given: Schema) -> Schema:
    made = _object(given) if given.get("type") == "object" else _field(given)
    return {name: value for name, value in made.items() if name != "description"}


def _field(given: Schema) -> Schema:
    made = {name: value for name, value in given.items() if name != "title"}
    kinds = [kind for kind in made.get("anyOf", []) if kind != NULL]
    if len(kinds) == 1:
        del made["anyOf"]
        made = kinds[0] | made
    if made.get("default", made) is None:
        del made["default"]
    return made


def problems(error: ValidationError, model: type[BaseModel]) -> str:
    """The errors of arguments, a sentence each."""
    found = [_problem(one, model) for one in cast("list[Mapping[str, Any]]", error.errors(include_url=False))]
    return "; ".join(found[:SEVERAL])


def _problem(one: Mapping[str, Any], model: type[BaseModel]) -> str:
    place = ".".join(map(str, one["loc"]))
    if one["type"] == "extra_forbidden":
        names = ", ".join(model.model_fields)
        return f"{place}: there is no such argument; {f'there are: {names}' if names else 'it takes none'}"
    return f"{place or 'arguments'}: {sentence(one)}"


# -- texts: tables as plain lines, long texts in pieces, times, messages ----


class TextPiece(NamedTuple):
    """A part of a long text."""

    text: str
    next: int | None
    """The offset of the rest; None at the end."""


def plain(*shown: RenderableType) -> str:
    """Renderables as a pipe gets them: without colours, each row of a table on one line."""
    console = Console(file=io.StringIO(), width=ENDLESS, highlight=False, emoji=False, markup=False, color_system=None)
    console.print(*shown, sep="\n", crop=False, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def piece(text: str, offset: int, most: int) -> TextPiece:
    """Up to `most` characters of a text from an offset on."""
    end = offset + most
    return TextPiece(text[offset:end], end if end < len(text) else None)


def cut(text: str, most: int) -> str:
    """The beginning of a text, with the number of missing characters. Line breaks stay."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} characters more"


def moment(ns: int | None) -> str | None:
    """An ISO time in UTC."""
    return None if ns is None else f"{datetime.fromtimestamp(ns / 1e9, UTC):%Y-%m-%dT%H:%M:%SZ}"


def message_text(message: Message) -> str:
    """The text of a message, including tool calls and their results."""
    return "\n".join(clean(_format_part(part)) for part in message.parts)


def _format_part(part: Part) -> str:
    text = part.text or ""
    name = f" {part.id}" if part.id else ""
    match part.type:
        case "text":
            return text
        case "tool_call":
            return f"[calls tool{name}] {part.name}({part.arguments or ''})"
        case "tool_call_response":
            return f"[tool result{name}] {text or compact(part.data)}"
        case _:
            return f"[{part.type}] {text or compact(part.data)}"


# -- lists of the API ----
#
# A selective filter may match nothing on many pages. After `PAGES` pages the answer is returned, with the cursor to
# continue.


P = TypeVar("P", bound=Page)
R = TypeVar("R")
PAGES = 20
"""Most pages that are read for one answer."""


class ListArguments(Protocol):
    """Arguments that all tools that list have."""

    @property
    def filter(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def cursor(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class RowPage(Generic[R]):
    """Rows, and the cursor of the next ones."""

    rows: list[R]
    next: str | None
    scanned: int


async def read_rows(
    client: Client, path: str, model: type[P], rows_of: Callable[[P], list[R]], asked: ListArguments
) -> RowPage[R]:
    """Reads rows of the list at `path`, whose pages are of type `model`."""
    rows, cursor, scanned = list[R](), asked.cursor, 0
    for _ in range(PAGES):
        params = {"filter": asked.filter or None, "limit": asked.limit - len(rows), "cursor": cursor}
        page = await client.get(path, model, params)
        rows, cursor, scanned = rows + rows_of(page), page.next, scanned + page.scanned
        if cursor is None or len(rows) >= asked.limit:
            break
    return RowPage(rows, cursor, scanned)
