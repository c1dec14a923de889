"""Calls as a client made them, read from the spans of an attempt. Pure.

A call is a request with what the server said until its answer: notifications, and requests of its own with the client's
answers to them. In streamable HTTP all of that is in the answer to the request. Where it came in another stream (the
older HTTP with SSE, or one that listens) it belongs to the call that was under way then: to the one whose token it
names, else to the only or the newest one of its session.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from penstock.gateway.dialects import sse
from penstock.gateway.dialects.loose_json import UNREADABLE, loads, obj, text
from penstock.gateway.dialects.mcp import Sent, message, messages
from penstock.gateway.model.span import Span

LISTENING: Final = "subscriptions/listen"
"""A request whose answer is a stream that lives on: what it says later is no part of an answer."""
ACKNOWLEDGED: Final = "notifications/subscriptions/acknowledged"
_SENDER: Final = "penstock.mcp.sender"
_SESSION: Final = "mcp.session.id"
_BY_THE_WAY: Final = (401, 404)
"""HTTP statuses that are between client and server: log in, open another session."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Exchanged(NamedTuple):
    """A span of an attempt, with its bytes."""

    span: Span
    request: bytes
    response: bytes


class Step(NamedTuple):
    """What a server said before it answered."""

    sent: Sent
    answer: bytes | None
    """What the client answered to a request; None where nothing is known of it."""


@dataclass(slots=True, eq=False)
class Call:
    """A recorded call."""

    server: str
    place: str
    """Where it stands on the tape: `a1#5`."""
    method: str
    params: Any
    steps: list[Step] = field(default_factory=list[Step])
    answer: bytes | None = None
    """The message that answers it, as it was sent."""
    missing: str = ""
    """Why there is no answer."""


@dataclass(slots=True)
class _Draft:
    """A call that is being put together."""

    call: Call
    id: bytes
    token: Any
    span: Span
    newest: list[Step] = field(default_factory=list[Step])

    def under_way(self, span: Span) -> bool:
        """Whether it was, in the same session, when something was said."""
        own = self.span
        sessions = {_attribute(one, _SESSION) for one in (own, span)}
        # The stream of the older HTTP with SSE has begun before its session has a name.
        same = own.upstream == span.upstream and len(sessions - {None}) < 2
        return same and own.start_ns <= span.start_ns and (own.end_ns is None or span.start_ns <= own.end_ns)


def read(exchanges: Iterable[Exchanged]) -> list[Call]:
    """The calls of an attempt, in the order in which they began. (Numbers of spans are given when they are written.)"""
    by_client, by_server = list[Exchanged](), list[Exchanged]()
    for one in sorted(exchanges, key=lambda one: one.span.start_ns):
        (by_server if _attribute(one.span, _SENDER) == "server" else by_client).append(one)
    answers = {(one.span.parent_id, message(one.request).id): one.response or None for one in by_server}
    drafts = list[_Draft]()
    for one in by_client:
        drafts += _drafts(one, answers)
    for one in by_server:
        _place(drafts, one, answers)
    return [draft.call for draft in drafts if draft.call.answer is not None or not _by_the_way(draft)]


def _by_the_way(draft: _Draft) -> bool:
    return draft.span.http_status in _BY_THE_WAY


def _drafts(one: Exchanged, answers: dict[tuple[str | None, bytes], bytes | None]) -> list[_Draft]:
    """The requests of an exchange, with what its own answer says. What is found in it is taken out of `answers`."""
    span = one.span
    made = [_draft(sent, span) for sent in messages(one.request) if sent.kind == "request"]
    said = list[Step]()
    for told in _told(one) if made else ():
        if told.kind == "request":
            said.append(Step(told, answers.pop((span.span_id, told.id), None)))
        elif told.kind == "notification":
            said.append(Step(told, None))
        elif (draft := _answered(made, told)) is not None:
            draft.call.answer, draft.call.steps, said = told.raw, said, []
    for draft in made[:1]:
        draft.call.steps += said  # Said after the answer, or without one.
    return made


def _draft(sent: Sent, span: Span) -> _Draft:
    params = value_of(fields(sent.raw).get("params"))
    token = obj(obj(params).get("_meta")).get("progressToken")
    why = "it was too large to be kept whole" if span.truncated else span.error or str(span.status)
    call = Call(span.upstream or "", f"{span.attempt}#{span.sequence}", sent.method, params, missing=why)
    return _Draft(call, sent.id, token, span)


def _answered(made: list[_Draft], told: Sent) -> _Draft | None:
    """The request that is answered. An error without an id is the answer to the only one."""
    if told.kind != "answer":
        return None
    if not told.id and len(made) == 1:
        return made[0]
    return next((draft for draft in made if draft.id == told.id), None)


def _told(one: Exchanged) -> Iterator[Sent]:
    bodies = [event.data.encode() for event in sse.events(one.response)] if one.span.stream else [one.response]
    return (told for body in bodies if body for told in messages(body))


def _place(drafts: list[_Draft], one: Exchanged, answers: dict[tuple[str | None, bytes], bytes | None]) -> None:
    """Gives what a server said in another stream to the call that was under way."""
    sent, span = message(one.request), one.span
    if sent.kind == "request" and (span.parent_id, sent.id) not in answers:
        return  # It is in the answer to its call.
    step = Step(sent, one.response or None)
    above = next((draft for draft in drafts if draft.span.span_id == span.parent_id), None)
    if above is not None:
        if above.call.method != LISTENING or sent.method == ACKNOWLEDGED:
            above.call.steps.append(step)
        return
    open_then = [draft for draft in drafts if draft.call.method != LISTENING and draft.under_way(span)]
    token = obj(value_of(fields(sent.raw).get("params"))).get("progressToken")
    named = [draft for draft in open_then if token is not None and draft.token == token]
    for draft in (named or open_then)[-1:]:
        draft.call.steps.append(step)


def fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a message, each as its bytes."""
    try:
        return _fields(raw)
    except UNREADABLE:
        return {}


def value_of(raw: msgspec.Raw | None) -> Any:
    """A JSON value, whole numbers of any size; None where there is none, or one too deep to be compared."""
    data = b"" if raw is None else bytes(raw)
    return None if loads(data) is None else json.loads(data)


def result_of(call: Call) -> dict[str, Any] | None:
    """The result of a call, None for an error."""
    found = fields(call.answer or b"").get("result")
    return None if found is None else obj(value_of(found))


def target_of(call: Call) -> str | None:
    """The tool, prompt or resource that a call is about."""
    params = obj(call.params)
    return text(params.get("uri" if call.method.startswith("resources/") else "name"))


def _attribute(span: Span, name: str) -> Any:
    return (span.attributes or {}).get(name)
