"""A connection of an agent to its front. Read `AgentConnection` from top to bottom.

CONNECT api.openai.com:443     a model host: TLS ends here, its bytes go to the gateway
CONNECT pypi.org:443           another: a tunnel to it, or 403
GET http://pypi.org/           the same without TLS; each request says where it goes

Clients that can use a Unix socket need none of this: all connections there are for one host (`UnixSocketConnection`).
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httptools

from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import (
    ConnectionRefusal,
    EgressConnector,
    GatewayUnreachable,
    ProxyTimeouts,
    SpliceEnd,
)
from penstock.sidecar.intercept.rules import ConnectionAction, InterceptPolicy

_LARGEST: Final = 64 << 10
"""The most bytes of a head."""
_CONNECT: Final = re.compile(
    rb"CONNECT (?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5}) HTTP/1\.[01]\r\n"
)
_REASONS: Final = {200: b"OK", 400: b"Bad Request", 403: b"Forbidden", 502: b"Bad Gateway", 504: b"Gateway Timeout"}
_AGREED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass(slots=True)
class ConnectionRecord:
    """The account of a connection, reported when it is closed."""

    host: str
    port: int
    action: ConnectionAction
    started: float
    seconds: float = 0.0
    sent: int = 0
    """Bytes that the agent sent."""
    received: int = 0
    """Bytes that the host sent."""
    problem: str | None = None
    """The reason why it failed, or went past the gateway; None without one."""
    address: str | None = None
    """The address of a redirected connection, whatever host it named; else None."""


@dataclass
class ProxyState:
    """The settings and state shared by all connections of an agent."""

    policy: InterceptPolicy
    authority: CertificateStore
    egress: EgressConnector
    limits: ProxyTimeouts
    on_closed: Callable[[ConnectionRecord], None]
    connections: set[AgentConnection] = field(default_factory=set["AgentConnection"])
    """The open connections."""
    redirect_loop: str | None = None
    """The reason why our own connections are redirected back to us; None when they are not."""


class AgentConnection(SpliceEnd):
    """A connection of the agent."""

    def __init__(self, setting: ProxyState) -> None:
        super().__init__()
        self.closed = asyncio.Event()
        """Set when the connection is closed and reported."""
        self._setting = setting
        self._head: bytes | None = b""
        self._task: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._passed: ConnectionRecord | None = None
        self._plain: PlainRequestParser | None = None
        """The parser of its requests, if they are plain HTTP."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._setting.connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(self._setting.limits.head, self.abort)

    def data_received(self, data: bytes) -> None:
        """Read the head that names the destination, then pass the bytes on."""
        if self._plain is not None:
            self._plainly(data)
            return
        if self._head is None:
            super().data_received(data)
            return
        self._head += data
        if b"\r\n\r\n" in self._head:
            head, _, rest = self._head.partition(b"\r\n\r\n")
            self._head = None
            self._asked(head + b"\r\n", rest)
        elif len(self._head) > _LARGEST:
            self._head = None
            self._refuse(400, "the head of the request is too large")

    def _asked(self, head: bytes, rest: bytes) -> None:
        """Act on the head of the agent's first request."""
        if self._timer is not None:
            self._timer.cancel()
        found = _CONNECT.match(head)
        if found is None:
            self._plain = PlainRequestParser()
            self._plainly(head + b"\r\n" + rest)
            return
        host, port = (found[1] or found[2]).decode("ascii").lower(), int(found[3])
        fate = self._setting.policy.action_for(host, port)
        self._passed = ConnectionRecord(host, port, fate, monotonic())
        if fate == "deny":
            self._refuse(403, f"{host}:{port} may not be reached from here")
            return
        if rest and fate in ("intercept", "check"):
            self._refuse(400, "bytes of TLS came before the tunnel was agreed to")
            return
        if rest:
            super().data_received(rest)
        self.pause_reading()
        self._begin(self._step(fate, host, port))

    def _step(self, fate: ConnectionAction, host: str, port: int) -> Awaitable[None]:
        if fate == "check":
            return self._check(host)
        return self._intercept(host, port) if fate == "intercept" else self._tunnel(host, port)

    def _begin(self, step: Awaitable[None]) -> None:
        self._task = asyncio.ensure_future(self._run(step))

    async def _run(self, step: Awaitable[None]) -> None:
        try:
            await step
        except ConnectionRefusal as refused:
            if refused.status == 403 and self._passed is not None:
                self._passed.action = "deny"
            self._refuse(refused.status, refused.message)
        except Exception as error:
            # Any other failure (a reset, an invalid name) must close the connection too, or the agent would wait
            # forever.
            self._refuse(502, f"this connection failed: {str(error) or type(error).__name__}")
        except asyncio.CancelledError:
            # During a handshake no other callback reports that the connection is gone.
            self._end("the agent left")
            raise

    # -- plain HTTP ----------------------------------------------------------------------------------------------------

    def _plainly(self, data: bytes) -> None:
        """Handle bytes of plain HTTP, where each request names its host."""
        assert self._plain is not None
        try:
            self._plain.feed(data)
        except PlainError as error:
            self._refuse(400, str(error))
            return
        if self._task is None or self._task.done():
            self._begin(self._send_plain(self._plain.pieces))

    async def _send_plain(self, pieces: deque[PlainRequestHead | bytes]) -> None:
        while pieces:
            piece = pieces.popleft()
            if isinstance(piece, bytes):
                self.received += len(piece)
                self.forward(piece)
                continue
            if self._passed is None or (piece.host, piece.port) != (self._passed.host, self._passed.port):
                await self._go_to(piece.host, piece.port)
            self.received += len(piece.data)
            self.forward(piece.data)

    async def _go_to(self, host: str, port: int) -> None:
        """Connect to the host of the next request. The one before was answered, or the agent would not ask."""
        fate = self._setting.policy.action_for(host, port)
        if self.peer is not None:
            self._count(self, self.peer)
            self._tell(None)
            self.detach()
        self._passed = ConnectionRecord(host, port, fate, monotonic())
        if fate in ("deny", "check"):  # the sidecar describes itself only over TLS
            raise ConnectionRefusal(403, f"{host}:{port} may not be reached from here")
        self.pause_reading()
        end = await (self._plain_way(host, port) if fate == "intercept" else self._straight(host, port, plain=True))
        self.received = 0
        self._follow(self, end)

    async def _plain_way(self, host: str, port: int) -> SpliceEnd:
        try:
            return await self._setting.egress.to_gateway(host, port)
        except GatewayUnreachable as away:
            if self._setting.policy.fail == "closed":
                raise
            self._goes_past(away)
            return await self._straight(host, port, plain=True)

    # -- TLS -----------------------------------------------------------------------------------------------------------

    async def _tunnel(self, host: str, port: int) -> None:
        """Pass the TLS on unchanged to its host."""
        end = await self._straight(host, port)
        await self._agree()
        self._follow(self, end)

    async def _agree(self) -> None:
        """Tell the agent that it may send."""
        assert self.transport is not None
        self.transport.write(_AGREED)

    async def _straight(self, host: str, port: int, plain: bool = False) -> SpliceEnd:
        return await self._setting.egress.to_host(host, port, plain)

    async def _intercept(self, host: str, port: int) -> None:
        """End the agent's TLS here and lead its bytes to the gateway. The gateway is asked during the handshake; but
        before it with `fail` open, because then the connection may have to go to its host.
        """
        asking = asyncio.ensure_future(self._setting.egress.to_gateway(host, port))
        try:
            if self._setting.policy.fail == "open":
                await asyncio.wait([asking])
                if isinstance(away := asking.exception(), GatewayUnreachable):
                    self._goes_past(away)
                    await self._tunnel(host, port)
                    return
            await self._ended(host, asking)
        finally:
            _drop(asking)

    async def _ended(self, host: str, asking: asyncio.Future[SpliceEnd]) -> None:
        inner = SpliceEnd()
        # Calls may wait for a rollout; one whose client leaves meanwhile must not become a call of it.
        inner.buffer_limit, inner.on_lost = _LARGEST, self.abort
        if not await self._trusted(host, inner):
            return
        try:
            end = await asking
        except ConnectionRefusal as refused:
            self._refuse(refused.status, refused.message)
            return
        self._follow(inner, end)

    async def _trusted(self, host: str, inner: SpliceEnd) -> bool:
        """End the TLS of the agent; True if it trusts our certificate. From then on `inner` gets its bytes."""
        try:
            await self._secure(self._setting.authority.context(host), inner)
        except (OSError, ssl.SSLError, TimeoutError) as error:
            self._end(_untrusted(host, error))
            self.abort()
            return False
        self.transport = inner.transport
        return True

    async def _secure(self, context: ssl.SSLContext, inner: SpliceEnd) -> None:
        await self._agree()
        assert self.transport is not None
        inner.transport = await asyncio.get_running_loop().start_tls(
            self.transport,
            inner,
            context,
            server_side=True,
            ssl_handshake_timeout=self._setting.limits.handshake,
        )

    async def _check(self, host: str) -> None:
        """Answer for the sidecar itself: the rollout of these calls, and the hosts whose calls reach the gateway."""
        asked = TargetReader()
        if not await self._trusted(host, asked):
            return
        assert asked.transport is not None
        target = await asked.target
        asked.transport.write(await status_response(target, self._setting.policy, self._setting.egress))
        asked.transport.close()
        self._end(None)

    def _goes_past(self, away: GatewayUnreachable) -> None:
        """Note that the connection goes past the gateway, which is away."""
        if self._passed is not None:
            self._passed.action = "unrecorded"
            self._passed.problem = f"{away.message}; it went straight to the host and is not recorded"

    # -- its end -------------------------------------------------------------------------------------------------------

    def _follow(self, agent: SpliceEnd, end: SpliceEnd) -> None:
        """Join both ends, which are connected."""
        agent.on_lost = lambda: self._over(agent, end)
        agent.join(end)
        if agent.lost:  # lost before they were joined
            self._over(agent, end)

    def _over(self, agent: SpliceEnd, end: SpliceEnd) -> None:
        self._count(agent, end)
        self._end(None)

    def _count(self, agent: SpliceEnd, end: SpliceEnd) -> None:
        if self._passed is not None:
            self._passed.sent, self._passed.received = agent.received, end.received

    def _refuse(self, status: int, message: str) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(http_response(status, message))
            self.transport.close()
        self._end(message)

    def _tell(self, problem: str | None) -> None:
        """Report the connection's account, once."""
        passed, self._passed = self._passed, None
        if passed is not None:
            passed.seconds, passed.problem = monotonic() - passed.started, problem or passed.problem
            self._setting.on_closed(passed)

    def _end(self, problem: str | None) -> None:
        self._tell(problem)
        self._setting.connections.discard(self)
        self.closed.set()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._task is not None:
            self._task.cancel()
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and not self._task.done():
            self._task.cancel()
        super().connection_lost(exc)
        self._end("the agent left")


class UnixSocketConnection(AgentConnection):
    """A connection on a Unix socket: plain HTTP for one host, from the first byte on."""

    def __init__(self, setting: ProxyState, host: str) -> None:
        super().__init__(setting)
        self._host = host
        self._head = None

    def data_received(self, data: bytes) -> None:
        """Pass calls through the gateway. They never go to their host without TLS, even if the run may go past the
        gateway.
        """
        if self._task is None:
            if self._timer is not None:
                self._timer.cancel()
            self._passed = ConnectionRecord(self._host, 443, "intercept", monotonic())
            self._begin(self._to_gateway())
        super().data_received(data)

    async def _to_gateway(self) -> None:
        self._follow(self, await self._setting.egress.to_gateway(self._host, 443))


def _drop(asking: asyncio.Future[SpliceEnd]) -> None:
    """Close a tunnel through the gateway that was not used."""
    if not asking.done():
        asking.cancel()
    elif not asking.cancelled() and asking.exception() is None and asking.result().peer is None:
        transport = asking.result().transport
        if transport is not None:
            transport.abort()


def _untrusted(host: str, error: Exception) -> str:
    """The reason of a failed handshake, as far as it is known."""
    words = str(error).lower()
    if "alert" in words and ("unknown ca" in words or "bad certificate" in words or "certificate unknown" in words):
        return f"the client does not trust the certificate of {host}: give it the bundle, or it pins its own"
    if isinstance(error, ConnectionError):
        return f"the client left in the handshake for {host}, as those do that do not trust its certificate here"
    return f"the client's TLS for {host} failed: {error}"


# Answers of the front itself: refusals, and its description of itself at the address `CHECK`.


def http_response(status: int, message: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    """A complete HTTP response of the front itself."""
    body = message.encode() + b"\n"
    head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, _REASONS[status], kind.encode(), len(body)) + body


class TargetReader(SpliceEnd):
    """The agent's end of a connection that the front answers itself: reads the target of its request."""

    def __init__(self) -> None:
        super().__init__()
        self.target: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._head = b""

    def data_received(self, data: bytes) -> None:
        if self.target.done():
            return
        self._head += data
        if b"\r\n\r\n" in self._head:
            words = self._head.split(b" ", 2)
            self.target.set_result(words[1].decode("latin-1") if len(words) > 2 else "/")
        elif len(self._head) > _LARGEST:
            self.target.set_exception(ConnectionRefusal(400, "the head of the request is too large"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.target.cancel()
        super().connection_lost(exc)


async def status_response(target: str, policy: InterceptPolicy, ways: EgressConnector) -> bytes:
    """The response that names the bound rollout; for the target `/hosts` also, for each model host, the problem that
    keeps its calls from the gateway, or null.
    """
    known = dict(ways.binding.headers) if ways.binding is not None else {}
    said: dict[str, object] = {"penstock": "sidecar", "bound": ways.binding is not None}
    said |= {"rollout": known.get("x-rollout-id"), "attempt": known.get("x-attempt-id")}
    if target == "/hosts":
        hosts = sorted(policy.hosts)
        found = await asyncio.gather(*(ways.problem(host, port) for host, port in hosts))
        said["hosts"] = {f"{host}:{port}": problem for (host, port), problem in zip(hosts, found, strict=True)}
    return http_response(200, json.dumps(said), "application/json")


# Rewrites requests to a proxy for plain HTTP (`GET http://host/path`) as their host expects them. Sans-I/O.
#
# The request line loses scheme and host, and headers for the proxy are removed; other names, their order and bodies
# stay.

_PROXY: Final = (b"proxy-authorization", b"proxy-connection")
_TARGET: Final = re.compile(rb"[^:]*://[^/?#]*([^#]*)")
_LONGEST: Final = 253
"""The most characters of a host's name (RFC 1035), and of an error of Python's about a URL."""


class PlainRequestHead(NamedTuple):
    """The head of a request, rewritten, and its host and port."""

    host: str
    port: int
    data: bytes


class PlainError(ValueError):
    """Raised for bytes that are no request to a proxy; the text is the reason."""


class PlainRequestParser:
    """Parses and rewrites the requests of one connection."""

    def __init__(self) -> None:
        self.pieces: deque[PlainRequestHead | bytes] = deque()
        """The pieces to send, in order: a head, then its body."""
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._size = self._quiet = 0
        """Bytes of the head; bytes of an unfinished line, also of a trailer."""
        self._chunked = False

    def feed(self, data: bytes) -> None:
        """Parse bytes of the agent; raises `PlainError`."""
        self._quiet += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise PlainError("a WebSocket needs CONNECT") from None
        except httptools.HttpParserCallbackError as error:
            raise PlainError(str(error.__context__ or error)[:_LONGEST]) from None
        except httptools.HttpParserError as error:
            raise PlainError(f"the request is not valid HTTP/1.1: {error}") from None
        if self._quiet > _LARGEST:
            raise PlainError("a line of the request is too large")

    def on_message_begin(self) -> None:
        self._url, self._headers, self._size, self._chunked = b"", [], 0, False
        self._quiet = 0

    def on_url(self, url: bytes) -> None:
        """Add a piece of the target, which may come in several."""
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        self._count(len(name) + len(value) + 4)

    def _count(self, size: int) -> None:
        self._quiet = 0
        self._size += size
        if self._size > _LARGEST:
            raise PlainError("the head of the request is too large")

    def on_headers_complete(self) -> None:
        parts = urlsplit(self._url.decode("latin-1"))
        if parts.scheme != "http" or not parts.hostname:
            raise PlainError("this is a proxy: it takes CONNECT HOST:PORT and http:// URLs")
        if len(parts.hostname) > _LONGEST:
            raise PlainError(f"the name of a host has at most {_LONGEST} characters")
        found = _TARGET.match(self._url)
        target = b"" if found is None else found[1]
        kept = [(name, value) for name, value in self._headers if name.lower() not in _PROXY]
        self._chunked = any(name.lower() == b"transfer-encoding" for name, _ in kept)
        lines = b"".join([b"%b: %b\r\n" % header for header in kept])
        line = b"%b %b HTTP/%b\r\n" % (
            self._parser.get_method(),
            target if target.startswith(b"/") else b"/" + target,
            self._parser.get_http_version().encode(),
        )
        self.pieces.append(PlainRequestHead(parts.hostname, parts.port or 80, line + lines + b"\r\n"))

    def on_body(self, body: bytes) -> None:
        self._quiet = 0
        self.pieces.append(b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body)

    def on_message_complete(self) -> None:
        if self._chunked:
            self.pieces.append(b"0\r\n\r\n")
