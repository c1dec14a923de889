"""An admitted call: its address, its request, and the facts that were read of it so far.

Agents send the same head again and again. What a head decides of a call, whatever its body, is decided once
(`HeadDecision`) and kept with the head (`wire.http.request.KnownHeads`). Nothing in it can change while the
gateway runs: keys, tokens, releases, budgets and the health of upstreams are looked at for each call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.traffic.calls.address import CallAddress
from penstock.gateway.traffic.calls.conversations import ConversationMatch
from penstock.gateway.traffic.calls.fingerprints import ConversationFingerprint, ParsedConversation
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import RouteChoice
from penstock.gateway.wire.dialects import request_body
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import LONGEST_LABEL, RequestFields, is_readable, peek
from penstock.gateway.wire.http.headers import KnownUpstreamHead

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
    """The `previous_response_id` that it names."""
    match: ConversationMatch = field(default_factory=ConversationMatch, init=False)
    """The result of matching its conversation."""
    peeked: RequestFields | None = field(default=None, init=False)
    """Fields that were already read of its body, so that none is read twice."""
    _model: str | None = field(default=_UNREAD, init=False)

    def set_conversation(self, read: ParsedConversation) -> None:
        """Take what was read of its conversation."""
        self.peeked, self.conversation, self.previous = read.items.asked, read.story, read.items.previous

    @property
    def model(self) -> str | None:
        """The model that it asks for. Read once, on first use by routes, releases, or the recorder."""
        if self._model is _UNREAD:
            if self.peeked is None:
                if self.form:
                    self.peeked = request_body.peek_form(self.body, self.form)
                elif self.dialect.peeks:
                    self.peeked = peek(self.body)
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
