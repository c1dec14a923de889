"""What is known of one call. The loop fills it in while the call runs; it becomes the call's entry on the tape.

`entry` runs on the recorder's thread: it draws the head's facts out of the bodies and masks secrets. A parser that
fails there costs the facts, never the bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gateway import trace
from gateway.admission import Admitted
from gateway.capture.asking import ATTRIBUTE as CAPTURED
from gateway.codec import Body
from gateway.dialects.base import Facts
from gateway.dialects.reading import decode_body
from gateway.link import Headers
from gateway.model import Side
from gateway.redact import Redactor
from gateway.redact import url as redact_url
from gateway.request import Request
from gateway.store import Entry
from gateway.upstream import Pool

_log = logging.getLogger("penstock.recorder")
_OVERHEAD = 1024
PROMPTS = "penstock.prompts.sha256"
"""Attribute of a call: the hashes of its prompts as the agent sent them, by resource."""


class Record:
    """One call, as far as it has come."""

    __slots__ = (
        "_entry",
        "_limit",
        "_redactor",
        "_size",
        "arm",
        "attributes",
        "body",
        "call",
        "captured",
        "encoding",
        "end_ns",
        "error",
        "first_byte_ns",
        "http_status",
        "marks",
        "pieces",
        "pool",
        "request",
        "response_bytes",
        "response_headers",
        "retell",
        "sent",
        "sides",
        "status",
        "stream",
        "texts",
        "trailers",
        "truncated",
        "versions",
    )

    def __init__(self, call: Admitted, request: Request, redactor: Redactor, limit: int) -> None:
        """`limit`: most bytes of the response that are kept."""
        self.call = call
        self.request = request
        self.body = call.body
        """As it goes upstream."""
        self.pool: Pool | None = None
        self.sent = b""
        """Header lines as they went upstream, masked."""
        self.http_status: int | None = None
        self.response_headers: Headers = []
        self.trailers: Headers = []
        self.encoding: bytes | None = None
        self.stream = False
        self.pieces: list[bytes] = []
        self.marks: list[int] = []
        self.response_bytes = 0
        self.truncated = False
        self.first_byte_ns: int | None = None
        self.status = "open"
        self.error: str | None = None
        self.end_ns: int | None = None
        self.versions: dict[str, str] = {}
        """Versions of resources that it was sent with, by name."""
        self.arm: str | None = None
        self.texts: dict[str, str] = {}
        """SHA-256 of each prompt as the agent sent it."""
        self.captured: tuple[str, ...] = ()
        """Names of the fields of the body that the gateway has added."""
        self.attributes: Mapping[str, str] = {}
        """More attributes of its span."""
        self.retell: Callable[[bytes], bytes] | None = None
        """How another body of its agent's goes upstream; None when as it is."""
        self.sides: list[Side] = []
        """Parties that were spoken with in another wire format, as far as they have come."""
        self._size = 0
        self._limit = limit
        self._redactor = redactor
        self._entry: Entry | None = None

    @property
    def weight(self) -> int:
        """Bytes that it holds in memory: the bodies, and once more the request's, which is a base for the next."""
        sides = sum(2 * len(side.request_body) + len(side.response_body) for side in self.sides)
        return _OVERHEAD + 2 * len(self.body) + self._size + sides

    def arrived(self, pieces: list[bytes], now: float) -> None:
        """Notes what one read brought, by reference."""
        elapsed = int((now - self.request.started) * 1e9)
        if self.first_byte_ns is None:
            self.first_byte_ns = elapsed
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        self.response_bytes += size
        if self._size + size <= self._limit and not self.truncated:
            self._size += size
            self.pieces += pieces
            self.marks += (elapsed // 1000, size)
        else:
            self.truncated = True

    def answered(self, status: int, body: bytes) -> None:
        """Notes an answer of the gateway's own."""
        self.http_status = status
        self.pieces, self.marks = [body], []
        self._size = self.response_bytes = len(body)

    def response(self) -> bytes:
        """The response body without content encoding, as far as it can be read."""
        body = b"".join(self.pieces)
        return body if self.encoding is None else decode_body(body, self.encoding.decode("latin-1"))[0]

    @property
    def sequence(self) -> int:
        """Its place in its attempt; 0 until it is on the tape."""
        return 0 if self._entry is None else self._entry.sequence

    # -- on the recorder's thread ------------------------------------------------------------------------------------

    def entry(self, final: bool) -> Entry | None:
        """The call as it goes to the tape, the same object every time; None for an announcement that comes too late."""
        if not final and self.status != "open":
            return None
        entry = self._entry
        if entry is None:
            entry = self._entry = self._opened()
        entry.versions, entry.arm = self.versions or None, self.arm
        entry.attributes = {
            **self.attributes,
            **({PROMPTS: self.texts} if self.texts else {}),
            **({CAPTURED: list(self.captured)} if self.captured else {}),
        } or None
        if final:
            self._close(entry)
        else:
            entry.model = self.call.model
        entry.body = self._bytes(b"".join(self.pieces) if final else b"")
        return entry

    def _opened(self) -> Entry:
        call, request = self.call, self.request
        address = call.address
        entry = Entry(address.rollout, address.attempt, address.origin, address.mode)
        entry.start_ns, entry.agent = request.started_ns, address.agent
        entry.dialect, entry.method = call.dialect.name, request.method
        entry.path, entry.request_bytes = redact_url(call.path), len(self.body)
        for low, _, value in request.headers:
            if low == b"traceparent" and (found := trace.parse(value.decode("latin-1"))):
                entry.trace_id, entry.parent_id = found
            elif low == b"x-stainless-retry-count" and value not in (b"0", b""):
                entry.retried = True
        return entry

    def _close(self, entry: Entry) -> None:
        facts, call = self._facts(), self.call
        # An alias has replaced the name that was asked for.
        named = facts.model if self.body is call.body else None
        entry.model = named or call.model
        # It may have been announced before it was translated.
        entry.dialect, entry.path = call.dialect.name, redact_url(call.path)
        entry.status, entry.error = self.status, self.error
        entry.end_ns, entry.first_byte_ns = self.end_ns, self.first_byte_ns
        entry.http_status, entry.stream = self.http_status, self.stream
        entry.upstream = None if self.pool is None else self.pool.name
        entry.model_served, entry.response_id, entry.finish = facts.model_served, facts.response_id, facts.finish
        # What the gateway itself has answered used up nothing here.
        entry.usage = None if self.pool is None else facts.usage
        entry.tool_calls, entry.choices = facts.tool_calls, facts.choices
        entry.request_bytes = len(self.body)
        entry.response_bytes, entry.truncated = self.response_bytes, self.truncated

    def _facts(self) -> Facts:
        try:
            asked = self.call.asked if self.body is self.call.body else None
            return self.call.dialect.facts(self.body, self.response(), self.stream, asked)
        except Exception:
            # The bytes are what happened; what could not be read out of them now can be read later.
            _log.exception("a call of %s could not be read", self.call.address.rollout)
            return Facts(self.call.model)

    def _bytes(self, response: bytes) -> Body:
        block, pool = self._redactor.block, self.pool
        return Body(
            "" if pool is None else redact_url(pool.url(self.call.path)),
            self.sent,
            self.body,
            block(self.response_headers),
            response,
            block(self.trailers),
            list(self.marks),
            list(self.sides),
        )
