"""Spans of messages in a stream that are recorded apart from the exchange that carried them.

Message     a request or a notification of the server: a span of its own
Unanswered  a request of the client whose answer comes in another exchange
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, outcome, request_facts
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.redaction import url as redact_url

SENDER = "penstock.mcp.sender"
"""Attribute of messages that the server has sent on its own."""
_OVERHEAD = 1024


class ServerMessageRecord:
    """A request or a notification of the server in a stream, with the client's answer, if any."""

    __slots__ = ("_entry", "_epoch_ns", "_of", "_recorder", "_redactor", "_sent", "_started", "answer", "end_ns",
                 "error", "status")  # fmt: skip

    def __init__(
        self, sent: JsonRpcMessage, of: CallRecord, recorder: Recorder, redactor: Redactor, epoch_ns: int, now: float
    ) -> None:
        """`of`: the exchange in whose stream it came; `now`: its time, in seconds of the monotonic clock."""
        self._sent, self._of, self._recorder, self._redactor = sent, of, recorder, redactor
        self._epoch_ns = epoch_ns
        self._started = epoch_ns + int(now * 1e9)
        self._entry: SpanEntry | None = None
        self.answer = b""
        self.status = "open"
        self.error: str | None = None
        self.end_ns: int | None = None

    def begin(self) -> None:
        """Announces a request, which is open until it is answered."""
        self._recorder.announce(self)

    def finish(self) -> None:
        """Ends a notification at once."""
        self._end("ok", None, self._started)

    def answered(self, answer: bytes, now: float) -> None:
        """Called with the client's answer."""
        self.answer = answer
        self._end("ok", None, self._epoch_ns + int(now * 1e9))

    def given_up(self) -> None:
        """Called when the client will not answer."""
        self._end("error", "unanswered", self._started)

    def _end(self, status: str, error: str | None, end_ns: int) -> None:
        self.status, self.error, self.end_ns = status, error, end_ns
        self._recorder.put(self)

    @property
    def weight(self) -> int:
        """Bytes that it holds in memory."""
        return _OVERHEAD + len(self._sent.raw) + len(self.answer)

    def entry(self, final: bool) -> SpanEntry | None:
        """The message as it goes to the tape."""
        if not final and self.status != "open":
            return None
        entry = self._entry = self._entry or self._opened()
        if final:
            self._close(entry)
        return entry

    def _opened(self) -> SpanEntry:
        of, about = self._of, request_facts(self._sent)
        address = of.call.address
        entry = SpanEntry(address.rollout, address.attempt, address.origin, address.mode)
        entry.kind, entry.start_ns, entry.agent = "mcp", self._started, address.agent
        entry.name = " ".join(filter(None, (self._sent.method, about.target)))
        entry.dialect, entry.method, entry.path = of.call.dialect.name, of.request.method, redact_url(of.call.path)
        entry.upstream = None if of.pool is None else of.pool.name
        entry.parent_id, entry.stream = of.span_id, False
        entry.attributes = {**of.attributes, **about.attributes, SENDER: "server"}
        entry.request_bytes = len(self._sent.raw)
        entry.body = self._body(entry)
        return entry

    def _close(self, entry: SpanEntry) -> None:
        entry.status, entry.error, entry.end_ns = self.status, self.error, self.end_ns
        entry.response_bytes = len(self.answer)
        if self.answer:
            failed, entry.finish, attributes = outcome(self.answer)
            if failed is not None:
                entry.status, entry.error = "error", failed
            entry.attributes = {**(entry.attributes or {}), **attributes}
        entry.body = self._body(entry)

    def _body(self, entry: SpanEntry) -> StoredBody:
        """The bytes of the message without secrets; masks these in the entry's other fields, too."""
        of = self._of
        secrets = self._redactor.secrets(of.request.headers, of.request.target.decode("latin-1")).for_call()
        url = "" if of.pool is None else secrets.text(redact_url(of.pool.url(of.call.path)))
        body = StoredBody(url, b"", secrets.hide(self._sent.raw), b"", secrets.hide(self.answer), b"", [])
        entry.path, entry.name, entry.error = (
            secrets.text(entry.path),
            secrets.text(entry.name or ""),
            (None if entry.error is None else secrets.text(entry.error)),
        )
        entry.attributes = {**secrets.json(entry.attributes or {}), **secrets.span_attributes}
        return body


class PendingExchangeRecord:
    """The record of an exchange that has ended without the answer to its request."""

    __slots__ = ("_done", "_epoch_ns", "_record", "_recorder", "_without")

    def __init__(self, record: CallRecord, recorder: Recorder, epoch_ns: int, done: Callable[[bool], None]) -> None:
        """`record`: with the status that it has if no answer comes; `done`: called when it is on the tape."""
        self._record, self._recorder, self._epoch_ns, self._done = record, recorder, epoch_ns, done
        self._without: tuple[str, str | None] = record.status, record.error
        record.status = "open"
        recorder.announce(record)

    @property
    def weight(self) -> int:
        """Bytes that it holds in memory."""
        return self._record.weight

    def answered(self, answer: bytes, now: float) -> None:
        """Called when the answer came in another exchange: appends it to the recorded stream of this one, or replaces
        the recorded acceptance (202) by it."""
        record = self._record
        if record.stream:
            answer = b"data: %b\n\n" % answer.replace(b"\n", b"\ndata: ")
        else:
            record.pieces, record.marks = [], []
        record.add_pieces([answer], now)
        record.status, record.error = "ok", None
        record.end_ns = self._epoch_ns + int(now * 1e9)
        self._recorder.put(record, self._done)

    def given_up(self) -> None:
        """Called when no answer will come."""
        self._record.status, self._record.error = self._without
        self._recorder.put(self._record, self._done)


def with_session_attributes(attributes: dict[str, Any], session: str | None, protocol: str | None) -> dict[str, Any]:
    """The attributes of a span with those of its session."""
    more = {"mcp.session.id": session, "mcp.protocol.version": protocol}
    return attributes | {name: value for name, value in more.items() if value is not None}
