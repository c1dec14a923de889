"""The line at the bottom in which a person types a filter or a command. It completes while one types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input, Static

Purpose = Literal["filter", "command"]
SIGNS: dict[Purpose, str] = {"filter": "/", "command": ":"}
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
    Prompt Static { width: 2; color: $accent; }
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
