"""Rewrites requests to a proxy for plain HTTP (`GET http://host/path`) as their host expects them. Sans-I/O.

The request line loses scheme and host, and headers for the proxy are removed; other names, their order and bodies stay.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httptools

_PROXY: Final = (b"proxy-authorization", b"proxy-connection")
_TARGET: Final = re.compile(rb"[^:]*://[^/?#]*([^#]*)")
LARGEST: Final = 64 << 10
"""The most bytes of a head."""
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
        if self._quiet > LARGEST:
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
        if self._size > LARGEST:
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
