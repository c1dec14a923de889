"""The use of budgets for readers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from penstock.console.views.noun import POSITIONAL, LimitedSelection, NounError, NounRows, NounView
from penstock.console.views.table import Column, figure
from penstock.console.views.text import duration, plain
from penstock.gateway.model.budget import BudgetPage, BudgetUse

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

_FULL, _NEAR = 1.0, 0.8
"""Used shares of a budget from which on it is coloured: red, and yellow."""


class BudgetSelection(LimitedSelection):
    """The options of the list of budgets."""

    name: Annotated[str | None, POSITIONAL] = None
    """Only of this budget."""


async def _fetch(client: Client, selection: BudgetSelection) -> NounRows[BudgetUse]:
    found = await client.budgets(selection.name, selection.limit)
    none = empty_reason(found, selection.name)
    if selection.name is not None and selection.name not in found.configured:
        raise NounError(none)
    more = found.total - len(found.budgets)
    below = [Text(f"{more:,} more; --limit shows them.", style="dim")] if more else []
    return NounRows(found.budgets, none, below=below)


def empty_reason(found: BudgetPage, name: str | None) -> str:
    """The reason why there is no row. `name`: name of the only budget that was requested."""
    configured = ", ".join(found.configured)
    if not configured:
        return "penstock.toml has no [[budget]]."
    if name is not None and name not in found.configured:
        return f"there is no budget {name!r}; penstock.toml has {configured}"
    return f"No call was counted yet of {name or configured}."


def _whose(one: BudgetUse) -> str:
    return "all calls" if one.per == "all" else f"{one.per} {one.of}"


def _amount(one: BudgetUse, amount: float) -> str:
    return f"{amount:,.4f}".rstrip("0").rstrip(".") if one.unit == "usd" else f"{amount:,.0f}"


def _share(one: BudgetUse) -> Text:
    style = "red" if one.share >= _FULL else "yellow" if one.share >= _NEAR else ""
    return Text(f"{one.share:.0%}", style=style)


def _frees(one: BudgetUse, now_ns: int) -> str:
    if one.frees_ns is None:
        return "never"
    seconds = (one.frees_ns - now_ns) // 10**9
    return duration(seconds * 10**9) if seconds > 0 else "now"


BUDGETS = NounView[BudgetSelection, BudgetUse](
    "budgets",
    BudgetUse,
    _fetch,
    selection=BudgetSelection,
    key=lambda one: f"{one.budget} {_whose(one)}",
    columns={
        Column("budget"): lambda one, _: plain(one.budget),
        Column("of", narrows="fold", least=12): lambda one, _: plain(_whose(one)),
        Column("unit", 2): lambda one, _: one.unit,
        figure("used"): lambda one, _: _amount(one, one.used),
        figure("reserved", 1): lambda one, _: _amount(one, one.reserved),
        figure("running", 0): lambda one, _: f"{one.running:,}",
        figure("unread", 0): lambda one, _: f"{one.unread:,}",
        figure("limit"): lambda one, _: _amount(one, one.limit),
        figure("full"): lambda one, _: _share(one),
        Column("frees in"): _frees,
    },
    concerns=frozenset({"rollouts"}),
    tool=True,
)
