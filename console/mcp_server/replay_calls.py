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
from typing import Any, Final, NamedTuple, cast

import msgspec

from penstock.gateway.model.span import Span
from penstock.gateway.wire.dialects import sse
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, obj, strict, text
from penstock.gateway.wire.dialects.mcp import CALL, JsonRpcMessage, message, messages

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


# Finds the recorded call that a request asks for. Pure.
#
# Two requests are the same if their methods and their params, as canonical JSON, are. Ignored are `_meta`, which
# holds the client, the protocol and the trace (progressToken, traceparent, protocol version, capabilities, a client's
# own ids) but nothing of the request's content; params that are null; empty arguments; and the difference between 1.0
# and 1. Of requests that open a session only the method counts.
#
# A round of a multi-round request is identified by the `requestState` from the round before it. The client's
# `inputResponses` may differ: a recorded round with the same ones comes first, then the others in their order.
#
# Equal requests are answered in recorded order. After the last one, a call of a tool is refused, because its next
# result is unknown. Every other request gets the last answer once more.

OPENING: Final = ("initialize", "server/discover")
"""Methods whose params describe only the client."""
NO_METHOD, NO_PARAMS = -32601, -32602
"""JSON-RPC's codes for an unknown method and for wrong params."""
_META: Final = "_meta"
_RESPONSES: Final = "inputResponses"
_SHOWN, _LONGEST = 3, 80
_EXACT: Final = 1 << 53
"""Largest whole number up to which floats are exact."""
_NOTHING: Final = "nothing"


class ParamDifference(NamedTuple):
    """A place where two params differ."""

    pointer: str
    recorded: str
    asked: str

    def __str__(self) -> str:
        return f"{self.pointer or 'the params'} is {self.recorded} there and {self.asked} here"


@dataclass(frozen=True, slots=True)
class ReplayMiss:
    """The error for a request that was not recorded."""

    code: int
    message: str
    data: dict[str, Any]


@dataclass(slots=True)
class _EqualCalls:
    """Equal calls; `left`: those that have not been played."""

    calls: list[ReplayCall] = field(default_factory=list[ReplayCall])
    left: list[ReplayCall] = field(default_factory=list[ReplayCall])


class CallMatcher:
    """The calls of a recording, and those that have been played."""

    def __init__(self, calls: Sequence[ReplayCall]) -> None:
        self._calls = calls
        self._groups: dict[str, _EqualCalls] = {}
        for call in calls:
            group = self._groups.setdefault(key(call.method, call.params), _EqualCalls())
            group.calls.append(call)
            group.left.append(call)

    def take(self, method: str, params: Any) -> ReplayCall | ReplayMiss:
        """Returns the recorded call of a request and marks it as played."""
        group = self._groups.get(key(method, params))
        if group is None:
            return self._nothing_like_it(method, params)
        servers = sorted({call.server for call in group.calls})
        if len(servers) > 1:
            return _miss(
                NO_PARAMS,
                f"{_named(group.calls[0])} is recorded for several servers ({', '.join(servers)}): start the replay "
                "with --server NAME",
                group.calls[0],
            )
        if not group.left:
            last = group.calls[-1]
            return _played(group.calls) if method == CALL else last
        given = canonical(obj(params).get(_RESPONSES))
        found = next((one for one in group.left if canonical(obj(one.params).get(_RESPONSES)) == given), group.left[0])
        group.left.remove(found)
        return found

    def _nothing_like_it(self, method: str, params: Any) -> ReplayMiss:
        same = [call for call in self._calls if call.method == method]
        if not same:
            known = ", ".join(dict.fromkeys(call.method for call in self._calls)) or "nothing"
            return ReplayMiss(
                NO_METHOD, f"the recording has no {method[:128]}; it has: {known}", {"reason": "not_recorded"}
            )
        call, found = nearest(same, params)
        shown = "; ".join(map(str, found[:_SHOWN])) + (f"; and {len(found) - _SHOWN} more" if found[_SHOWN:] else "")
        place = "place differs" if len(found) == 1 else "places differ"
        said = f"this call is not recorded. The nearest is {_named(call)} ({call.place}), and {len(found)} {place}: "
        return _miss(NO_PARAMS, said + shown, call, differs=[one.pointer for one in found])


def key(method: str, params: Any) -> str:
    """A text that is the same for equal requests."""
    return method if method in OPENING else canonical([method, _asked(method, params), _RESPONSES in obj(params)])


def _asked(method: str, params: Any) -> Any:
    """The part of params that counts."""
    if params is not None and not isinstance(params, dict):
        return params
    kept = {name: one for name, one in obj(params).items() if name not in (_META, _RESPONSES) and one is not None}
    if method == CALL and kept.get("arguments") == {}:
        del kept["arguments"]
    return kept


def canonical(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in cast("dict[str, Any]", value).items()}
    return [_plain(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value


def nearest(calls: Iterable[ReplayCall], params: Any) -> tuple[ReplayCall, list[ParamDifference]]:
    """The call with the fewest differences, the first of several, and these. A call of the same tool is nearer than any
    other."""
    compared = [(call, _compared(call, params)) for call in calls]
    return min(compared, key=lambda one: (any(d.pointer in ("/name", "/uri") for d in one[1]), len(one[1])))


def _compared(call: ReplayCall, params: Any) -> list[ParamDifference]:
    found = list(differences(_asked(call.method, call.params), _asked(call.method, params)))
    recorded, asked = ("something" if _RESPONSES in obj(one) else _NOTHING for one in (call.params, params))
    return found if recorded == asked else [*found, ParamDifference(f"/{_RESPONSES}", recorded, asked)]


def differences(recorded: Any, asked: Any, at: str = "") -> Iterator[ParamDifference]:
    """The places where two values differ, as deep as they can be compared, as JSON pointers."""
    if isinstance(recorded, dict) and isinstance(asked, dict):
        one, other = cast("dict[str, Any]", recorded), cast("dict[str, Any]", asked)
        for name in dict.fromkeys([*one, *other]):
            place = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
            if name in one and name in other:
                yield from differences(one[name], other[name], place)
            else:
                yield ParamDifference(place, _shown(one, name), _shown(other, name))
    elif isinstance(recorded, list) and isinstance(asked, list):
        first, second = cast("list[Any]", recorded), cast("list[Any]", asked)
        for number in range(max(len(first), len(second))):
            if number < len(first) and number < len(second):
                yield from differences(first[number], second[number], f"{at}/{number}")
            else:
                pair = [_short(values[number]) if number < len(values) else _NOTHING for values in (first, second)]
                yield ParamDifference(f"{at}/{number}", *pair)
    elif canonical(recorded) != canonical(asked):
        yield ParamDifference(at, _short(recorded), _short(asked))


def _shown(values: dict[str, Any], name: str) -> str:
    return _short(values[name]) if name in values else _NOTHING


def _short(value: Any) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def _played(calls: Sequence[ReplayCall]) -> ReplayMiss:
    times = "once" if len(calls) == 1 else f"{len(calls)} times"
    said = (
        f"{_named(calls[-1])} was called {times} with these arguments ({calls[-1].place} was the last), and that has "
        "been played: what it would have answered now is not known"
    )
    return _miss(NO_PARAMS, said, calls[-1])


def _named(call: ReplayCall) -> str:
    return " ".join(filter(None, (call.method, target_of(call))))


def _miss(code: int, said: str, call: ReplayCall, **more: Any) -> ReplayMiss:
    near = {"span": call.place, "server": call.server, "method": call.method}
    return ReplayMiss(code, said, {"reason": "not_recorded", "nearest": near, **more})
