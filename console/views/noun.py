"""A noun for readers: how it is fetched, its columns, and what is shown of one row. Pure.

`penstock NOUN`, its `--json`, its screen in the TUI and, with `tool`, its tool for coding agents are made from one
`NounView`. The views are listed in `console.views.registry`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.table import Column, Listing, compact, joined, moment, plain
from penstock.gateway.model.base import Noun

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

FeedNoun = Literal["rollouts", "resources", "releases", "runs"]
"""The nouns that digests of the change feed name."""
POSITIONAL: Final = "positional"
"""Marks a field of a selection that a command takes as a word, not as an option."""


class NounSelection(Noun):
    """The options of a list: those of its command, the words of its screen, the arguments of its tool. The docstrings
    of fields are their help. A field `filter` takes terms of the filter language."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


Limit = Annotated[int, Field(ge=1)]


WITHOUT_OPTIONS: Final[Any] = NounSelection
"""The selection of a noun that is listed whole."""


class LimitedSelection(NounSelection):
    """A selection of a list that may be long."""

    limit: Limit = 100
    """How many at most."""


S = TypeVar("S", bound=NounSelection)
R = TypeVar("R", bound=BaseModel)


class NounError(Exception):
    """The selection names something that is not there; the message says so."""


@dataclass(frozen=True)
class NounRows(Generic[R]):
    """The rows of a noun, and what is said of all of them."""

    rows: Sequence[R]
    none: str = ""
    """The reason why there is no row; empty if the text around the table says it."""
    more: bool = False
    """True if there are more rows than the selection's limit."""
    above: Sequence[Text] = ()
    """Lines above the table."""
    below: Sequence[Text] = ()
    """Lines below the table."""
    part: str = ""
    """Says which part of the tape was looked at, if not all of it."""


Fetch = Callable[["Client", NounSelection], Awaitable[NounRows[R]]]


async def limited(limit: int, rows: Callable[[int], AsyncIterator[R]], none: str) -> NounRows[R]:
    """Up to `limit` rows. `rows` yields up to so many."""
    found = [row async for row in rows(limit + 1)]
    return NounRows(found[:limit], none, more=len(found) > limit)


def all_rows(ask: Callable[[Client], Awaitable[Sequence[R]]], none: str = "") -> Fetch[R]:
    """The `fetch` of a noun that is listed whole. `none`: why there is no row."""

    async def fetch(client: Client, selection: NounSelection) -> NounRows[R]:
        return NounRows(await ask(client), none)

    return fetch


def only_row(ask: Callable[[Client], Awaitable[R]]) -> Fetch[R]:
    """The `fetch` of a noun that is one thing."""

    async def fetch(client: Client, selection: NounSelection) -> NounRows[R]:
        return NounRows([await ask(client)])

    return fetch


def fields(row: BaseModel, now_ns: int) -> Mapping[str, RenderableType]:
    """Everything that is known of a row, a line for each field."""
    known = row.model_dump(mode="json", exclude_none=True)
    lines = (_line(name, value) for name, value in known.items())
    return {"Fields": Group(*(joined(Text(f"{name:<14}", style="dim"), plain(value)) for name, value in lines))}


def _line(name: str, value: Any) -> tuple[str, str]:
    """A field for a person: a time, or the text of its value."""
    if name.endswith("_ns") and isinstance(value, int):
        return name.removesuffix("_ns"), f"{moment(value)} UTC" if value else "never"
    return name, value if isinstance(value, str) else compact(value)


@dataclass(frozen=True)
class NounView(Generic[S, R]):
    """A noun with its questions to the gateway, its columns and its pictures."""

    name: str
    """Its name in the registry, in the TUI and, behind `list_`, of its tool."""
    row: type[R]
    """The type of its rows, which `--json` prints."""
    fetch: Callable[[Client, S], Awaitable[NounRows[R]]]
    """Asks the gateway for rows. Raises `ClientError`, and `NounError` for a wrong selection."""
    key: Callable[[R], str]
    """The id of a row."""
    columns: Mapping[Column, Callable[[R, int], Text | str]] = field(
        default_factory=dict[Column, "Callable[[R, int], Text | str]"]
    )
    """The cell of a row in each column; the second argument is the time now, in ns."""
    detail: Callable[[R, int], Mapping[str, RenderableType]] = fields
    """Draws what stands beside the table of the chosen row, by title."""
    selection: type[S] = WITHOUT_OPTIONS
    whole: Callable[[R, int], RenderableType] | None = None
    """Draws the only row of a noun that is one thing, and so has no columns."""
    orders: Mapping[str, Callable[[R], Any]] = field(default_factory=dict[str, Callable[[R], Any]])
    """The columns by which a screen sorts, and the value of a row in each."""
    concerns: frozenset[FeedNoun] = frozenset()
    """Nouns of the change feed after whose changes a screen asks again."""
    every_s: float = 10.0
    """Interval at which a screen asks again; s."""
    tool: bool = False
    """True if coding agents have a tool for it."""

    def table(self, rows: Sequence[R], now_ns: int) -> Listing:
        """A line for each row."""
        made = Listing(*self.columns)
        for row in rows:
            made.add_row(*self.cells(row, now_ns))
        return made

    def find(self, found: NounRows[R], id: str | None) -> R | None:
        """The row of this id; None without one."""
        return next((row for row in found.rows if self.key(row) == id), None)

    def cells(self, row: R, now_ns: int) -> list[Text | str]:
        """The cells of one row."""
        return [cell(row, now_ns) for cell in self.columns.values()]

    def picture(self, found: NounRows[R], now_ns: int) -> RenderableType:
        """The table with the lines around it, or the whole of a noun that is one thing."""
        if self.whole is not None:
            return Group(*(self.whole(row, now_ns) for row in found.rows))
        if not (found.above or found.below):
            return self.table(found.rows, now_ns)
        return Group(*found.above, self.table(found.rows, now_ns), *found.below)
