"""Answers of a server that may be changed before they pass: a document when it is whole, a stream event by event.

Nothing passes unread: an answer with a content encoding, and one that is too large to be held, is refused. Sans-I/O.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final

from penstock.gateway.calls.capture.framing import LIMIT, Framing, Stream, Whole
from penstock.gateway.dialects.mcp import Sent, error_of, messages
from penstock.gateway.http.errors import Refusal, UpstreamFault
from penstock.gateway.http.upstream_connection import UpstreamConnection
from penstock.gateway.mcp.interests import Interests

_IDENTITY: Final = (None, b"identity")


def changed(changer: Changer, connection: UpstreamConnection, chunked: bool) -> Framing | None:
    """The way of an answer; None for one without a body. `chunked`: whether the client gets it in chunks. Raises
    `UpstreamFault` for one that cannot be read.
    """
    if connection.status in (202, 204):
        return None
    if connection.encoding not in _IDENTITY:
        named = (connection.encoding or b"").decode("latin-1")
        message = f"the server answered with content-encoding {named[:40]!r} although none was asked for"
        raise UpstreamFault(502, "unreadable", f"{message}: its answers must be read here, and this one cannot be")
    if connection.events and not connection.length_known:
        return _Bounded(Stream(changer, chunked, sys.maxsize))
    return _Bounded(Whole(changer, connection.events, chunked, sys.maxsize))


class Changer:
    """Changes the answers that pass. `document` and `event` are those of `capture.answer.Cleaner`."""

    ids = False

    def __init__(self, interests: Callable[[], Iterable[Interests]], named: Callable[[bytes], bytes] | None) -> None:
        """`interests`: those of the exchange and of its session, as they are when an answer passes; `named`: changes
        the data of a first event that is no message but names a path (HTTP with SSE)."""
        self._interests, self._named = interests, named
        self.refused: Refusal | None = None
        """Why an answer was refused, the last that was."""

    def document(self, body: bytes) -> bytes:
        """An answer in one piece, the same object when it stays as it is."""
        read = messages(body)
        made = [self._made(one) for one in read]
        if all(new is one.raw for new, one in zip(made, read, strict=True)):
            return body
        return b"[%b]" % b",".join(made) if body.lstrip()[:1] == b"[" else made[0]

    def event(self, data: bytes) -> bytes:
        """The data of an event, the same object when it stays as it is."""
        named, self._named = self._named, None
        if named is not None and data.lstrip()[:1] not in (b"{", b"["):
            return named(data)
        return self.document(data)

    def _made(self, one: Sent) -> bytes:
        try:
            return self._changed(one)
        except Refusal as refusal:
            self.refused = refusal
            return error_of(one.id or b"null", refusal.status, refusal.message, refusal.kind, refusal.field)

    def _changed(self, one: Sent) -> bytes:
        raw = one.raw
        if one.kind == "answer":
            for change in next(filter(None, (kept.changes(one.id) for kept in self._interests())), ()):
                raw = change(raw)
        elif one.kind == "unreadable" and raw.strip() and any(self._interests()):
            raise UpstreamFault(
                502, "unreadable", "the server sent a message that cannot be read, so it is not passed on"
            )
        return raw


class _Bounded:
    """A way that holds back no more than `LIMIT` bytes."""

    ids = False

    def __init__(self, framing: Stream | Whole) -> None:
        self._framing = framing

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """What the client gets of the head and of the bytes in the same read."""
        return self._checked(self._framing.begin(connection, head, raw))

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """What the client gets of a read."""
        return self._checked(self._framing.go_on(connection, raw))

    def broken(self) -> bytes:
        """What the client still gets of an answer that breaks off."""
        return self._framing.broken()

    def _checked(self, out: bytes) -> bytes:
        if self._framing.held > LIMIT:
            message = f"an answer of more than {LIMIT} bytes cannot be read here, and so is not passed on"
            raise UpstreamFault(502, "unreadable", message)
        return out
