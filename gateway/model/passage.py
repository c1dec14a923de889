"""The texts that a call adds to a conversation: `text~` searches them and the index keeps them."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST: Final = 4 << 20
"""Most characters of all passages of a span; the rest is left out, wherever they are read."""


class Passage(NamedTuple):
    """A text that one party sends to another."""

    answer: bool
    """True if it is part of the call's answer."""
    role: str
    """system, developer, user, assistant or tool; empty where the sender is not known."""
    kind: str
    """A part's type: `text`, `reasoning`, `tool_call`, `tool_call_response`, `refusal`, `unknown` (JSON that this
    version has no name for); or `error`, `body` (of a call in no known format) or `attribute`."""
    name: str | None
    """The name of the tool or the attribute."""
    id: str | None
    """The id of the tool call."""
    text: str
    """The text; that of a tool call is `NAME(ARGUMENTS)`, with the arguments exactly as they were generated."""
