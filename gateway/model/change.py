"""A change of the tape, as followers get it: one by one, or in digests."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.gateway.model.rollout import Attempt, Rollout
from penstock.gateway.model.span import Span

TAPE_HEADER: Final = "Penstock-Tape"
"""The header of an answer that names the tape whose cursors it has."""
ChangeKind: TypeAlias = Literal["rollout", "attempt", "span", "resource", "release", "run", "forgotten"]


class Change(Noun):
    """One entry of the change feed."""

    cursor: int
    """Its place in the feed; ask for `since=cursor` to go on after it."""
    kind: ChangeKind
    """What changed."""
    name: str | None = None
    """Set when kind is resource, release or run: which one; when it is forgotten, which rollout was."""
    rollout: Rollout | None = None
    """Set when kind is rollout."""
    attempt: Attempt | None = None
    """Set when kind is attempt."""
    span: Span | None = None
    """Set when kind is span: its newest head."""


class Digest(Noun):
    """What has changed in a piece of the feed: names, and sums over the calls that ended in it."""

    cursor: int
    """The last change in it; ask for `since=cursor` to go on after it."""
    rollouts: list[str] = Field(default_factory=list[str])
    """Rollouts that changed, or an attempt or a span of which did: each once, the newest change last."""
    more: int = 0
    """Rollouts that changed and are not named."""
    resources: list[str] = Field(default_factory=list[str])
    """Resources that changed."""
    releases: list[str] = Field(default_factory=list[str])
    """Releases that changed."""
    runs: list[str] = Field(default_factory=list[str])
    """Training runs that changed."""
    calls: int = 0
    """Model calls that ended."""
    errors: int = 0
    """Those that ended neither ok nor cancelled."""
    cancelled: int = 0
    """Those whose client went away."""
    tool_runs: int = 0
    """Runs of tools that ended."""
    input_tokens: int = 0
    """Prompt tokens of these calls that were counted."""
    output_tokens: int = 0
    """Generated tokens of these calls that were counted."""
