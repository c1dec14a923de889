"""MCP servers that speak on stdin and stdout (`[mcp.servers.NAME] command`): the gateway starts their processes, with
streamable HTTP in front of them.

An agent reaches such a server like any other, at `/mcp/NAME` by streamable HTTP. So does `tools.call`: its calls go by
HTTP to the bridge, so that there is one way to record and join them. A client of the bridge has passed the gateway's
checks already (its address, its token, its `Origin`); nothing else can reach the bridge, because its connections are
socket pairs. The bridge exchanges lines with the process (`tools.hosted_process`).

    agent --HTTP--> McpCall --HTTP on a socket pair--> bridge --lines--> process

**Errors.** A request that a process cannot answer gets a JSON-RPC error with status 200, because some clients wait for
ever after any other status; errors of the transport have the status that the protocol demands.

**Lines pass as they are.** A message goes to the process in the bytes of the client (line breaks between tokens become
spaces), and back in the bytes of the process. No id is rewritten, because a process serves one client:

* Up to revision 2025-11-25 a process is a session, from `initialize` to DELETE. The bridge gives the id of the session.
* Revision 2026-07-28 has no sessions. There a process serves one address: the attempt of a rollout; those who name no
  rollout share one. Clients at one address may use the same id at the same time. The later request waits then, until
  the earlier one is answered. A `subscriptions/listen` is never answered, so who would wait for one gets a further
  process.

**How it ends.** With DELETE, after half an hour without a request or a stream, and with the gateway: stdin is closed,
then comes TERM, then KILL. If the gateway is killed, wardens notice and do the same. The open requests of a process
that ends by itself are answered with an error that holds the way it ended and its last lines on stderr; its session is
unknown from then on (404), so that clients begin a new one. A process is started only for a client's request. If
processes of a server end before they have answered anything, the next may start after 1 s, then 2 s, up to 60 s; a
process that fails later delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets as randomness
from collections.abc import Callable, Iterable
from math import ceil
from time import monotonic
from typing import Final, NamedTuple, Protocol

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from penstock.gateway.model.known_secrets import Secrets, fingerprint
from penstock.gateway.model.rollout import LIVE
from penstock.gateway.model.settings import McpServer
from penstock.gateway.model.times import Backoff
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.hosted_process import GRACE_S, LineQueue, Owner, PostExchange, ProcessSession
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, error_code, error_of, messages, meta
from penstock.gateway.work.dispatcher import Dispatcher

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


# -- the processes of one server: their limit, their idle time, and the wait before the next start --------------------

_PAUSES: Final = Backoff(1.0, 60.0)
"""Longest wait between two starts of a server that ends before it has answered anything."""
IDLE_S: Final = 1800.0
"""Time without a request or a stream after which a session ends, and its process."""
_LOOK_S: Final = 5.0
"""Interval at which an unused session checks whether its attempt has ended."""
_log = logging.getLogger("penstock.mcp")


class ProcessStartError(Exception):
    """No process can be started now. `reason`: short; the text says why and what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ProcessExit(NamedTuple):
    """A process that has ended, for the tape."""

    server: str
    owner: Owner
    session: str
    exit_reason: str
    stop_requested: bool
    """True if the gateway stopped it."""
    last_lines: str


class ProcessJournal(Protocol):
    """The tape as hosted processes use it."""

    def tell(self, ending: ProcessExit) -> None:
        """Called when a process has ended."""
        ...

    def over(self, owner: Owner) -> bool:
        """True if the attempt that a process belongs to has ended."""
        ...


class ProcessPool:
    def __init__(self, name: str, config: McpServer, secrets: Secrets, rollouts: ProcessJournal) -> None:
        self.name, self._config, self._secrets, self._rollouts = name, config, secrets, rollouts
        self._sessions: dict[str, ProcessSession] = {}
        self._shared: dict[Owner, list[ProcessSession]] = {}
        self._all: set[ProcessSession] = set()
        self._failures, self._not_before, self._why = 0, 0.0, ""

    # Sessions -------------------------------------------------------------------------------------------------------

    def begin(self, owner: Owner) -> ProcessSession:
        """Starts a process for a new session with an id; raises `ProcessStartError`."""
        session = self._start(owner)
        session.id = randomness.token_urlsafe(24)
        self._sessions[session.id] = session
        return session

    def find(self, id: str, rollout: str) -> ProcessSession | None:
        """The session of that id; None if it is unknown or belongs to another rollout."""
        session = self._sessions.get(id)
        return session if session is not None and session.owner[0] == rollout else None

    async def share(self, owner: Owner, ids: Iterable[bytes]) -> ProcessSession:
        """Returns a process in which none of these ids is in use, for revisions without sessions: waits, or starts one;
        raises `ProcessStartError`."""
        while True:
            own = self._shared.get(owner, [])
            holders = [session.holder(ids) for session in own]
            free = next((session for session, holder in zip(own, holders, strict=True) if holder is None), None)
            if free is not None:
                return free
            busy = [holder for holder in holders if holder is not None and not holder.listens]
            if not busy:
                session = self._start(owner)
                self._shared.setdefault(owner, []).append(session)
                return session
            _ = await busy[0].over.wait()

    def shared(self, owner: Owner) -> ProcessSession | None:
        """The first running process of an address, for revisions without sessions; None without one."""
        return next(iter(self._shared.get(owner, ())), None)

    def end(self, session: ProcessSession) -> None:
        """Forgets a session and stops its process."""
        self._forget(session)
        session.process.stop()

    # Processes ------------------------------------------------------------------------------------------------------

    def _start(self, owner: Owner) -> ProcessSession:
        wait = self._not_before - monotonic()
        if wait > 0:
            raise ProcessStartError("mcp_backoff", f"{self._why}. It may start again in {ceil(wait)} s")
        if len(self._all) >= self._config.processes:
            said = f"{len(self._all)} processes of MCP server {self.name!r} run, which is the limit"
            raise ProcessStartError(
                "mcp_processes", f"{said} (mcp.servers.{self.name}.processes): end sessions, or raise it"
            )
        session = ProcessSession(self.name, self._config, self._secrets, owner, self._on_end)
        self._all.add(session)
        return session

    def _on_end(self, session: ProcessSession) -> None:
        self._forget(session)
        self._all.discard(session)
        process = session.process
        if session.answered:
            self._failures = 0
        elif not process.stop_requested:
            self._failures += 1
            self._why = session.exit_summary()
            self._not_before = monotonic() + _PAUSES.after(self._failures)
        if not process.stop_requested:
            _log.warning("a process of MCP server %r %s", self.name, process.exit_reason)
        said = "\n".join(process.last_lines)
        self._rollouts.tell(
            ProcessExit(self.name, session.owner, session.id, process.exit_reason, process.stop_requested, said)
        )

    def _forget(self, session: ProcessSession) -> None:
        self._sessions.pop(session.id, None)
        own = self._shared.get(session.owner, [])
        if session in own:
            own.remove(session)
            if not own:
                del self._shared[session.owner]

    def expire(self, now: float) -> None:
        """Ends sessions that are idle for too long, and within seconds those whose attempt has ended."""
        for session in [one for one in self._all if not (one.in_use or one.process.stop_requested)]:
            unused = now - session.last_active
            if unused > IDLE_S:
                self.end(session)
            elif unused > _LOOK_S and now - session.last_checked > _LOOK_S:
                session.last_checked = now
                if self._over(session.owner):
                    self.end(session)

    def _over(self, owner: Owner) -> bool:
        try:
            return self._rollouts.over(owner)
        except Exception as error:
            # A damaged record must not keep the other sessions from being checked.
            _log.warning("MCP server %r: whether the attempt of a session has ended is not known: %s", self.name, error)
            return False

    async def close(self) -> None:
        """Stops all processes and waits until they are gone, for at most twice the grace time and a second."""
        for session in list(self._all):
            session.process.stop()
        tasks = [session.task for session in self._all]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=2 * GRACE_S + 1)
            for task in late:
                task.cancel()
            if late:
                _ = await asyncio.wait(late)


# -- the tape: the end of a process is an event of its rollout; the end of an attempt ends its processes --------------

NAME: Final = "mcp server ended"
SERVER, ENDED, STDERR = "penstock.mcp.server", "penstock.mcp.ended", "penstock.mcp.stderr"
"""Attributes: the server of the process, how it ended, its last lines on stderr."""


class TapeProcessJournal:
    """The tape as hosted processes use it (`ProcessJournal`)."""

    def __init__(self, dispatcher: Dispatcher, tape: StoreReader, now_ns: Callable[[], int]) -> None:
        self._dispatcher, self._tape, self._now_ns = dispatcher, tape, now_ns
        self._telling: set[asyncio.Task[list[int]]] = set()

    def tell(self, ending: ProcessExit) -> None:
        """Writes the end of a process to the tape."""
        entry = _event(ending, self._now_ns())
        if entry is not None:
            task = asyncio.get_running_loop().create_task(self._dispatcher.add([entry]))
            self._telling.add(task)
            task.add_done_callback(self._told)

    def over(self, owner: Owner) -> bool:
        """True if an attempt has ended. False for one that is not yet on the tape."""
        rollout, attempt = owner
        found = [one for one in self._tape.attempts(rollout) if one.id == attempt] if rollout else []
        return any(one.status not in LIVE for one in found)

    def _told(self, task: asyncio.Task[list[int]]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("the end of an MCP server could not be recorded: %s", error)


def _event(ending: ProcessExit, now_ns: int) -> SpanEntry | None:
    """The event of an ended process. None if it was stopped and wrote nothing but messages, or if its client named no
    rollout."""
    rollout, attempt = ending.owner
    if not rollout or (ending.stop_requested and not ending.last_lines):
        return None
    entry = SpanEntry(rollout, attempt, kind="event", name=NAME, method="", start_ns=now_ns, end_ns=now_ns)
    entry.status = "ok" if ending.stop_requested else "error"
    entry.error = None if ending.stop_requested else "mcp_process"
    entry.attributes = {SERVER: ending.server, ENDED: ending.exit_reason, STDERR: ending.last_lines}
    if ending.session:
        entry.attributes["mcp.session.id"] = fingerprint(ending.session.encode())
    return entry
