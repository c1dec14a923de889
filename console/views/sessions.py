"""Sessions that calls on the tape belong to, for readers. Pure.

They are read from the newest calls: those of MCP servers with a session, those to a provider's hosted agents
(`/v1/sessions/ID/...`), and model calls of coding agents that name a session in a header. The tape keeps a hash of an
MCP session's id, because the id gives access.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

from pydantic import Field
from rich.text import Text

from penstock.console.views.noun import LimitedSelection, NounRows, NounView
from penstock.console.views.rollouts import pluralized
from penstock.console.views.table import Column, ago, figure, plain
from penstock.gateway.model.base import CALLS, Noun
from penstock.gateway.model.facts import HOSTED_SESSION
from penstock.gateway.model.span import Span, SpanStatus

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

SessionKind = Literal["mcp", "hosted", "agent"]
TERMS: Final = (
    "dialect:mcp,opaque,managed_*,agent_*",
    "kind:llm origin:implicit rollout:claude-*,session-*,thread-*",
)
"""The filters that find calls with a session: of servers and hosted agents, and of coding agents."""
HOSTED: Final = re.compile(r"(?:/v\d\w*)*(?:/agents)?/sessions/([^/?]+)")
"""The path of a call to a session of a provider's agent, and the session's id in it."""
SERVER: Final = re.compile(r"/mcp/([^/?]+)")
"""The path of a call to a server of tools, and the server's name in it."""
ENDED: Final = "end session"
"""The name of the call that ends an MCP session."""


class Session(Noun):
    """A session, as far as the calls that were looked at tell."""

    id: str
    """The hash of an MCP session's id, the id of a hosted session, or the rollout of a coding agent's session."""
    kind: SessionKind
    """Its party: an MCP server, an agent that a provider hosts, or a coding agent."""
    of: str
    """The server, the upstream, or the name of the agent."""
    rollouts: list[str]
    """The rollouts whose calls belong to it, newest first."""
    first_seen_ns: int
    """Start of the oldest call that was looked at."""
    last_seen_ns: int
    """Start of the newest call."""
    calls: int = 0
    errors: int = 0
    """Calls that failed or broke off."""
    ended: bool = False
    """True if its newest call has ended it; other sessions may be open or forgotten."""


class SessionSelection(LimitedSelection):
    """The options of the list of sessions."""

    filter: str = ""
    """Terms about their calls, such as server:files rollout:r1 since:1h."""
    calls: Annotated[int, Field(ge=1, le=100_000)] = 2000
    """How many of the newest calls of each kind to look at."""


class _SessionName(NamedTuple):
    kind: SessionKind
    of: str
    id: str


async def _fetch(client: Client, selection: SessionSelection) -> NounRows[Session]:
    spans, partial = dict[tuple[str, str, int], Span](), False
    for terms in TERMS:
        found = [one async for one in client.recent_spans(f"{terms} {selection.filter}".strip(), selection.calls)]
        spans |= {(one.rollout, one.attempt, one.sequence): one for one in found}
        partial = partial or len(found) == selection.calls
    rows = sessions(spans.values())
    none = "No call that matches has a session." if selection.filter else "No call on the tape has a session yet."
    over = (
        f"Looked at the newest {pluralized(selection.calls, 'call')} of each kind; a filter or --calls looks at others."
    )
    none, part = (f"{none} {over}", over) if partial else (none, "")
    return NounRows(rows[: selection.limit], none, more=len(rows) > selection.limit, part=part)


def sessions(spans: Iterable[Span]) -> list[Session]:
    """The sessions of calls, the one with the newest call first."""
    found = dict[_SessionName, Session]()
    for span in sorted(spans, key=lambda one: -one.start_ns):
        name = _name(span)
        if name is None:
            continue
        session = found.setdefault(
            name, Session(id=name.id, kind=name.kind, of=name.of, rollouts=[], first_seen_ns=0, last_seen_ns=0)
        )
        session.of = session.of or span.upstream or ""
        session.last_seen_ns, session.first_seen_ns = session.last_seen_ns or span.start_ns, span.start_ns
        session.calls += 1
        session.errors += span.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED)
        # The newest call comes first. A server may refuse to end a session.
        session.ended |= (
            span.name == ENDED and name.kind == "mcp" and span.status == SpanStatus.OK and session.calls == 1
        )
        if span.rollout not in session.rollouts:
            session.rollouts.append(span.rollout)
    return list(found.values())


def _name(span: Span) -> _SessionName | None:
    """The session of a call; None for a call without one, and for what is no call."""
    if span.kind not in CALLS:
        return None
    id = (span.attributes or {}).get("mcp.session.id")
    if id is not None:
        # A call that is open, or was not passed on, has no upstream yet.
        server = SERVER.match(span.path)
        return _SessionName("mcp", span.upstream or (server[1] if server else ""), str(id))
    if (told := (span.attributes or {}).get(HOSTED_SESSION)) is not None:
        return _SessionName("hosted", "", str(told).partition("/")[2])
    if (path := HOSTED.match(span.path)) is not None:
        return _SessionName("hosted", "", path[1])
    return _SessionName("agent", span.agent or _agent(span.rollout), span.rollout) if span.kind == "llm" else None


def _agent(rollout: str) -> str:
    """The coding agent whose sessions give rollouts such a name; empty where several do."""
    return "Claude Code" if rollout.startswith("claude-") else ""


SESSIONS = NounView[SessionSelection, Session](
    "sessions",
    Session,
    _fetch,
    selection=SessionSelection,
    key=lambda one: f"{one.id}/{one.of}" if one.of else one.id,
    columns={
        Column("session", narrows="cut", least=16): lambda one, _: plain(one.id),
        Column("kind", 4): lambda one, _: one.kind,
        Column("of", narrows="fold", least=8): lambda one, _: plain(one.of),
        Column("rollout", narrows="fold", least=12): lambda one, _: plain(
            " ".join(it for it in one.rollouts if it != one.id)
        ),
        figure("first call", 1): lambda one, now_ns: ago(one.first_seen_ns, now_ns),
        figure("last call"): lambda one, now_ns: ago(one.last_seen_ns, now_ns),
        figure("calls"): lambda one, _: f"{one.calls:,}",
        figure("errors"): lambda one, _: Text(f"{one.errors:,}", style="red" if one.errors else ""),
        Column("state", 3, optional=True): lambda one, _: "ended" if one.ended else "",
    },
    orders={
        "calls": lambda one: one.calls,
        "errors": lambda one: one.errors,
        "first call": lambda one: one.first_seen_ns,
    },
    concerns=frozenset({"rollouts"}),
    every_s=30.0,
    tool=True,
)
