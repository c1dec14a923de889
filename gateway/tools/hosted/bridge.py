"""Streamable HTTP in front of the hosted processes: `tools.call` calls it in place of a server with a URL.

A client of the bridge has passed the gateway's checks already: its address, its token, its `Origin`. Its connections
are socket pairs, so there are no other clients. A request that a process cannot answer gets a JSON-RPC error with
status 200, because some clients wait for ever after any other status; errors of the transport have the status that the
protocol demands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.settings import McpServer
from penstock.gateway.tools.hosted.process_pool import ProcessJournal, ProcessPool, ProcessStartError
from penstock.gateway.tools.hosted.session import LineQueue, Owner, PostExchange, ProcessSession
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, error_code, error_of, messages, meta

OWNER: Final = "Penstock-Owner"
"""Header of a call with its rollout and attempt."""
NAMED: Final = "Penstock-Named"
"""Header that is present if the client has named its rollout."""
_SESSION: Final = "Mcp-Session-Id"
_PROTOCOL: Final = "MCP-Protocol-Version"
_STATELESS: Final = "2026-07-28"
"""The first revision without sessions."""
_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
_EVENTS: Final = {"Content-Type": EVENT_STREAM.decode(), "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_UNSUPPORTED: Final = -32022
"""JSON-RPC error code of a server that knows revision negotiation but not the revision asked for."""
_STATUS: Final = {-32601: 404, -32700: 400, -32600: 400, -32602: 400, -32020: 400, -32021: 400, _UNSUPPORTED: 400}
"""HTTP statuses of JSON-RPC errors since revision 2026-07-28, by code."""
_SECONDS: Final = 1.0
_HEAD: Final = 64 << 10


class Bridge:
    """The HTTP server in front of all hosted servers."""

    def __init__(self, servers: Iterable[tuple[str, McpServer]], secrets: Secrets, rollouts: ProcessJournal) -> None:
        self._secrets, self._rollouts = secrets, rollouts
        self._hosts = dict[str, ProcessPool]()
        for name, config in servers:
            if config.command is not None:
                self.add(name, config)
        # Bodies have passed the gateway's own limit.
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SECONDS,
            max_line_size=_HEAD,
            max_field_size=_HEAD,
        )

    async def start(self) -> None:
        """Called before the first connection."""
        await self._runner.setup()

    def add(self, name: str, config: McpServer) -> None:
        self._hosts[name] = ProcessPool(name, config, self._secrets, self._rollouts)

    async def stop(self) -> None:
        """Ends all processes, then the HTTP server."""
        _ = await asyncio.gather(*(host.close() for host in self._hosts.values()))
        await self._runner.cleanup()

    def expire(self) -> None:
        """Ends sessions that have been idle for too long."""
        for host in self._hosts.values():
            host.expire(monotonic())

    def protocol(self) -> RequestHandler:
        """The bridge's end of a new connection."""
        server = self._runner.server
        assert server is not None
        return server()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        host = self._hosts[request.host]
        if request.path != "/":
            return _refused(404, "path", f"a server that the gateway hosts has no path {request.path!r}")
        match request.method:
            case "POST":
                return await _Post(host, request).serve()
            case "GET" | "DELETE":
                return await _of_session(host, request)
            case _:
                return web.Response(status=405, headers={"Allow": "DELETE, GET, POST"})


async def _of_session(host: ProcessPool, request: web.Request) -> web.StreamResponse:
    """Answers a GET, which listens, or a DELETE."""
    if _SESSION not in request.headers and request.headers.get(_PROTOCOL, "") >= _STATELESS:
        return web.Response(status=405, headers={"Allow": "POST"})
    session = _session(host, request)
    if isinstance(session, web.Response):
        return session
    if request.method == "DELETE":
        host.end(session)
        return web.Response()
    if not _accepts(request, EVENT_STREAM.decode()):
        return _refused(406, "accept", "a stream is text/event-stream: name it in Accept")
    stream = session.listen()
    try:
        return await _stream(request, stream, {})
    finally:
        stream.detach()
        session.last_active = monotonic()


class _Post:
    """A POST with messages of the client."""

    def __init__(self, host: ProcessPool, request: web.Request) -> None:
        self._host, self._request = host, request
        self._sent: list[JsonRpcMessage] = []
        self._asks: list[JsonRpcMessage] = []
        rollout, _, attempt = request.headers[OWNER].partition("/")
        self._owner: Owner = (rollout, attempt)
        self._stateless = False

    async def serve(self) -> web.StreamResponse:
        if not self._request.content_type.startswith("application/json"):
            return _refused(415, "content_type", "messages are application/json")
        if not _accepts(self._request, "application/json", EVENT_STREAM.decode()):
            return _refused(406, "accept", "name both application/json and text/event-stream in Accept")
        body = await self._request.read()
        self._sent = messages(body)
        if not self._sent or any(one.kind == "unreadable" for one in self._sent):
            return _refused(400, "message", "the body is no message of JSON-RPC")
        self._asks = [one for one in self._sent if one.kind == "request"]
        try:
            session = await self._find()
        except ProcessStartError as error:
            id = self._asks[0].id if self._asks else b"null"
            return _json(error_of(id, 503, str(error), error.reason, None))
        if not isinstance(session, ProcessSession):
            return session
        # Line breaks stand between tokens only.
        line = body.strip().replace(b"\r", b" ").replace(b"\n", b" ")
        if not self._asks:
            await session.send(self._sent, line)
            return web.Response(status=202)
        if session.holder(one.id for one in self._asks) is not None or len({*self._ids}) < len(self._asks):
            return _refused(400, "id", "a request of this id is not answered yet in this session", self._asks[0].id)
        return await self._ask(session, line)

    @property
    def _ids(self) -> list[bytes]:
        return [one.id for one in self._asks]

    async def _find(self) -> ProcessSession | web.Response:
        """The session of the messages: a known one, a new one, or that of an address. A response if there is none."""
        request, first = self._request, self._sent[0]
        if _SESSION in request.headers:
            return _session(self._host, request)
        if first.method == "initialize" and first.kind == "request":
            return self._host.begin(self._owner)
        if request.headers.get(_PROTOCOL, "") < _STATELESS and _VERSION not in meta(first):
            return _refused(400, "session", f"{_SESSION} is missing: a session begins with initialize")
        self._stateless = True
        owner = self._owner if NAMED in request.headers else ("", "")
        if self._asks:
            return await self._host.share(owner, self._ids)
        found = self._host.shared(owner) if first.kind == "notification" else None
        return found or _refused(400, "message", "no request is under way that this belongs to")

    async def _ask(self, session: ProcessSession, line: bytes) -> web.StreamResponse:
        begins = not self._stateless and self._sent[0].method == "initialize"
        given = {_SESSION: session.id} if begins else {}
        exchange = await session.request(self._sent, line)
        try:
            first = await exchange.next()
            if first is None or not exchange.at_end:
                return await _stream(self._request, exchange, given, first)
            return self._whole(session, exchange, first, given)
        finally:
            if begins and exchange.waiting:
                # The client left without the id of the session that it has begun.
                self._host.end(session)
            # Without sessions a client cancels by leaving; with sessions it may come back for the answer.
            await session.release(exchange, cancels=self._stateless)

    def _whole(
        self, session: ProcessSession, exchange: PostExchange, answer: bytes, given: dict[str, str]
    ) -> web.Response:
        """The response with an answer that came without other messages."""
        code = error_code(answer)
        earlier = self._stateless and exchange.requests[0].method == "server/discover" and code != _UNSUPPORTED
        if code is not None and (given or earlier):
            # No session has begun, or the server has an earlier revision and the client will initialize.
            if session.idle:
                self._host.end(session)
            given = {}
        return _json(answer, _STATUS.get(code or 0, 200) if self._stateless else 200, given)


def _session(host: ProcessPool, request: web.Request) -> ProcessSession | web.Response:
    """The session that a request names; a response with the error if there is none."""
    id = request.headers.get(_SESSION)
    if id is None:
        return _refused(400, "session", f"{_SESSION} is missing: a session begins with initialize")
    session = host.find(id, request.headers[OWNER].partition("/")[0])
    return session or _refused(404, "session", "there is no such session (any more): begin a new one with initialize")


async def _stream(
    request: web.Request, stream: LineQueue, headers: dict[str, str], first: bytes | None = None
) -> web.StreamResponse:
    """Sends lines as events until the stream ends."""
    response = web.StreamResponse(headers=_EVENTS | headers)
    await response.prepare(request)
    line = first if first is not None else await stream.next()
    while line is not None:
        await response.write(b"event: message\ndata: %b\n\n" % line)
        line = await stream.next()
    return response


def _accepts(request: web.Request, *types: str) -> bool:
    """True if a client accepts all of these media types; one without Accept accepts everything."""
    named = [one.partition(";")[0].strip().lower() for one in request.headers.get("Accept", "*/*").split(",")]
    return all({type, type.partition("/")[0] + "/*", "*/*"} & {*named} for type in types)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": "application/json"} | (headers or {}))


def _refused(status: int, reason: str, message: str, id: bytes = b"null") -> web.Response:
    return _json(error_of(id, status, message, reason, None), status)
