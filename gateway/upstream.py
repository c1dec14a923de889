"""Connections to model endpoints: one asyncio protocol over httptools, pooled per upstream, without a cap.

A `Link` carries one call at a time. Its owner (`gateway.proxy`) is told what arrives, read by read, as raw wire bytes
that can be passed on unchanged, while the parser runs beside them only to find the head, the end and the payload. A link
that was idle and closes before it answered has lost a race with the server's keep-alive timer: the call is sent again on
a fresh one. Nothing is ever sent twice once a byte of an answer was seen.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from time import monotonic
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from gateway.config import Upstream

_HEAD_LIMIT = 256 << 10
Headers = list[tuple[bytes, bytes]]


class Caller(Protocol):
    """The slice of a call that a link talks to."""

    head_only: bool
    """True for HEAD: the answer has no body whatever its headers say."""

    def on_connected(self, link: Link) -> None:
        """A link is there; the request may be written."""
        ...

    def on_unreachable(self, reason: str, detail: str) -> None:
        """No connection came about."""
        ...

    def on_answer(self, link: Link, head: bytes, raw: bytes) -> None:
        """The answer's head (status line to empty line) and the raw body bytes that came with it."""
        ...

    def on_data(self, link: Link, raw: bytes) -> None:
        """More raw body bytes; `link.done` says whether they are the last."""
        ...

    def on_broken(self, link: Link, reason: str) -> None:
        """The connection ended, or what it sent is not HTTP, before the answer was complete."""
        ...


class Link(asyncio.Protocol):
    """One connection to an upstream."""

    __slots__ = (
        "_buffer",
        "_garbage",
        "_headed",
        "_parser",
        "caller",
        "chunked",
        "done",
        "head_fields",
        "headers",
        "idle_since",
        "keep_alive",
        "length_known",
        "pieces",
        "pool",
        "reused",
        "seen",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport
        self.caller: Caller | None = None
        self.reused = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._clear()

    def _clear(self) -> None:
        self._buffer = b""
        self._headed = self._garbage = False
        self.headers: Headers = []
        self.head_fields = 0
        self.pieces: list[bytes] = []
        self.seen = self.done = self.chunked = self.length_known = False
        self.keep_alive = True

    # -- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A second message in one answer is garbage after its end."""
        self._garbage = self.done

    def on_header(self, name: bytes, value: bytes) -> None:
        """Headers, and trailers once the body has begun."""
        self.headers.append((name, value))
        low = name.lower()
        if low == b"transfer-encoding":
            self.chunked = b"chunked" in value.lower()
        elif low == b"content-length":
            self.length_known = True

    def on_headers_complete(self) -> None:
        """What follows in `headers` are trailers."""
        self.head_fields = len(self.headers)

    def on_body(self, piece: bytes) -> None:
        """Payload without transfer framing."""
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """The answer ends here."""
        self.done = True
        self.keep_alive = self._parser.should_keep_alive()

    # -- transport callbacks -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Hands on what arrived; on an idle link anything is a mistake."""
        caller = self.caller
        if caller is None:
            self.transport.abort()
            return
        self.seen = True
        if self._headed:
            if self._feed(data):
                caller.on_data(self, data)
            return
        self._buffer = data = self._buffer + data if self._buffer else data
        end = data.find(b"\r\n\r\n") + 4
        while end > 3 and data[9:10] == b"1" and data[:5] == b"HTTP/":
            # 100 Continue, 103 Early Hints: not the answer. 101 cannot come, no upgrade was asked for.
            self._buffer = data = data[end:]
            end = data.find(b"\r\n\r\n") + 4
        if end > 3:
            self._head_arrived(caller, data, end)
        elif len(data) > _HEAD_LIMIT or (data and not b"HTTP/".startswith(data[:5]) and data[:5] != b"HTTP/"):
            self._break("upstream_protocol")

    def _head_arrived(self, caller: Caller, data: bytes, end: int) -> None:
        self._headed, self._buffer = True, b""
        head, raw = data[:end], data[end:]
        if not self._feed(head if caller.head_only else data):
            return
        if caller.head_only:
            self.done, self.keep_alive = True, not raw and self.keep_alive
            self._parser = httptools.HttpResponseParser(self)
        caller.on_answer(self, head, raw)

    def _feed(self, data: bytes) -> bool:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._break("upstream_protocol")
            return False
        if self._garbage:
            self._break("upstream_protocol")
            return False
        return True

    def _break(self, reason: str) -> None:
        caller, self.caller = self.caller, None
        self.transport.abort()
        if caller is not None:
            caller.on_broken(self, reason)

    def eof_received(self) -> None:
        """The upstream has said all it will say; None lets the transport close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: the end of the answer where nothing else marks it, else a broken one."""
        self.pool.forget(self)
        caller, self.caller = self.caller, None
        if caller is None:
            return
        if self._headed and exc is None and not (self.chunked or self.length_known):
            self.done, self.keep_alive = True, False
            caller.on_data(self, b"")
        else:
            caller.on_broken(self, "upstream_closed")

    def pause_writing(self) -> None:
        """The request does not drain; it is already in memory as a whole, so there is nothing to hold back."""

    def resume_writing(self) -> None:
        """See `pause_writing`."""

    # -- for the call ------------------------------------------------------------------------------------------------

    def send(self, caller: Caller, head: bytes, body: bytes) -> None:
        """Writes a request; small ones in one packet."""
        self.caller = caller
        self._clear()
        if len(body) < 16384:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def release(self) -> None:
        """The answer is complete: back to the pool, or closed when it cannot be used again."""
        self.caller = None
        if self.keep_alive and self.done and not self.transport.get_write_buffer_size():
            self.pool.put_back(self)
        else:
            self.transport.abort()

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self.caller = None
        self.transport.abort()


class Pool:
    """The connections to one upstream."""

    def __init__(self, config: Upstream) -> None:
        """`config.key` is read here, so that a missing one stops the start and not the first call."""
        self.config = config
        self.name = config.name
        self.key = config.key()
        parts = urlsplit(config.base_url)
        self.tls = parts.scheme == "https"
        self.address = (parts.hostname or "", parts.port or (443 if self.tls else 80))
        self.path = parts.path
        self.host = parts.netloc.encode("ascii")
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.connections = 0
        self._idle: deque[Link] = deque()
        self._context = ssl.create_default_context() if self.tls else None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> int:
        """Connections that wait for a call."""
        return len(self._idle)

    def url(self, path: str) -> str:
        """What a call to this path asks for, for the record."""
        return self.origin + self.target(path)

    def target(self, path: str) -> str:
        """The path to ask the upstream for: base URL plus path, a doubled `/v1` written once."""
        if path.startswith("/v1") and (self.config.dialect == "openai" or self.path.endswith("/v1")):
            return self.path + path[3:] if path[3:4] in ("/", "?", "") else self.path + path
        return self.path + path

    def take(self) -> Link | None:
        """A connection that stands; None when there is none."""
        while self._idle:
            link = self._idle.pop()
            if not link.transport.is_closing():
                link.reused = True
                return link
        return None

    def connect(self, caller: Caller) -> asyncio.Task[None]:
        """Makes a connection and hands it to the caller; the task can be cancelled."""
        task = asyncio.get_running_loop().create_task(self._connect(caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connect(self, caller: Caller) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.config.connect_timeout):
                _, link = await loop.create_connection(
                    lambda: Link(self),
                    *self.address,
                    ssl=self._context,
                    server_hostname=self.address[0] if self.tls else None,
                )
        except TimeoutError:
            caller.on_unreachable("connect_timeout", f"no connection within {self.config.connect_timeout:g} s")
        except (OSError, ssl.SSLError) as error:
            caller.on_unreachable("connect", error.strerror or str(error))
        else:
            self.connections += 1
            caller.on_connected(link)

    def put_back(self, link: Link) -> None:
        """Keeps a connection for the next call."""
        link.idle_since = monotonic()
        self._idle.append(link)

    def forget(self, link: Link) -> None:
        """The connection is gone."""
        self.connections -= 1
        if link in self._idle:
            self._idle.remove(link)

    def expire(self, now: float) -> None:
        """Closes what has been idle for too long; the oldest are on the left."""
        while self._idle and now - self._idle[0].idle_since > self.config.idle_timeout:
            self._idle.popleft().transport.abort()

    def close(self) -> None:
        """Closes every idle connection."""
        while self._idle:
            self._idle.popleft().transport.abort()
