"""The nouns of tools: those that an attempt used, sums over uses, and the definitions that servers list."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.gateway.model.base import ActionRequest, Id, Noun
from penstock.gateway.model.span import SpanStatus


class ToolUse(Noun):
    """A tool that was run: on a server behind the gateway, or inside the agent."""

    span: int | None = None
    """Sequence of its span; None for a tool that ran inside the agent."""
    span_id: str | None = None
    """Id of its span; None for a tool that ran inside the agent."""
    server: str | None = None
    """The server, by its name in penstock.toml; None for a tool that ran inside the agent."""
    tool: str
    """Its name: the server's own, or the one that the model knows."""
    grade: Literal["certain", "likely", "ambiguous", "none"]
    """How well it is known which answer asked for it. `none`: none did, the host began it."""
    reason: str
    """Why, in a sentence."""
    run_in: str | None = None
    """ROLLOUT/ATTEMPT that has its span, where that is another one: the agent's address of the server named none."""
    asked_in: str | None = None
    """ROLLOUT/ATTEMPT of the model call that asked for it, where that is another one."""
    asked_by: int | None = None
    """Sequence of the model call whose answer asked for it, where that is certain or likely."""
    asked_span_id: str | None = None
    """Span id of that call."""
    call_id: str | None = None
    """The tool-call id in that answer."""
    candidates: list[int] = Field(default_factory=list[int])
    """Sequences of all model calls that may have asked for it, where nothing tells them apart."""
    elsewhere: list[str] = Field(default_factory=list[str])
    """The same of other rollouts that were alive then: ROLLOUT/ATTEMPT#SEQUENCE of each call."""
    carried_by: int | None = None
    """Sequence of the model call that carried its result."""
    status: SpanStatus = SpanStatus.OK
    """How its span ended."""
    error: str | None = None
    """Short reason when its span did not end well."""
    rule: str | None = None
    """The rule of a policy that has decided about it; of a tool inside the agent, which nobody can stop, the one that
    would not simply have let it run."""
    start_ns: int
    """When it began; of a tool inside the agent the earliest that it can have; ns since the epoch."""
    end_ns: int | None
    """When it had ended; of a tool inside the agent the latest that it can have; ns since the epoch."""
    measured_ns: int | None = None
    """How long it took by its agent's own clock, where the agent says so; ns."""


class _User(Noun):
    """The rollout and the attempt that used a tool."""

    rollout: Id
    """The rollout that used it."""
    attempt: Id
    """The attempt that used it."""


class ToolRow(ToolUse, _User):
    """A tool that was run, with the attempt that used it: a row of an export of tools."""


class UnansweredCall(Noun):
    """A tool call of an answer whose result the model was never shown, although the agent went on."""

    asked_by: int
    """Sequence of the model call whose answer asked for it."""
    call_id: str | None
    """The tool-call id in that answer."""
    tool: str
    """The tool, as the model knows it."""
    run: int | None
    """Sequence of the run that was for it; None where no server saw one."""


class SubAgent(Noun):
    """An agent that another agent of the same attempt has started, with a conversation of its own."""

    agent: str | None
    """Its kind; None where its address and its headers say nothing."""
    agent_id: str | None
    """Its id, if its coding agent names it; None if it is inferred."""
    parent_agent: str | None
    """The id of the agent that started it; None for the main agent, or if nobody says."""
    calls: list[int]
    """Sequences of its model calls."""
    asked_by: int | None
    """Sequence of the model call whose answer started it; None where nothing tells."""
    call_id: str | None
    """The tool-call id in that answer; None where several tool calls of it fit."""
    inferred: bool
    """True if it is inferred from times and texts, and not named by its coding agent."""


class ToolList(Noun):
    """The tools that an attempt used."""

    tools: list[ToolUse]
    """By start."""
    unanswered: list[UnansweredCall] = Field(default_factory=list[UnansweredCall])
    """Tool calls whose results the model was never shown."""
    agents: list[SubAgent] = Field(default_factory=list[SubAgent])
    """The sub-agents among those that made the calls, by start."""
    skipped: int
    """Calls that were not looked at, because there are too many."""
    cut: bool = False
    """True when so many rollouts were alive that not all were looked at for runs whose address named no rollout."""


class ToolStats(Noun):
    """Sums over the runs of one tool of a server behind the gateway."""

    server: str
    """The server, by its name in penstock.toml."""
    tool: str
    """The tool, by the server's own name."""
    calls: int = 0
    """How often it was run."""
    errors: int = 0
    """Runs that the server refused, whose result says that they failed, or that broke off."""
    cancelled: int = 0
    """Runs whose agent went away, or that it cancelled."""
    median_ns: int | None = None
    """Half of its finished runs took no longer; ns."""
    p95_ns: int | None = None
    """95 of 100 of its finished runs took no longer; ns."""
    rollouts: int = 0
    """Rollouts that ran it and of which it is known how they went."""
    failed: int = 0
    """Those of them that failed: they ended as failed, or their reward is 0 or less."""
    share_of_failed: float | None = None
    """The share of all failed rollouts that ran it; None when none has failed."""
    share_of_others: float | None = None
    """The share of all rollouts that ran it which did not fail; None when there are none."""


# The definitions that servers of tools give, as versions: lists of tools, prompts and resources, and instructions.

DefinitionKind = Literal["tools", "prompts", "resources", "templates", "instructions"]
"""The kind of a list. Instructions are a list of one text, which has no name."""

OnChange = Literal["warn", "hold", "deny"]
"""What happens when a server's definitions differ from those before."""


class DefinitionVersion(Noun):
    """One wording of one of a server's lists."""

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
    """The definitions that a server has listed, and the approvals of them."""

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
