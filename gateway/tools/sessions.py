"""Open requests of sessions, whose answers come in another exchange or never, and who watches or changes these answers.

Up to revision 2025-11-25 a server may end the stream of a request before it has answered; the client then opens another
stream and gets the answer there. In the older HTTP with SSE every answer comes that way. And the server sends requests,
too (sampling, elicitation, roots): the client's answer is a POST of its own. A `McpSession` keeps both kinds until the
answer passes. It is found by the id that the server gave it; without one, no answer can come in another exchange.

Everything here happens in the event loop. Nothing is on the tape twice: a kept request is handed to the recorder once,
by `PendingRequest.answered` or `PendingRequest.given_up`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import orjson

from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, outcome, request_facts
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.redaction import url as redact_url

OPEN: Final = 100_000
"""Most sessions that are remembered, the newest."""
PATIENCE_S: Final = 3600.0
"""Seconds for which an answer may still come in another exchange."""
OWED: Final = 1000
"""Most requests of one side that a session keeps, the newest; older ones are given up."""
OWED_BYTES: Final = 64 << 20
"""Most bytes of them."""
UNWANTED: Final = 1000
"""Most requests of one session that are remembered as cancelled, the newest."""
EARLY: Final = 8
"""Most answers of one session that are kept before their exchanges have ended, the newest."""
EARLY_BYTES: Final = 8 << 20
"""Most bytes of them."""
PASSED: Final = 256
"""Most messages of one session that are remembered, the newest, to recognise those that a server repeats."""
_LONG: Final = 128
"""Longest id that is kept unhashed, in bytes."""


class PendingRequest(Protocol):
    """A request without its answer."""

    @property
    def weight(self) -> int:
        """Bytes that it holds in memory."""
        ...

    def answered(self, answer: bytes, now: float) -> None:
        """Called when the answer came in another exchange: the request goes to the tape as answered."""
        ...

    def given_up(self) -> None:
        """Called when no answer will come: the request goes to the tape as it is."""
        ...


_PendingRequests = dict[bytes, tuple[PendingRequest, float]]
T = TypeVar("T")
_NOTHING: Final[dict[Any, Any]] = {}
"""Stands for each empty collection of a session, because there may be very many. Nothing is ever put into it."""


class McpSession:
    """One session of one server."""

    __slots__ = ("_asked", "_asking", "_early", "_passed", "_unwanted", "interests", "rollout")

    def __init__(self, rollout: str) -> None:
        self.rollout = rollout
        """The rollout of the call that opened it; later calls that name none belong to it, too."""
        self.interests = ResponseHandlers()
        """Watches and changes of the answers to its requests."""
        self._asked: _PendingRequests = _NOTHING
        """Requests of the client, by id, and when their exchanges ended."""
        self._asking: _PendingRequests = _NOTHING
        """Requests of the server, by id, and since when they are open."""
        self._early: dict[bytes, bytes] = _NOTHING
        """Answers that came before the exchanges of their requests had ended, by id."""
        self._unwanted: dict[bytes, None] = _NOTHING
        """Requests that the client has cancelled, by id."""
        self._passed: dict[tuple[str, int], None] = _NOTHING
        """The number and the hash of messages that the server has sent in numbered events."""

    def cancel(self, id: bytes) -> None:
        """Called when the client cancels a request."""
        self._unwanted = _newest(self._unwanted, id, UNWANTED)

    def is_cancelled(self, ids: Iterable[bytes]) -> bool:
        """True if the client has cancelled one of these requests."""
        return bool(self._unwanted) and not self._unwanted.keys().isdisjoint(ids)

    def is_repeated(self, event: str, raw: bytes) -> bool:
        """True if the server has sent this message before, in an event of this number. Remembers the message."""
        key = event, hash(raw)
        known = key in self._passed
        self._passed = _newest(self._passed, key, PASSED)
        return known

    def keep_client_request(self, id: bytes, request: PendingRequest) -> None:
        """Keeps a request of the client whose exchange has ended without the answer, unless the answer has come
        already."""
        if (early := self._early.pop(id, None)) is not None:
            request.answered(early, monotonic())
        else:
            self._asked = self._replace(self._asked, id, request)

    def keep_server_request(self, id: bytes, request: PendingRequest) -> None:
        """Keeps a request of the server."""
        self._asking = self._replace(self._asking, id, request)

    @staticmethod
    def _replace(kept: _PendingRequests, id: bytes, request: PendingRequest) -> _PendingRequests:
        kept = kept or {}
        if (before := kept.pop(id, None)) is not None:
            before[0].given_up()
        kept[id] = request, monotonic()
        while len(kept) > 1 and (len(kept) > OWED or sum(one.weight for one, _ in kept.values()) > OWED_BYTES):
            kept.pop(next(iter(kept)))[0].given_up()
        return kept

    def settle_client_request(self, id: bytes, answer: bytes) -> bool:
        """Called with an answer of the server; False if no kept request waits for it."""
        return self._settle(self._asked, id, answer)

    def keep_early_answer(self, id: bytes, answer: bytes) -> None:
        """Keeps an answer for which no kept request waits yet: in HTTP with SSE a server may send it before it accepts
        the POST with the request."""
        self._early = self._early or {}
        self._early[id] = answer
        while len(self._early) > EARLY or sum(map(len, self._early.values())) > EARLY_BYTES:
            self._early.pop(next(iter(self._early)))

    def settle_server_request(self, id: bytes, answer: bytes) -> bool:
        """Called with an answer of the client; False if the server has not asked."""
        return self._settle(self._asking, id, answer)

    @staticmethod
    def _settle(kept: _PendingRequests, id: bytes, answer: bytes) -> bool:
        found = kept.pop(id, None)
        if found is not None:
            found[0].answered(answer, monotonic())
        return found is not None

    def withdraw(self, id: bytes, by_client: bool) -> PendingRequest | None:
        """Removes and returns a request that its sender has cancelled."""
        found = (self._asked if by_client else self._asking).pop(id, None)
        return None if found is None else found[0]

    def give_up(self, before: float) -> None:
        """Gives up requests that are kept since before that moment, in seconds of the monotonic clock."""
        for kept in (self._asked, self._asking):
            for id in [id for id, (_, since) in kept.items() if since <= before]:
                kept.pop(id)[0].given_up()

    @property
    def has_pending(self) -> bool:
        """True if a request is kept."""
        return bool(self._asked or self._asking)


class SessionTable:
    """All sessions of all servers, by server and the id that it gave."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, bytes], McpSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def find(self, server: str, id: bytes) -> McpSession | None:
        """The session of that id; None if it is unknown."""
        return self._open.get(_key(server, id))

    def open(self, server: str, id: bytes, rollout: str) -> McpSession:
        """The session of that id; a new one of this rollout if it is unknown, as after a restart."""
        key = _key(server, id)
        session = self._open.get(key)
        if session is None:
            session = self._open[key] = McpSession(rollout)
            if len(self._open) > OPEN:
                _, oldest = self._open.popitem(last=False)
                oldest.give_up(monotonic())
        else:
            self._open.move_to_end(key)
        return session

    def end(self, server: str, id: bytes) -> None:
        """Called when the client has ended the session, or the server does not know it."""
        session = self._open.pop(_key(server, id), None)
        if session is not None:
            session.give_up(monotonic())

    def sweep(self, now: float) -> None:
        """Gives up requests that are kept for too long."""
        for session in self._owing():
            session.give_up(now - PATIENCE_S)

    def close(self) -> None:
        """Called when the gateway stops: all kept requests go to the tape as they are."""
        for session in self._owing():
            session.give_up(monotonic())

    def _owing(self) -> Iterator[McpSession]:
        return iter([session for session in self._open.values() if session.has_pending])


def _key(server: str, id: bytes) -> tuple[str, bytes]:
    """Hashes long ids: a client may send ids of any length, which no server has given."""
    return server, id if len(id) <= _LONG else sha256(id).digest()


def _newest(kept: dict[T, None], key: T, limit: int) -> dict[T, None]:
    """Adds a key, and forgets the oldest above the limit."""
    kept = kept or {}
    kept.pop(key, None)
    kept[key] = None
    if len(kept) > limit:
        del kept[next(iter(kept))]
    return kept


# -- spans of messages in a stream that are recorded apart from the exchange that carried them ------------------------
#
# A `ServerMessageRecord` is a request or a notification of the server: it has a span of its own. A
# `PendingExchangeRecord` is an exchange whose request is answered in another one.

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


# -- watches and changes of answers that have not come yet, by the ids of their requests ------------------------------
#
# An answer may come as a document, in the stream of its exchange, or in a later stream of its session, and a server
# may send it again there. So the interests of an exchange are those of its session, too.

ResponseObserver = Callable[[bytes], None]
"""Receives an answer as the JSON that the server has sent. It is kept with its session, so it must hold no record."""


class TransformResult(NamedTuple):
    """A changed answer, and the attributes that describe the change on the span of the exchange that brought it."""

    answer: bytes
    attributes: dict[str, str]


ResponseTransform = Callable[[bytes], "bytes | TransformResult"]
"""Returns the answer for the client; raises `Refusal` if the client gets an error in its place."""
_KEPT: Final = 1000
"""Most answers of one session that are watched or changed, the newest: a server may repeat them in a later stream."""


@dataclass(slots=True)
class ResponseHandler:
    """The watches and changes of the answer to one request."""

    observers: list[ResponseObserver] = field(default_factory=list[ResponseObserver])
    transforms: list[ResponseTransform] = field(default_factory=list[ResponseTransform])


class ResponseHandlers:
    """Watches and changes of answers, by the ids of their requests."""

    __slots__ = ("_by_id", "default_transforms")

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, ResponseHandler] | None = None
        """None while there are none, as in most sessions, of which there may be very many."""
        self.default_transforms: list[ResponseTransform] = []
        """Changes of all other answers in this exchange: to requests of before a restart of the gateway, or without an
        entry here."""

    def __bool__(self) -> bool:
        return bool(self._by_id or self.default_transforms)

    def handler_of(self, id: bytes) -> ResponseHandler:
        """The entry of a request, which may be new."""
        if self._by_id is None:
            self._by_id = OrderedDict()
        return self._by_id.setdefault(_loose(id), ResponseHandler())

    def observers_of(self, one: JsonRpcMessage) -> Sequence[ResponseObserver]:
        """The watches of a server's message. An unreadable message may be any answer: it gets those of the newest
        request."""
        if not self._by_id:
            return ()
        if one.kind == "unreadable" and one.raw.strip():
            return next((found.observers for found in reversed(self._by_id.values()) if found.observers), ())
        found = self._by_id.get(_loose(one.id)) if one.kind == "answer" else None
        return () if found is None else found.observers

    def transforms_of(self, id: bytes) -> Sequence[ResponseTransform]:
        """The changes of the answer to a request."""
        found = self._by_id.get(_loose(id)) if self._by_id else None
        return () if found is None else found.transforms

    def merge(self, others: ResponseHandlers) -> None:
        """Adds the entries of one exchange."""
        if not others._by_id:
            return
        mine = self._by_id = self._by_id or OrderedDict()
        mine.update(others._by_id)
        while len(mine) > _KEPT:
            mine.popitem(last=False)


def _loose(id: bytes) -> str:
    """An id as the loosest client compares it: SDKs take `"1"` and `1.0` for an answer to `1`."""
    try:
        value = orjson.loads(id)
    except ValueError:
        return id.decode("latin-1")
    text = value.strip() if isinstance(value, str) else id.decode()
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else repr(number)
