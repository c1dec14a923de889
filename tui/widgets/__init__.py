"""The widgets of the terminal, for any view."""

from __future__ import annotations

from rich.console import Console
from textual.widget import Widget


def console_of(widget: Widget) -> Console:
    """Rich's console of the app to which a widget belongs."""
    # Textual does not annotate the type of the app.
    return widget.app.console  # pyright: ignore[reportUnknownMemberType]
