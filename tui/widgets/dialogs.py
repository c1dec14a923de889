"""Dialogs before the screen: the question before a change, and the help with the keys."""

from __future__ import annotations

import getpass
from collections.abc import Sequence

from rich.table import Table as Grid
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from penstock.console.views.table import abbreviate, plain
from penstock.gateway.model.base import ActionRequest
from penstock.tui.keys import TITLES, KeyBinding, name

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
            made.add_row(Text(" ".join(map(name, row.keys))), Text(row.does))
    return made
