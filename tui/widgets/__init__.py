"""The pieces of the terminal, for any view."""

from __future__ import annotations

from rich.console import Console
from textual.widget import Widget


def console_of(widget: Widget) -> Console:
    """Rich's console of the app that a widget is in."""
    # Textual does not say which kind of app.
    return widget.app.console  # pyright: ignore[reportUnknownMemberType]
