"""Answers to SQL, and the views that it may read, for a terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Group
from rich.text import Text

from penstock.console.views.table import Column, Listing, clean, figure, plain
from penstock.gateway.model.state import SqlAnswer, SqlViews

_FIGURES = ("bigint", "integer", "double", "hugeint", "decimal", "float", "ubigint")


def answer(found: SqlAnswer) -> Group:
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


def views(found: SqlViews) -> Group:
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
