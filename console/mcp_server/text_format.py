"""Text for a model: tables as plain lines, long texts in pieces, times, messages. Pure."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, NamedTuple, Protocol, TypeVar

from rich.console import Console, RenderableType

from penstock.console.views.table import ENDLESS, clean, compact
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Page
from penstock.gateway.model.turn import Message, Part


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
    return "\n".join(clean(_part(part)) for part in message.parts)


def _part(part: Part) -> str:
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


# Reads pages of the API's lists: up to the requested number of rows, and the cursor for the rest.
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
