"""An admitted call: its address, its request, and the facts that were read of it so far.

Agents send the same head again and again. What a head decides of a call, whatever its body, is decided once
(`HeadDecision`) and kept with the head (`wire.http.request.KnownHeads`). Nothing in it can change while the
gateway runs: keys, tokens, releases, budgets and the health of upstreams are looked at for each call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, cast, get_args
from urllib.parse import unquote

from penstock.gateway.model.base import ID_PATTERN, Mode, Origin
from penstock.gateway.model.facts import (
    AGENT_ID,
    CALL_CLASS,
    COMPACTED,
    COMPACTION,
    PARENT_AGENT,
    PROMPT_ID,
    TOOL_DURATIONS,
)
from penstock.gateway.model.span import members
from penstock.gateway.traffic.calls.conversations import (
    ConversationFingerprint,
    ConversationMatch,
    ParsedConversation,
    RepeatableRequest,
)
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import RouteChoice
from penstock.gateway.wire.dialects import request_body
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import LONGEST_LABEL, RequestFields, is_readable, loads, obj
from penstock.gateway.wire.http.headers import KnownUpstreamHead
from penstock.gateway.wire.http.redaction import looks_secret
from penstock.gateway.wire.http.request import Headers

# The address of a call: URL, headers or baggage <-> (rollout, attempt, agent). Pure; only this module knows the
# grammar.
#
#     /rollout/{rollout}[/attempt/{attempt}][/agent/{agent}][/prompt/{prompt}]/v1/...
#     [/agl1]/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}/openai/v1/...       Agent Lightning 1.0
#     x-rollout-id, x-attempt-id, x-agent-id
#     baggage: penstock.rollout_id=...,penstock.attempt_id=...,penstock.agent_id=...
#     session headers that coding agents send by themselves
#
# The first one that names a rollout wins; then the session of a hosted agent that the path of a call about it names
# (`HeadDecision.session`). Without any, `gateway.traffic.calls.conversations` follows the
# conversation. Agent Lightning 0.3 writes the first form too.

FIRST_ATTEMPT = "a1"
LIGHTNING_BASE: Final = "/agl1"
"""Path of Agent Lightning 1.0's server API (`api.lightning_server`)."""
SESSION_HEADERS = {
    b"x-claude-code-session-id": "claude",
    b"session-id": "session",
    b"session_id": "session",
    b"x-session-id": "session",
    b"thread-id": "thread",
}
"""Headers that name a session: Claude Code; Codex and opencode; opencode; Codex."""

ADDRESS_HEADERS = frozenset({b"x-rollout-id", b"x-attempt-id", b"x-agent-id", b"baggage", *SESSION_HEADERS})

_ID = re.compile(ID_PATTERN)
_SEGMENTS = ("rollout", "attempt", "agent", "mode", "prompt")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_REMEMBERED_LENGTH = 1024


class AddressError(ValueError):
    """An id that is not valid; names the part, the value and what is allowed."""

    def __init__(
        self, part: str, value: str, allowed: str = f"1 to 128 of A-Z a-z 0-9 . _ - ({ID_PATTERN}), not . or .."
    ) -> None:
        self.part, self.value = part, value
        super().__init__(f"{part} {value[:140]!r} is not valid: use {allowed}")


@dataclass(slots=True, frozen=True)
class CallAddress:
    """The rollout, attempt and agent that a call belongs to."""

    rollout: str
    attempt: str = FIRST_ATTEMPT
    agent: str | None = None
    mode: Mode = "online"
    origin: Origin = "header"
    prompt: str | None = None
    """Name of the registered prompt that the first system text is."""
    ambiguous: bool = False
    """True if the call could belong to another implicit rollout as well (`gateway.traffic.calls.conversations`)."""
    session: bool = False
    """True if a coding agent's own session header names it."""
    retry: bool = False
    """True if the call repeats one that failed, whose implicit rollout it has therefore."""


def check_id(part: str, value: str) -> str:
    """Return the value if it is a valid id; else raise `AddressError`."""
    if value in (".", "..") or not _ID.fullmatch(value):
        raise AddressError(part, value)
    return value


def from_path(path: str) -> tuple[CallAddress | None, str]:
    """(address, path below it); (None, path) if the path names no rollout. Raises `AddressError`."""
    # An attempt repeats the same paths; a path too long to be one of those is not worth the memory.
    return _remembered(path) if len(path) <= _REMEMBERED_LENGTH else _parse(path)


def _parse(path: str) -> tuple[CallAddress | None, str]:
    short = path.removeprefix(LIGHTNING_BASE)
    lightning = short.startswith("/proxy/rollout/")
    if not lightning and not path.startswith("/rollout/"):
        return None, path
    rest = short[6:] if lightning else path
    found: dict[str, str] = {}
    for name in _SEGMENTS:
        value, tail = _segment(rest, name)
        if value is not None:
            found[name], rest = check_id(name, value), tail
    mode = found.get("mode", "online")
    if mode not in get_args(Mode):
        raise AddressError("mode", mode, "train, val, test or online")
    if lightning and rest.startswith("/openai/"):
        rest = rest[7:]
    attempt = found.get("attempt", FIRST_ATTEMPT)
    address = CallAddress(found["rollout"], attempt, found.get("agent"), cast(Mode, mode), prompt=found.get("prompt"))
    return address, rest or "/"


_remembered = lru_cache(maxsize=8192)(_parse)


def _segment(path: str, name: str) -> tuple[str | None, str]:
    head = f"/{name}/"
    if not path.startswith(head):
        return None, path
    value, slash, tail = path[len(head) :].partition("/")
    return value, slash + tail


def from_headers(headers: Mapping[bytes, bytes]) -> CallAddress | None:
    """The address in a request's headers (names in lower case); None if they name no rollout."""
    if not ADDRESS_HEADERS & headers.keys():
        return None
    named = _named(headers)
    if "rollout" in named:
        return CallAddress(
            check_id("x-rollout-id", named["rollout"]),
            check_id("x-attempt-id", named.get("attempt", FIRST_ATTEMPT)),
            _agent(named),
        )
    for header, kind in SESSION_HEADERS.items():
        if session := headers.get(header):
            rollout = session_rollout(kind, session.decode("latin-1"))
            return CallAddress(rollout, agent=_agent(named), origin="implicit", session=True)
    return None


def session_rollout(kind: str, session: str) -> str:
    """The implicit rollout of a session. `kind`: of the header that names it (`SESSION_HEADERS`)."""
    return f"{kind}-{_UNSAFE.sub('-', _unkeyed(session))[:100]}"


def _unkeyed(session: str) -> str:
    """A session as it may be shown; if it looks like a key, its hash."""
    return hashlib.sha256(session.encode()).hexdigest()[:32] if looks_secret(session) else session


def _agent(named: Mapping[str, str]) -> str | None:
    agent = named.get("agent")
    return None if agent is None else check_id("x-agent-id", agent)


def _named(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    found = _baggage(headers.get(b"baggage", b"").decode("latin-1"))
    for name in ("rollout", "attempt", "agent"):
        if (value := headers.get(b"x-%s-id" % name.encode())) is not None:
            found[name] = value.decode("latin-1")
    return found


def _baggage(header: str) -> dict[str, str]:
    """The baggage's members of Penstock."""
    ours = ((name, value) for name, value in members(header) if name.startswith("penstock.") and name.endswith("_id"))
    return {name[9:-3]: unquote(value) for name, value in ours}


def path_of(address: CallAddress) -> str:
    """The path prefix of an agent's base URL; the inverse of `from_path`."""
    agent = "" if address.agent is None else f"/agent/{address.agent}"
    mode = "" if address.mode == "online" else f"/mode/{address.mode}"
    prompt = "" if address.prompt is None else f"/prompt/{address.prompt}"
    return f"/rollout/{address.rollout}/attempt/{address.attempt}{agent}{mode}{prompt}"


# The headers in which coding agents say which of their agents makes a call, and what for. Codex says the same on a
# WebSocket in the body of each request.
#
# Claude Code sends the ids of sub-agents always, the rest if CLAUDE_CODE_GATEWAY_HINT_HEADERS is 1.

_KIND: Final = b"x-claude-code-agent-type"
_CLAUDE_AGENT: Final = b"x-claude-code-agent-id"
_CODEX_KIND: Final = b"x-openai-subagent"
_DURATIONS: Final = b"x-claude-code-prev-tool-durations"
_THREAD: Final = b"thread-id"
_CODEX_PARENT: Final = b"x-codex-parent-thread-id"
TURN_METADATA: Final = b"x-codex-turn-metadata"
"""JSON in which Codex tells of the turn that a request is part of."""
_FACTS: Final = {
    _CLAUDE_AGENT: AGENT_ID,
    b"x-claude-code-parent-agent-id": PARENT_AGENT,
    b"x-claude-code-request-class": CALL_CLASS,
    b"x-claude-code-prompt-id": PROMPT_ID,
    b"x-claude-code-compaction": COMPACTION,
    b"x-claude-code-context-compacted": COMPACTED,
    _CODEX_PARENT: PARENT_AGENT,
}
"""The fact that each header is."""
AGENT_HEADERS: Final = frozenset({*_FACTS, _KIND, _CODEX_KIND, _DURATIONS, TURN_METADATA})
"""Headers that tell of the agent, or what the call is for."""
_MEASURED: Final = re.compile(r"[^=;]+=[0-9]{1,15}")
"""A tool's name, percent-encoded, and the milliseconds that it took."""
_CONTROL: Final = re.compile(r"[^ -~\u00a0-\ud7ff\ue000-\U0010ffff]")
_LONGEST_TOOL: Final = 200
SUBAGENT: Final = "subagent"
"""The name of a sub-agent whose kind the coding agent does not say."""


def agent_kind(headers: Mapping[bytes, bytes]) -> str | None:
    """The kind of sub-agent that headers name, as the name of an agent; None for the main agent."""
    kind = headers.get(_CODEX_KIND) or headers.get(_KIND)
    if kind:
        label = _label(kind)
        return label if label.strip(".") else SUBAGENT
    return SUBAGENT if _CLAUDE_AGENT in headers or _CODEX_PARENT in headers else None


def agent_facts(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The facts in the headers of a coding agent, by their attributes' names."""
    found: dict[str, Any] = {fact: _label(headers[name]) for name, fact in _FACTS.items() if headers.get(name)}
    if _CODEX_KIND in headers and _THREAD in headers:
        found[AGENT_ID] = _label(headers[_THREAD])
    if turn := obj(loads(headers.get(TURN_METADATA, b""))):
        told = {CALL_CLASS: turn.get("request_kind"), PROMPT_ID: turn.get("root_turn_id")}
        told[COMPACTION] = obj(turn.get("compaction")).get("trigger")
        found |= {
            fact: _label(value.encode("latin-1", "replace")) for fact, value in told.items() if isinstance(value, str)
        }
    durations = headers.get(_DURATIONS, b"").decode("latin-1")
    if measured := [_measured(one) for one in durations.split(";") if _MEASURED.fullmatch(one)]:
        found[TOOL_DURATIONS] = measured
    return found


def _label(value: bytes) -> str:
    return _UNSAFE.sub("-", _unkeyed(value.decode("latin-1")))[:100]


def _measured(entry: str) -> str:
    name, _, took = entry.strip().rpartition("=")
    return f"{_CONTROL.sub('-', _unkeyed(unquote(name)))[:_LONGEST_TOOL]}={took}"


# Connections of a sidecar, which ends an agent's TLS, and names once the rollout and the host of the calls that
# follow.
#
#     CONNECT api.anthropic.com:443 HTTP/1.1
#     Proxy-Authorization: Bearer pst_...         the agent token; also x-rollout-id, x-attempt-id, x-agent-id, baggage
#
# After the gateway's `200` the agent's own bytes follow, in plain text. Nothing in them can name another rollout,
# reach the control API or go to another host, so a sidecar need not look into them. They are forwarded unchanged: an
# agent behind a sidecar sends its model the same bytes as without one.

_AUTHORITY: Final = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


@dataclass(slots=True, frozen=True)
class Tunnel:
    """The data that all calls of one connection share."""

    address: CallAddress | None
    """Address of the calls; None if their conversation decides."""
    token: bool
    """True if its agent token was presented."""
    direct_pool: ConnectionPool
    """The host that the agent has called."""
    key: str | None = None
    """Name of the key that was presented."""


def host_of(target: str) -> tuple[str, int] | None:
    """The host and the port of a CONNECT target; None if it names none."""
    found = _AUTHORITY.fullmatch(target)
    return None if found is None else (found[1].strip("[]").lower(), int(found[2]))


_NO_MATCH: Final = ConversationMatch()
RETRY_COUNT: Final = b"x-stainless-retry-count"
"""Header in which the SDKs of OpenAI and Anthropic count their retries of a call, from 0."""
UNCOUNTED: Final = b"x-claude-code-session-id"
"""Header of Claude Code, which repeats failed calls with a `RETRY_COUNT` of 0."""
NOTED: Final = frozenset({b"content-encoding", b"traceparent", RETRY_COUNT, UNCOUNTED, _THREAD, *AGENT_HEADERS})
"""Headers of a request that its span tells of."""
_UNREAD: Final = "\0"
"""Stands for a model name that was not read yet; no model has this name."""


@dataclass(slots=True, eq=False)
class HeadDecision:
    """The facts of a call that the head of its request decides, whatever the body."""

    address: CallAddress | None
    """The address in its path or its headers; None if it has none."""
    dialect: Dialect
    path: str
    """Path and query below the address."""
    form: str
    """Its content type if its body is a form; else empty."""
    packed: bool
    """True if its body has a content encoding."""
    credential: str | None
    """The agent token or the named key that it shows."""
    baggage: str
    """Its `baggage` header."""
    session: CallAddress | None = None
    """The address by the hosted agent's session that its path names, for a call without another one."""
    noted: bool = False
    """True if it has a header that the span tells of."""
    own_site: bool = False
    """True once its host and its origin were found to be this machine's."""
    routes: dict[str | None, RouteChoice] = field(default_factory=dict[str | None, RouteChoice])
    """Where its calls go, by model; by None where the model does not matter."""
    upstream_heads: dict[ConnectionPool, KnownUpstreamHead] = field(
        default_factory=dict[ConnectionPool, KnownUpstreamHead]
    )
    """The heads that go upstream for it."""


@dataclass(slots=True)
class CallRequest:
    """A call that may pass."""

    address: CallAddress
    dialect: Dialect
    path: str
    """Path and query below the address."""
    body: bytes
    """The request's body, without its content encoding if that can be undone."""
    direct_pool: ConnectionPool | None = None
    """The host that its agent has called through a sidecar; else None."""
    token: bool = False
    """True if it came with the agent token of its rollout."""
    key: str | None = None
    """Name of the key for calls that it came with; None without one."""
    baggage: str = ""
    """Its `baggage` header."""
    encoded_body: bytes | None = None
    """The request's body as it came, if its content encoding was undone."""
    families: tuple[Family, ...] = ()
    """API families that it may belong to, once its destination is known."""
    routed: bool = False
    """True if a route of its model, or a release, decides its destination."""
    decision: HeadDecision | None = None
    """What its head decides; None if its connection, or another worker, has decided too."""
    form: str = field(default="", init=False)
    """Its content type if its body is a form, which then names its model; else empty."""
    waits: bool = field(default=False, init=False)
    """True if it must be followed (`ConversationMatcher.follow`) before its rollout, or its request, is known."""
    encodings: str | None = field(default=None, init=False)
    """The content encodings that are not undone yet."""
    anonymous: bool = field(default=False, init=False)
    """True if its conversation decides the rollout."""
    conversation: ConversationFingerprint | None = field(default=None, init=False)
    """Its conversation, if that decides the rollout; None if something else does, or while it was not read."""
    previous: str | None = field(default=None, init=False)
    """The name of the answer that it continues."""
    match: ConversationMatch = field(default=_NO_MATCH, init=False)
    """The result of matching its conversation."""
    headers: Headers | tuple[()] = field(default=(), init=False)
    """The headers that it came with, if its conversation decides the rollout."""
    repeats: RepeatableRequest | None = field(default=None, init=False)
    """Its request, if it may repeat a call that failed."""
    peeked: RequestFields | None = field(default=None, init=False)
    """Fields that were already read of its body, so that none is read twice."""
    said: Mapping[bytes, bytes] | None = field(default=None, init=False)
    """The metadata of a request on a WebSocket, which stands for headers of its own; None over HTTP."""
    _model: str | None = field(default=_UNREAD, init=False)

    def set_conversation(self, read: ParsedConversation) -> None:
        """Take what was read of its conversation."""
        self.peeked, self.conversation, self.previous = read.items.asked, read.story, read.items.previous

    def set_model(self, model: str | None) -> None:
        """Take the model that its session has named elsewhere."""
        self._model = model

    @property
    def model(self) -> str | None:
        """The model that it asks for. Read once, on first use by routes, releases, or the recorder."""
        if self._model is _UNREAD:
            if self.peeked is None:
                if self.form:
                    self.peeked = request_body.peek_form(self.body, self.form)
                elif self.dialect.peeks:
                    self.peeked = self.dialect.request_fields(self.body)
            self._model = self.dialect.model(self.body, self.path, self.peeked)
        return self._model

    @property
    def model_problem(self) -> tuple[str, str] | None:
        """(field, what is wrong) if a call must name a model and its model cannot be read; None for any other call."""
        if self.model is not None or (self.dialect.unknown and not self.form):
            return None
        if self.peeked is not None and self.peeked.model is not None:
            return "model", f"a model is named once, by a string of at most {LONGEST_LABEL} characters"
        return None if self.form or is_readable(self.body) else ("body", "it is no JSON object")
