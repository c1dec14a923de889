"""Who asks, and who changed what: the audit log of a gateway.

A request that changes something may say who wants it and why. Both are what the client says of itself: whoever has the
admin key can give any name.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.gateway.model.resource import Person

Role = Literal["admin", "read"]
"""What a key may do: everything, or only read."""
NOBODY: Final = "api"
"""Stands for who has not said a name."""


class Said(Noun):
    """Who wants a change, and why."""

    who: Person = ""
    """Who; `gateway` is what decides by the rules."""
    why: str = Field(default="", max_length=4000)
    """Why, in a sentence."""


UNSAID: Final = Said()
"""Neither who nor why."""


class Caller(Noun):
    """Whom the gateway takes a client for."""

    role: Role
    """What its key may do. Without keys everybody is `admin`."""
    version: str
    """Version of the gateway."""
    started_ns: int
    """When the gateway started; ns since the epoch."""


class AuditEntry(Noun):
    """One change that was asked for."""

    number: int
    """From 1, ascending."""
    at_ns: int
    """When; ns since the epoch."""
    who: str
    """Who, as the request said; `api` where it did not say."""
    action: str
    """What was done: `cancel_rollout`, `requeue_rollout`, `open_queue`, `pause_queue`, `drain_queue`, `pause_upstream`,
    `open_upstream`, `approve_definitions`, `approve_call`, `refuse_call`; of a release `start_release`,
    `approve_release`, `promote_release`, `rollback_release`, `hold_release`, `resume_release`, `abort_release`."""
    target: str
    """What it was done to: a rollout, an upstream, a release, a server with what was approved (`github tools 3`), or a
    tool call (`r1/a1 github.search`). Empty for the queue."""
    why: str
    """Why, as the request said."""
