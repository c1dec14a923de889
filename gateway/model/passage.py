"""What a call adds to a conversation, piece by piece: what `text~` looks at and the index keeps."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST: Final = 4 << 20
"""Characters of all passages of a span; what is behind them is left out, wherever they are looked at."""


class Passage(NamedTuple):
    """A text that one party says to another."""

    answer: bool
    """Whether the call was answered with it."""
    role: str
    """system, developer, user, assistant or tool; empty where nobody is known to say it."""
    kind: str
    """A part's type: `text`, `reasoning`, `tool_call`, `tool_call_response`, `refusal`, `unknown` (JSON that this
    version has no name for); `error`, `body` (of a call that is not understood) or `attribute`."""
    name: str | None
    """The tool's, or the attribute's."""
    id: str | None
    """The tool call's."""
    text: str
    """Of a tool call `NAME(ARGUMENTS)`, with the arguments exactly as they were generated."""
