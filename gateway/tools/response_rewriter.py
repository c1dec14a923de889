"""Answers of a server that may be changed before they pass: a document as a whole, a stream event by event.

Nothing passes unread: an answer with a content encoding, and one that is too large to be held, is refused. Sans-I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.gateway.tools.response_handlers import ResponseHandlers, TransformResult
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, error_of, messages
from penstock.gateway.wire.http.errors import Refusal, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import IDENTITY, LIMIT, BufferedFraming, Framing, StreamFraming


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
