"""The screen that shows every view: a line on top, rows, panes, a line to type in, a line of keys.

Keys are looked up in the key map and become calls of methods of `key_handler.KeyHandler`, or actions of the view; none
asks the gateway itself. `loader` asks it, and tells this screen when to draw again. The screen then draws at most ten
times a second, and at once after a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from rich.console import Group, RenderableType
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Static

from penstock.console.views.table import clean
from penstock.tui import completion, row_arrangement
from penstock.tui.keys import HINTS, KeyBinding, name
from penstock.tui.loader import RefreshKind, ViewState
from penstock.tui.program import Program
from penstock.tui.view import Pane, ScreenView, TableModel
from penstock.tui.widgets.prompt import Prompt
from penstock.tui.widgets.rows import Rows
from penstock.tui.widgets.sheet import Sheet

DRAW_S: Final = 0.1
"""Least time between two drawings, except after keys; s."""
MESSAGE_S: Final = 8.0
"""The time for which a message stays; s."""
TALL: Final = 32
"""The fewest lines of a terminal with which rows and panes are shown below each other."""
DEEPEST: Final = 20
"""The most screens that Escape leads back through."""


class InputHandler(Protocol):
    """The interface of `key_handler.KeyHandler`, which carries out keys."""

    def press(self, key: str) -> None:
        """Do what the key map says, or show why nothing happens."""
        ...

    def submit(self, event: Prompt.Submitted) -> None:
        """Handle a line that was typed."""
        ...

    def choose(self, at: int) -> None:
        """Select the row at a place."""
        ...

    def open_row(self) -> None:
        """Open the view of the selected row, if there is one."""
        ...


class MainScreen(Screen[None], inherit_bindings=False):
    """Shows the view on top of the stack."""

    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    MainScreen { layout: vertical; background: $background; color: $foreground; }
    MainScreen > Static { height: 1; }
    #top { background: $panel; }
    #keys { background: $panel; color: $text-muted; }
    #tabs { color: $text-muted; }
    """

    def __init__(self, penstock: Program) -> None:
        super().__init__()
        self.penstock = penstock
        self.stack: list[ViewState] = []
        self.marked: dict[str, list[str]] = {}
        self.before: ViewState | None = None
        self.table: TableModel | None = None
        self.ids: Sequence[str] = ()
        self.at: int | None = None
        self.panes: Sequence[Pane] = ()
        self._message = ""
        self._likely: Sequence[str] = ()
        self._due = False
        self.rows, self.sheet, self.prompt = Rows(), Sheet(), Prompt()
        self._top, self._head, self._tabs, self._keys = (Static(id=id) for id in ("top", "head", "tabs", "keys"))
        self.handler: InputHandler

    def compose(self) -> ComposeResult:
        yield from (self._top, self._head, self.rows, self._tabs, self.sheet, self.prompt, self._keys)

    def on_mount(self) -> None:
        """Draw every second, because ages change."""
        self.set_interval(1.0, self.draw_soon)

    # The shown view ---------------------------------------------------------------------------------------------------

    @property
    def shown(self) -> ViewState:
        """The view on top of the stack."""
        return self.stack[-1]

    def open(self, view: ScreenView[Any, Any], over: bool = True) -> None:
        """Show another view: on top of this one, or (`over` False) in place of the whole stack."""
        if self.stack:
            self.before = self.shown
        kept = self.stack[-DEEPEST:] if over else []
        self.go([*kept, ViewState(view)])

    def go(self, stack: list[ViewState]) -> None:
        self.stack, self.at, self.panes = stack, None, ()
        self.shown.view.pane, self.shown.view.traffic = "", self.penstock.traffic
        self.penstock.loader.show(self.shown)
        self.draw()

    def handle_refresh(self, what: RefreshKind) -> None:
        """Called when new data has come."""
        self.draw_soon()

    def draw_soon(self) -> None:
        """Draw within `DRAW_S`, once for all changes until then."""
        if not self._due and self.stack and self.is_mounted:
            self._due = True
            self.set_timer(DRAW_S, self._draw_now)

    def _draw_now(self) -> None:
        self._due = False
        self.draw()

    def draw(self) -> None:
        """Draw every part of the screen from the data of the shown view."""
        if not self.stack:
            return
        shown, now = self.shown, self.penstock.now_ns()
        self.table = None if shown.data is None else shown.view.table(shown.data, now)
        self.ids = (
            ()
            if self.table is None
            else row_arrangement.arrange_rows(self.table, shown.sort, shown.reverse, shown.search)
        )
        self._arrange(has_table=self.table is not None)
        self._draw_rows(shown)
        self._draw_top(shown, now)
        self._draw_head(shown, now)
        self.draw_panes()
        self.draw_keys()

    def _arrange(self, has_table: bool) -> None:
        """Show rows, panes or both, as the room allows."""
        focus = self.shown.focus if has_table else "panes"
        split = has_table and self.size.height >= TALL and not self.shown.zoomed
        # A short list leaves its room to the panes.
        self.rows.styles.height = min(len(self.ids) + 2, self.size.height * 3 // 5) if split else "1fr"
        self.rows.display = has_table and (split or focus == "rows")
        self.sheet.display = self._tabs.display = split or focus == "panes"

    def _draw_rows(self, shown: ViewState) -> None:
        if shown.chosen is None and self.table is not None and self.table.start in self.ids:
            shown.chosen, shown.following = self.table.start, False
        at = row_arrangement.selection_index(self.ids, shown.chosen, self.at, shown.following)
        chosen = None if at is None else self.ids[at]
        if chosen != shown.chosen:
            shown.chosen = chosen
            self.penstock.loader.reload_details()
        marked = self.marked.get(shown.view.name, ())
        self.rows.show(self.table, self.ids, marked, shown.sort)
        self.rows.choose(at, keep=not shown.following and self.at is not None)
        self.at = at
        self.penstock.loader.set_visible(self.rows.in_sight())

    def _draw_top(self, shown: ViewState, now: int) -> None:
        trail = " › ".join(" ".join(filter(None, (one.view.title, one.view.place()))) for one in self.stack[-3:])
        left = Text.assemble(
            (" Penstock ", "bold reverse"), " ", clean(self.penstock.context), "  ", (clean(trail), "bold")
        )
        states = [self.penstock.link.words(now), *self.penstock.status_notes()]
        if self.penstock.loader.paused:
            states.append("paused: p goes on")
        if self.table is not None and not shown.following:
            states.append("not following: f")
        right = Text("  ".join(states), style="" if self.penstock.link.state == "live" else "bold yellow")
        room = self.size.width - right.cell_len - 2
        left.truncate(max(20, room), overflow="ellipsis", pad=True)
        self._top.update(left.append(" ").append_text(right))

    def _draw_head(self, shown: ViewState, now: int) -> None:
        if shown.error is not None:
            # Before there is data, the error has the whole pane.
            head = Text(clean(shown.error) if shown.data is not None else "", style="bold red")
        elif shown.data is None:
            head = Text("asking ...", style="dim")
        else:
            head = shown.view.head(shown.data, now)
        if shown.search:
            head = Text.assemble(head, f"  searched for {clean(shown.search)}: {len(self.ids):,} rows")
        if shown.sort or shown.reverse:
            head = Text.assemble(head, f"  sorted by {shown.sort or 'time'}{', reversed' if shown.reverse else ''}")
        self._head.update(head)

    def draw_panes(self) -> None:
        """Draw the panes beside the rows."""
        shown = self.shown
        empty = self._nothing(shown)
        closer = shown.details if shown.details_of == shown.chosen else None
        self.panes = () if shown.data is None else shown.view.panes(
            shown.data, shown.chosen, closer, self.penstock.now_ns()
        )  # fmt: skip
        if not self.panes:
            self._tabs.update("")
            self.sheet.show(None, lambda width: empty)
        elif shown.view.stacked:
            self._tabs.display = False
            panes = self.panes
            self.sheet.show(shown.view.name, lambda width: stacked(panes, width), shown.details)
        else:
            shown.tab = min(shown.tab, len(self.panes) - 1)
            one = self.panes[shown.tab]
            self._in_sight(one.title)
            self._tabs.update(tabs([pane.title for pane in self.panes], shown.tab))
            self.sheet.show((shown.view.name, shown.chosen, one.title), one.draw, shown.details)

    def _in_sight(self, title: str) -> None:
        """Tell the view which pane is in sight, and let it ask for that pane's data."""
        if self.shown.view.pane != title:
            self.shown.view.pane = title
            self.penstock.loader.reload_details()

    def _nothing(self, shown: ViewState) -> Text:
        """The text in place of a pane when there is none."""
        if shown.details_error is not None and shown.chosen is not None:
            return Text(clean(shown.details_error), style="red")
        if shown.data is None and shown.error is not None:
            return Text(clean(shown.error), style="red")
        if shown.data is None or (shown.chosen is not None and shown.details_of != shown.chosen):
            return Text("asking ..." if shown.error is None else "", style="dim")
        return Text("" if self.table is None or self.ids else self.table.none)

    def draw_keys(self) -> None:
        """Draw the bottom line: a message, completions of the typed line, or the keys."""
        if self.prompt.is_open and not self._message:
            self._keys.update(Text(completion.format_completions(self._likely)))
            return
        if self._message:
            self._keys.update(Text(self._message, style="bold"))
            return
        keys = {key.id: key for key in self.penstock.keys.for_view(self.shown.view.name)}
        own = [key for key in keys.values() if key.group == "change"]
        self._keys.update(hints([*own, *(keys[id] for id in HINTS if id in keys)], self.size.width))

    def say(self, text: str) -> None:
        """Show a message on the bottom line, for a moment."""
        self._message = clean(" ".join(text.split()))
        said = self._message
        self.draw_keys()
        self.set_timer(MESSAGE_S, lambda: self._forget(said))

    def _forget(self, said: str | None = None) -> None:
        """Show the keys again in place of the message `said`, or of any message when it is None."""
        if self._message and said in (None, self._message):
            self._message = ""
            self.draw_keys()

    def on_key(self, event: events.Key) -> None:
        """Carry out a key, unless a line is being typed."""
        if not self.prompt.is_open and self.stack:
            event.stop()
            self._forget()
            self.handler.press(event.key)

    def on_prompt_changed(self, event: Prompt.Changed) -> None:
        """Show the completions of the line."""
        self._likely = event.likely
        self._forget()
        self.draw_keys()

    def on_prompt_cancelled(self, event: Prompt.Cancelled) -> None:
        """Close the input line, and show the keys in its place."""
        self.prompt.close()
        self.draw_keys()

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        self.handler.submit(event)

    # The mouse --------------------------------------------------------------------------------------------------------

    def on_rows_clicked(self, event: Rows.Clicked) -> None:
        """Select a row; a second click opens it."""
        if event.id not in self.ids:  # it has gone meanwhile
            return
        self.shown.following = False
        self.handler.choose(self.ids.index(event.id))
        if event.twice:
            self.handler.open_row()

    def on_rows_scrolled(self, event: Rows.Scrolled) -> None:
        """Fill the rows that are now in sight."""
        if self.stack:
            self.penstock.loader.set_visible(self.rows.in_sight())

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.draw)

    @property
    def pane(self) -> Pane | None:
        """The pane that is shown; None when there is none."""
        return self.panes[self.shown.tab] if self.panes else None


HINT_WORDS: Final = {"copy_command": "copy", "filter": "filter", "command": "go to", "help": "keys"}


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


def stacked(panes: Sequence[Pane], width: int) -> RenderableType:
    pieces: list[RenderableType] = []
    for one in panes:
        title = [Text(one.title, style="bold underline")] if one.title else []
        pieces += [*title, one.draw(width), Text()]
    return Group(*pieces)
