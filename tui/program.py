"""The interface of the program (`app.PenstockApp`) that the main screen and its keys use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock.gateway.model.answers import FilterField
from penstock.tui.keys import KeyBinding, KeyMap
from penstock.tui.loader import GatewayLink, ViewLoader
from penstock.tui.traffic import DigestHistory
from penstock.tui.view import ScreenView


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
    fields: Sequence[FilterField]
    """The gateway's filter language, for completion."""
    now_ns: Callable[[], int]

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
