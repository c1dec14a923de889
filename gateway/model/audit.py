"""The audit log of a gateway: who changed what; and the identity of clients.

A request that changes something may say who wants it and why. Both are the client's own claims. Only the name of the
key that it came with is known for sure.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from pydantic import Field, PrivateAttr

from penstock.gateway.model.base import Noun
from penstock.gateway.model.resource import Person

Role = Literal["read", "operate", "release", "admin"]
"""What a key may do at the control API: read; also operate the queue, upstreams and tools, and make agent tokens; also
register versions and decide on releases; everything, calls included. Each may do what those before it may."""
CALL: Final = "call"
"""The role of a key that opens calls, and nothing at the control API."""
ROLES: tuple[Role, ...] = get_args(Role)
NOBODY: Final = "api"
"""The `who` of a client that gives no name."""


class AuthenticatedRequest(Noun):
    """A change that is asked for, and the key that it came with. Only the gateway sets the key: it is no field."""

    _key: str = PrivateAttr(default="")

    @property
    def key(self) -> str:
        """Name of the key; empty where the gateway has none."""
        return self._key

    def set_key(self, key: str) -> None:
        self._key = key


class ActionRequest(AuthenticatedRequest):
    """The author and the reason of a change."""

    who: Person = ""
    """Who; `gateway` is what decides by the rules."""
    why: str = Field(default="", max_length=4000)
    """Why, in a sentence."""


EMPTY_ACTION: Final = ActionRequest()
"""A change without a person or a reason."""


class Caller(Noun):
    """Whom the gateway takes a client for."""

    role: Role
    """What its key may do. Without keys everybody is `admin`."""
    key: str = ""
    """Name of its key; empty where the gateway has none."""
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
    """Who, as the request claimed; `api` where it did not say."""
    key: str = ""
    """Name of the key that it came with; empty where the gateway has none."""
    action: str
    """What was done: `cancel_rollout`, `requeue_rollout`, `open_queue`, `pause_queue`, `drain_queue`, `pause_upstream`,
    `open_upstream`, `rebuild_index`, `approve_definitions`, `approve_call`, `refuse_call`; of a release
    `start_release`, `approve_release`, `promote_release`, `rollback_release`, `hold_release`, `resume_release`,
    `abort_release`."""
    target: str
    """What it was done to: a rollout, an upstream, a release, a server with what was approved (`github tools 3`), or a
    tool call (`r1/a1 github.search`). Empty for the queue."""
    why: str
    """Why, as the request said."""
