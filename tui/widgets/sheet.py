"""A long text of which only the lines in sight are drawn: a pane, or several below each other."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import ClassVar, Final

from rich.console import RenderableType
from rich.segment import Segment
from textual import events
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from penstock.tui.widgets import console_of

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
        self._draw: Callable[[int], RenderableType] | None = None
        self._name: object = None
        self._strips: list[Strip] = []
        self._about: object = None
        self._rests_until = 0.0

    def show(self, name: object, draw: Callable[[int], RenderableType] | None, about: object = None) -> None:
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
            lines = console_of(self).render_lines(self._draw(width), options, pad=False)
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
