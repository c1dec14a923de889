"""A table with any number of rows, of which only those in sight are drawn.

The widget has the ids of all rows and asks for the cells of those it draws (`view.TableModel`), so a list of 100,000
rows costs as much as one screen of rows. A drawn line is kept until the table changes: moving the selection draws two
lines. The heading stays in place while rows scroll below it.

Textual's `DataTable` has every cell of every row: 100,000 rows would hold the event loop for half a minute.

Columns are as wide as the widest cells seen so far, so that they do not jump while one scrolls; another table begins
anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from penstock.console.views.table import GAP, Column, TableLayout, lay_out
from penstock.tui.view import TableModel
from penstock.tui.widgets import console_of

CHOSEN, MARKED, BOTH, NEITHER = "▶ ", "● ", "▶●", "  "
"""Signs of the gutter for the selected and for marked rows, so that colour is not needed."""
GUTTER: Final = len(NEITHER)
LEAST_BAR: Final = 12
"""The least width of the bar right of the columns; characters."""
AHEAD: Final = 20
"""The rows above and below those in sight that are asked for with them."""
NOTHING: Final = TableModel((), (), lambda id: ())


class Rows(ScrollView, can_focus=False):
    """A table with one selected row."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--heading", "rows--chosen"}
    DEFAULT_CSS = """
    Rows { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    Rows .rows--heading { color: $text-muted; text-style: underline; }
    Rows .rows--chosen { background: $primary 35%; }
    """

    class Clicked(Message):
        """Sent when a row was clicked; `twice` for a double click."""

        def __init__(self, id: str, twice: bool) -> None:
            super().__init__()
            self.id, self.twice = id, twice

    class Scrolled(Message):
        """Sent when other rows have come into sight."""

    def __init__(self) -> None:
        super().__init__()
        self._table, self._marked, self._sorted = NOTHING, frozenset[str](), ""
        self._ids: Sequence[str] = ()
        self._at: int | None = None
        self._widest: list[int] = []
        self._fit: TableLayout | None = None
        self._scrollbar = 0
        """The width of the scrollbar that `_fit` allows for: it covers the end of each line."""
        self._lines: dict[str, Strip] = {}
        self._cells: dict[str, Sequence[Text]] = {}
        self._columns: Sequence[Column] = ()

    # The shown rows ---------------------------------------------------------------------------------------------------

    def show(self, table: TableModel | None, ids: Sequence[str], marked: Collection[str], sorted_by: str) -> None:
        """Show these rows of a table, in this order."""
        table = table or NOTHING
        if table.columns != self._columns:
            self._columns, self._widest, self._fit = table.columns, [0] * len(table.columns), None
        self._table, self._ids, self._marked, self._sorted = table, ids, frozenset(marked), sorted_by
        self._lines.clear()
        self._cells.clear()
        size = Size(self.size.width, len(ids) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
        self.refresh()

    def choose(self, at: int | None, keep: bool = False) -> None:
        """Select the row at a place, and scroll it into sight. `keep`: rows came or went above it, so keep its line on
        the screen.
        """
        before, self._at = self._at, at
        if at is None:
            return
        if keep and before is not None:
            self._scroll(int(self.scroll_y) + at - before)
        top, height = int(self.scroll_y), max(1, self.size.height - 1)
        if at < top:
            self._scroll(at)
        elif at >= top + height:
            self._scroll(at - height + 1)
        for place in {before, at} - {None}:
            if place is not None:
                self._repaint(place)

    def _scroll(self, y: int) -> None:
        self.scroll_to(y=max(0, y), animate=False, immediate=True)

    def _repaint(self, place: int) -> None:
        if 0 <= place < len(self._ids):
            self._lines.pop(self._ids[place], None)
        self.refresh(Region(0, place - int(self.scroll_y) + 1, self.size.width, 1))

    @property
    def page(self) -> int:
        """Number of rows that fit on the screen."""
        return max(1, self.size.height - 1)

    def in_sight(self) -> Sequence[str]:
        """The ids of the rows in sight, and of `AHEAD` rows on both sides."""
        top = int(self.scroll_y)
        return self._ids[max(0, top - AHEAD) : top + self.page + AHEAD]

    # Drawing ----------------------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            return self._heading().adjust_cell_length(width, self.rich_style)
        place = int(self.scroll_y) + y - 1
        if not 0 <= place < len(self._ids):
            return Strip.blank(width, self.rich_style)
        id = self._ids[place]
        line = self._lines.get(id)
        if line is None:
            line = self._line(id, place == self._at).adjust_cell_length(width, self.rich_style)
            self._lines[id] = line
        return line

    def _heading(self) -> Strip:
        self._widen()
        style = self.rich_style + self.get_component_rich_style("rows--heading", partial=True)
        names = [Text(c.name + ("↓" if c.name == self._sorted else "")) for c in self._columns]
        return self._strip(NEITHER, names, style, "")

    def _line(self, id: str, chosen: bool) -> Strip:
        style = self.rich_style
        if chosen:
            style += self.get_component_rich_style("rows--chosen", partial=True)
        marked = id in self._marked
        gutter = (BOTH if marked else CHOSEN) if chosen else MARKED if marked else NEITHER
        return self._strip(gutter, self._cells_of(id), style, id)

    def _cells_of(self, id: str) -> Sequence[Text]:
        found = self._cells.get(id)
        if found is None:
            found = [one if isinstance(one, Text) else Text(one) for one in self._table.cells(id)]
            self._cells[id] = found
        return found

    def _strip(self, gutter: str, cells: Sequence[Text], style: Style, id: str) -> Strip:
        """A line of cells in the widths of their columns, with the bar right of them."""
        parts = [Segment(gutter, style)]
        for place, width in (self._fit.widths if self._fit else {}).items():
            if len(parts) > 1:
                parts.append(Segment(" " * GAP, style))
            parts += self._cell(cells[place], width, self._columns[place].right, style)
        line = Strip(parts)
        room = self.size.width - line.cell_length - 2 * GAP
        if self._table.bar is None or room < LEAST_BAR:
            return line
        bar = self._cell(self._table.bar(id, room), room, False, style)
        return Strip([*parts, Segment(" " * GAP, style), *bar])

    def _cell(self, cell: Text, width: int, right: bool, style: Style) -> Sequence[Segment]:
        """A cell in its width, on one line."""
        text = cell.copy()
        text.plain = text.plain.replace("\n", "␊").replace("\t", "␉")
        text.truncate(width, overflow="ellipsis")
        room = Segment(" " * (width - text.cell_len), style)
        if not text.spans and not isinstance(text.style, Style):
            whole = Segment(text.plain, style + Style.parse(text.style) if text.style else style)
            return (room, whole) if right else (whole, room)
        drawn = [Segment(s.text, style + s.style if s.style else style) for s in text.render(console_of(self))]
        return (room, *drawn) if right else (*drawn, room)

    def _widen(self) -> None:
        """Make columns as wide as the cells in sight need, and never narrower than before."""
        if not self._columns:
            return
        top = int(self.scroll_y)
        seen = [self._cells_of(id) for id in self._ids[top : top + self.page]]
        widest = [max(w, *(row[p].cell_len for row in seen)) if seen else w for p, w in enumerate(self._widest)]
        scrollbar = int(len(self._ids) > self.page)
        if self._fit is None or widest != self._widest or scrollbar != self._scrollbar:
            self._widest, self._scrollbar = widest, scrollbar
            stand_in = [Text("x" * wide) for wide in widest]
            kept = scrollbar if self._table.bar is None else self.size.width // 3
            self._fit = lay_out([*self._columns], [stand_in], max(20, self.size.width - GUTTER - kept))
            self._lines.clear()

    @property
    def left_out(self) -> Sequence[str]:
        """Names of the columns for which there is no room."""
        return [self._columns[place].name for place in self._fit.left_out] if self._fit else ()

    # The mouse and the window -----------------------------------------------------------------------------------------

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Report that other rows are in sight, which may have to be asked for."""
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self.post_message(self.Scrolled())

    def on_resize(self, event: events.Resize) -> None:
        self._fit = None
        self._lines.clear()
        self.post_message(self.Scrolled())

    def on_click(self, event: events.Click) -> None:
        """Report a click on the row below the pointer."""
        place = int(self.scroll_y) + event.y - 1
        if event.y > 0 and 0 <= place < len(self._ids):
            self.post_message(self.Clicked(self._ids[place], event.chain > 1))
