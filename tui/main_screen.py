"""The screen that shows every view: a line on top, rows, panes, a line to type in, a line of keys.

Keys are looked up in the key map and become calls of methods of `KeyHandler`, or actions of the view; none asks the
gateway itself. A key that can do nothing at the moment shows the reason. `loader` asks the gateway, and tells this
screen when to draw again. The screen then draws at most ten times a second, and at once after a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Static

from penstock.console.views.table import clean
from penstock.gateway.model.answers import FilterField
from penstock.tui.keys import HINTS, VIEW_KEYS, KeyBinding, KeyMap, name
from penstock.tui.loader import GatewayLink, RefreshKind, ViewLoader, ViewState
from penstock.tui.view import (
    DigestHistory,
    Pane,
    ScreenView,
    TableModel,
    arrange_rows,
    find_failed_row,
    next_sort,
    selection_index,
    with_columns,
)
from penstock.tui.widgets import (
    Prompt,
    Rows,
    ScreenBar,
    Sheet,
    complete_command,
    complete_filter,
    format_completions,
    hints,
    range_words,
    stacked,
    tabs,
)

DRAW_S: Final = 0.1
"""Least time between two drawings, except after keys; s."""
MESSAGE_S: Final = 8.0
"""The time for which a message stays; s."""
TALL: Final = 32
"""The fewest lines of a terminal with which rows and panes are shown below each other, whatever the number of rows."""
CHROME, LEAST_PANE = 7, 10
"""The lines around rows and panes, and the fewest of a pane that a short list leaves room for."""
NARROW: Final = 60
"""The fewest columns of a terminal with which the name of the program is shown."""
FLAT: Final = 14
"""The fewest lines of a terminal with which the screens are listed on a line."""
RANGES: Final = ("", "15m", "1h", "24h", "7d")
"""The ranges of time that a key leads through; the first is all."""
DEEPEST: Final = 20
"""The most screens that Escape leads back through."""
FAR_ROWS = 10**9
"""More rows than any table has."""


class Program(Protocol):
    """A connection to a gateway, and the commands that keys call."""

    loader: ViewLoader
    """Asks the gateway for the data of the screen."""
    link: GatewayLink
    """The state of the connection."""
    traffic: DigestHistory
    """The recent digests of the feed."""
    keys: KeyMap
    context: str
    """Name of the gateway that is shown."""
    address: str
    """Its address for agents; empty if it is unknown."""
    fields: Sequence[FilterField]
    """The gateway's filter language, for completion."""
    now_ns: Callable[[], int]

    def may_not_change(self) -> str | None:
        """The reason why nothing can be changed; None when changes are allowed."""
        ...

    def status_notes(self) -> list[str]:
        """Notes for the line on top, such as `read-only`."""
        ...

    def go(self, words: Sequence[str]) -> None:
        """Go to a screen, a context or a theme, or quit."""
        ...

    def commands(self) -> Mapping[str, Sequence[str]]:
        """Completions of `:`: the commands, each with its possible arguments."""
        ...

    def try_filter(self, view: ScreenView[Any, Any]) -> None:
        """Show a filtered view if the gateway accepts its filter."""
        ...

    def change(self, key: KeyBinding) -> None:
        """Ask the person, and carry out the key's action."""
        ...

    def compare(self) -> None:
        """Show the marked rows side by side."""
        ...

    def next_theme(self) -> None:
        """Switch to the next theme by name."""
        ...

    def open_palette(self) -> None:
        """Show the palette of commands."""
        ...

    def save_view(self, name: str) -> None:
        """Keep the shown view under a name."""
        ...

    def delete_view(self) -> None:
        """Delete the chosen saved view."""
        ...

    def recall(self, number: int) -> None:
        """Show the saved view of this number."""
        ...

    def copy(self, text: str) -> None:
        """Copy to the clipboard of the terminal."""
        ...

    def copy_command(self, command: str) -> None:
        """Copy a command of `penstock`, which names the gateway unless it is the default."""
        ...

    def open_outside(self, variable: str) -> None:
        """Show the pane in the program that a variable names."""
        ...

    def show_help(self, title: str, keys: Sequence[KeyBinding]) -> None:
        """List keys until one is pressed."""
        ...

    def action_suspend_process(self) -> None:
        """Return to the shell, until `fg`."""
        ...

    def quit(self) -> None:
        """End the program, and restore the terminal."""
        ...


class MainScreen(Screen[None], inherit_bindings=False):
    """Shows the view on top of the stack."""

    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    MainScreen { layout: vertical; background: $background; color: $foreground; }
    MainScreen > Static { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #top { background: $panel; }
    #keys { background: $panel; color: $text-muted; }
    MainScreen > #head, MainScreen > #keys { height: auto; min-height: 1; max-height: 3; text-wrap: wrap; }
    MainScreen > #head { max-height: 2; }
    #tabs { color: $text-muted; }
    """

    def __init__(self, penstock: Program) -> None:
        super().__init__()
        self.penstock = penstock
        self.stack: list[ViewState] = []
        self.marked: dict[str, list[str]] = {}
        self.before: ViewState | None = None
        self.kept: dict[str, ViewState] = {}
        """The last state of each screen that was at the bottom of the stack: one finds it again as one left it."""
        self.since = ""
        """The range of time of all screens that have one; empty for all."""
        self.table: TableModel | None = None
        self.ids: Sequence[str] = ()
        self.at: int | None = None
        self.panes: Sequence[Pane] = ()
        self._message = ""
        self._likely: Sequence[str] = ()
        self._due = False
        self.rows, self.sheet, self.prompt = Rows(), Sheet(), Prompt()
        self._top, self._head, self._tabs, self._keys = (Static(id=id) for id in ("top", "head", "tabs", "keys"))
        self._screens = ScreenBar()
        self.handler = KeyHandler(self)

    def compose(self) -> ComposeResult:
        yield from (self._top, self._screens, self._head, self.rows, self._tabs, self.sheet, self.prompt, self._keys)

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
        state = ViewState(view)
        if (told := view.arrangement) is not None:
            state.columns, state.sort, state.reverse, self.since = told
        self.go([*kept, state])

    def go(self, stack: list[ViewState]) -> None:
        self.stack, self.at, self.panes = stack, None, ()
        shown = self.shown
        self.kept[stack[0].view.name] = stack[0]
        shown.view.pane, shown.view.traffic, shown.view.address = "", self.penstock.traffic, self.penstock.address
        if shown.view.ranged and shown.view.since != self.since:
            shown.view.since = self.since
            shown.forget()
        self.penstock.loader.show(shown)
        self.draw()

    def limit(self, since: str) -> None:
        """Limit what is shown to a range of time, such as 24h; empty for all."""
        self.since = since
        self.go(self.stack)
        self.say(f"Shown is {range_words(since)}." if self.shown.view.ranged else "This screen has no range of time.")

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
        if self.table is not None and shown.columns:
            try:
                self.table = with_columns(self.table, shown.columns)
            except ValueError as e:  # of a view that another version saved
                shown.columns = ()
                self.say(f"All columns are shown: {e}")
        self.ids = () if self.table is None else arrange_rows(self.table, shown.sort, shown.reverse, shown.search)
        self._arrange(has_table=self.table is not None)
        self._draw_rows(shown)
        self._draw_top(shown, now)
        self._screens.display = self.size.height >= FLAT
        self._screens.show(VIEW_KEYS, self.stack[0].view.name, self.size.width)
        self._draw_head(shown, now)
        self.draw_panes()
        self.draw_keys()

    def _arrange(self, has_table: bool) -> None:
        """Show rows, panes or both, as the room allows."""
        focus = self.shown.focus if has_table else "panes"
        needed = len(self.ids) + CHROME + LEAST_PANE
        split = has_table and not self.shown.zoomed and (not self.ids or self.size.height >= min(TALL, needed))
        # A short list leaves its room to the panes.
        self.rows.styles.height = min(len(self.ids) + 2, self.size.height * 3 // 5) if split else "1fr"
        self.rows.display = has_table and (split or focus == "rows")
        self.sheet.display = self._tabs.display = split or focus == "panes"

    def _draw_rows(self, shown: ViewState) -> None:
        if shown.chosen is None and self.table is not None and self.table.start in self.ids:
            shown.chosen, shown.following = self.table.start, False
        at = selection_index(self.ids, shown.chosen, self.at, shown.following)
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
        width = self.size.width
        badge = (" Penstock ", "bold reverse") if width >= NARROW else ("", "")
        left = Text.assemble(badge, " ", clean(self.penstock.context), "  ", (clean(trail), "bold"))
        states = [self.penstock.link.words(now)]
        if self.since and shown.view.ranged:
            states.append(range_words(self.since))
        if self.penstock.loader.paused:
            states.append("paused: p goes on")
        if self.table is not None and not shown.following:
            states.append("not following: f")
        notes = self.penstock.status_notes()
        # Notes give way to the name of the screen.
        while notes and sum(len(one) + 2 for one in (*states, *notes)) + min(left.cell_len, width // 2) > width:
            notes.pop()
        right = Text("  ".join([*states, *notes]), style="" if self.penstock.link.state == "live" else "bold yellow")
        left.truncate(max(10, width - right.cell_len - 2), overflow="ellipsis", pad=True)
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
        self._head.display = bool(head.plain)
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
            self.sheet.show(None, lambda width, height: empty)
        elif shown.view.stacked:
            self._tabs.display = False
            panes = self.panes
            self.sheet.show(shown.view.name, lambda width, height: stacked(panes, width, height), shown.details)
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
            self._keys.update(Text(format_completions(self._likely) or "Enter does it, Esc does not."))
            return
        if self._message:
            self._keys.update(Text(self._message, style="bold"))
            return
        keys = {key.id: key for key in self.penstock.keys.for_view(self.shown.view.name)}
        own = [key for key in keys.values() if key.group == "change" and self._useful(key.id)]
        self._keys.update(
            hints([*own, *(keys[id] for id in HINTS if id in keys and self._useful(id))], self.size.width)
        )

    def _useful(self, id: str) -> bool:
        """False if a key of the bottom line does nothing on this screen at the moment."""
        shown, table = self.shown, self.table
        action = next((one for one in shown.view.actions if one.id == id), None)
        if action is not None:
            free = shown.data is not None and self.penstock.may_not_change() is None
            return free and action.unavailable(shown.data, shown.chosen) is None
        match id:
            case "open" | "mark" | "compare":
                return bool(self.ids)
            case "filter":
                return table is not None
            case "sort":
                return table is not None and bool(table.order and self.ids)
            case "back":
                return len(self.stack) > 1 or shown.focus == "panes" or bool(shown.search or shown.view.terms)
            case "range":
                return shown.view.ranged
            case _:
                return True

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

    def on_screen_bar_chosen(self, event: ScreenBar.Chosen) -> None:
        self.penstock.go([event.screen])

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


class KeyHandler:
    """Carries out keys for the main screen."""

    def __init__(self, main: MainScreen) -> None:
        self.main = main
        self._does: dict[str, Callable[[], None]] = self._methods()

    def press(self, key: str) -> None:
        """Do what the key map says, or show why nothing happens."""
        view = self.main.shown.view.name
        found = self.main.penstock.keys.find(key, view)
        if found is None:
            other = self.main.penstock.keys.find_anywhere(key)
            where = f" here; on {' and '.join(sorted(other.views or ()))} it is: {other.does}" if other else ""
            self.main.say(f"{name(key)} does nothing{where or ' here'}. ? lists the keys.")
        elif found.group == "change":
            self.main.penstock.change(found)
        elif found.id.startswith("go."):
            self.main.penstock.go([found.id.removeprefix("go.")])
        elif found.id == "recall":
            self.main.penstock.recall(found.keys.index(key) + 1)
        else:
            self._does[found.id]()

    def _methods(self) -> dict[str, Callable[[], None]]:
        app = self.main.penstock
        return {
            "up": lambda: self.move(-1), "down": lambda: self.move(1),
            "page_up": lambda: self._page(-1), "page_down": lambda: self._page(1),
            "first": lambda: self.move(-FAR_ROWS), "last": lambda: self.move(FAR_ROWS),
            "next_error": lambda: self._to_error(1), "previous_error": lambda: self._to_error(-1),
            "open": self.open_row, "back": self._back, "other": self._other, "focus": self._focus,
            "next_pane": lambda: self._pane(1), "previous_pane": lambda: self._pane(-1),
            "follow": self._follow, "pause": self._pause, "refresh": self._refresh,
            "sort": self._sort, "reverse": lambda: self._sort(turn=True), "theme": app.next_theme,
            "filter": self._filter, "command": self._command, "help": self._help,
            "mark": self._mark, "compare": app.compare, "range": self._range, "palette": app.open_palette,
            "search": lambda: self.main.prompt.open("search", "", lambda text: ()), "save": self._save,
            "views": lambda: app.go(["views"]), "delete_view": app.delete_view,
            "copy_command": self._copy_command, "copy_id": self._copy_id,
            "pager": lambda: app.open_outside("PAGER"), "editor": lambda: app.open_outside("EDITOR"),
            "suspend": app.action_suspend_process, "quit": app.quit,
        }  # fmt: skip

    def _page(self, by: int) -> None:
        in_panes = self.main.shown.focus == "panes" or self.main.table is None
        self.move(by * (self.main.sheet.size.height if in_panes else self.main.rows.page))

    def move(self, by: int) -> None:
        """Move the selection, or scroll the pane when it has the focus."""
        if self.main.shown.focus == "panes" or self.main.table is None:
            self._scroll(by)
            return
        if not self.main.ids:
            self.main.say(self.main.table.none or "There are no rows.")
            return
        at = min(max((self.main.at or 0) + by, 0), len(self.main.ids) - 1)
        self.main.shown.following = at == 0 and by < 0
        if at == self.main.at:
            self.main.say("This is the first row." if by < 0 else "This is the last row that is loaded.")
        self.choose(at)

    def _scroll(self, by: int) -> None:
        sheet = self.main.sheet
        if sheet.max_scroll_y == 0:
            self.main.say("All of the pane is in sight.")
        elif sheet.scroll_offset.y == (0 if by < 0 else sheet.max_scroll_y):
            self.main.say("This is the top of the pane." if by < 0 else "This is the end of the pane.")
        sheet.scroll_relative(y=by, animate=False)

    def choose(self, at: int) -> None:
        """Select the row at a place."""
        shown = self.main.shown
        shown.chosen, self.main.at = self.main.ids[at], at
        self.main.rows.choose(at)
        self.main.penstock.loader.reload_details()
        self.main.penstock.loader.set_visible(self.main.rows.in_sight())
        if shown.details_of == shown.chosen:
            self.main.draw_panes()

    def _to_error(self, step: int) -> None:
        if self.main.table is None or self.main.at is None:
            self.main.say("There are no rows here.")
            return
        at = find_failed_row(self.main.table, self.main.ids, self.main.at, step)
        if at is None:
            self.main.say(f"No row {'below' if step > 0 else 'above'} went wrong, as far as rows are loaded.")
        else:
            self.main.shown.following = False
            self.choose(at)

    def open_row(self) -> None:
        shown = self.main.shown
        if shown.data is None or shown.chosen is None:
            self.main.say("There is no row to open.")
        elif (view := shown.view.opens(shown.data, shown.chosen)) is not None:
            self.main.open(view)
        else:
            shown.focus, shown.zoomed = "panes", True
            self.main.draw()

    def _back(self) -> None:
        shown = self.main.shown
        if shown.focus == "panes" and self.main.table is not None:
            shown.focus, shown.zoomed = "rows", False
            self.main.draw()
        elif shown.search:
            shown.search = ""
            self.main.draw()
        elif len(self.main.stack) > 1:
            self.main.before = shown
            self.main.go(self.main.stack[:-1])
        elif shown.view.terms and (view := shown.view.filtered("")) is not None:
            self.main.open(view, over=False)
        else:
            self.main.say("This is the first screen; q quits.")

    def _other(self) -> None:
        if self.main.before is None:
            self.main.say("There was no screen before this one.")
            return
        before, self.main.before = self.main.before, self.main.shown
        self.main.go([*self.main.stack[:-1], before])

    def _focus(self) -> None:
        shown = self.main.shown
        if self.main.table is None:
            self.main.say("This screen has panes only.")
            return
        shown.focus = "panes" if shown.focus == "rows" else "rows"
        shown.zoomed = False
        self.main.draw()

    def _pane(self, step: int) -> None:
        if len(self.main.panes) < 2 or self.main.shown.view.stacked:
            self.main.say("There is one pane." if self.main.panes else "There are no panes for this row.")
            return
        self.main.shown.tab = (self.main.shown.tab + step) % len(self.main.panes)
        if not self.main.sheet.display:
            self.main.shown.focus = "panes"
            self.main.draw()
        else:
            self.main.draw_panes()

    def _follow(self) -> None:
        self.main.shown.following = not self.main.shown.following
        self.main.say("Following what is new." if self.main.shown.following else "Not following.")
        self.main.draw()

    def _pause(self) -> None:
        looking = self.main.penstock.loader
        looking.paused = not looking.paused
        if not looking.paused:
            looking.reload()
        self.main.draw()

    def _refresh(self) -> None:
        self.main.penstock.loader.reload()
        self.main.say("Asking again.")

    def _sort(self, turn: bool = False) -> None:
        shown, table = self.main.shown, self.main.table
        if table is None or not table.order:
            self.main.say("These rows have one order only.")
            return
        shown.sort, shown.reverse = shown.sort if turn else next_sort(table, shown.sort), shown.reverse ^ turn
        self.main.draw()

    def _range(self) -> None:
        at = RANGES.index(self.main.since) if self.main.since in RANGES else 0
        self.main.limit(RANGES[(at + 1) % len(RANGES)])

    def _save(self) -> None:
        self.main.prompt.open("save", "", lambda text: ())

    def _mark(self) -> None:
        shown = self.main.shown
        if shown.chosen is None:
            self.main.say("There is no row to mark.")
            return
        marked = self.main.marked.setdefault(shown.view.name, [])
        (marked.remove if shown.chosen in marked else marked.append)(shown.chosen)
        self.main.draw()
        self.main.say(f"{len(marked)} marked{'; c compares them' if len(marked) > 1 else ''}.")

    def _copy_command(self) -> None:
        self.main.penstock.copy_command(self.main.shown.view.command(self.main.shown.chosen))

    def _copy_id(self) -> None:
        if self.main.shown.chosen is None:
            self.main.say("There is no row whose id could be copied.")
        else:
            self.main.penstock.copy(self.main.shown.chosen)

    def _help(self) -> None:
        view, app = self.main.shown.view, self.main.penstock
        keys = [key for key in app.keys.for_view(view.name) if key.group != "change" or app.may_not_change() is None]
        app.show_help(f"{view.title}: {view.help}", keys)

    # The line to type in ----------------------------------------------------------------------------------------------

    def _filter(self) -> None:
        shown = self.main.shown
        if self.main.table is None and shown.data is not None:
            self.main.say("There are no rows here to filter.")
            return
        gateway = shown.view.filtered("") is not None
        fields = self.main.penstock.fields if gateway else ()
        text = shown.view.terms if gateway else shown.search
        self.main.prompt.open("filter", f"{text} " if text else "", lambda text: complete_filter(text, fields))

    def _command(self) -> None:
        wanted = self.main.penstock.commands()
        self.main.prompt.open("command", "", lambda text: complete_command(text, wanted))

    def submit(self, event: Prompt.Submitted) -> None:
        """Handle a typed line: apply a filter, or carry out a command."""
        shown, app, text = self.main.shown, self.main.penstock, event.text
        if event.purpose == "filter" and (view := shown.view.filtered(text)) is not None:
            app.try_filter(view)
        else:
            self.main.prompt.close()
            if event.purpose == "filter":
                shown.search = text
                self.main.draw()
            elif text and event.purpose == "save":
                app.save_view(text)
            elif text:
                app.go(["search", text] if event.purpose == "search" else text.split())
        self.main.draw_keys()
