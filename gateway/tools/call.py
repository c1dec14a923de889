"""A call of an MCP server. Its bytes pass as those of every call, while a copy is parsed into messages.

    POST    messages of the client: one request, as a rule. The answer is JSON, or a stream that ends with it
    GET     listens: a stream of the server's own messages, and of answers that an earlier stream did not bring
    DELETE  ends the session

Every exchange is one span, named by its request. A server's requests and notifications in a stream that listens, and
its requests in the answer to a request, are spans of their own (`sessions.ServerMessageRecord`), below that of the
exchange. A request whose answer comes in another exchange ends when that answer passes (`sessions`).

Nothing is sent twice: a tool may have run although its server said nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import getrandbits
from time import monotonic
from typing import Any, Final

from penstock.gateway.model import span
from penstock.gateway.model.known_secrets import fingerprint
from penstock.gateway.model.settings import LocalNames
from penstock.gateway.reading.policy.questions import QuestionQueue
from penstock.gateway.tools.definition_enforcement import DefinitionMiddleware, DefinitionService, ToolTextMiddleware
from penstock.gateway.tools.middleware import McpContext, McpMiddleware, McpRequest
from penstock.gateway.tools.oauth import DocumentFraming, PublicUrls, is_rewritable
from penstock.gateway.tools.policy_enforcement import PolicyEnvironment, PolicyMiddleware
from penstock.gateway.tools.response_rewriter import (
    EndpointFraming,
    McpStreamReader,
    ResponseRewriter,
    refusal_response,
    rewrite_framing,
)
from penstock.gateway.tools.servers import WELL_KNOWN, DirectServerPool, Permit, ServerPool
from penstock.gateway.tools.sessions import (
    McpSession,
    PendingExchangeRecord,
    ResponseHandlers,
    ServerMessageRecord,
    with_session_attributes,
)
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.calls.conversations import new_rollout
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.call_lifecycle import CallState
from penstock.gateway.traffic.proxy.proxy_context import CallPlan, ProxyContext
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.capture import accept_identity
from penstock.gateway.wire.dialects.mcp import (
    CALL,
    LISTENING,
    PREFIX,
    JsonRpcMessage,
    McpRequestFacts,
    cancelled_request_id,
    messages,
    mismatches,
    request_facts,
)
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, Refusal
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import Framing

WHOLE_S: Final = 3600.0
"""Seconds until an answer must be whole, which is as long as any tool may take. Streams that only listen may last."""


_SCHEME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")


def check_origin(headers: Mapping[bytes, bytes], names: LocalNames) -> None:
    """Raises `ClientFault` for a request of a foreign site's page: the gateway may hold the keys of servers. (The
    protocol wants servers to check `Origin`, but a server would see the gateway's host.)"""
    for name in (b"host", b"origin"):
        value = headers.get(name, b"").decode("latin-1")
        host = value if name == b"host" else _SCHEME.sub("", value)
        if value and not names.is_own(host):
            message = f"{value[:100]!r} is no name of this machine: without agent tokens only local pages are served"
            raise ClientFault(403, "origin", message, name.decode())


SESSION: Final = b"mcp-session-id"
_PROTOCOL: Final = b"mcp-protocol-version"
_OPENING: Final = "initialize"
_LISTEN, _LISTENING = LISTENING
_WITHOUT_METHOD: Final = {"GET": _LISTEN, "DELETE": "end session", "POST": "answer"}
"""Names of exchanges in which the client sends neither a request nor a notification, by HTTP method."""


class McpCall(HttpCall):
    """One exchange with a server. The server's limits (`Permit`) bound its calls and their time, and learn how they
    end."""

    __slots__ = ("_changer", "_interests", "_listens", "_mcp", "_messages", "_permit", "_server", "_session",
                 "_session_id", "_since", "_stream", "_waiting")  # fmt: skip

    def __init__(
        self,
        shared: ProxyContext,
        mcp: McpContext,
        client: ClientConnection,
        request: HttpRequest,
        admitted: CallRequest,
    ) -> None:
        super().__init__(shared, client, request, admitted)
        self._mcp, self.filtered = mcp, True
        self._server: ServerPool
        self._listens = False
        """True if its answer is an endless stream."""
        self._permit: Permit | None = None
        """Its passage through the limits; None before it has reached them."""
        self._since = request.started
        """Monotonic seconds since which the server has had time to answer."""
        self._messages: list[JsonRpcMessage] = []
        """The client's messages."""
        self._waiting: dict[bytes, None] = {}
        """Ids of the client's requests that are not answered, in order."""
        self._session: McpSession | None = None
        self._session_id = b""
        self._stream: McpStreamReader | None = None
        """Reads the answer while it passes; None if the answer is a document."""
        self._interests = ResponseHandlers()
        """Watches and changes of the answers to the client's requests."""
        self._changer: ResponseRewriter | None = None
        """Changes the answer; None if it passes unchanged."""

    # The request ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        shared, call = self._shared, self._admitted
        if self.request.method == "POST":
            self._messages = messages(call.body)
            self._waiting = dict.fromkeys(one.id for one in self._messages if one.kind == "request")
        first = next((one for one in self._messages if one.method), None)
        # The span of a refused call has a name, too.
        about = self._name(first)
        if shared.recorder.failing is not None:
            shared.check_gap(call)
        # The span of a call that is refused later names its server, too.
        wanted = call.direct_pool if isinstance(call.direct_pool, DirectServerPool) else None
        self.record.pool = self._server = wanted or self._mcp.servers.find(call.path)
        self._listens = self.request.method == "GET" or (first is not None and first.method == _LISTENING)
        headers = {low: value for low, _, value in self.request.headers}
        if self._mcp.servers.local_only and not call.token and call.direct_pool is None:
            check_origin(headers, self._mcp.servers.names)
        self._server.check(headers, call.token or call.key is not None)
        if first is not None and first.method == _OPENING:
            self._belong(new_rollout())
        self._join(headers.get(SESSION, b"") or self._server.own_path(call.path).encode("latin-1"))
        self._describe(first, about, headers)
        server, mcp = self._server, self._mcp
        asking = McpRequest(server, call.address, self.request, self._messages, self.record, self._interests)
        sent = accept_identity(self.request.headers) if mcp.changes(server.name) else self.request.headers
        sent = server.headers(sent, call.address)
        self._plan_features(iter(mcp.features), asking, CallPlan([server], call, call.body, sent))

    def _plan_features(self, features: Iterator[McpMiddleware], asking: McpRequest, send: CallPlan) -> None:
        """Lets each feature plan the exchange in turn, and waits where one has to."""
        for feature in features:
            waited = feature.plan(asking, send)
            if waited is not None:
                self._wait(waited.cancel)
                waited.add_done_callback(lambda done: self._on_planned(features, asking, send, done))
                return
        if self._session is not None:
            self._session.interests.merge(self._interests)
        self._carry_out(send)

    def _on_planned(
        self, features: Iterator[McpMiddleware], asking: McpRequest, send: CallPlan, done: asyncio.Future[None]
    ) -> None:
        """Called when the future of a waiting feature is done: continues with the features behind it."""

        def go_on() -> None:
            done.result()
            self._plan_features(features, asking, send)

        if self._resumes():
            self._do("planned", go_on)

    @property
    def _own(self) -> PublicUrls:
        """The server's URLs as this client must see them."""
        return PublicUrls(self.request, self._admitted.path, self._server, self._mcp.servers.scheme)

    def _join(self, id: bytes) -> None:
        """Joins the session of this id, and opens it if it is unknown."""
        if id:
            self._session_id = id
            self._session = self._mcp.sessions.open(self._server.name, id, self._admitted.address.rollout)
            self._session.interests.merge(self._interests)
            self._belong(self._session.rollout)

    def _belong(self, rollout: str) -> None:
        """Gives a call that names no rollout the rollout of its session."""
        call = self._admitted
        if call.address.origin == "implicit" and not call.address.session:
            call.address = replace(call.address, rollout=rollout)
            self.client.hints.last = rollout

    def _name(self, first: JsonRpcMessage | None) -> McpRequestFacts | None:
        """Sets the span's kind, name and trace. Returns the description of its first message; None without one."""
        record = self.record
        record.kind, record.span_id = "mcp", f"{getrandbits(64):016x}"
        if first is None:
            about_server = self._admitted.path.startswith(WELL_KNOWN)
            unread = any(one.kind == "unreadable" for one in self._messages)
            other = "unreadable" if unread else _WITHOUT_METHOD.get(self.request.method)
            record.name = "metadata" if about_server else other
            return None
        about = request_facts(first)
        record.name = " ".join(filter(None, (first.method, about.target)))
        record.kind = "tool" if first.method == CALL else "mcp"
        if about.traceparent is not None:
            record.trace = span.parse(about.traceparent)
        return about

    def _describe(
        self, first: JsonRpcMessage | None, about: McpRequestFacts | None, headers: dict[bytes, bytes]
    ) -> None:
        """Sets the attributes of the span."""
        session = fingerprint(self._session_id) if self._session_id else None
        protocol, more = headers.get(_PROTOCOL, b"").decode("latin-1")[:64] or None, dict[str, Any]()
        if first is not None and about is not None:
            odd, protocol = mismatches(first, about, headers), about.protocol or protocol
            more = ({} if odd is None else {"penstock.mcp.mismatch": odd}) | about.attributes
        self.record.attributes = with_session_attributes({**more, **self._server.attributes}, session, protocol)

    # Within the limits of its server --------------------------------------------------------------------------------

    def _counts(self) -> bool:
        """True if it needs a slot, and its outcome counts for the breaker."""
        return bool(self._waiting) and not self._listens

    def _reach(self, pool: ConnectionPool, fresh: bool = False) -> None:
        """Connects as soon as the limits allow it."""
        limits = self._server.limits
        permit = self._permit = self._permit or Permit(limits, self._counts())
        if permit.acquired:
            super()._reach(pool, fresh)
        elif permit.must_wait():
            self._wait_for_slot(limits, self.on_open)
        else:
            self._enter(permit, pool)

    def _enter(self, permit: Permit, pool: ConnectionPool) -> None:
        permit.acquire()
        super()._reach(pool)

    def on_open(self) -> None:
        """Called when it has a slot. The time that it has waited for the slot does not count against the server."""
        permit, pool = self._permit, self.record.pool
        if permit is None or permit.acquired:
            super().on_open()
        elif self._resumes() and pool is not None:
            self._since = monotonic()
            self._do("sent", lambda: self._enter(permit, pool))

    def _check_queue(self, waited_s: float) -> None:
        """Refuses the call if it has waited for its slot for too long."""
        if self._permit is None or self._permit.acquired:
            super()._check_queue(waited_s)
        elif waited_s > self._server.server.first_byte_timeout:
            self.cancel_upstream()
            self._fail(self._server.limits.wait_timeout_refusal())

    def _late(self, now: float) -> str | None:
        if self._listens:
            return None
        begun = self.state is CallState.STREAMING
        limit = WHOLE_S if begun else self._server.server.first_byte_timeout
        if now - self._since <= limit:
            return None
        if begun:
            return f"has not ended its answer within {limit:g} s"
        return f"has not begun its answer within {limit:g} s (mcp.servers.{self._server.name}.first_byte_timeout)"

    # The answer -----------------------------------------------------------------------------------------------------

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Joins the session that the answer opens, and reads its messages if it is a stream."""
        if connection.status == 404 and self.record.call.path.startswith(WELL_KNOWN + PREFIX):
            self._ask_root()
            return
        if connection.status in (401, 403) and self._admitted.direct_pool is None:
            head = self._own.challenge(head)
        if connection.status < 400:
            given = next((value for name, value in connection.headers if name.lower() == SESSION), b"")
            if given and given != self._session_id:
                self._join(given)
                self.record.attributes = with_session_attributes(dict(self.record.attributes), fingerprint(given), None)
        self._listens = self._listens and connection.events
        if connection.events:
            resumes = any(low == b"last-event-id" for low, _, _ in self.request.headers)
            self._stream = McpStreamReader(connection.encoding, self._session, resumes)
        if self._permit is not None:
            self._permit.observe_status(connection.status)
        try:
            super().on_answer(connection, head, raw)
        except Refusal as refusal:
            self.started = False
            self._refuse_answer(refusal)

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        """Passes a read to the client."""
        try:
            super().on_data(connection, raw)
        except Refusal as refusal:
            self._refuse_answer(refusal)

    def _refuse_answer(self, refusal: Refusal) -> None:
        """Called when an answer that must be changed cannot be changed: refuses it, or breaks it off if it
        has begun."""
        self.cancel_upstream()
        if self.started and self.record.stream:
            self._cut_off("error", refusal.kind)
        else:
            self._fail(refusal)

    def _ask_root(self) -> None:
        """The server has no metadata for its path: asks for those at the root of its host."""
        self.cancel_upstream()
        self._move(CallState.PLANNING)
        self.record.call = replace(self.record.call, path=WELL_KNOWN)
        self._pools = [self._server]
        self._do("asked again", self._forward)

    def framing(self, connection: UpstreamConnection) -> Framing | None:
        """Replaces the path for messages that a stream names (HTTP with SSE), and the URLs in metadata, by the
        gateway's own. Answers of a server pass through a `ResponseRewriter` if a feature may change them."""
        chunked = connection.chunked and not self.request.http10
        messages_come = self.request.method == "POST" or connection.events or connection.status >= 300
        if connection.status < 400 and messages_come and self._mcp.changes(self._server.name):
            self._changer = ResponseRewriter(
                self._all_interests, self._renamed if self.request.method == "GET" else None
            )
            if (made := rewrite_framing(self._changer, connection, chunked)) is not None:
                return made
        if self.request.method == "GET" and connection.status == 200:
            if connection.events:
                return EndpointFraming(self._named, self.request.http10)
            if is_rewritable(connection) and self._admitted.direct_pool is None:
                return DocumentFraming(self._own.document, chunked)
        return super().framing(connection)

    def _all_interests(self) -> Iterator[ResponseHandlers]:
        yield self._interests
        if self._session is not None:
            yield self._session.interests

    def _renamed(self, data: bytes) -> bytes:
        ours = self._named(data.strip().decode("utf-8", "replace"))
        return data if ours is None else b" " + ours.encode()

    def _named(self, endpoint: str) -> str | None:
        """The path below the client's own address that stands for a path of the server; it identifies the
        session, too."""
        ours = self._server.register_path(endpoint)
        if ours is None:
            return None
        self._join(self._server.own_path(ours).encode())
        return self._own.address + ours if self._admitted.direct_pool is None else None

    def _pass_on(self, connection: UpstreamConnection, out: bytes) -> None:
        for one in self._stream.feed(connection.pieces) if self._stream is not None else ():
            self._told(one)
        if connection.pieces and self._listens:
            # A stream that listens may be endless, so its messages are spans of their own and its body is not kept.
            record = self.record
            record.response_bytes += sum(map(len, connection.pieces))
            record.first_byte_ns = record.first_byte_ns or int((monotonic() - self.request.started) * 1e9)
            connection.pieces = []
        super()._pass_on(connection, out)

    def _told(self, one: JsonRpcMessage) -> None:
        """Handles a message of the server."""
        self._watched(one)
        if one.kind == "answer":
            if one.id in self._waiting:
                del self._waiting[one.id]
                if self._listens:
                    self._note(one).finish()
            elif self._session is not None and not self._session.settle_client_request(one.id, one.raw):
                self._session.keep_early_answer(one.id, one.raw)
        elif one.kind == "request":
            made = self._note(one)
            made.begin()
            if self._session is not None:
                self._session.keep_server_request(one.id, made)
            else:
                made.given_up()
        elif self._listens:
            self._note(one).finish()

    def _watched(self, one: JsonRpcMessage) -> None:
        kept = self._all_interests() if one.kind == "answer" or self._listens else (self._interests,)
        for watch in next(filter(None, (some.observers_of(one) for some in kept)), ()):
            watch(one.raw)

    def _note(self, one: JsonRpcMessage) -> ServerMessageRecord:
        shared = self._shared
        return ServerMessageRecord(one, self.record, shared.recorder, shared.redactor, shared.epoch_ns, monotonic())

    # The end --------------------------------------------------------------------------------------------------------

    def _complete(self, connection: UpstreamConnection, out: bytes) -> None:
        self._settle(connection)
        if self._follows(connection.status):
            self.record.trailers = connection.trailers
            self.release_upstream()
            self._set_aside("error", "ended_early")
            if out:
                self.client.transport.write(out)
            self.end_answer()
        else:
            super()._complete(connection, out)

    def _settle(self, connection: UpstreamConnection) -> None:
        """Updates the session and the open requests after the whole answer."""
        session, status = self._session, connection.status
        if status != 202 and not connection.events:
            self._waiting = {}
            for one in messages(self.record.response()) if self._interests and status < 400 else ():
                self._watched(one)
        if session is None:
            return
        for one in self._messages if status < 400 else ():
            if one.kind == "answer":
                session.settle_server_request(one.id, one.raw)
            elif (unwanted := cancelled_request_id(one)) is not None:
                session.cancel(unwanted)
        if status == 404 or (self.request.method == "DELETE" and status < 400):
            self._mcp.sessions.end(self._server.name, self._session_id)

    def _follows(self, status: int) -> bool:
        """True if the answer may come in another exchange."""
        resumable = self._stream is not None and self._stream.resumable and not self._stream.unread
        return bool(self._waiting) and self._session is not None and (resumable or status == 202)

    def _problem(self) -> str | None:
        if self._changer is not None and self._changer.last_refusal is not None:
            return self._changer.last_refusal.kind
        unread = self._stream is not None and self._stream.unread
        return "ended_early" if self._waiting and not self._listens and not unread else super()._problem()

    def _set_aside(self, status: str, error: str) -> None:
        """Ends an exchange whose request is not answered, and gives the request to the session to keep."""
        assert self._session is not None
        self._end(status, error)
        shared, first = self._shared, next(iter(self._waiting))
        self._session.keep_client_request(
            first, PendingExchangeRecord(self.record, shared.recorder, shared.epoch_ns, self._recorded)
        )

    def on_client_gone(self) -> None:
        """A client ends a stream that listens by leaving; official SDKs also leave a stream once it has brought the
        answer. The rest of any other stream may still come in another exchange."""
        if self.state >= CallState.ENDING:
            return
        if self._listens or (self.record.stream and not self._waiting):
            self.cancel_upstream()
            self._end("ok", None)
            self._shared.recorder.put(self.record, self._recorded)
        elif self._follows(0):
            self.cancel_upstream()
            self._set_aside("cancelled", "client_gone")
        else:
            super().on_client_gone()

    def _cut_off(self, status: str, reason: str) -> None:
        if self._follows(0):
            self._set_aside(status, reason)
            self.break_off()
        else:
            super()._cut_off(status, reason)

    def _end(self, status: str, error: str | None) -> None:
        if self._changer is not None and self._changer.span_attributes:
            self.record.note(self._changer.span_attributes)
        if status != "ok" and self._session is not None and self._session.is_cancelled(self._waiting):
            super()._end("cancelled", "client_cancelled")
        else:
            super()._end(status, error)
        if self._permit is not None:
            self._permit.release(self.record.status, self.record.error)
        if self.request.method == "GET" and self._session is not None and self._session_id.startswith(b"/"):
            # The stream was the session (HTTP with SSE).
            self._mcp.sessions.end(self._server.name, self._session_id)

    def _repeats(self, connection: UpstreamConnection, pool: ConnectionPool) -> bool:
        return self.request.method != "POST" and super()._repeats(connection, pool)

    def _refusal_body(self, refusal: Refusal) -> bytes:
        """A JSON-RPC error with the id of the request; one for each request of a batch."""
        ids = list(self._waiting) or [b"null"]
        errors = [refusal_response(id, refusal) for id in ids]
        return errors[0] if len(errors) == 1 else b"[%b]" % b",".join(errors)


def build_mcp_middleware(
    shared: ProxyContext, definitions: DefinitionService, questions: QuestionQueue, around: PolicyEnvironment
) -> tuple[McpMiddleware, ...]:
    """All features, in the order in which they plan an exchange and change its answers: policy rules come first; a
    server's lists are held to their approved versions before releases change them."""
    rules = shared.config.policy
    policing = [PolicyMiddleware(rules, definitions.annotations, questions, around)] if rules else []
    return *policing, DefinitionMiddleware(definitions, shared.metrics), ToolTextMiddleware(shared, definitions)
