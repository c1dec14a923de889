"""The record of one call. The event loop fills it in while the call runs; then it becomes the call's entry on the tape.

`entry` runs on the recorder's thread: it reads the summary's facts out of the bodies and masks secrets. If a parser
fails there, the facts are missing, but never the bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from penstock.gateway.model import span
from penstock.gateway.model.base import SpanKind
from penstock.gateway.model.facts import (
    AMBIGUOUS,
    BACKGROUND,
    CAPTURED,
    HASHED_MEDIA,
    HOSTED_SESSION,
    REQUEST_ID,
    UNREAD,
)
from penstock.gateway.model.known_secrets import NO_SECRETS, BodyContext
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.settings import LogSettings
from penstock.gateway.model.turn import Side
from penstock.gateway.reading.turns import CUT, decode_body
from penstock.gateway.tape import background_answers, hosted_sessions
from penstock.gateway.tape.background_answers import UsageCorrector
from penstock.gateway.tape.hosted_sessions import ResultCounter
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.traffic.calls import batches
from penstock.gateway.traffic.calls.answer_masking import (
    MaskedBody,
    mask_recorded_body,
    masked_facts,
    rescaled,
    unencoded,
    without_tokens,
)
from penstock.gateway.traffic.calls.call_log import LOGGER, log_call
from penstock.gateway.traffic.calls.call_request import (
    FIRST_ATTEMPT,
    NOTED,
    RETRY_COUNT,
    UNCOUNTED,
    CallRequest,
    agent_facts,
    session_rollout,
)
from penstock.gateway.traffic.calls.session_stream import EventOperation, SessionStream
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.base import EVENT_STREAM, Facts
from penstock.gateway.wire.dialects.batches import batch_facts as batch_told
from penstock.gateway.wire.dialects.hosted import SessionFacts, session_facts
from penstock.gateway.wire.dialects.realtime import GIVES_KEYS, given_keys
from penstock.gateway.wire.dialects.responses import deferred_answer_name
from penstock.gateway.wire.dialects.sse import distinct_events
from penstock.gateway.wire.dialects.tokens import (
    TOKEN_IDS,
    estimate_usage,
    lacks_counts,
    lacks_token_counts,
    usage_from_token_ids,
)
from penstock.gateway.wire.dialects.unread_content import Gaps, find_unread
from penstock.gateway.wire.http.headers import header_fields
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.request import HttpRequest
from penstock.gateway.wire.media_hashes import hash_media

_log = logging.getLogger("penstock.recorder")
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_OVERHEAD = 1024
_MANY = 64
"""Most chunks of one read that are kept as they are; more are joined: chunks of a byte each would take ten times the
memory."""
_CAME = BodyContext(answer=True)
_LONGEST_ID = 200
_BEGINNINGS = b"deir:\r\n\xef\0"
"""First bytes of streams of any format; no JSON begins with one."""
ALWAYS_KEPT = 1 << 20
"""Bytes of an answer that are always kept, whatever other calls hold."""
PROMPTS = "penstock.prompts.sha256"
"""Attribute of a call: the hashes of its prompts as the agent sent them, by resource."""


def decoded_body(pieces: list[bytes], encoding: bytes | None) -> bytes:
    """A body without content encoding, as far as it can be decoded."""
    body = b"".join(pieces)
    return body if encoding is None else decode_body(body, encoding.decode("latin-1"))[0]


class BufferUsage:
    """Counts the bytes of answers that running calls hold for the tape, all calls together."""

    __slots__ = ("_most", "bytes")

    def __init__(self, most: int) -> None:
        """`most`: bytes beyond which a call that holds `ALWAYS_KEPT` keeps no more of its answer."""
        self._most = most
        self.bytes = 0

    @property
    def too_much(self) -> bool:
        """True if they hold more than they may."""
        return self.bytes > self._most


class CallRecord:
    """The record of one call while it runs: the bytes and the facts that its span is made of."""

    __slots__ = (
        "_agent_facts",
        "_encodings",
        "_entry",
        "_held",
        "_limit",
        "_redactor",
        "_secrets",
        "_size",
        "arm",
        "attributes",
        "body",
        "call",
        "came",
        "captured",
        "convert",
        "correct",
        "count_results",
        "encoding",
        "end_ns",
        "error",
        "first_byte_ns",
        "follows",
        "http_status",
        "kind",
        "marks",
        "name",
        "path",
        "pieces",
        "pin",
        "pool",
        "request",
        "response_bytes",
        "response_head",
        "sent",
        "session_stream",
        "settle",
        "sides",
        "span_id",
        "status",
        "stream",
        "texts",
        "trace",
        "trailers",
        "truncated",
        "versions",
    )

    def __init__(
        self, call: CallRequest, request: HttpRequest, redactor: Redactor, limit: int, held: BufferUsage
    ) -> None:
        """`limit`: most bytes of the response that are kept. `held`: counter of all running calls."""
        self.call, self.request = call, request
        self.came = request.headers
        """The client's headers, before any change of the request."""
        self.body = call.body
        """The request's body that goes upstream."""
        self.path: str | None = None
        """Path and query that go upstream, if an alias stands in them; None for those of the call."""
        self.pool: ConnectionPool | None = None
        self.kind: SpanKind = "llm"
        self.name: str | None = None
        """Name of its span, if that is not a model."""
        self.span_id: str | None = None
        """Id of its span, if others must refer to it before it is on the tape."""
        self.trace: tuple[str, str] | None = None
        """The caller's trace and span, if the body names them."""
        self.sent = self.response_head = b""
        """The heads as they went upstream and came."""
        self.http_status: int | None = None
        self.trailers: Sequence[tuple[bytes, bytes]] = ()
        self.encoding: bytes | None = None
        self.status, self.stream, self.truncated = "open", False, False
        self.pieces: list[bytes] = []
        self.marks: list[int] = []
        self.response_bytes = self._size = 0
        self.first_byte_ns: int | None = None
        self.error: str | None = None
        self.end_ns: int | None = None
        self.versions: Mapping[str, str] = NOTHING
        """Versions of resources that it was sent with, by name."""
        self.arm: str | None = None
        self.texts: Mapping[str, str] = NOTHING
        """SHA-256 of each prompt as the agent sent it."""
        self.captured: tuple[str, ...] = ()
        """Names of the fields of the body that the gateway has added."""
        self.attributes: Mapping[str, Any] = NOTHING
        """Further attributes of its span; `note` adds some."""
        self.convert: Callable[[bytes], bytes] | None = None
        """Converts another body of the agent's for the upstream; None if bodies pass unchanged."""
        self.sides: Sequence[Side] = ()
        """Exchanges with other parties in another wire format, so far."""
        self.settle: Callable[[Transaction, SpanEntry], None] | None = None
        """Called in the transaction of its span; None for nothing."""
        self.correct: UsageCorrector | None = None
        """Called in the transaction of its span with an answer that an earlier call has asked for; None for nothing."""
        self.count_results: ResultCounter | None = None
        """Called in the transaction of its span with what hosted agents have used; None for nothing."""
        self.pin: Callable[[Transaction, SpanEntry], None] | None = None
        """Like `settle`, also for an open span: writes pins of its rollout that the tape does not have yet."""
        self.session_stream: SessionStream | None = None
        self.follows = False
        """True if it concerns answers that are fetched by another call; set when it is recorded."""
        self._limit, self._held, self._redactor = limit, held, redactor
        self._secrets, self._agent_facts = NO_SECRETS, NOTHING
        self._entry: SpanEntry | None = None
        self._encodings: tuple[bytes, ...] = ()
        """The content encodings that the client has named."""

    @property
    def changed(self) -> bool:
        """True if it goes upstream as another request than the client's."""
        return self.body is not self.call.body and self.body is not self.call.encoded_body

    @property
    def plain(self) -> bytes:
        """The request without content encoding, as far as it can be decoded."""
        return self.body if self.changed else self.call.body

    @property
    def weight(self) -> int:
        """Bytes that it holds in memory: the bodies, and the request twice, because it is the base of the next
        request's."""
        weight = _OVERHEAD + 2 * len(self.body) + self._size
        for side in self.sides:
            weight += 2 * len(side.request_body) + len(side.response_body)
        return weight

    def add_pieces(self, pieces: list[bytes], now: float) -> None:
        """Note the bytes of one read, by reference. `now`: monotonic seconds."""
        elapsed = int((now - self.request.started) * 1e9)
        if self.first_byte_ns is None:
            self.first_byte_ns = elapsed
            if not self.stream and pieces[0][:1] in _BEGINNINGS:
                self.stream = self.call.dialect.is_stream(False, self.plain, self.call.path, pieces[0])
            if self.stream and self.call.dialect.tells_sessions and self._may_tell_sessions:
                self.session_stream = SessionStream(self, self.encoding)
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        self.response_bytes += size
        whole, held = self._size + size, self._held
        if self.session_stream is not None:
            self.session_stream.add(pieces, size, ALWAYS_KEPT if held.too_much else max(ALWAYS_KEPT, self._limit))
        if not self.truncated and whole <= self._limit and (whole <= ALWAYS_KEPT or not held.too_much):
            self._size = whole
            held.bytes += size
            self.pieces += pieces if len(pieces) <= _MANY else (b"".join(pieces),)
            self.marks += elapsed // 1000, size
        else:
            self.truncated = True

    def add_earlier(self, piece: bytes, now: float) -> None:
        """Note bytes that came before the answer began: they do not count as its first ones."""
        first = self.first_byte_ns
        self.add_pieces([piece], max(now, self.request.started))
        self.first_byte_ns = first

    def note(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes of its span. Those that are there are not changed: the recorder may be reading them."""
        self.attributes = {**self.attributes, **attributes}

    def on_end(self) -> None:
        """Called when the call has ended: its bytes count for the recorder from now on."""
        self._held.bytes -= self._size

    def set_own_answer(self, status: int, body: bytes) -> None:
        """Note an answer of the gateway's own."""
        self.http_status = status
        self._held.bytes += len(body) - self._size
        self.pieces, self.marks = [body], []
        self._size = self.response_bytes = len(body)

    def response(self) -> bytes:
        """The response body without content encoding, as far as it can be decoded."""
        return decoded_body(self.pieces, self.encoding)

    @property
    def sequence(self) -> int:
        """Its number in its attempt; 0 until it is on the tape."""
        return 0 if self._entry is None else self._entry.sequence

    # -- on the recorder's thread ------------------------------------------------------------------------------------

    def entry(self, final: bool) -> SpanEntry | None:
        """The call's entry for the tape, always the same object; None for an announcement that comes too late."""
        if not final and self.status != "open":
            return None
        entry = self._entry
        if entry is None:
            entry = self._entry = self._opened()
        if self._secrets.notes:
            self._secrets = self._secrets.for_call()
        secrets = self._secrets
        entry.versions, entry.arm, entry.pin = self.versions or None, self.arm, self.pin
        attributes = {**self._agent_facts, **self.attributes}
        if self.texts:
            attributes[PROMPTS] = self.texts
        if self.captured:
            attributes[CAPTURED] = list(self.captured)
        if entry.ambiguous:
            attributes[AMBIGUOUS] = True
        entry.attributes = attributes or None
        answer = b"".join(self.pieces) if final else b""
        if final:
            # In one piece: otherwise a batch of streams would hold all their chunks twice.
            self.pieces = [answer]
            if self.call.dialect.unknown and GIVES_KEYS.fullmatch(self.call.path.partition("?")[0]):
                secrets = self._secrets = secrets.with_values(given_keys(self.response())).for_call()
        sides: list[Side] = []
        if secrets.notes or self._encodings or self.encoding or self.sides:
            request, response, sides = self._kept(answer)
        else:
            sent = secrets.hide(self.body) if secrets.values else self.body
            came = secrets.hide(answer) if secrets.values else answer
            request, response = MaskedBody(sent, sent, False), MaskedBody(came, came, False)
        # It may have been announced before it was translated.
        entry.dialect, entry.path = self.call.dialect.name, redact_url(self.path or self.call.path)
        if final:
            self._close(entry, request.plain, response)
        else:
            entry.model = self.call.model
        in_part = (request.decoded or response.decoded) and (request.in_part or response.in_part)
        entry.truncated = self.truncated or in_part
        # Mask secrets in the texts that come from the bodies or the request.
        said = [
            entry.path, entry.name, entry.error, entry.model, entry.model_served, entry.response_id, entry.finish
        ]  # fmt: skip
        if (shown := secrets.texts(said)) is not said:
            entry.path, entry.name, entry.error = shown[0] or "", shown[1], shown[2]
            entry.model, entry.model_served, entry.response_id, entry.finish = shown[3:]
        if entry.attributes and (secrets.notes or secrets.values):
            entry.attributes = secrets.json(entry.attributes)
        if not self._redactor.media:
            request, response, sides = self._without_media(entry, request, response, sides)
        entry.body = self._bytes(request, response, sides)
        if secrets.notes and secrets.span_attributes:
            entry.attributes = {**(entry.attributes or {}), **secrets.span_attributes}
        return entry

    def _opened(self) -> SpanEntry:
        """The entry of a call that has begun, as far as the call's address and headers tell."""
        call, request = self.call, self.request
        address = call.address
        decided = call.decision
        self._secrets = self._redactor.secrets(self.came, request.target.decode("latin-1"))
        entry = SpanEntry(address.rollout, address.attempt, address.origin, address.mode)
        entry.start_ns, entry.agent, entry.ambiguous = request.started_ns, address.agent, address.ambiguous
        entry.method, entry.request_bytes, entry.retried = request.method, len(self.body), address.retry
        entry.kind, entry.name, entry.span_id = self.kind, self.name, self.span_id
        if self.trace is not None:
            entry.trace_id, entry.parent_id = self.trace
        said: dict[bytes, bytes] = {}
        for low, _, value in request.headers if decided is None or decided.noted else ():
            if low not in NOTED:
                continue
            if low == b"content-encoding":
                self._encodings += (value,)
            elif low == RETRY_COUNT:
                entry.retried = entry.retried or value not in (b"0", b"")
            elif low != b"traceparent":
                said[low] = value
            elif found := span.parse(value.decode("latin-1")):
                entry.trace_id, entry.parent_id = found
        entry.uncounted_tries = UNCOUNTED in said
        if said or call.said:
            self._agent_facts = agent_facts(call.said or said)
        return entry

    def _kept(self, answer: bytes) -> tuple[MaskedBody, MaskedBody, list[Side]]:
        """Request, response and sides without secrets, where more than the values of keys may have to be hidden, or
        bodies are encoded."""
        secrets = self._secrets
        asked, told = b"" if self.changed else b",".join(self._encodings), self.encoding or b""
        sent = BodyContext(self._request_type)
        came = BodyContext(self._response_type, answer=True, cut=self.truncated)
        request = mask_recorded_body(secrets, self.body, asked.decode("latin-1"), about=sent)
        response = mask_recorded_body(secrets, answer, told.decode("latin-1"), about=came)
        sides = [self._side(side) for side in self.sides]
        if secrets.masked:
            # Token ids would disclose the masked text, maybe in another body.
            request, response = without_tokens(secrets, request, sent), without_tokens(secrets, response, came)
            sides = [self._side_without_tokens(side) for side in sides]
        return request, response, sides

    def _close(self, entry: SpanEntry, request: bytes, response: MaskedBody) -> None:
        call, dialect, plain, changed = self.call, self.call.dialect, response.plain, self.changed
        if plain and (self.stream or plain[:1] in _BEGINNINGS):
            self.stream = dialect.is_stream(self.stream, self.body if changed else call.body, call.path, plain)
        masked = self._secrets.notes and self._secrets.masked
        # What a rule has masked is read too, so that its cost stays known.
        asked, told = (self.plain, self.response()) if masked else (request, plain)
        brief, left_out = told, 0
        if self.stream and dialect.generates and dialect.streaming_content_type == EVENT_STREAM:
            brief, left_out = distinct_events(told)
        facts = self._facts(request, response, brief, masked)
        # An alias has replaced the requested name.
        entry.model = (None if changed else facts.model) or call.model
        if self.status == "ok" and facts.failed is not None:
            self.status, self.error = "error", facts.failed
        entry.status, entry.error = self.status, self.error
        if facts.attributes:
            entry.attributes = {**(entry.attributes or {}), **facts.attributes}
        entry.end_ns, entry.first_byte_ns = self.end_ns, self.first_byte_ns
        entry.http_status, entry.stream = self.http_status, self.stream
        entry.upstream = None if self.pool is None else self.pool.name
        entry.model_served, entry.response_id, entry.finish = facts.model_served, facts.response_id, facts.finish
        if facts.response_id is None and entry.status == "error" and self.pool is not None:
            self._note_request_id(entry)
        # An answer of the gateway's own has used no tokens.
        refused = dialect.media and (self.http_status or 500) >= 400
        usage = entry.usage = None if self.pool is None or refused else facts.usage
        if dialect.stateful or dialect.retrieves or dialect.unknown:
            self._look_for_answer(entry, request, response, facts)
        if entry.deferred is None and (usage is None or usage.input_tokens is None or usage.output_tokens is None):
            self._count(entry, asked, told, brief, left_out)
        entry.tool_calls, entry.choices = facts.tool_calls, facts.choices
        good = self.status == "ok" and not self.truncated and response.problem is None
        if good and (gaps := self._unread(asked, told, brief, facts)):
            entry.attributes = {**(entry.attributes or {}), UNREAD: gaps}
        if self.settle is not None and entry.status != "ok" and entry.usage is not None:
            came = self.response()
            if dialect.nested:
                dialect, came = dialect.unwrap(asked, came, self.stream) or (dialect, came)
            guess = estimate_usage(None, b"", came, dialect.answer_text_pattern(self.stream))
            entry.partial_tokens = guess.output_tokens
        entry.settle, entry.request_bytes = self.settle, len(self.body)
        entry.response_bytes = self.response_bytes

    def _note_request_id(self, entry: SpanEntry) -> None:
        """Note the provider's id of a request whose answer has none: its own telemetry names that."""
        named = (value for name, value in header_fields(self.response_head) if name.lower() == b"request-id")
        if (value := next(named, None)) is not None:
            entry.attributes = {**(entry.attributes or {}), REQUEST_ID: value.decode("latin-1")[:_LONGEST_ID]}

    def _look_for_answer(self, entry: SpanEntry, request: bytes, response: MaskedBody, facts: Facts) -> None:
        """Note that its answer is still to be fetched, or that it has fetched another call's, or a batch's."""
        if self.pool is None or (entry.http_status or 500) >= 400:
            return
        if facts.answers is not None:
            name, found = facts.answers
            hidden = self._secrets.texts([found.model_served, found.response_id, found.finish])
            found = replace(found, model_served=hidden[0], response_id=hidden[1], finish=hidden[2])
            entry.follow = partial(background_answers.record_fetched, answers=(name, found), correct=self.correct)
        elif (name := deferred_answer_name(self.call.dialect, request, facts)) is not None:
            entry.deferred, entry.follow = name, partial(background_answers.record_deferred, correct=self.correct)
            entry.attributes = {**(entry.attributes or {}), BACKGROUND: name}
        elif self.call.dialect.tells_sessions:
            if self._may_tell_sessions:
                self._take_session(entry, response.plain)
        elif self.call.dialect.unknown:
            told = batch_told(self.request.method, self.call.path, response.plain)
            if told is not None:
                entry.batch = next((one.name for one in told.batches if one.made), None)
                entry.follow = partial(batches.record_batches, told=told)
        self.follows = entry.follow is not None

    @property
    def _may_tell_sessions(self) -> bool:
        """False for a host that the agent has named and that is not the API's: it may tell of another's session."""
        return self.pool is not None and self.pool.speaks_for(self.call.dialect.family)

    def _take_session(self, entry: SpanEntry, response: bytes) -> None:
        """Note what its answer tells of a hosted agent's session."""
        if self.truncated and self.session_stream is not None:
            response = b"%b\n\n%b" % (response, self.session_stream.untaken())
        told = session_facts(self.call.dialect, self.call.path, response, self.stream, entry.end_ns or entry.start_ns)
        if told is None:
            return
        home = self._session_home(entry, told)
        if self.call.address.origin == "implicit" and self.call.anonymous and not entry.sequence:
            # It has made the session: the answer tells its rollout.
            entry.rollout, entry.attempt = home
        entry.attributes = {**(entry.attributes or {}), HOSTED_SESSION: told.session}
        given = self.call.dialect.gives_work(self.request.method, self.call.path.partition("?")[0])
        entry.batch = told.session if given else None
        entry.follow = partial(hosted_sessions.record_events, told=told, home=home, count=self.count_results)

    def _session_home(self, entry: SpanEntry, told: SessionFacts) -> tuple[str, str]:
        if self.call.address.origin == "implicit":
            return session_rollout("session", told.session.partition("/")[2]), FIRST_ATTEMPT
        return entry.rollout, entry.attempt

    def hide_events(self, events: bytes) -> bytes:
        """See `StreamOwner`. The notes of what is masked are those of the whole answer."""
        self._entry = self._entry or self._opened()
        return self._secrets.for_call().body(events, BodyContext(self._response_type, answer=True))

    def event_operation(self, stream: SessionStream, events: bytes, now: float) -> EventOperation | None:
        """The operation of a `StreamOwner` for these events."""
        entry, call, at_ns = self._entry, self.call, self.request.started_ns + int((now - self.request.started) * 1e9)
        told = session_facts(call.dialect, call.path, events, True, at_ns, stream.session)
        if entry is None or told is None:
            return None
        stream.session = told.session.partition("/")[2]
        by = SpanEntry(entry.rollout, entry.attempt, entry.origin, entry.mode, start_ns=entry.start_ns)
        by.upstream = None if self.pool is None else self.pool.name
        home = self._session_home(entry, told)
        return partial(hosted_sessions.record_events, entry=by, told=told, home=home, count=self.count_results)

    def _count(self, entry: SpanEntry, request: bytes, response: bytes, brief: bytes, left_out: int) -> None:
        """Count or estimate the tokens that the provider did not report. `left_out`: bytes of the texts that `brief`
        lacks."""
        dialect = self.call.dialect
        if lacks_token_counts(entry, dialect):
            if dialect.nested:
                unwrapped = dialect.unwrap(request, response, self.stream)
                if unwrapped is None:
                    return
                dialect, response = unwrapped
                brief = response
            whole = entry.status == "ok" and not self.truncated
            usage = entry.usage
            if TOKEN_IDS in brief:
                usage = entry.usage = usage_from_token_ids(usage, response, self.stream, whole)
            if lacks_counts(usage, dialect.generates) and not dialect.media:
                guess = estimate_usage(usage, request, brief, dialect.answer_text_pattern(self.stream), left_out)
                entry.estimate = [guess.input_tokens, guess.output_tokens]

    def _facts(self, request: bytes, response: MaskedBody, brief: bytes, masked: bool) -> Facts:
        """`brief`: the response as it came, of a stream the distinct events. `masked`: a rule has masked something."""
        try:
            dialect, stream = self.call.dialect, self.stream
            changed = self.body is not self.call.body and self.body is not self.call.encoded_body
            asked = None if changed else self.call.peeked
            facts = dialect.facts(self.plain if masked else request, brief, stream, asked)
            if masked:
                facts = masked_facts(dialect, request, response.plain, stream, facts)
            if dialect.uses_headers:
                facts = dialect.with_headers(facts, header_fields(self.response_head))
            if self.truncated or (response.problem is not None and not response.problem.endswith(CUT)):
                # The end of the answer is not among the kept bytes.
                facts.failed = None
            return facts
        except Exception:
            # The bytes are the truth; facts that could not be read now can be read later.
            _log.exception("a call of %s could not be read", self.call.address.rollout)
            return Facts(self.call.model)

    def _unread(self, request: bytes, response: bytes, brief: bytes, facts: Facts) -> Gaps:
        """The keys of its bytes that were not read."""
        try:
            return find_unread(self.call.dialect, request, response, self.stream, facts, brief)
        except Exception:
            _log.exception("what was read of a call of %s could not be held against it", self.call.address.rollout)
            return {}

    def _bytes(self, request: MaskedBody, response: MaskedBody, sides: list[Side]) -> StoredBody:
        secrets, redactor, head_block = self._secrets, self._redactor, self._redactor.head_block
        url = "" if self.pool is None else redact_url(self.pool.url(self.path or self.call.path))
        sent = redactor.block(unencoded(header_fields(self.sent))) if request.decoded else head_block(self.sent)
        head = self.response_head
        came = redactor.block(unencoded(header_fields(head))) if response.decoded else head_block(head)
        trailers = redactor.block(self.trailers) if self.trailers else b""
        if secrets.notes or secrets.values:
            url, sent, came = secrets.text(url), secrets.block(sent), secrets.block(came)
            trailers = secrets.block(trailers) if trailers else trailers
        marks = rescaled(self.marks, len(response.body)) if response.decoded else list(self.marks)
        return StoredBody(url, sent, request.body, came, response.body, trailers, marks, sides)

    def _without_media(
        self, entry: SpanEntry, request: MaskedBody, response: MaskedBody, sides: list[Side]
    ) -> tuple[MaskedBody, MaskedBody, list[Side]]:
        """The bodies with hashes in place of media, whose number the span has."""
        bodies, count = list[MaskedBody](), 0
        for one, kind in ((request, self._request_type), (response, self._response_type)):
            made = hash_media(one.plain, kind)
            bodies.append(MaskedBody(made.body, made.body, True, one.problem) if made.replaced else one)
            count += made.replaced
        for at, side in enumerate(sides):
            asked, told = hash_media(side.request_body), hash_media(side.response_body)
            sides[at] = side.model_copy(update={"request_body": asked.body, "response_body": told.body})
            count += asked.replaced + told.replaced
        if count:
            entry.attributes = {**(entry.attributes or {}), HASHED_MEDIA: count}
        return bodies[0], bodies[1], sides

    @property
    def _request_type(self) -> str:
        return _content_type([(low, value) for low, _, value in self.request.headers])

    @property
    def _response_type(self) -> str:
        return _content_type(header_fields(self.response_head))

    def _side(self, side: Side) -> Side:
        hide = self._secrets.body
        bodies = {
            "request_body": hide(side.request_body, BodyContext()),
            "response_body": hide(side.response_body, _CAME),
        }
        return side.model_copy(update=bodies | {"path": self._secrets.text(side.path)})

    def _side_without_tokens(self, side: Side) -> Side:
        take_out, about = self._secrets.without_tokens, BodyContext()
        bodies = {"request_body": take_out(side.request_body, about)}
        return side.model_copy(update=bodies | {"response_body": take_out(side.response_body, about)})


def _content_type(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name.lower() == b"content-type":
            return value.decode("latin-1")
    return ""


# What is told of a recorded call, on the recorder's thread: a line of the log, and the keys of its answer that were not
# read.

_MOST_KEYS: Final = 100
"""Most paths of keys that are counted separately; all others are counted together."""
OTHER: Final = "other"


def call_logger(
    log: LogSettings, metrics: Metrics, show: Callable[[SpanEntry], None] | None
) -> Callable[[SpanEntry, bool], None]:
    """The function that is called with each recorded call. Lines of calls do not depend on the level of the log.
    `show`: shows a call on the terminal."""
    if log.calls:
        logging.getLogger(LOGGER).setLevel(logging.INFO)

    def told(entry: SpanEntry, recorded: bool) -> None:
        if entry.attributes and entry.status != "open" and (keys := entry.attributes.get(UNREAD)):
            count_unread(metrics, entry.dialect, keys)
        if log.calls:
            log_call(entry, recorded)
        if show is not None:
            show(entry)

    return told


def count_unread(metrics: Metrics, dialect: str, keys: Iterable[str]) -> None:
    """Count the keys of an answer that were not read."""
    counts = Counter(metrics.unread)
    for key in keys:
        known = (dialect, key) in counts or len(counts) < _MOST_KEYS
        counts[dialect, key if known else OTHER] += 1
    # A new object, since the event loop may be iterating over the old one.
    metrics.unread = counts
