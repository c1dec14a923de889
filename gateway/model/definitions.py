"""The definitions that servers of tools give, as versions: lists of tools, prompts and resources, and instructions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.base import Noun

DefinitionKind = Literal["tools", "prompts", "resources", "templates", "instructions"]
"""The kind of a list. Instructions are a list of one text, which has no name."""

OnChange = Literal["warn", "hold", "deny"]
"""What happens when a server's definitions differ from those before."""


class DefinitionVersion(Noun):
    """What a server listed: one wording of one list."""

    version: int
    """Its number among all versions of the server."""
    kind: DefinitionKind
    """What is listed."""
    fingerprint: str
    """SHA-256 of the names and fingerprints in it; hex. The order of a list does not matter."""
    first_seen_ns: int
    """When it was listed first."""
    last_seen_ns: int
    """When it was listed last, to the minute."""
    rollout: str
    """The rollout that saw it first."""
    items: dict[str, str]
    """Fingerprints of the definitions by name (of resources by URI): SHA-256 of their canonical JSON; hex."""


class Approval(Noun):
    """That a version was approved."""

    at_ns: int
    """When."""
    person: str
    """By whom."""
    kind: DefinitionKind
    """Which list it is of."""
    version: int
    """What was approved."""
    before: int | None
    """The version that was served until then."""
    note: str = ""
    """Why, in a sentence."""


class ServerDefinitions(Noun):
    """What a server has said of itself."""

    server: str
    """Its name in penstock.toml."""
    versions: list[DefinitionVersion] = Field(default_factory=list[DefinitionVersion])
    """Oldest first; of very many the oldest are forgotten."""
    pinned: dict[DefinitionKind, int] = Field(default_factory=dict[DefinitionKind, int])
    """The version of each list that is approved: the first, then whichever a person approves. While changes are only
    warned of, it is the newest."""
    newest: dict[DefinitionKind, int] = Field(default_factory=dict[DefinitionKind, int])
    """The version of each list that the server gave last."""
    given: int = 0
    """How many versions there have been."""
    approvals: list[Approval] = Field(default_factory=list[Approval])
    """Oldest first."""

    def version(self, number: int | None) -> DefinitionVersion | None:
        """The version of this number; None if there is none."""
        return next((one for one in self.versions if one.version == number), None)

    def of(self, kind: DefinitionKind) -> list[DefinitionVersion]:
        """The versions of one list, oldest first."""
        return [one for one in self.versions if one.kind == kind]

    def pending(self, kind: DefinitionKind) -> bool:
        """True if the server's newest list differs from the approved one."""
        return self.newest.get(kind) != self.pinned.get(kind)


class ServerView(ServerDefinitions):
    """The same, as a person looks at it."""

    on_change: OnChange | None = None
    """What happens when it changes; None for a server that is not configured any more."""
    texts: dict[str, str] = Field(default_factory=dict[str, str])
    """Definitions by their fingerprints, as canonical JSON. Only where one server is asked for."""


class ServerList(Noun):
    """Servers and what they have said of themselves."""

    servers: list[ServerView]
    """By name."""


class ApproveRequest(ActionRequest):
    """Approves what a server says."""

    version: int | None = Field(default=None, ge=1)
    """Which version; the newest of every list unless given."""
