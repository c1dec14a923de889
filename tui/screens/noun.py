"""The screen of a noun of `console.views.registry`: its table, and beside it what is known of the chosen row."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel
from rich.text import Text

from penstock.console.views.noun import NounRows, NounView
from penstock.console.views.registry import NOUNS, noun_view
from penstock.console.views.table import joined
from penstock.tui.view import Pane, ScreenView, TableModel, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

R = TypeVar("R", bound=BaseModel)
E = TypeVar("E")


class NounScreen(ScreenView[NounRows[R], E], Generic[R, E]):
    """Shows a noun as its view says. Subclasses add what only a screen has: actions, and panes that ask for more."""

    noun: ClassVar[NounView[Any, Any]]

    def __init_subclass__(cls) -> None:
        noun = cls.noun
        cls.name, cls.concerns, cls.every_s = noun.name, noun.concerns, noun.every_s
        cls.stacked = noun.whole is not None
        cls.title = vars(cls).get("title", noun.name.capitalize())
        cls.help = vars(cls).get("help", NOUNS[noun.name].help)

    def __init__(self, terms: str = "") -> None:
        self._terms = terms
        self.selection = self.noun.selection(**({"filter": terms} if terms else {}))

    async def load(self, client: Client) -> NounRows[R]:
        return await self.noun.fetch(client, self.selection)

    def head(self, data: NounRows[R], now_ns: int) -> Text:
        if self.noun.whole is not None:
            return Text()
        count = f"the first {len(data.rows):,}" if data.more else f"{len(data.rows):,}"
        return joined(
            f"{self.title}: {count}", *data.above, *data.below, Text(data.part if data.rows else "", style="dim")
        )

    def table(self, data: NounRows[R], now_ns: int) -> TableModel | None:
        if self.noun.whole is not None:
            return None
        rows = {self.noun.key(row): row for row in data.rows}

        def order(value: Callable[[R], Any]) -> Callable[[str], Any]:
            return lambda id: value(rows[id])

        def cells(id: str) -> list[Text | str]:
            return self.noun.cells(rows[id], now_ns)

        orders = {name: order(value) for name, value in self.noun.orders.items()}
        return TableModel([*self.noun.columns], list(rows), cells, data.none, orders)

    def panes(self, data: NounRows[R], id: str | None, closer: E | None, now_ns: int) -> Sequence[Pane]:
        if self.noun.whole is not None:
            return [pane("", self.noun.whole(row, now_ns)) for row in data.rows] or [pane("", Text(data.none))]
        row = self.noun.find(data, id)
        return () if row is None else [pane(title, it) for title, it in self.noun.detail(row, now_ns).items()]

    def command(self, id: str | None) -> str:
        entry = NOUNS[self.name]
        if id is not None and entry.shows:
            return f"penstock {entry.shows} {id}"
        return f"penstock {entry.command}" + (f" {shlex.quote(self._terms)}" if self._terms else "")

    def filtered(self, terms: str) -> ScreenView[Any, Any] | None:
        return type(self)(terms) if "filter" in self.noun.selection.model_fields else None

    @property
    def terms(self) -> str:
        return self._terms


def noun_screen(name: str) -> type[NounScreen[Any, Any]]:
    """The screen of a noun that needs nothing of its own."""
    return type(f"{name.capitalize()}Screen", (NounScreen,), {"noun": noun_view(name)})
