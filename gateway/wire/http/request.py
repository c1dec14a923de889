"""Requests: what a client sent, how it is read from the bytes of a connection, and the gateway's own refusals, a class
for each party that can be at fault. Sans-I/O: HTTP/1.1 by llhttp, as strict as it is, and within limits.

A request is read whole, because its model decides where it goes; its chunks are remembered, so that a chunked body
leaves as it came. Bytes that are no request, or are too large, become a request with a `refusal`, in its turn behind
those before it; nothing is read after it. A refusal is answered in the error shape of the API being spoken.

An agent sends the same head again and again. A head that was parsed before is found by its bytes (`KnownHeads`) and
not parsed again: only its body is read, by the length that it gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import monotonic, time
from types import MappingProxyType
from typing import Final

import httptools

Headers = list[tuple[bytes, bytes, bytes]]
"""(lower-case name, name as sent, value), in order."""
HEADER_BYTES = 64 << 10
"""Largest request head, request line included: eight times what agents with baggage and cookies send."""
_CHUNKS = 65536
_PIECES = 4096
_WATCHED = frozenset({b"connection", b"content-length", b"expect", b"transfer-encoding", b"upgrade"})
_PIPELINED = 64
_FRAMING = frozenset({b"content-length", b"host", b"transfer-encoding"})
_NUMBERED: Final = (
    b"content-length", b"traceparent", b"x-client-request-id", b"x-request-id", b"x-stainless-retry-count",
    b"x-claude-code-prompt-id",
)  # fmt: skip
_TOLD: Final = (b"x-claude-code-prev-tool-durations", b"x-codex-turn-metadata")
_VOLATILE: Final = _NUMBERED + _TOLD
"""Headers whose values differ from one request of a client to the next. They decide nothing but the length."""
_VALUE: Final = re.compile(
    rb"(\r\n(?i:"
    + b"|".join(_NUMBERED)
    + rb"):[ ]?(?=[0-9A-Fa-f][0-9A-Fa-f-]{0,126}\r\n)|\r\n(?i:"
    + b"|".join(_TOLD)
    + rb"):[ ]?(?=\{|[^\r=]+=[0-9]+[;\r])(?![^\r]*pst_))([ -~]{1,4096})(?=\r\n)"
)
"""Their usual values: numbers and ids of hexadecimal digits, a JSON object, and names with milliseconds: no keys."""
_LONGEST_HEAD, _DIGITS = 8 << 10, 12
_MOST_BYTES, _BESIDE = 8 << 20, 4096
"""Bytes of memory for known heads, and those that each takes besides its text: what it was parsed to, and decided."""


class RequestHead:
    """A head that a client may send again: what it was parsed to, and what was decided for it."""

    __slots__ = ("decision", "headers", "hops", "length", "method", "places", "target")

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        hops: frozenset[bytes],
        places: list[tuple[int, bytes, bytes]],
        length: int | None,
    ) -> None:
        """`places`: index and names of each header whose value differs from request to request. `length`: the index of
        Content-Length among these; None without one."""
        self.method, self.target, self.headers, self.hops = method, target, headers, hops
        self.places, self.length = places, length
        self.decision: object = None
        """What the gateway has decided for calls with this head, whatever their bodies; None if nothing was decided."""


class HttpRequest:
    """Filled in by its connection; whole when it is served."""

    __slots__ = (
        "_gathered",
        "_pieces",
        "chunked",
        "chunks",
        "head",
        "headers",
        "hops",
        "http10",
        "keep_alive",
        "length",
        "method",
        "refusal",
        "size",
        "started",
        "started_ns",
        "target",
        "trailers",
        "upgrade",
        "websocket",
    )

    def __init__(self, head: RequestHead | None = None, values: Sequence[bytes] = (), body: bytes = b"") -> None:
        """`head`: the one that it has in common with earlier requests, with these values of the headers that differ.
        `body`: the beginning of its payload."""
        self.head = head
        self.method = ""
        self.target = b""
        self.headers: Headers = []
        self.trailers: Headers | tuple[()] = ()
        self.hops: frozenset[bytes] = frozenset()
        """Headers that its Connection header makes hop-by-hop (RFC 9110 §7.6.1)."""
        self.http10 = self.keep_alive = self.chunked = False
        if head is not None:
            self.method, self.target, self.hops, self.keep_alive = head.method, head.target, head.hops, True
            self.headers = headers = head.headers.copy()
            for value, (at, low, name) in zip(values, head.places, strict=True):
                headers[at] = low, name, value
        self.upgrade = self.websocket = False
        """True if the request asks for another protocol, and `websocket` if that is a WebSocket."""
        self.length = 0
        """The value of Content-Length."""
        self.size = len(body)
        """Payload bytes received."""
        self.chunks: list[int] | tuple[()] = ()
        """The offsets at which the client's chunks ended; at most `_CHUNKS` of them."""
        self.started = 0.0
        """Monotonic seconds at which its head was complete."""
        self.started_ns = 0
        """`started` on the clock of the tape, in nanoseconds."""
        self.refusal: Refusal | None = None
        """The reason why it cannot be served; None if it can."""
        self._pieces: list[bytes] = [body] if body else []
        self._gathered: bytearray | None = None

    def add(self, piece: bytes) -> None:
        """Appends payload. Pieces are joined when the request is whole, or before there are too many small ones."""
        self.size += len(piece)
        self._pieces.append(piece)
        if len(self._pieces) == _PIECES:
            self._gathered = self._gathered or bytearray()
            self._gathered += b"".join(self._pieces)
            self._pieces.clear()

    def end_chunk(self) -> None:
        """Notes the end of a chunk. Ends beyond an absurd number of chunks are forgotten."""
        self.chunks = self.chunks or []
        if len(self.chunks) < _CHUNKS:
            self.chunks.append(self.size)

    def body(self) -> bytes:
        """The payload without transfer framing. It is stored once, however often it is read."""
        if self._gathered:
            self._pieces = [b"".join((self._gathered, *self._pieces))]
            self._gathered = None
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]


# -- refusals ----------------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """A call that is answered by the gateway itself."""

    code: int | None = None
    """JSON-RPC error code, if this refusal has one of its own."""
    data: Mapping[str, str] = MappingProxyType({})
    """Further members of a JSON-RPC error's `data`, for programs."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Additional headers of the answer."""

    def __init__(self, status: int, kind: str, message: str, field: str | None = None) -> None:
        """`status`: HTTP; `kind`: short reason for the span; `field`: the part of the request that is at fault."""
        super().__init__(message)
        self.status, self.kind, self.message, self.field = status, kind, message, field


class ClientFault(Refusal):
    """The request cannot be served as it is: 4xx."""


class GatewayFault(Refusal):
    """The gateway cannot serve it now: 500, 503."""


class UpstreamFault(Refusal):
    """The upstream could not be reached or did not answer in time: 502, 504."""


def internal_fault() -> Refusal:
    return GatewayFault(500, "internal", "the gateway failed on this call; its log says why")


def retry_after(value: str | None, longest_s: float) -> float | None:
    """Seconds to wait, at most `longest_s`; the header holds a number of them, or a date. None if it cannot be read."""
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            seconds = max(0.0, parsedate_to_datetime(value or "").timestamp() - time())
        except (ValueError, OverflowError):
            return None
    # NaN is not >= 0 either.
    return min(seconds, longest_s) if seconds >= 0 else None


# -- reading -----------------------------------------------------------------------------------------------------------


FoundHead = tuple[tuple[bytes, ...], list[bytes], int, RequestHead | None, int]
"""The head at the beginning of a read: its bytes without the values of `_VOLATILE`, these values, the offset of the
body, the same head as it was parsed before (None if it was not), and then the length of the body."""


class KnownHeads:
    """The heads that the clients of a listener have sent, by their bytes. Holds a bounded number of bytes."""

    def __init__(self) -> None:
        self._heads: dict[tuple[bytes, ...], RequestHead] = {}
        self._bytes = 0

    def find(self, data: bytes) -> FoundHead | None:
        """Find the head at the beginning of a read; None if it is not complete, or long, or behind an empty line."""
        end = data.find(b"\r\n\r\n", 0, _LONGEST_HEAD)
        if end < 0 or data[0] in b"\r\n":
            return None
        pieces = _VALUE.split(data[: end + 2])
        values = pieces[2::3]
        del pieces[2::3]
        key = (*pieces,)
        known, length = self._heads.get(key), 0
        if known is not None and known.length is not None:
            digits = values[known.length]
            known, length = (known, int(digits)) if digits.isdigit() and len(digits) <= _DIGITS else (None, 0)
        return key, values, end + 4, known, length

    def add(self, found: FoundHead, request: HttpRequest) -> None:
        """Remember the head of a whole request, if its body has a length (or there is none) and the connection goes
        on: HTTP/1.0 and other protocols end it."""
        if request.chunked or not request.keep_alive:
            return
        key, values, *_ = found
        headers, text = request.headers, b"".join(key)
        places = [(at, low, name) for at, (low, name, _) in enumerate(headers) if low in _VOLATILE]
        lines = text.count(b"\r\n") - 1
        if lines != len(headers) or text.count(b"\n") != lines + 1 or any(low == b"expect" for low, _, _ in headers):
            return
        if [headers[at][2] for at, *_ in places] != values or len({low for _, low, _ in places}) < len(places):
            return
        if key in self._heads:
            return
        self._bytes += len(text) + _BESIDE
        if self._bytes > _MOST_BYTES:
            self._heads, self._bytes = {}, len(text) + _BESIDE
        length = next((i for i, place in enumerate(places) if place[1] == b"content-length"), None)
        request.head = RequestHead(request.method, request.target, headers.copy(), request.hops, places, length)
        self._heads[key] = request.head


class RequestReader:
    """The requests of one connection."""

    __slots__ = ("_began", "_behind", "_epoch_ns", "_found", "_header_bytes", "_heads", "_missing", "_parser",
                 "_payload", "_read", "_request", "_request_bytes", "_unparsed", "expects", "in_head", "over",
                 "requests")  # fmt: skip

    def __init__(self, request_bytes: int, epoch_ns: int, heads: KnownHeads, header_bytes: int = HEADER_BYTES) -> None:
        """`request_bytes`, `header_bytes`: the largest body and head. `epoch_ns`: the zero of the monotonic clock on
        the clock of the tape. `heads`: those of all connections of the listener."""
        self.requests: list[HttpRequest] = []
        """Whole requests, oldest first. There are few: an empty deque would be the largest object of an idle
        connection."""
        self.expects = False
        """True while the client waits for a 100 (`Expect: 100-continue`)."""
        self.over = False
        """True after a refusal: further bytes are not read."""
        self._header_bytes = header_bytes
        self._request_bytes = request_bytes
        self._epoch_ns = epoch_ns
        self._parser = httptools.HttpRequestParser(self)
        self._request: HttpRequest | None = None
        self.in_head = False
        """True while the head of a request has begun and is not complete."""
        self._heads = heads
        self._found: FoundHead | None = None
        """The head of the request that is being parsed, if it came in one read."""
        self._missing = 0
        """Bytes that the body of a request with a known head still lacks."""
        self._behind: bytearray | None = None
        """Bytes that came behind a CONNECT or the opening of a WebSocket that is not yet answered; else None."""
        self._read = self._began = self._unparsed = self._payload = 0

    @property
    def unfinished(self) -> bool:
        """True while a request has begun and is not complete."""
        return self._request is not None

    def feed(self, data: bytes) -> None:
        """Parses the bytes of one read. Whole requests are then in `requests`."""
        if self._behind is not None:
            self._behind += data
            if len(self._behind) > self._header_bytes:
                self._refuse(400, "too much came before another protocol was agreed to", "request")
            return
        while data and not self.over:
            if self._missing and self._request is not None:
                request, data = self._request, self._add_body(self._request, data)
            elif self._request is not None:
                break
            else:
                self._found = found = self._heads.find(data)
                if found is None:
                    break
                _, values, start, known, length = found
                if known is None or length > self._request_bytes or start > self._header_bytes:
                    break
                self._request = request = HttpRequest(known, values, data[start : start + length])
                request.started = now = monotonic()
                request.started_ns, request.length = self._epoch_ns + int(now * 1e9), length
                self._missing = length - request.size
                data = data[start + length :]
            if not self._missing and not (self.requests and self._is_crowded(request)):
                self._request = None
                self.requests.append(request)
        if not data:
            return
        self._read = len(data)
        whole = len(self.requests)
        self._parse(data)
        if self._request is not None:
            self._bound(self._request, len(self.requests) > whole)

    def enter(self) -> None:
        """Called when a CONNECT is accepted: the bytes that follow are requests of the tunnel."""
        behind, self._behind = self._behind or b"", None
        self._parser = httptools.HttpRequestParser(self)
        if behind:
            self.feed(bytes(behind))

    def leave(self) -> bytes:
        """Called when a WebSocket is accepted: reads nothing further, and returns the bytes that came behind its
        opening."""
        behind, self._behind, self.over = bytes(self._behind or b""), None, True
        return behind

    def _add_body(self, request: HttpRequest, data: bytes) -> bytes:
        """Add bytes to a body of a known length. Returns the bytes behind the request."""
        missing = self._missing
        request.add(data[:missing])
        self._missing = max(0, missing - len(data))
        return data[missing:]

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            self._refuse(400, f"the request is not valid HTTP/1.1: {error}", "request")

    def _bound(self, request: HttpRequest, shared: bool) -> None:
        """Limits the head, and everything in a body besides its payload, to the size of a head. `shared`: this read
        also held the end of another request, and is only an upper bound of what belongs to this one.
        """
        if shared:
            self._began = self._read
        elif self.in_head or request.size + len(request.trailers) == self._payload:
            self._unparsed += self._read
            self._limit_head(self._unparsed)
        else:
            self._payload, self._unparsed = request.size + len(request.trailers), 0

    # -- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self.over:
            self._request = HttpRequest()
            self.in_head = True
            self._began = self._unparsed = self._payload = 0

    def on_url(self, url: bytes) -> None:
        """Adds a piece of the request target."""
        if self._request is not None:
            self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header, or a trailer after the body."""
        request = self._request
        if request is None:
            return
        if self.in_head:
            request.headers.append((name.lower(), name, value))
        else:
            request.trailers = request.trailers or []
            request.trailers.append((name.lower(), name, value))
            self._limit_head(_size(request.trailers))

    def on_headers_complete(self) -> None:
        """Reads what the head says of the body and the connection, and refuses heads that cannot be served."""
        request = self._request
        if request is None:
            return
        self.in_head = False
        request.method = self._parser.get_method().decode("ascii")
        request.started = monotonic()
        request.started_ns = self._epoch_ns + int(request.started * 1e9)
        version = self._parser.get_http_version()
        request.http10 = version != "1.1"
        hosts = 0
        for low, _, value in request.headers:
            if low in _WATCHED:
                self._note(request, low, value)
            elif low == b"host":
                hosts += 1
        if hosts > 1:
            self._refuse(400, "a request names one host, and this one has more than one Host header", "Host")
        elif version not in ("1.1", "1.0"):
            self._refuse(505, f"HTTP/{version} is not spoken here: use HTTP/1.1", "request")
        elif self._began + self._unparsed + self._read > self._header_bytes:
            self._limit_head(_line(request) + _size(request.headers))
        if request.length > self._request_bytes:
            self._too_large()
        self._unparsed = 0

    def _note(self, request: HttpRequest, low: bytes, value: bytes) -> None:
        if low == b"transfer-encoding":
            request.chunked = True
        elif low == b"content-length":
            request.length = int(value)
        elif low == b"upgrade":
            request.upgrade = self._parser.should_upgrade()
        elif low == b"expect":
            self.expects = value.lower() == b"100-continue" and not request.http10
        elif value.lower() not in (b"keep-alive", b"close"):
            # Framing headers stay even if Connection names them: a body without its length would be read as a request.
            request.hops |= {name.strip() for name in value.lower().split(b",")} - _FRAMING

    def on_body(self, piece: bytes) -> None:
        request = self._request
        if request is None:
            return
        if request.size + len(piece) > self._request_bytes:
            self._too_large()
        else:
            request.add(piece)

    def on_chunk_complete(self) -> None:
        """Notes the end of a chunk, which may have come in several pieces."""
        if self._request is not None:
            self._request.end_chunk()

    def on_message_complete(self) -> None:
        """Appends the request to `requests`, unless it asks for another protocol."""
        request = self._request
        if request is None or request.upgrade or request.method == "CONNECT":
            return
        if self.requests and self._is_crowded(request):
            return
        self._request, self.expects = None, False
        request.keep_alive = not request.http10 and self._parser.should_keep_alive()
        if (found := self._found) is not None:
            self._found = None
            self._heads.add(found, request)
        self.requests.append(request)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str, field: str) -> None:
        if self.over:
            return
        request, self._request = self._request or HttpRequest(), None
        request.keep_alive = False
        request.refusal = ClientFault(status, "refused", message, field)
        self.over, self.expects, self.in_head = True, False, False
        self.requests.append(request)

    def _is_crowded(self, request: HttpRequest) -> bool:
        """Refuses a request, and returns True, if too much waits before it on this connection."""
        if len(self.requests) == _PIPELINED:
            self._refuse(400, f"{_PIPELINED} requests wait on this connection: await their answers first", "request")
        elif request.size + sum(waiting.size for waiting in self.requests) > self._request_bytes:
            self._too_large()
        return self.over

    def _limit_head(self, size: int) -> None:
        limit = self._header_bytes
        if size > limit:
            self._refuse(431, f"the request head is larger than {limit} bytes", "headers")

    def _too_large(self) -> None:
        limit = self._request_bytes
        self._refuse(413, f"the request body is larger than limits.request_bytes = {limit}", "body")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Ignores an offer of another HTTP, as RFC 9110 allows. A CONNECT or a WebSocket becomes a request: whether it
        opens is decided where calls are routed."""
        request = self._request
        if request is None:
            return
        offered = b",".join(value.lower() for low, _, value in request.headers if low == b"upgrade")
        request.websocket = request.method != "CONNECT" and b"websocket" in offered
        if request.websocket or request.method == "CONNECT":
            self._request, self._behind = None, bytearray(rest)
            request.keep_alive = not request.websocket
            self.requests.append(request)
        else:
            kept = [header for header in request.headers if header[0] not in (b"upgrade", b"connection")]
            lines = b"".join([b"%b: %b\r\n" % (name, value) for _, name, value in kept])
            head = b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), request.target, lines)
            self._parser = httptools.HttpRequestParser(self)
            self._parse(head + rest)


def _line(request: HttpRequest) -> int:
    """The length of the request line, `METHOD target HTTP/1.1 CRLF`."""
    return len(request.method) + len(request.target) + len("  HTTP/1.1\r\n")


def _size(headers: list[tuple[bytes, bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for _, name, value in headers)
