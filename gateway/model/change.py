"""A change of the tape, as followers are told of it."""

from __future__ import annotations

from typing import Literal

from penstock.gateway.model.base import Noun
from penstock.gateway.model.rollout import Attempt, Rollout
from penstock.gateway.model.span import Span


class Change(Noun):
    """One entry of the change feed."""

    cursor: int
    """Its place in the feed; ask for `since=cursor` to go on after it."""
    kind: Literal["rollout", "attempt", "span", "resource", "release", "run"]
    """What changed."""
    name: str | None = None
    """Set when kind is resource, release or run: which one."""
    rollout: Rollout | None = None
    """Set when kind is rollout."""
    attempt: Attempt | None = None
    """Set when kind is attempt."""
    span: Span | None = None
    """Set when kind is span: its newest head."""
