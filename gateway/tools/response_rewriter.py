"""Answers of a server that may be changed before they pass: a document as a whole, a stream event by event.

Nothing passes unread: an answer with a content encoding, and one that is too large to be held, is refused. Sans-I/O.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from penstock.gateway.tools.sessions import McpSession, ResponseHandlers, TransformResult
from penstock.gateway.wire.dialects import sse
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, error_of, messages
from penstock.gateway.wire.http.request import Refusal, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import IDENTITY, LIMIT, BufferedFraming, Framing, StreamFraming, encode_chunk


def rewrite_framing(changer: ResponseRewriter, connection: UpstreamConnection, chunked: bool) -> Framing | None:
    """The framing of an answer; None for one without a body. `chunked`: True if the client gets it in chunks. Raises
    `UpstreamFault` if the answer cannot be read."""
    if connection.status in (202, 204):
        return None
    if connection.status >= 300:
        message = "the server sends its clients elsewhere, and what they get there could not be read here"
        raise UpstreamFault(502, "redirected", f"{message}: give the gateway the URL that answers")
    if connection.encoding not in IDENTITY:
        named = (connection.encoding or b"").decode("latin-1")
        message = f"the server answered with content-encoding {named[:40]!r} although none was asked for"
        raise UpstreamFault(502, "unreadable", f"{message}: its answers must be read here, and this one cannot be")
    if connection.events and not connection.length_known:
        return StreamFraming(changer, chunked, LIMIT, refuses=True)
    return BufferedFraming(changer, chunked, LIMIT, connection.events, refuses=True)


def refusal_response(id: bytes, refusal: Refusal) -> bytes:
    """The JSON-RPC error that answers a refused request."""
    return error_of(id, refusal.status, refusal.message, refusal.kind, refusal.field, refusal.code, refusal.data)


class ResponseRewriter:
    """Changes passing answers. `document` and `event` are those of `AnswerRewriter`."""

    ids = False

    def __init__(
        self, interests: Callable[[], Iterable[ResponseHandlers]], named: Callable[[bytes], bytes] | None
    ) -> None:
        """`interests`: those of the exchange and of its session at the time when an answer passes; `named`: changes the
        data of a first event that is no message but names a path (HTTP with SSE)."""
        self._interests, self._named = interests, named
        self.last_refusal: Refusal | None = None
        """The last refusal of an answer."""
        self.span_attributes: dict[str, str] = {}
        """Attributes of the span that describe the changes."""

    def document(self, body: bytes) -> bytes:
        """Changes an answer in one piece. Returns the same object if nothing changes."""
        read = messages(body)
        made = [self._made(one) for one in read]
        if all(new is one.raw for new, one in zip(made, read, strict=True)):
            return body
        return b"[%b]" % b",".join(made) if body.lstrip()[:1] == b"[" else made[0]

    def event(self, data: bytes) -> bytes:
        """Changes the data of an event. Returns the same object if nothing changes."""
        named, self._named = self._named, None
        if named is not None and data.lstrip()[:1] not in (b"{", b"["):
            return named(data)
        return self.document(data)

    def _made(self, one: JsonRpcMessage) -> bytes:
        try:
            return self._changed(one)
        except Refusal as refusal:
            self.last_refusal = refusal
            return refusal_response(one.id or b"null", refusal)

    def _changed(self, one: JsonRpcMessage) -> bytes:
        raw = one.raw
        if one.kind == "answer":
            found = next(filter(None, (kept.transforms_of(one.id) for kept in self._interests())), None)
            for change in found or next(filter(None, (kept.default_transforms for kept in self._interests())), ()):
                made = change(raw)
                if isinstance(made, TransformResult):
                    self.span_attributes |= made.attributes
                    made = made.answer
                raw = made
        elif one.kind == "unreadable" and raw.strip() and any(self._interests()):
            raise UpstreamFault(
                502, "unreadable", "the server sent a message that cannot be read, so it is not passed on"
            )
        return raw


# Reads the messages of a stream of events while it passes to its client. Sans-I/O.
#
# Held and unpacked bytes are limited: beyond the limit the stream is read no further. Its bytes pass.

LONGEST: Final = 32 << 20
"""Largest event that is read, in bytes."""
UNPACKED: Final = 8 << 20
"""Most bytes of one read after its content encoding is removed."""
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_PLAIN: Final = (None, b"identity")
_PACKED: Final = (b"gzip", b"deflate")
_BLANK: Final = (b"\n\n", b"\n\r\n", b"\r\r")


class McpStreamReader:
    """The reader of one stream."""

    __slots__ = ("_begun", "_events", "_packed", "_resumes", "_session", "resumable")

    def __init__(self, encoding: bytes | None, session: McpSession | None = None, resumes: bool = False) -> None:
        """`encoding`: content encoding; a stream with an unknown one is not read. `resumes`: True if the client
        continues an earlier stream of the session; the server then repeats the messages that the client has missed."""
        self._events: sse.SseParser | None = sse.SseParser() if encoding in (*_PLAIN, *_PACKED) else None
        self._packed = zlib.decompressobj(_GZIP_OR_ZLIB) if encoding in _PACKED else None
        self._session, self._resumes = session, resumes
        self._begun = 0
        """Bytes of the incomplete event."""
        self.resumable = False
        """True if the stream has numbered its events, so that another stream may continue it."""

    @property
    def unread(self) -> bool:
        """True if messages pass that cannot be read."""
        return self._events is None

    def feed(self, pieces: Iterable[bytes]) -> Iterator[JsonRpcMessage]:
        """The messages that are complete now, without those of the server that passed in an earlier stream."""
        for event in self._whole(pieces):
            self.resumable = self.resumable or bool(event.id)
            for one in messages(event.data.encode()) if event.type == "message" else ():
                if one.kind == "answer" or not self._repeats(event.id, one):
                    yield one

    def _whole(self, pieces: Iterable[bytes]) -> list[sse.ServerSentEvent]:
        if self._events is None:
            return []
        data = b"".join(pieces)
        try:
            if self._packed is not None:
                data = self._packed.decompress(data, UNPACKED)
        except zlib.error:
            self._events = None
            return []
        found = self._events.feed(data)
        blank = max(map(data.rfind, _BLANK))
        self._begun = len(data) - blank if blank >= 0 else self._begun + len(data)
        if self._begun > LONGEST or (self._packed is not None and self._packed.unconsumed_tail):
            self._events = None
        return found

    def _repeats(self, event: str, one: JsonRpcMessage) -> bool:
        if not event or self._session is None:
            return False
        return self._session.is_repeated(event, one.raw) and self._resumes


# Replaces the path for messages in the first event of HTTP with SSE by one of the gateway's own. Sans-I/O.
#
# A stream of streamable HTTP begins with another event, or stays silent for hours. So bytes are held back only while
# they may be the beginning of that event; after that everything passes unchanged.

_FIRST: Final = re.compile(rb"\A(?:\xef\xbb\xbf)?event: ?endpoint(?:\r\n|\r|\n)data: ?([^\r\n]*)(?:\r\n|\r|\n){2}")
_NAME: Final = (b"event: endpoint", b"event:endpoint", b"\xef\xbb\xbfevent: endpoint", b"\xef\xbb\xbfevent:endpoint")
_LONGEST: Final = 8192
"""Largest event that may name a path, in bytes."""


class EndpointFraming:
    """The framing of one stream."""

    __slots__ = ("_changed", "_held", "_named", "_plain", "_raw")
    ids = False

    def __init__(self, named: Callable[[str], str | None], plain: bool) -> None:
        """`named`: returns the gateway's path for one of the server's, or None to leave it; `plain`: True if the client
        takes no chunks (HTTP/1.0)."""
        self._named, self._plain = named, plain
        self._held: bytes | None = b""
        """Payload that may begin the event; None once that is settled."""
        self._raw = b""
        """`_held` with its transfer framing."""
        self._changed = False

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Returns the head at once, with what `go_on` passes."""
        return head + (self.go_on(connection, raw) if raw else b"")

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Returns the bytes of a read that go to the client."""
        payload = b"".join(connection.pieces)
        if self._held is None:
            return self._framed(connection, payload) if self._changed or self._plain else raw
        self._held += payload
        self._raw += raw
        held, found = self._held, _FIRST.match(self._held)
        if found is not None:
            return self._settle(connection, found)
        if connection.done or len(held) > _LONGEST or not _may_begin(held):
            self._held = None
            return held if self._plain else self._raw
        return b""

    def _settle(self, connection: UpstreamConnection, found: re.Match[bytes]) -> bytes:
        held, raw = self._held or b"", self._raw
        self._held, self._raw = None, b""
        ours = self._named(found[1].decode("utf-8", "replace"))
        if ours is None:
            return held if self._plain else raw
        self._changed = True
        return self._framed(connection, held[: found.start(1)] + ours.encode() + held[found.end(1) :])

    def _framed(self, connection: UpstreamConnection, payload: bytes) -> bytes:
        return payload if self._plain or not connection.chunked else encode_chunk(connection, payload)

    def broken(self) -> bytes:
        """Returns nothing: held bytes are an incomplete event."""
        return b""


def _may_begin(held: bytes) -> bool:
    return any(held.startswith(name) or name.startswith(held) for name in _NAME)
