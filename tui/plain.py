"""A screen as text, once: for pipes, agents and screen readers. The same rows and panes as in the terminal, no boxes.

Titles are lines of their own that begin with `==`. A row of a table is one line. All panes are printed below each
other, among them those of one row: the first, unless another is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from penstock.console.views.table import Column, Listing, plain
from penstock.gateway.client.connection import ClientError
from penstock.tui.view import Pane, ScreenView, TableModel

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

MOST_ROWS = 100
"""The most rows of a table."""
BAR = 30
"""Width of the bar right of the columns; characters."""


async def render_plain(
    view: ScreenView[Any, Any], client: Client, now_ns: int, width: int, id: str | None = None
) -> list[RenderableType]:
    """The pieces of a screen, with the panes of the row `id` or of its first row. Raises `ClientError`."""
    data = await view.load(client)
    table = view.table(data, now_ns)
    if table is not None:
        await view.fill(client, data, table.ids[:MOST_ROWS])
        # `fill` may have changed the rows.
        table = view.table(data, now_ns) or table
    found: list[RenderableType] = [title(view), *_some(view.head(data, now_ns))]
    if table is not None:
        found += rows(table)
        if id is not None and id not in table.ids:
            raise ClientError(f"{view.name} has no row {id!r}", 404)
        id = id or table.start or next(iter(table.ids), None)
    closer = None if id is None else await view.load_details(client, data, id)
    for one in view.panes(data, id, closer, now_ns):
        head = [Text(), _titled(one, None if table is None else id)] if one.title else []
        found += [*head, one.draw(width)]
    return found


def title(view: ScreenView[Any, Any]) -> Text:
    """The first line: the name of the screen, and the command that prints the same."""
    return plain(f"== {' '.join(filter(None, (view.title, view.place())))}  ({view.command(None)})", "bold")


def _titled(one: Pane, id: str | None) -> Text:
    return plain(f"== {one.title}" + (f": {id}" if id else ""), "bold")


def _some(head: Text) -> list[Text]:
    return [head] if head.plain else []


def rows(table: TableModel) -> Iterator[RenderableType]:
    """The rows in the format of `penstock ...`."""
    bar = table.bar
    made = Listing(*table.columns) if bar is None else Listing(*table.columns, Column(bar("", BAR).plain))
    for id in table.ids[:MOST_ROWS]:
        made.add_row(*table.cells(id), *([] if bar is None else [bar(id, BAR)]))
    if made.rows:
        yield made
    elif table.none:
        yield Text(table.none)
    if len(table.ids) > MOST_ROWS:
        yield Text(f"{len(table.ids) - MOST_ROWS:,} more rows are not shown.")
