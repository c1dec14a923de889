"""The way to an upstream: the trusted certificates, the client certificate, and the proxy.

A call's connection is made here (`connect`); requests that the gateway itself makes by aiohttp take `options`.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.wire.http.certificates import load_pair

_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n")
_LONGEST: Final = 64 << 10
"""Most bytes of a proxy's answer before its tunnel."""


@dataclass(frozen=True, slots=True)
class ConnectProxy:
    """A proxy that supports CONNECT."""

    host: str
    port: int
    url: str
    context: ssl.SSLContext | None
    """TLS to the proxy; None for a plain one."""
    credential: str | None = field(repr=False)
    """The value of Proxy-Authorization."""


@dataclass(frozen=True, slots=True)
class UpstreamTransport:
    """The way to one upstream: its TLS and its proxy."""

    context: ssl.SSLContext | None
    """TLS to the upstream; None for plain HTTP."""
    proxy: ConnectProxy | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for a request of an aiohttp session."""
        made: dict[str, Any] = {} if self.context is None else {"ssl": self.context}
        if self.proxy is not None:
            sent = {} if self.proxy.credential is None else {"Proxy-Authorization": self.proxy.credential}
            made |= {"proxy": self.proxy.url, "proxy_headers": sent}
        return made

    async def connect(self, protocol: asyncio.Protocol, host: str, port: int) -> None:
        """Connect a protocol to a host; raises `OSError`."""
        loop, name = asyncio.get_running_loop(), None if self.context is None else host
        if self.proxy is None:
            await loop.create_connection(lambda: protocol, host, port, ssl=self.context, server_hostname=name)
            return
        transport = await self._tunnel(self.proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        try:
            if self.context is not None:
                made = await loop.start_tls(transport, protocol, self.context, server_hostname=name)
                assert made is not None
                transport = made
            else:
                transport.set_protocol(protocol)
            protocol.connection_made(transport)
        except BaseException:
            transport.abort()
            raise

    async def _tunnel(self, proxy: ConnectProxy, authority: str) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        try:
            transport, _ = await loop.create_connection(
                lambda: _ConnectProtocol(answer), proxy.host, proxy.port, ssl=proxy.context
            )
        except OSError as error:
            raise OSError(f"the proxy {proxy.url}: {error.strerror or error}") from None
        try:
            credential = "" if proxy.credential is None else f"Proxy-Authorization: {proxy.credential}\r\n"
            transport.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{credential}\r\n".encode("latin-1"))
            if (status := await answer) != 200:
                said = f"answers {status}" if status else "closed the connection, or is none"
                raise OSError(f"the proxy {proxy.url} {said}")
        except BaseException:
            transport.abort()
            raise
        return transport


class _ConnectProtocol(asyncio.Protocol):
    """Reads a proxy's answer about a tunnel: its status, 0 for an answer that cannot be read."""

    def __init__(self, answer: asyncio.Future[int]) -> None:
        self._answer, self._head = answer, b""

    def data_received(self, data: bytes) -> None:
        """Read the head of the answer. A server of HTTP or TLS is silent until it gets a request, so nothing comes
        after it."""
        self._head += data
        found = _STATUS.match(self._head)
        if found is not None:
            self._say(int(found[1]) if found.end() == len(self._head) or found[1] != b"200" else 0)
        elif len(self._head) > _LONGEST:
            self._say(0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._say(0)

    def _say(self, status: int) -> None:
        if not self._answer.done():
            self._answer.set_result(status)


def make_transport(config: UpstreamSettings) -> UpstreamTransport:
    """Return the way to an upstream; raises `ConfigError` where a file or a variable is missing."""
    tls = urlsplit(config.base_url).scheme == "https"
    shown = (config.client_cert, config.client_key)
    if shown != (None, None) and (shown[0] is None or not tls):
        why = "base_url is not https://" if shown[0] else "client_cert is missing, which names its certificate"
        key = "client_cert" if shown[0] else "client_key"
        raise ConfigError(f"upstream {config.name!r}: {key} does nothing: {why}")
    try:
        proxy = None if config.proxy is None else _proxy(config.proxy, config.proxy_auth(), config.ca_file)
        made = _context(config.ca_file) if tls else None
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"upstream {config.name!r}: ca_file {config.ca_file!r} cannot be read: {why}") from None
    if config.client_cert is not None:
        # Another upstream must not see the client certificate.
        made = _new_context(config.ca_file)
        settings = f"upstream {config.name!r}: client_cert", f"upstream {config.name!r}: client_key"
        key = None if config.client_key is None else Path(config.client_key)
        load_pair(made, *settings, Path(config.client_cert), key)
    return UpstreamTransport(made, proxy)


def _proxy(url: str, credential: str | None, ca_file: str | None) -> ConnectProxy:
    parts, encoded = urlsplit(url), None
    tls = parts.scheme == "https"
    if credential is not None:
        encoded = f"Basic {b64encode(credential.encode()).decode('ascii')}"
    context = _context(ca_file) if tls else None
    return ConnectProxy(parts.hostname or "", parts.port or (443 if tls else 80), url, context, encoded)


def _new_context(ca_file: str | None) -> ssl.SSLContext:
    made = ssl.create_default_context()
    if ca_file is not None:
        made.load_verify_locations(ca_file)
    return made


_context = lru_cache(maxsize=64)(_new_context)
"""Loading the machine's trusted certificates takes some milliseconds, and all upstreams trust the same."""
