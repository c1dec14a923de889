"""The onward connections of a front: through the gateway, or straight to a host, if need be by this machine's proxy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final, TypeVar, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from penstock.gateway.client.opener import client_context


class SpliceEnd(asyncio.Protocol):
    """One of the two ends of a connection. Each gets the other's bytes as they come, no faster than it accepts them."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: SpliceEnd | None = None
        self.received = 0
        """Bytes received."""
        self.lost = self.ended = False
        self.on_lost: Callable[[], None] | None = None
        """Called once, when the connection is lost."""
        self.buffer_limit = 0
        """Bytes that may wait for the other end before reading stops; while it stops, the loss of this end is not
        noticed.
        """
        self._waiting: list[bytes] = []
        """Bytes that came before there was another end."""
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def join(self, other: SpliceEnd) -> None:
        """Connect the two ends: from now on the bytes of each go to the other."""
        self.peer, other.peer = other, self
        for one in (self, other):
            one.flush()
            one.resume_reading()
            if one.lost:
                one.connection_lost(None)

    def detach(self) -> None:
        """Part from the other end, and close that one."""
        other, self.peer = self.peer, None
        if other is not None:
            other.peer = None
            if other.transport is not None:
                other.transport.close()

    def flush(self) -> None:
        """Pass on the bytes that have waited for the other end."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.forward(data)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, or keep them until there is another end."""
        self.received += len(data)
        if self.peer is None:
            self._waiting.append(data)
            if self.received > self.buffer_limit:
                self.pause_reading()
        else:
            self.forward(data)

    def forward(self, data: bytes) -> None:
        """Write to the other end."""
        other = self.peer
        if other is not None and other.transport is not None and not other.transport.is_closing():
            other.transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading until `resume_reading`; no effect on a closing transport."""
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again after `pause_reading`; no effect otherwise."""
        if self._paused and self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Called when this end accepts less than the other sends."""
        if self.peer is not None:
            self.peer.pause_reading()

    def resume_writing(self) -> None:
        """Called when this end has caught up."""
        if self.peer is not None:
            self.peer.resume_reading()

    def eof_received(self) -> bool:
        """Called when this end sends no more. Over plain TCP the other end is told, and its remaining bytes still
        pass.
        """
        self.ended, other = True, self.peer
        if other is None or other.ended or other.transport is None or not other.transport.can_write_eof():
            return False
        other.transport.write_eof()
        return self.transport is not None and self.transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when this end is gone: close the other one, after the bytes that were written to it."""
        first, self.lost = not self.lost, True
        if self.peer is not None and self.peer.transport is not None:
            if exc is None:
                self.peer.transport.close()
            else:
                self.peer.transport.abort()
        if first and self.on_lost is not None:
            self.on_lost()


_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
_EMPTY: Final = re.compile(rb"\r\ncontent-length:[ \t]*0+[ \t]*(?:\r|\Z)", re.IGNORECASE)
_LOCAL: Final = ("::1", "::ffff:127.0.0.1", "::")
E = TypeVar("E", bound=SpliceEnd)


@dataclass(frozen=True, slots=True)
class RolloutBinding:
    """The rollout of the calls that pass, as headers."""

    headers: tuple[tuple[str, str], ...]
    """Headers for the gateway: the ids of rollout and attempt, and the token, as far as they are known."""


@dataclass(slots=True)
class ProxyTimeouts:
    """The longest waits of a front; s."""

    head: float = 30.0
    """Until an agent has sent the head of its first request."""
    handshake: float = 15.0
    connect: float = 10.0
    bind: float = 60.0
    """Until a rollout is bound."""


class ConnectionRefusal(Exception):
    """Raised for a connection that is refused, with the HTTP status and message for the agent."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class GatewayUnreachable(ConnectionRefusal):
    """Raised when the gateway cannot be reached."""

    def __init__(self, why: str) -> None:
        super().__init__(502, f"the gateway could not be reached: {why}")


class EgressConnector:
    """Opens the onward connections of one agent."""

    def __init__(self, gateway: str, limits: ProxyTimeouts, ours: set[int]) -> None:
        """`gateway`: its URL. `ours`: ports of this machine that no agent may reach through a front."""
        parts = urlsplit(gateway)
        tls = parts.scheme == "https"
        self._gateway = (parts.hostname or "", parts.port or (443 if tls else 80))
        self._tls = client_context() if tls else None
        self._limits, self.reserved_ports = limits, ours
        self.binding: RolloutBinding | None = None
        self._bound = asyncio.Event()

    def bind(self, binding: RolloutBinding | None) -> None:
        """Let calls pass from now on, as those of this rollout; with None they wait for the next one."""
        self.binding = binding
        if binding is None:
            self._bound.clear()
        else:
            self._bound.set()

    async def to_gateway(self, host: str, port: int) -> SpliceEnd:
        """Open a tunnel through the gateway to a model host; raises `ConnectionRefusal`."""
        try:
            async with asyncio.timeout(self._limits.bind):
                await self._bound.wait()
        except TimeoutError:
            raise ConnectionRefusal(
                504, f"no rollout was bound to this sidecar within {self._limits.bind:g} s"
            ) from None
        assert self.binding is not None
        try:
            end = await self._open(*self._gateway, ConnectTunnel, self._tls)
        except ConnectionRefusal as refused:
            raise GatewayUnreachable(refused.message) from None
        status, words = await self._asked(end, host, port, self.binding.headers)
        if status is None:
            raise GatewayUnreachable(words)
        if status != 200:
            raise ConnectionRefusal(502, f"the gateway refused this connection: {words}")
        return end

    async def problem(self, host: str, port: int) -> str | None:
        """The reason why calls of a host do not reach the gateway now; None when they do."""
        if self.binding is None:
            return "no rollout is bound yet: calls wait"
        try:
            end = await self.to_gateway(host, port)
        except ConnectionRefusal as refused:
            return refused.message
        assert end.transport is not None
        end.transport.abort()
        return None

    async def to_host(self, host: str, port: int, plain: bool = False, address: str | None = None) -> SpliceEnd:
        """Connect to a host, past the gateway; raises `ConnectionRefusal`. `plain`: for HTTP without TLS. `address`:
        the host's address, if known.
        """
        proxy = proxy_for(host, plain)
        if proxy is not None:
            return await self._by(proxy, host, port)
        end = await self._open(address or host, port, SpliceEnd)
        assert end.transport is not None
        peer, here = end.transport.get_extra_info("peername"), end.transport.get_extra_info("sockname")
        # Only the address decides: any name may resolve to this machine.
        if peer[1] in self.reserved_ports and (peer[0] == here[0] or peer[0] in _LOCAL or peer[0].startswith("127.")):
            end.transport.abort()
            raise ConnectionRefusal(403, f"{host}:{port} may not be reached from here")
        return end

    async def _by(self, proxy: UpstreamProxy, host: str, port: int) -> SpliceEnd:
        tls = ssl.create_default_context() if proxy.tls else None
        end = await self._open(proxy.host, proxy.port, ConnectTunnel, tls)
        status, words = await self._asked(end, host, port, proxy.headers)
        if status != 200:
            raise ConnectionRefusal(502, f"the proxy {proxy.host}:{proxy.port} does not lead to {host}:{port}: {words}")
        return end

    async def _asked(
        self, end: ConnectTunnel, host: str, port: int, headers: tuple[tuple[str, str], ...]
    ) -> tuple[int | None, str]:
        """Ask for a tunnel to a host: (200, ""), or another status or None, and the reason."""
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [
            f"CONNECT {authority} HTTP/1.1",
            f"Host: {authority}",
            *(f"{name}: {value}" for name, value in headers),
        ]
        try:
            async with asyncio.timeout(self._limits.connect):
                return await end.connect("\r\n".join([*lines, "", ""]).encode("latin-1"))
        except TimeoutError:
            return None, f"no answer within {self._limits.connect:g} s"

    async def _open(self, host: str, port: int, kind: Callable[[], E], tls: ssl.SSLContext | None = None) -> E:
        name = host if tls is not None else None
        try:
            async with asyncio.timeout(self._limits.connect):
                _, end = await asyncio.get_running_loop().create_connection(
                    kind, host, port, ssl=tls, server_hostname=name
                )
        except (OSError, TimeoutError) as error:
            why = failure_reason(error) or f"no connection within {self._limits.connect:g} s"
            raise ConnectionRefusal(502, f"{host}:{port} could not be reached: {why}") from None
        return end


def failure_reason(error: OSError) -> str:
    """The reason of a failed connection; empty for a timeout. Errors of TLS and of name lookup have numbers of their
    own, which mean something else to the system.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    # asyncio's own message repeats the address.
    return os.strerror(error.errno) if error.errno else str(error)


def _said(words: str) -> str:
    """The message in the body of a refusal, which a gateway writes as JSON."""
    try:
        # A lone surrogate could not be encoded.
        return str(json.loads(words)["error"]["message"]).encode(errors="replace").decode()
    except (ValueError, TypeError, LookupError):
        return words[:500]


class ConnectTunnel(SpliceEnd):
    """Our side of a tunnel through a proxy or the gateway: reads the answer to CONNECT first."""

    def __init__(self) -> None:
        super().__init__()
        self._head: bytes | None = b""
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def connect(self, ask: bytes) -> tuple[int | None, str]:
        """Ask for the tunnel: (status, message). The status is None without an answer."""
        assert self.transport is not None
        found = None
        try:
            self.transport.write(ask)
            head = await self._answer
            found = _STATUS.match(head)
            words = head.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
        finally:
            if found is None or found[1] != b"200":
                self.transport.abort()
        return (None, words) if found is None else (int(found[1]), _said(words) or f"it answered {int(found[1])}")

    def data_received(self, data: bytes) -> None:
        """Collect the answer, then pass on bytes of the tunnel."""
        if self._head is None:
            super().data_received(data)
            return
        self._head += data
        status, mark, rest = self._head.partition(b"\r\n\r\n")
        agreed = status.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
        if not mark or not (agreed or rest or _EMPTY.search(status)):
            return
        head, self._head = self._head, None
        if not self._answer.done():
            self._answer.set_result(head)
        if rest and agreed:
            super().data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answer.done():
            head = self._head or b""
            self._answer.set_result(head if b"\r\n\r\n" in head else b"\r\n\r\nit closed the connection")
        super().connection_lost(exc)


# The proxy that this machine itself needs for other hosts, from its own environment. It is used for hosts, never for
# the gateway.

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class UpstreamProxy:
    """A proxy that accepts CONNECT."""

    host: str
    port: int
    tls: bool
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """The header with its user and password; empty without them."""


def proxy_for(host: str, plain: bool) -> UpstreamProxy | None:
    """The proxy for a host; None when the host is reached without one."""
    proxies = getproxies_environment()
    url = proxies.get("http" if plain else "https") or proxies.get("all")
    if not url or _is_here(host) or proxy_bypass(host):
        return None
    return parse_proxy_url(url)


def check_environment() -> None:
    """Raise `ValueError` when a proxy variable of this environment does not name a proxy."""
    for kind, url in getproxies_environment().items():
        if kind in ("http", "https", "all"):
            try:
                _ = parse_proxy_url(url)
            except ValueError as error:
                raise ValueError(f"{kind.upper()}_PROXY: {error}") from None


def parse_proxy_url(url: str) -> UpstreamProxy | None:
    """The proxy that the value of a variable names; None for an unsupported kind. Raises `ValueError` when the value is
    invalid.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        _ = parts.port
    except ValueError:
        # Without user and password, of which Python's own message may hold a part.
        raise ValueError(f"{url.rpartition('@')[2]!r} is no proxy: HOST, and a port up to 65535 behind it") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        return None
    headers = ()
    if parts.username is not None:
        known = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = (("Proxy-Authorization", f"Basic {b64encode(known.encode()).decode('ascii')}"),)
    return UpstreamProxy(parts.hostname, parts.port or _PORTS[parts.scheme], parts.scheme == "https", headers)


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
