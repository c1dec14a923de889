"""Calls as a client made them, read from the spans of an attempt. Pure.

A call is a request with the server's messages up to its answer: notifications, and requests of its own with the
client's answers to them. In streamable HTTP all of these are in the answer to the request. A message in another stream
(the older HTTP with SSE, or one that listens) belongs to a call that was running then: to the one whose token it names,
else to the only or the newest one of its session.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, NamedTuple

import msgspec

from penstock.gateway.model.span import Span
from penstock.gateway.wire.dialects import sse
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, obj, strict, text
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, message, messages

LISTENING: Final = "subscriptions/listen"
"""A request whose answer is an endless stream: later messages are no part of an answer."""
ACKNOWLEDGED: Final = "notifications/subscriptions/acknowledged"
_SENDER: Final = "penstock.mcp.sender"
_SESSION: Final = "mcp.session.id"
_ANY: Final = object()
"""In place of a session: any session."""
_BY_THE_WAY: Final = (401, 404)
"""HTTP statuses that only make the client log in or open another session."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class SpanExchange(NamedTuple):
    """A span of an attempt, with its bodies."""

    span: Span
    request: bytes
    response: bytes


class ReplayMessage(NamedTuple):
    """A message of the server before its answer."""

    sent: JsonRpcMessage
    answer: bytes | None
    """The client's answer to a request; None if it is unknown."""


@dataclass(slots=True, eq=False)
class ReplayCall:
    server: str
    place: str
    """Its place on the tape: `a1#5`."""
    method: str
    params: Any
    steps: list[ReplayMessage] = field(default_factory=list[ReplayMessage])
    answer: bytes | None = None
    """The message that answers it, as it was sent; None without one."""
    missing: str = ""
    """The reason why there is no answer."""


@dataclass(slots=True)
class _CallDraft:
    """A call that is being assembled."""

    call: ReplayCall
    id: bytes
    token: Any
    span: Span
    newest: list[ReplayMessage] = field(default_factory=list[ReplayMessage])


class _MessagePlacer:
    """Assigns a server's messages in other streams to calls, one after the other, in the order of time."""

    def __init__(self, drafts: Sequence[_CallDraft], answers: dict[tuple[str | None, bytes], bytes | None]) -> None:
        """`drafts`: in the order in which they began."""
        self._answers = answers
        self._above: dict[str | None, _CallDraft] = {}
        for draft in drafts:
            self._above.setdefault(draft.span.span_id, draft)
        self._coming = deque(enumerate(one for one in drafts if one.call.method != LISTENING))
        """Calls that have not begun, each with its index."""
        self._begun = defaultdict[tuple[Any, ...], list[tuple[int, _CallDraft]]](list)
        """Calls that have begun, by upstream, session and token, the newest last."""

    def place(self, one: SpanExchange) -> None:
        """Assigns a message to the call that was running."""
        sent, span = message(one.request), one.span
        if sent.kind == "request" and (span.parent_id, sent.id) not in self._answers:
            return  # It was taken from the answer to its call.
        step = ReplayMessage(sent, one.response or None)
        above = self._above.get(span.parent_id)
        if above is not None:
            if above.call.method != LISTENING or sent.method == ACKNOWLEDGED:
                above.call.steps.append(step)
            return
        token = obj(value_of(fields(sent.raw).get("params"))).get("progressToken")
        self._begin(span.start_ns)
        found = None if token is None else self._newest(span, token)
        found = found or self._newest(span, None)
        if found is not None:
            found.call.steps.append(step)

    def _begin(self, now_ns: int) -> None:
        """Moves the calls that have begun until now."""
        while self._coming and self._coming[0][1].span.start_ns <= now_ns:
            place, draft = self._coming.popleft()
            tokens = {None, _hashable(draft.token)}
            sessions = {_ANY, _attribute(draft.span, _SESSION)}
            for token, session in product(tokens, sessions):
                self._begun[draft.span.upstream, session, token].append((place, draft))

    def _newest(self, span: Span, token: Any) -> _CallDraft | None:
        """The newest call that was running in the same session, with this token or, for None, with any."""
        session = _attribute(span, _SESSION)
        found = list[tuple[int, _CallDraft]]()
        # The stream of the older HTTP with SSE begins before its session has an id.
        for one in (_ANY,) if session is None else (session, None):
            begun = self._begun.get((span.upstream, one, _hashable(token)), [])
            # A call that has ended now has ended for every later message, too.
            while begun and (ended := begun[-1][1].span.end_ns) is not None and ended < span.start_ns:
                begun.pop()
            found += begun[-1:]
        return max(found, key=lambda one: one[0])[1] if found else None


def read(exchanges: Iterable[SpanExchange]) -> list[ReplayCall]:
    """The calls of an attempt, in the order in which they began. (Spans are numbered in the order in which they are
    written.)"""
    by_client, by_server = list[SpanExchange](), list[SpanExchange]()
    for one in sorted(exchanges, key=lambda one: one.span.start_ns):
        (by_server if _attribute(one.span, _SENDER) == "server" else by_client).append(one)
    answers = {(one.span.parent_id, message(one.request).id): one.response or None for one in by_server}
    drafts = list[_CallDraft]()
    for one in by_client:
        drafts += _drafts(one, answers)
    placing = _MessagePlacer(drafts, answers)
    for one in by_server:
        placing.place(one)
    return [draft.call for draft in drafts if draft.call.answer is not None or not _is_handshake(draft)]


def _is_handshake(draft: _CallDraft) -> bool:
    return draft.span.http_status in _BY_THE_WAY


def _drafts(one: SpanExchange, answers: dict[tuple[str | None, bytes], bytes | None]) -> list[_CallDraft]:
    """The requests of an exchange, with the messages in its own answer. Removes the client's answers to these from
    `answers`."""
    span = one.span
    made = [_draft(sent, span) for sent in messages(one.request) if sent.kind == "request"]
    said = list[ReplayMessage]()
    for told in _answer_messages(one) if made else ():
        if told.kind == "request":
            said.append(ReplayMessage(told, answers.pop((span.span_id, told.id), None)))
        elif told.kind == "notification":
            said.append(ReplayMessage(told, None))
        elif (draft := _answered(made, told)) is not None:
            draft.call.answer, draft.call.steps, said = told.raw, said, []
    for draft in made[:1]:
        draft.call.steps += said  # Messages after the answer, or without one.
    return made


def _draft(sent: JsonRpcMessage, span: Span) -> _CallDraft:
    params = value_of(fields(sent.raw).get("params"))
    token = obj(obj(params).get("_meta")).get("progressToken")
    why = "it was too large to be kept whole" if span.truncated else span.error or str(span.status)
    call = ReplayCall(span.upstream or "", f"{span.attempt}#{span.sequence}", sent.method, params, missing=why)
    return _CallDraft(call, sent.id, token, span)


def _answered(made: list[_CallDraft], told: JsonRpcMessage) -> _CallDraft | None:
    """The request that is answered. An error without an id answers the only request."""
    if told.kind != "answer":
        return None
    if not told.id and len(made) == 1:
        return made[0]
    return next((draft for draft in made if draft.id == told.id), None)


def _answer_messages(one: SpanExchange) -> Iterator[JsonRpcMessage]:
    bodies = [event.data.encode() for event in sse.events(one.response)] if one.span.stream else [one.response]
    return (told for body in bodies if body for told in messages(body))


def fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """The members of a message, each as its bytes."""
    try:
        return _fields(raw)
    except UNREADABLE:
        return {}


def value_of(raw: msgspec.Raw | None) -> Any:
    """A JSON value, with whole numbers of any size; None if there is none, or it is too deep to be compared."""
    data = b"" if raw is None else bytes(raw)
    return None if strict(data) is None else json.loads(data)


def result_of(call: ReplayCall) -> dict[str, Any] | None:
    """The result of a call, None for an error."""
    found = fields(call.answer or b"").get("result")
    return None if found is None else obj(value_of(found))


def target_of(call: ReplayCall) -> str | None:
    """The tool, prompt or resource that a call is about."""
    params = obj(call.params)
    return text(params.get("uri" if call.method.startswith("resources/") else "name"))


def _hashable(token: Any) -> Any:
    """A token as the key of a dictionary; a list or object, which is no valid token, as its JSON."""
    return (json.dumps(token, sort_keys=True),) if isinstance(token, list | dict) else token


def _attribute(span: Span, name: str) -> Any:
    return (span.attributes or {}).get(name)
