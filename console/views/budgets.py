"""Budgets for a terminal. Pure."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import duration, plain
from penstock.gateway.model.budget import BudgetPage, BudgetUse

_FULL, _NEAR = 1.0, 0.8
"""Used shares of a budget from which on it is coloured: red, and yellow."""


def budgets(found: BudgetPage, now_ns: int) -> Group:
    """A row for each budget's use, and how many more there are."""
    listing = Listing(
        Column("budget"), Column("of", narrows="fold", least=12), Column("unit", 2), figure("used"),
        figure("reserved", 1), figure("running", 0), figure("unread", 0), figure("limit"), figure("full"),
        Column("frees in"),
    )  # fmt: skip
    for one in found.budgets:
        listing.add_row(
            plain(one.budget), plain(_whose(one)), one.unit, _amount(one, one.used), _amount(one, one.reserved),
            f"{one.running:,}", f"{one.unread:,}", _amount(one, one.limit), _share(one), _frees(one, now_ns),
        )  # fmt: skip
    more = found.total - len(found.budgets)
    return Group(listing, *([Text(f"{more:,} more; --limit shows them.", style="dim")] if more else []))


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
