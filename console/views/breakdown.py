"""Figures over the tape for a terminal: calls by a common property, what was not read, and answers to SQL. Pure."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from penstock.console.views.noun import NounRows, NounSelection, NounView
from penstock.console.views.rollouts import cost, sums, unpriced
from penstock.console.views.table import Column, Listing, clean, duration, figure, moment, plain
from penstock.gateway.model.answers import Breakdown, UnreadRow
from penstock.gateway.model.prices import staleness_warning
from penstock.gateway.model.state import SqlAnswer, SqlViews

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


def breakdown(found: Breakdown) -> Group:
    """A row for each value of the property, and the spans that the sums are over."""
    listing = Listing(
        Column(found.by, narrows="cut", least=12), figure("calls"), figure("errors", 6), figure("cancelled", 1),
        figure("tokens", 7), figure("cost", 8), figure("tools asked for", 2), figure("median", 4), figure("p95", 5),
        figure("rollouts", 3), figure("reward"),
    )  # fmt: skip
    for row in found.rows:
        value = plain(row.value) if row.value else Text("(none)", "dim")
        listing.add_row(
            value, f"{row.calls:,}", f"{row.errors:,}", f"{row.cancelled:,}", sums(row), cost(row),
            f"{row.tool_calls:,}", duration(row.median_ns), duration(row.p95_ns), f"{row.rollouts:,}",
            "" if row.reward is None else f"{row.reward:.3f}",
        )  # fmt: skip
    over = "the whole tape" if found.complete else f"the newest {found.looked_at:,} spans"
    said = [Text(f"{found.more:,} more values; a filter leaves out some.")] if found.more else []
    said += unpriced(found.rows)
    if reported := sum(row.reported for row in found.rows):
        said.append(Text(f"By the provider's own word, and not by the list: the cost of {reported:,} calls."))
    if aged := staleness_warning(found.prices_as_of, time.time_ns()):
        said.append(Text(f"Warning: {aged}.", style="yellow"))
    head = f"Sums over {over}; reward is the mean of rollouts that have one."
    return Group(Text(head), listing, *said)


class UnreadSelection(NounSelection):
    """The options of the list of what was not read."""

    filter: str = ""
    """Terms such as status:failed model:qwen* latency>2s."""


async def _fetch_unread(client: Client, selection: UnreadSelection) -> NounRows[UnreadRow]:
    found = await client.unread(selection.filter)
    over = "Looked at the newest calls alone; a filter such as since:7d looks at all its own."
    none = "All answers were read as they came, as far as calls were looked at."
    return NounRows(found.rows, none, part="" if found.complete else over)


UNREAD = NounView[UnreadSelection, UnreadRow](
    "unread",
    UnreadRow,
    _fetch_unread,
    selection=UnreadSelection,
    key=lambda one: f"{one.dialect} {one.key}",
    columns={
        Column("dialect", 1): lambda one, _: plain(one.dialect),
        Column("key", narrows="fold", least=16): lambda one, _: plain(one.key),
        Column("what", 2): lambda one, _: one.kind.replace("_", " "),
        figure("calls"): lambda one, _: f"{one.calls:,}",
        Column("first", 3): lambda one, _: moment(one.first_ns)[:16],
        Column("last", 4): lambda one, _: moment(one.last_ns)[:16],
        Column("example", narrows="fold", least=12): lambda one, _: plain(one.example),
    },
)


_FIGURES = ("bigint", "integer", "double", "hugeint", "decimal", "float", "ubigint")


def sql_answer(found: SqlAnswer) -> Group:
    """The rows of an answer as a table."""
    figures = [column.type.startswith(_FIGURES) and not column.type.endswith("]") for column in found.columns]
    listing = Listing(
        *(
            figure(clean(column.name)) if is_figure else Column(clean(column.name), narrows="cut", least=8)
            for column, is_figure in zip(found.columns, figures, strict=True)
        )
    )
    for row in found.rows:
        listing.add_row(*(plain(_cell(value)) for value in row))
    return Group(listing)


def sql_views(found: SqlViews) -> Group:
    """The views, each with its columns."""
    parts: list[Any] = []
    for view in found.views:
        parts += [
            Text(f"{view.name}: {view.help}", style="bold"),
            Listing(Column("column"), Column("type"), Column("what it is", narrows="words")),
        ]
        for column in view.columns:
            parts[-1].add_row(column.name, plain(column.type, "dim"), column.help)
    return Group(*parts)


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else " ".join(value.split())
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
