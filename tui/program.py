"""What the screen and its keys need of the program that they are part of. `app.PenstockApp` is it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.gateway.model.answers import FilterField
from penstock.tui.keys import Key, KeyMap
from penstock.tui.link import Link
from penstock.tui.looking import Looking
from penstock.tui.traffic import Traffic
from penstock.tui.view import View


class Program(Protocol):
    """One connection to a gateway, and what can be done with it."""

    looking: Looking
    """Asks for what the screen shows."""
    link: Link
    """How the connection is."""
    traffic: Traffic
    """What the feed told lately."""
    keys: KeyMap
    context: str
    """Name of the gateway that is shown."""
    fields: Sequence[FilterField]
    """The gateway's filter language, for completion."""
    now_ns: Callable[[], int]

    def limits(self) -> list[str]:
        """What the line on top says of what may be done."""
        ...

    def go(self, words: Sequence[str]) -> None:
        """To a screen, a context or a theme; or out."""
        ...

    def commands(self) -> Mapping[str, Sequence[str]]:
        """What may be typed after `:`, and behind it."""
        ...

    def try_filter(self, view: View[Any, Any]) -> None:
        """Shows a filtered view if the gateway takes its filter."""
        ...

    def change(self, key: Key) -> None:
        """Asks the person, and does what a key changes."""
        ...

    def compare(self) -> None:
        """Shows what is marked side by side."""
        ...

    def next_theme(self) -> None:
        """The next one by name."""
        ...

    def copy(self, text: str) -> None:
        """To the clipboard of the terminal."""
        ...

    def copy_command(self, command: str) -> None:
        """The same for a command of `penstock`, which then names the gateway if it has to."""
        ...

    def open_outside(self, variable: str) -> None:
        """Shows the pane in the program that a variable names."""
        ...

    def show_help(self, title: str, keys: Sequence[Key]) -> None:
        """Lists keys until one is pressed."""
        ...

    def action_suspend_process(self) -> None:
        """To the shell, until `fg`."""
        ...

    def quit(self) -> None:
        """Ends it."""
        ...
