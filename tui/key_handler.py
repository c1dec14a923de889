"""Carries out keys: each id of the key map that changes nothing becomes a call of a method here. None asks the gateway.

A key that can do nothing at the moment shows the reason.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.tui import completion, row_arrangement
from penstock.tui.keys import name
from penstock.tui.main_screen import MainScreen
from penstock.tui.widgets.prompt import Prompt

FAR_ROWS = 10**9
"""More rows than any table has."""


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
            "sort": self._sort, "reverse": self._reverse, "theme": app.next_theme,
            "filter": self._filter, "command": self._command, "help": self._help,
            "mark": self._mark, "compare": app.compare,
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
        at = row_arrangement.find_failed_row(self.main.table, self.main.ids, self.main.at, step)
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

    def _sort(self) -> None:
        if self.main.table is None or not self.main.table.order:
            self.main.say("These rows have one order only.")
            return
        shown = self.main.shown
        shown.sort = row_arrangement.next_sort(self.main.table, shown.sort)
        self.main.draw()

    def _reverse(self) -> None:
        if self.main.table is None or not self.main.table.order:
            self.main.say("These rows have one order only.")
            return
        self.main.shown.reverse = not self.main.shown.reverse
        self.main.draw()

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
        view = self.main.shown.view
        self.main.penstock.show_help(f"{view.title}: {view.help}", self.main.penstock.keys.for_view(view.name))

    # The line to type in ----------------------------------------------------------------------------------------------

    def _filter(self) -> None:
        shown = self.main.shown
        if self.main.table is None and shown.data is not None:
            self.main.say("There are no rows here to filter.")
            return
        gateway = shown.view.filtered("") is not None
        fields = self.main.penstock.fields if gateway else ()
        text = shown.view.terms if gateway else shown.search
        self.main.prompt.open("filter", f"{text} " if text else "", lambda text: completion.filters(text, fields))

    def _command(self) -> None:
        wanted = self.main.penstock.commands()
        self.main.prompt.open("command", "", lambda text: completion.commands(text, wanted))

    def submit(self, event: Prompt.Submitted) -> None:
        """Handle a typed line: apply a filter, or carry out a command."""
        shown = self.main.shown
        if event.purpose == "command":
            self.main.prompt.close()
            if event.text:
                self.main.penstock.go(event.text.split())
        elif (view := shown.view.filtered(event.text)) is not None:
            self.main.penstock.try_filter(view)
        else:
            self.main.prompt.close()
            shown.search = event.text
            self.main.draw()
        self.main.draw_keys()
