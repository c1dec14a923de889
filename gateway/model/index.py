"""The state of the gateway's index (`followers.index`)."""

from __future__ import annotations

from typing import Literal

from penstock.gateway.model.base import Noun

IndexStatus = Literal["ready", "reading", "starting", "busy", "small", "off", "missing", "broken"]


class IndexView(Noun):
    """How the index of the tape is, and how far it has read."""

    status: IndexStatus
    """`ready`: filters answer from it. Else they scan the tape: it is still `reading` or `starting`; it is `busy` with
    an earlier question; the tape is too `small` to need one; the configuration has turned it `off`; its extra is
    `missing`; or it is `broken` and made anew in a moment."""
    reason: str
    """The same for a person, with the way out where there is one."""
    cursor: int = 0
    """The last change of the tape that it has."""
    newest: int
    """The last change of the tape."""
    files: int = 0
    """How many files it has."""
    bytes: int = 0
    """The size of its files."""
    forgotten: int = 0
    """Forgotten rollouts that are still in its files; they are in no answer."""
    unsealed: int = 0
    """Spans that are in memory only; they are read from the tape again when the gateway starts."""
