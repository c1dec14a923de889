"""The proxy that an agent has in its environment. Read `Front`, then `_Agent` from top to bottom.

CONNECT api.openai.com:443     a model host: TLS ends here, its bytes go to the gateway
CONNECT pypi.org:443           another: a tunnel to it, or 403
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, TypeVar
from urllib.parse import urlsplit

from penstock.sidecar.intercept.authority import Authority
from penstock.sidecar.intercept.plain import Head, PlainError, PlainRequests
from penstock.sidecar.intercept.policy import Fate, Policy
from penstock.sidecar.intercept.splice import End

_log = logging.getLogger("penstock.sidecar")
_LARGEST: Final = 64 << 10
"""Bytes of a head."""
_CONNECT: Final = re.compile(rb"CONNECT (?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5}) HTTP/1\.[01]\r\n")
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
_AGREED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
E = TypeVar("E", bound=End)
_REASONS: Final = {400: b"Bad Request", 403: b"Forbidden", 502: b"Bad Gateway", 504: b"Gateway Timeout"}


@dataclass(frozen=True, slots=True)
class Binding:
    """Whose calls pass."""

    headers: tuple[tuple[str, str], ...]
    """What the gateway is told: the token, or the ids of rollout, attempt and agent."""


@dataclass(slots=True)
class Passed:
    """A connection that is over."""

    host: str
    port: int
    fate: Fate
    started: float
    seconds: float = 0.0
    sent: int = 0
    """Bytes of the agent."""
    got: int = 0
    """Bytes of the host."""
    problem: str | None = None
    """Why it came to nothing."""


@dataclass(slots=True)
class Limits:
    """Seconds."""

    head: float = 30.0
    """Until an agent has said where it wants to go."""
    handshake: float = 15.0
    connect: float = 10.0
    bind: float = 60.0
    """Until a rollout is known."""


@dataclass
class Front:
    """One agent's proxy."""

    gateway: str
    """URL of the gateway."""
    policy: Policy
    authority: Authority
    on_passed: Callable[[Passed], None]
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        parts = urlsplit(self.gateway)
        tls = parts.scheme == "https"
        self._gateway = (parts.hostname or "", parts.port or (443 if tls else 80))
        self._tls = ssl.create_default_context() if tls else None
        self._binding: asyncio.Future[Binding] | None = None
        self._servers: list[asyncio.Server] = []
        self._agents: set[_Agent] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens; returns the port."""
        loop = asyncio.get_running_loop()
        self._binding = self._binding or loop.create_future()
        server = await loop.create_server(lambda: _Agent(self), host, port)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    def bind(self, binding: Binding) -> None:
        """From now on calls pass, as those of this rollout."""
        if self._binding is None or self._binding.done():
            self._binding = asyncio.get_running_loop().create_future()
        self._binding.set_result(binding)

    async def stop(self) -> None:
        """Closes everything."""
        for server in self._servers:
            server.close()
        for agent in list(self._agents):
            agent.abort()
        await self._empty.wait()
        if self._binding is not None:
            self._binding.cancel()

    async def to_gateway(self, host: str, port: int) -> End:
        """A tunnel through the gateway to a host that it knows; raises `Refused`."""
        assert self._binding is not None
        try:
            binding = await asyncio.wait_for(asyncio.shield(self._binding), self.limits.bind)
        except TimeoutError:
            raise Refused(504, f"no rollout was named within {self.limits.bind:g} s") from None
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}", *(f"{a}: {b}" for a, b in binding.headers)]
        end = await self.connect(*self._gateway, _Gateway, self._tls)
        assert isinstance(end, _Gateway)
        await end.agree("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return end

    async def connect(self, host: str, port: int, kind: Callable[[], E], tls: ssl.SSLContext | None = None) -> E:
        """A connection; raises `Refused`."""
        loop = asyncio.get_running_loop()
        name = host if tls is not None else None
        try:
            async with asyncio.timeout(self.limits.connect):
                _, end = await loop.create_connection(kind, host, port, ssl=tls, server_hostname=name)
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or f"no connection within {self.limits.connect:g} s"
            raise Refused(502, f"{host}:{port} could not be reached: {why}") from None
        return end

    def opened(self, agent: _Agent) -> None:
        self._agents.add(agent)
        self._empty.clear()

    def closed(self, agent: _Agent) -> None:
        self._agents.discard(agent)
        if not self._agents:
            self._empty.set()


class Refused(Exception):
    """A connection that comes to nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Gateway(End):
    """Our side of a tunnel through the gateway: its answer comes first."""

    def __init__(self) -> None:
        super().__init__()
        self._head: bytes | None = b""
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def agree(self, ask: bytes) -> None:
        """Asks for the tunnel; raises `Refused`."""
        assert self.transport is not None
        self.transport.write(ask)
        head = await self._answer
        found = _STATUS.match(head)
        if found is None or found[1] != b"200":
            self.transport.abort()
            words = head.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
            raise Refused(502, f"the gateway refused this connection: {words[:500]}")

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            super().data_received(data)
            return
        self._head += data
        status, mark, rest = self._head.partition(b"\r\n\r\n")
        if not mark or (not status.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")) and not rest):
            return
        head, self._head = self._head, None
        if not self._answer.done():
            self._answer.set_result(head)
        if rest and status.startswith(b"HTTP/1.1 200"):
            super().data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_result((self._head or b"") + b"\r\n\r\nit closed the connection")
        super().connection_lost(exc)


class _Agent(End):
    """A connection of the agent."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front
        self._head: bytes | None = b""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._passed: Passed | None = None
        self._plain: PlainRequests | None = None
        """Its requests, where they are plain HTTP."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._front.opened(self)
        self._timer = asyncio.get_running_loop().call_later(self._front.limits.head, self.abort)

    def data_received(self, data: bytes) -> None:
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
        """The agent has said where it wants to go."""
        if self._timer is not None:
            self._timer.cancel()
        found = _CONNECT.match(head)
        if found is None:
            self._plain = PlainRequests()
            self._plainly(head + b"\r\n" + rest)
            return
        host, port = (found[1] or found[2]).decode("ascii").lower(), int(found[3])
        fate = self._front.policy.fate(host, port)
        self._passed = Passed(host, port, fate, monotonic())
        if fate == "deny":
            self._refuse(403, f"{host}:{port} may not be reached from here")
            return
        if rest and fate == "intercept":
            self._refuse(400, "bytes of TLS came before the tunnel was agreed to")
            return
        if rest:
            super().data_received(rest)
        self.hold()
        step = self._intercept if fate == "intercept" else self._tunnel
        self._task = asyncio.get_running_loop().create_task(self._run(step(host, port)))

    async def _run(self, step: Awaitable[None]) -> None:
        try:
            await step
        except Refused as refused:
            self._refuse(refused.status, refused.message)

    async def _tunnel(self, host: str, port: int) -> None:
        end = await self._front.connect(host, port, End)
        assert self.transport is not None
        self.transport.write(_AGREED)
        self._follow(self, end)

    def _plainly(self, data: bytes) -> None:
        """Plain HTTP: each request says where it goes."""
        assert self._plain is not None
        try:
            self._plain.feed(data)
        except PlainError as error:
            self._refuse(400, str(error))
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(self._send_plain(self._plain.pieces)))

    async def _send_plain(self, pieces: deque[Head | bytes]) -> None:
        while pieces:
            piece = pieces.popleft()
            if isinstance(piece, bytes):
                self.received += len(piece)
                self.pass_on(piece)
                continue
            if self._passed is None or (piece.host, piece.port) != (self._passed.host, self._passed.port):
                await self._go_to(piece.host, piece.port)
            self.received += len(piece.data)
            self.pass_on(piece.data)

    async def _go_to(self, host: str, port: int) -> None:
        """The host of the next request; the one before has answered, or the agent would not ask."""
        front, fate = self._front, self._front.policy.fate(host, port)
        if self.other is not None:
            self._over(self, self.other)
            self.leave()
            self._front.opened(self)
        self._passed = Passed(host, port, fate, monotonic())
        if fate == "deny":
            raise Refused(403, f"{host}:{port} may not be reached from here")
        self.hold()
        end = await (front.to_gateway(host, port) if fate == "intercept" else front.connect(host, port, End))
        self.received = 0
        self._follow(self, end)

    async def _intercept(self, host: str, port: int) -> None:
        """Ends the TLS of the agent while the gateway is asked."""
        assert self.transport is not None
        self.transport.write(_AGREED)
        inner = End()
        loop = asyncio.get_running_loop()
        asking = loop.create_task(self._front.to_gateway(host, port))
        try:
            context = self._front.authority.context(host)
            seconds = self._front.limits.handshake
            plain = await loop.start_tls(
                self.transport, inner, context, server_side=True, ssl_handshake_timeout=seconds
            )
        except (OSError, ssl.SSLError, TimeoutError) as error:
            asking.cancel()
            self._note(_untrusted(host, error))
            self.abort()
            return
        assert plain is not None
        inner.transport = self.transport = plain
        try:
            end = await asking
        except Refused as refused:
            self._note(refused.message)
            plain.write(_answer(refused.status, refused.message))
            plain.close()
            return
        self._follow(inner, end)

    def _follow(self, agent: End, end: End) -> None:
        """Both ends stand."""

        agent.on_lost = lambda: self._over(agent, end)
        agent.join(end)

    def _over(self, agent: End, end: End) -> None:
        if self._passed is not None:
            self._passed.sent, self._passed.got = agent.received, end.received
        self._note(None)

    def _refuse(self, status: int, message: str) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(_answer(status, message))
            self.transport.close()
        self._note(message)

    def _note(self, problem: str | None) -> None:
        """It is over: says so once."""
        passed, self._passed = self._passed, None
        self._front.closed(self)
        if passed is not None:
            passed.seconds, passed.problem = monotonic() - passed.started, problem
            self._front.on_passed(passed)

    def abort(self) -> None:
        """Ends it at once."""
        if self._task is not None:
            self._task.cancel()
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
        super().connection_lost(exc)
        self._note("the agent left")


def _answer(status: int, message: str) -> bytes:
    body = message.encode() + b"\n"
    head = (
        b"HTTP/1.1 %d %b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    )
    return head % (status, _REASONS[status], len(body)) + body


def _untrusted(host: str, error: Exception) -> str:
    """Why a handshake failed, as far as that is known."""
    words = str(error).lower()
    if "alert" in words and ("unknown ca" in words or "bad certificate" in words or "certificate unknown" in words):
        return f"the client does not trust the certificate of {host}: give it the bundle, or it pins its own"
    if isinstance(error, ConnectionError):
        return f"the client left in the handshake for {host}, as those do that do not trust its certificate here"
    return f"the client's TLS for {host} failed: {error}"
