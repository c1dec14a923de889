"""Coverage of a prompt's versions: the numbers of calls that had its text, and of those that had nearly the same."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.gateway.model.base import Id, Noun

UnreadReason = Literal["encoding", "utf8", "nan", "depth", "shape", "json"]
"""Why a request's texts cannot be read, so that it passes as it came: an unknown or wrong content encoding; no UTF-8;
nested too deep; JSON that is not of this API; no JSON. Tapes of earlier versions also have `nan`, for `NaN` or
`Infinity`, which are read now."""
MissReason = Literal["miss", "ambiguous", "placeholder", "slots", "unknown"]
"""Why a text passes as it came: it is no registered prompt; it could be two, or one in two ways; it has a placeholder
that cannot be read; the version has other slots; there is no version."""


class TextDifference(Noun):
    """The first difference between the text of a call and the version that it is nearest to."""

    version: Id
    """The version."""
    at: int
    """Where; characters from the beginning of the text."""
    found: str
    """What the text has there, its first words."""
    wanted: str
    """What the version has there."""


class LastMiss(Noun):
    """The latest call whose text was nearly a prompt."""

    rollout: Id
    """Its rollout."""
    at_ns: int
    """When it was counted; ns since the epoch."""
    why: MissReason | UnreadReason
    """Why its text passed as it came."""
    difference: TextDifference | None = None
    """Where the text differs; None where it does not, could not be read, or has a secret."""


class Coverage(Noun):
    """Whom a resource reaches, since the newest text that agents send was registered."""

    since_ns: int
    """When that was, or when the first call was counted; ns since the epoch."""
    matched: int = 0
    """Calls in which its text was recognised."""
    missed: dict[str, int] = Field(default_factory=dict[str, int])
    """Calls with a text that is nearly its own and passed as it came, by why."""
    recent: str = ""
    """The last rollouts by their first call, the oldest first: `+` where it matched, `-` where it missed."""
    before: float = 0.0
    """Weight of the rollouts before these; older ones count less."""
    before_matched: float = 0.0
    """Weight of those of them that matched."""
    last: LastMiss | None = None
    """The latest miss."""
    fell_ns: int | None = None
    """Since when it is lower than it was before; None while it is not."""
    fell: str = ""
    """In words."""
