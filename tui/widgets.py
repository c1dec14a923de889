"""The widgets of the terminal, for any view: a table, a long text, a line to type in, and dialogs.

A table has the ids of all rows and asks for the cells of those in sight (`view.TableModel`), so a list of 100,000 rows
costs as much as one screen of rows. A drawn line is kept until the table changes: moving the selection draws two lines.
The heading stays in place while rows scroll below it. Columns are as wide as the widest cells seen so far, so that they
do not jump while one scrolls; another table begins anew. Textual's `DataTable` has every cell of every row: 100,000
rows would hold the event loop for half a minute. Of a long text (a pane, or several below each other) only the lines in
sight are drawn, too.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import ClassVar, Final, Literal

from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.suggester import Suggester
from textual.widget import Widget
from textual.widgets import Input, Static

from penstock.console.views.table import GAP, Column, TableLayout, abbreviate, lay_out, plain
from penstock.gateway.model.answers import FilterField
from penstock.gateway.model.base import ActionRequest
from penstock.tui.keys import TITLES, KeyBinding, key_names, name
from penstock.tui.view import Pane, TableModel

CHOSEN, MARKED, BOTH, NEITHER = "▶ ", "● ", "▶●", "  "
"""Signs of the gutter for the selected and for marked rows, so that colour is not needed."""
GUTTER: Final = len(NEITHER)
LEAST_CELL: Final = 8
"""The least width of a cell that is cut off at the edge; characters."""
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
    Rows .rows--chosen { background: $primary-muted; }
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
        if self._fit is None:
            # After a resize a row may be drawn before the heading.
            self._widen()
        if y == 0:
            return self._heading().adjust_cell_length(width, self.rich_style)
        place = int(self.scroll_y) + y - 1
        if not 0 <= place < len(self._ids):
            return Strip.blank(width, self.rich_style)
        id = self._ids[place]
        line = self._lines.get(id)
        if line is None:
            chosen = place == self._at
            line = self._line(id, chosen).adjust_cell_length(width, self._row_style(chosen))
            self._lines[id] = line
        return line

    def _heading(self) -> Strip:
        self._widen()
        style = self.rich_style + self.get_component_rich_style("rows--heading", partial=True)
        names = [Text(c.name + ("↓" if c.name == self._sorted else "")) for c in self._columns]
        return self._strip(NEITHER, names, style, "")

    def _row_style(self, chosen: bool) -> Style:
        style = self.rich_style
        return style + self.get_component_rich_style("rows--chosen", partial=True) if chosen else style

    def _line(self, id: str, chosen: bool) -> Strip:
        style = self._row_style(chosen)
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
        room = self.size.width - GUTTER
        for place, width in (self._fit.widths if self._fit else {}).items():
            # What does not fit is left out, or cut off if it is a text.
            if room < (width if self._columns[place].right else min(width, LEAST_CELL)):
                break
            if len(parts) > 1:
                parts.append(Segment(" " * GAP, style))
            parts += self._cell(cells[place], min(width, room), self._columns[place].right, style)
            room -= width + GAP
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
        # The heading has an arrow, too.
        widest = [
            max(w, len(c.name) + 1) if c.name == self._sorted else w for w, c in zip(widest, self._columns, strict=True)
        ]
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


MOST_LINES: Final = 20_000
"""The most lines that are kept; a pane notes its own cuts."""
RESTS: Final = 10
"""An unchanged text is not drawn again for this many times the time that its drawing took."""


class Sheet(ScrollView, can_focus=False):
    """Shows the output of a drawing function at the widget's width."""

    DEFAULT_CSS = """
    Sheet { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; padding: 0 1; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self._draw: Callable[[int, int | None], RenderableType] | None = None
        self._name: object = None
        self._strips: list[Strip] = []
        self._about: object = None
        self._rests_until = 0.0

    def show(self, name: object, draw: Callable[[int, int | None], RenderableType], about: object = None) -> None:
        """Show another text; one of the same name keeps its scroll position. A text of the same name and the same
        `about` is not drawn again for a while if its drawing took long, because keys would wait for it.
        """
        if name == self._name and about is self._about and monotonic() < self._rests_until:
            return
        self._about = about
        if name != self._name:
            self._name = name
            self.scroll_to(y=0, animate=False, immediate=True)
        self._draw = draw
        self._again()

    def _again(self) -> None:
        began = monotonic()
        self._lay_out()
        ended = monotonic()
        self._rests_until = ended + RESTS * (ended - began)

    def _lay_out(self) -> None:
        width = max(1, self.scrollable_content_region.width or self.content_size.width)
        lines: list[list[Segment]] = []
        if self._draw is not None:
            options = console_of(self).options.update(width=width, height=None, highlight=False)
            drawn = self._draw(width, max(1, self.size.height))
            lines = console_of(self).render_lines(drawn, options, pad=False)
        self._strips = [Strip(line) for line in lines[:MOST_LINES]]
        self.virtual_size = Size(width, len(self._strips))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        place, width = int(self.scroll_y) + y, self.content_size.width
        if not 0 <= place < len(self._strips):
            return Strip.blank(width, self.rich_style)
        return self._strips[place].apply_style(self.rich_style).adjust_cell_length(width, self.rich_style)

    def on_resize(self, event: events.Resize) -> None:
        self._again()

    def watch_show_vertical_scrollbar(self) -> None:
        """Draw again for the width without the bar: its appearance is not a resize."""
        self.call_after_refresh(self._again)


def console_of(widget: Widget) -> Console:
    """Rich's console of the app to which a widget belongs."""
    # Textual does not annotate the type of the app.
    return widget.app.console  # pyright: ignore[reportUnknownMemberType]


# -- lines of text around the rows and panes ----


HINT_WORDS: Final = {
    "copy_command": "copy", "command": "go to", "help": "keys", "palette": "palette", "range": "time",
    "delete_view": "delete",
}  # fmt: skip
LENGTHS: Final = {"m": "min", "h": "h", "d": "days"}


def hints(keys: Sequence[KeyBinding], width: int) -> Text:
    """The keys that there is room for, each with a word; the last two (help and quit) always. `width`: columns."""
    pieces = [Text.assemble((name(key.keys[0]), "bold"), f" {_word(key)}") for key in keys]
    first, last = pieces[:-2], pieces[-2:]
    room = width - 1 - sum(piece.cell_len + 2 for piece in last)
    kept: list[Text] = []
    for piece in first:
        if sum(one.cell_len + 2 for one in kept) + piece.cell_len + 2 <= room:
            kept.append(piece)
    return Text(" ").append_text(Text("  ").join([*kept, *last]))


def _word(key: KeyBinding) -> str:
    return key.id.partition(".")[2] or HINT_WORDS.get(key.id, key.id)


def tabs(titles: Sequence[str], at: int) -> Text:
    """The titles of the panes; that of the pane in sight is in brackets."""
    line = Text(" ")
    for place, title in enumerate(titles):
        line.append(f"[{title}]" if place == at else f" {title} ", "bold" if place == at else "").append(" ")
    return line


def stacked(panes: Sequence[Pane], width: int, height: int | None) -> RenderableType:
    """Panes below each other. One alone has all the lines there are."""
    if len(panes) == 1 and not panes[0].title:
        return panes[0].draw(width, height)
    pieces: list[RenderableType] = []
    for one in panes:
        title = [Text(one.title, style="bold underline")] if one.title else []
        pieces += [*title, one.draw(width, None), Text()]
    return Group(*pieces)


def range_words(since: str) -> str:
    """A range of time in words."""
    return f"the last {since[:-1]} {LENGTHS.get(since[-1], since[-1])}" if since else "all of the tape"


# -- the line of screens ----


class ScreenBar(Static):
    """The screens that have a key, on one line; a click goes to one. Where they do not all fit, the last are shown by
    their keys alone."""

    DEFAULT_CSS = """
    ScreenBar { height: 1; color: $text-muted; }
    """

    class Chosen(Message):
        """Sent when the name of a screen was clicked."""

        def __init__(self, screen: str) -> None:
            super().__init__()
            self.screen = screen

    def __init__(self) -> None:
        super().__init__(id="screens")
        self._ends: list[tuple[int, str]] = []

    def show(self, keys: Mapping[str, str], shown: str, width: int) -> None:
        """`keys`: the key of each screen; `shown`: the screen one is on; `width`: columns."""
        room = width - 2 - sum(len(key) + 1 for key in keys.values())
        named = set[str]()
        for screen in sorted(keys, key=lambda screen: screen != shown):
            if len(screen) + 1 <= room:
                named.add(screen)
                room -= len(screen) + 1
        line, self._ends = Text(" "), []
        for screen, key in keys.items():
            style = "reverse" if screen == shown else ""
            line.append(key, f"bold {style}").append(f" {screen}" if screen in named else "", style).append(" ")
            self._ends.append((line.cell_len, screen))
        self.update(line)

    def on_click(self, event: events.Click) -> None:
        """Report a click on a screen."""
        screen = next((screen for end, screen in self._ends if event.x < end), None)
        if screen is not None:
            self.post_message(self.Chosen(screen))


# -- the line to type in ----
#
# Filters are completed by the gateway's own list of fields (`GET /api/filters`): a name, then an operator, then a value
# if the values are listed. A command is the name of a screen and its arguments.


Purpose = Literal["filter", "command", "search", "save"]
SIGNS: dict[Purpose, str] = {"filter": "/", "command": ":", "search": "Find text:", "save": "Save as:"}
Complete = Callable[[str], Sequence[str]]
"""Returns the completions of a text: whole texts, the likeliest first."""


class _PromptSuggester(Suggester):
    def __init__(self, complete: Complete) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._complete = complete

    async def get_suggestion(self, value: str) -> str | None:
        return next((text for text in self._complete(value) if text.startswith(value) and text != value), None)


class PromptInput(Input):
    """A line of text in which Tab accepts the suggestion."""

    def on_key(self, event: events.Key) -> None:
        """Take the completion on Tab, else go to the end of the line."""
        if event.key == "tab":
            event.prevent_default().stop()
            self.action_cursor_right() if self.cursor_position == len(self.value) else self.action_end()


class Prompt(Horizontal):
    """A line to type in, with a sign before it; hidden unless it is open."""

    DEFAULT_CSS = """
    Prompt { height: 1; display: none; background: $surface; }
    Prompt.open { display: block; }
    Prompt Static { width: auto; padding: 0 1 0 0; color: $accent; }
    Prompt Input { width: 1fr; border: none; padding: 0; height: 1; background: $surface; }
    """

    class Submitted(Message):
        """Sent when a line was entered."""

        def __init__(self, purpose: Purpose, text: str) -> None:
            super().__init__()
            self.purpose, self.text = purpose, text

    class Cancelled(Message):
        """Sent when the line was left without entering one."""

    class Changed(Message):
        """Sent when the line has changed; `likely` has its completions."""

        def __init__(self, likely: Sequence[str]) -> None:
            super().__init__()
            self.likely = likely

    def __init__(self) -> None:
        super().__init__()
        self._purpose: Purpose = "filter"
        self._complete: Complete = lambda text: ()
        self._sign, self._line = Static("/"), PromptInput(compact=True, select_on_focus=False)

    def compose(self) -> ComposeResult:
        yield self._sign
        yield self._line

    def open(self, purpose: Purpose, text: str, complete: Complete) -> None:
        """Show the line with a text, and focus it."""
        self._purpose, self._complete = purpose, complete
        self._line.suggester = _PromptSuggester(complete)
        self._sign.update(SIGNS[purpose])
        self._line.value = text
        self._line.cursor_position = len(text)
        self.add_class("open")
        self._line.focus()

    def close(self) -> None:
        self.remove_class("open")
        self._line.blur()

    @property
    def is_open(self) -> bool:
        return self.has_class("open")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Send the completions of the line."""
        event.stop()
        if self.is_open:
            self.post_message(self.Changed(self._complete(event.value)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Submitted(self._purpose, event.value.strip()))

    def on_key(self, event: events.Key) -> None:
        """Post `Cancelled` on Escape, instead of the typed line."""
        if event.key == "escape":
            event.stop()
            self.post_message(self.Cancelled())


MOST = 12
"""The most completions."""
_TERM = re.compile(r"(?P<sign>-?)(?P<name>[a-z_.]*)(?P<operator>[:=<>~!]*)(?P<value>.*)", re.DOTALL)


def complete_filter(text: str, fields: Sequence[FilterField]) -> list[str]:
    """Completions of a filter: whole texts, each one word longer."""
    before, last = _split(text)
    match = _TERM.fullmatch(last)
    if match is None:
        return []
    sign, name, operator, value = match["sign"], match["name"], match["operator"], match["value"]
    if not operator:
        found = [f"{sign}{one.name}{one.operators[0]}" for one in fields if one.name.startswith(name)]
        return [before + one for one in found][:MOST]
    field = next((one for one in fields if one.name == name), None)
    if field is None:
        return []
    values = [one for one in field.values if one.startswith(value) and one != value]
    return [f"{before}{sign}{name}{operator}{one}" for one in values][:MOST]


def complete_command(text: str, wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Completions of a command. `wanted`: the possible arguments of each name."""
    before, last = _split(text)
    if not before:
        return [name for name in wanted if name.startswith(last) and name != last][:MOST]
    rest = wanted.get(before.split()[0], ())
    return [before + one for one in rest if one.startswith(last) and one != last][:MOST]


def _split(text: str) -> tuple[str, str]:
    """(the finished words, the last word)."""
    at = text.rfind(" ") + 1
    return text[:at], text[at:]


def format_completions(likely: Sequence[str]) -> str:
    """Completions for the bottom line: their last words."""
    return "  ".join(_split(text)[1] for text in likely)


# -- dialogs: the question before a change, and the help with the keys ----


LONGEST = 600
"""The most characters of a question: the texts of others in it may be long, and the answer has to stay in sight."""
MOST_WHY = 1_000
"""The most characters of a reason, as in the gateway."""


def person() -> str:
    """The name of the person at the keyboard, as in `penstock release`; empty when it is unknown."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


class Confirm(ModalScreen[ActionRequest | None]):
    """Asks for a confirmation and a reason: Enter confirms, Escape cancels."""

    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 72; max-width: 100%; height: auto; border: round $warning; padding: 0 1; }
    Confirm Input { border: none; padding: 0; height: 1; margin: 1 0; background: $boost; }
    Confirm #wrong { color: $error; height: auto; }
    """

    def __init__(self, question: str, reason: bool) -> None:
        super().__init__()
        self._question, self._reason = question, reason

    def compose(self) -> ComposeResult:
        need = "Why? (it is kept; needed)" if self._reason else "Why? (it is kept; may be empty)"
        with Vertical():
            yield Static(plain(abbreviate(self._question, LONGEST)))
            yield Input(placeholder=need, compact=True)
            yield Static(Text("Enter does it, Esc does not.", style="dim"))
            yield Static("", id="wrong")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Confirm, if the reason is valid."""
        event.stop()
        why = event.value.strip()
        if self._reason and not why:
            self.query_one("#wrong", Static).update("Say why, in a few words: it stands in the audit.")
            return
        if len(why) > MOST_WHY:
            self.query_one("#wrong", Static).update(f"{len(why):,} characters are too many; say it in {MOST_WHY:,}.")
            return
        self.dismiss(ActionRequest(who=person(), why=why))

    def on_key(self, event: events.Key) -> None:
        """Dismiss the dialog with None on Escape."""
        if event.key == "escape":
            event.stop()
            self.dismiss(None)


class Help(ModalScreen[None]):
    """The keys of a screen."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 76; max-width: 100%; height: 90%; border: round $primary; padding: 0 1; }
    Help Static { height: auto; }
    """

    def __init__(self, about: str, keys: Sequence[KeyBinding]) -> None:
        super().__init__()
        self._about, self._keys = about, keys

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(key_table(self._about, self._keys))

    def on_key(self, event: events.Key) -> None:
        """Close on any key that does not scroll."""
        if event.key not in ("up", "down", "pageup", "pagedown", "home", "end"):
            event.stop()
            self.dismiss(None)


def key_table(about: str, keys: Sequence[KeyBinding]) -> Grid:
    """A table of keys and their effects, by group."""
    made = Grid.grid(padding=(0, 2))
    made.add_row("", Text(about, style="bold"))
    for group, title in TITLES.items():
        rows = [key for key in keys if key.group == group]
        if rows:
            made.add_row("", "")
            made.add_row("", Text(title, style="bold"))
        for row in rows:
            made.add_row(Text(" ".join(key_names(row))), Text(row.does))
    return made
