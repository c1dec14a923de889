"""Filters and sorts the rows of a table, and places the selection. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from penstock.tui.view import TableModel

FAILED = ("failed", "error", "timeout", "unresponsive", "interrupted", "rolled back", "silent")
"""Words in the text of a row that went wrong."""


def arrange_rows(table: TableModel, sort: str, reverse: bool, search: str) -> Sequence[str]:
    """The ids of the rows that match the search, sorted."""
    ids = table.ids
    if search:
        wanted = [word.casefold() for word in search.split()]
        ids = [id for id in ids if matches(row_text(table, id).casefold(), wanted)]
    value = table.order.get(sort)
    if value is None:
        return list(reversed(ids)) if reverse else ids
    known = [id for id in ids if value(id) is not None]
    rest = [id for id in ids if value(id) is None]
    return [*sorted(known, key=value, reverse=reverse), *rest]


def matches(text: str, wanted: Sequence[str]) -> bool:
    """True if a text has all words, and none of those that begin with `!`."""
    return all((word[1:] not in text) if word.startswith("!") and word != "!" else word in text for word in wanted)


def row_text(table: TableModel, id: str) -> str:
    """The text of a row, for searches."""
    if table.words is not None:
        return table.words(id)
    return " ".join([id, *(cell.plain if isinstance(cell, Text) else cell for cell in table.cells(id))])


def next_sort(table: TableModel, sort: str) -> str:
    """The column after `sort` by which rows can be sorted; empty for the original order."""
    names = ["", *table.order]
    return names[(names.index(sort) + 1) % len(names)] if sort in names else ""


def selection_index(ids: Sequence[str], chosen: str | None, before: int | None, following: bool) -> int | None:
    """The selection's place: that of its row; the first one while it follows; the place before if its row is gone. None
    without rows.
    """
    if not ids:
        return None
    if following or chosen is None:
        return 0
    try:
        return ids.index(chosen)
    except ValueError:
        return min(before or 0, len(ids) - 1)


def find_failed_row(table: TableModel, ids: Sequence[str], at: int, step: int) -> int | None:
    """The place of the next row that went wrong, in steps of `step` from `at`; None when there is none."""
    place = at + step
    while 0 <= place < len(ids):
        text = row_text(table, ids[place]).casefold()
        if any(word in text for word in FAILED):
            return place
        place += step
    return None
