"""The ways out of a front: through the gateway, or straight to a host, also by the proxy that this machine needs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

from penstock.gateway.client.tls import client_context
from penstock.sidecar.intercept.beyond import Proxy, proxy_for
from penstock.sidecar.intercept.splice import End

_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
_EMPTY: Final = re.compile(rb"\r\ncontent-length:[ \t]*0+[ \t]*(?:\r|\Z)", re.IGNORECASE)
_LOCAL: Final = ("::1", "::ffff:127.0.0.1", "::")
E = TypeVar("E", bound=End)


@dataclass(frozen=True, slots=True)
class Binding:
    """Whose calls pass."""

    headers: tuple[tuple[str, str], ...]
    """What the gateway is told: the token, or the ids of rollout, attempt and agent."""


@dataclass(slots=True)
class Limits:
    """Seconds."""

    head: float = 30.0
    """Until an agent has said where it wants to go."""
    handshake: float = 15.0
    connect: float = 10.0
    bind: float = 60.0
    """Until a rollout is known."""


class Refused(Exception):
    """A connection that comes to nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Unreachable(Refused):
    """The gateway is not there."""

    def __init__(self, why: str) -> None:
        super().__init__(502, f"the gateway could not be reached: {why}")


class Ways:
    """Where connections of one agent go."""

    def __init__(self, gateway: str, limits: Limits, ours: set[int]) -> None:
        """`gateway` is its URL, `ours` are ports of this machine that nobody gets to through a front."""
        parts = urlsplit(gateway)
        tls = parts.scheme == "https"
        self._gateway = (parts.hostname or "", parts.port or (443 if tls else 80))
        self._tls = client_context() if tls else None
        self._limits, self.ours = limits, ours
        self.binding: Binding | None = None
        self._bound = asyncio.Event()

    def bind(self, binding: Binding | None) -> None:
        """From now on calls pass, as those of this rollout; with None they wait for the next one."""
        self.binding = binding
        if binding is None:
            self._bound.clear()
        else:
            self._bound.set()

    async def to_gateway(self, host: str, port: int) -> End:
        """A tunnel through the gateway to a host that it knows; raises `Refused`."""
        try:
            async with asyncio.timeout(self._limits.bind):
                await self._bound.wait()
        except TimeoutError:
            raise Refused(504, f"no rollout was bound to this sidecar within {self._limits.bind:g} s") from None
        assert self.binding is not None
        try:
            end = await self._open(*self._gateway, Asking, self._tls)
        except Refused as refused:
            raise Unreachable(refused.message) from None
        status, words = await self._asked(end, host, port, self.binding.headers)
        if status is None:
            raise Unreachable(words)
        if status != 200:
            raise Refused(502, f"the gateway refused this connection: {words}")
        return end

    async def problem(self, host: str, port: int) -> str | None:
        """What keeps calls of a host from the gateway now; None where nothing does."""
        if self.binding is None:
            return "no rollout is bound yet: calls wait"
        try:
            end = await self.to_gateway(host, port)
        except Refused as refused:
            return refused.message
        assert end.transport is not None
        end.transport.abort()
        return None

    async def to_host(self, host: str, port: int, plain: bool = False, address: str | None = None) -> End:
        """A connection to a host, past the gateway; raises `Refused`. `plain`: for HTTP without TLS; `address`: where
        the host is, if that is known."""
        proxy = proxy_for(host, plain)
        if proxy is not None:
            return await self._by(proxy, host, port)
        end = await self._open(address or host, port, End)
        assert end.transport is not None
        peer, here = end.transport.get_extra_info("peername"), end.transport.get_extra_info("sockname")
        # Only the address tells: any name may lead here.
        if peer[1] in self.ours and (peer[0] == here[0] or peer[0] in _LOCAL or peer[0].startswith("127.")):
            end.transport.abort()
            raise Refused(403, f"{host}:{port} may not be reached from here")
        return end

    async def _by(self, proxy: Proxy, host: str, port: int) -> End:
        tls = ssl.create_default_context() if proxy.tls else None
        end = await self._open(proxy.host, proxy.port, Asking, tls)
        status, words = await self._asked(end, host, port, proxy.headers)
        if status != 200:
            raise Refused(502, f"the proxy {proxy.host}:{proxy.port} does not lead to {host}:{port}: {words}")
        return end

    async def _asked(
        self, end: Asking, host: str, port: int, headers: tuple[tuple[str, str], ...]
    ) -> tuple[int | None, str]:
        """Asks for a tunnel to a host: (200, ""), or why there is none."""
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [
            f"CONNECT {authority} HTTP/1.1",
            f"Host: {authority}",
            *(f"{name}: {value}" for name, value in headers),
        ]
        try:
            async with asyncio.timeout(self._limits.connect):
                return await end.agree("\r\n".join([*lines, "", ""]).encode("latin-1"))
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
            why = reason(error) or f"no connection within {self._limits.connect:g} s"
            raise Refused(502, f"{host}:{port} could not be reached: {why}") from None
        return end


def reason(error: OSError) -> str:
    """Why a connection has failed; empty where nobody has answered in time. Errors of TLS and of names have numbers of
    their own, which mean something else to the system."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    # asyncio writes the address into it once more.
    return os.strerror(error.errno) if error.errno else str(error)


def _said(words: str) -> str:
    """The message in the body of a refusal, which a gateway writes as JSON."""
    try:
        # Half of a surrogate pair could be sent to nobody.
        return str(json.loads(words)["error"]["message"]).encode(errors="replace").decode()
    except (ValueError, TypeError, LookupError):
        return words[:500]


class Asking(End):
    """Our side of a tunnel through a proxy, which the gateway is too: its answer comes first."""

    def __init__(self) -> None:
        super().__init__()
        self._head: bytes | None = b""
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def agree(self, ask: bytes) -> tuple[int | None, str]:
        """Asks for the tunnel: (status, what it says). No status where it does not answer."""
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
        """Its answer, then what comes through the tunnel."""
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
        """It is gone, perhaps without an answer."""
        if not self._answer.done():
            head = self._head or b""
            self._answer.set_result(head if b"\r\n\r\n" in head else b"\r\n\r\nit closed the connection")
        super().connection_lost(exc)
