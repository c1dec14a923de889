"""Hosted agents: sessions whose loop runs at the provider. Clients send input to a session and read its events. Pure.

The calls themselves use no tokens (`SessionDialect`). Their answers tell what the agent has done: `session_facts` reads
them into events, whichever way they came: an answer to POST, a stream, or a page of a list. Each event has an id.
`tape.hosted_sessions` makes a span of each model turn and of each run of a tool, once. The bytes of such a span are the
events that it is made of; `SessionTurnDialect` and `SessionToolDialect` read them.

Source: the types of Anthropic's SDK (`beta.sessions`). An event has a time (`processed_at`); without one it is queued,
and told again later. `span.model_request_start` and `_end` enclose a model turn. A thread is a sub-agent: it has lists
and streams of its own, and some of its events also stand in those of the session, with the thread's id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Passage, Turn
from penstock.gateway.wire.dialects.base import Dialect, Facts, GenAiNames
from penstock.gateway.wire.dialects.family import ANTHROPIC, Family
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    dumps,
    error_message,
    label,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.opaque import OpaqueDialect
from penstock.gateway.wire.dialects.parts import content_parts, flat, message_passages, result_part
from penstock.gateway.wire.dialects.sse import chunks
from penstock.gateway.wire.dialects.tokens import messages_usage

# -- calls ---------------------------------------------------------------------------------------------------------

_ID: Final = r"[A-Za-z0-9._~-]{1,128}"
_CALLS: Final = re.compile(rf"(?:/v1)*/sessions(?:/({_ID})(?:/threads/({_ID}))?(/.*)?)?")
"""Matches the path of a call; the groups are the session, the thread, and what follows."""
_INPUT: Final = re.compile(rf"(?:/v1)*/sessions(?:/{_ID}/events)?")
"""Matches the path of a POST that makes a session or sends it input."""


class SessionDialect(OpaqueDialect):
    """A call about sessions: it makes one, sends it input, or reads of it."""

    name = "managed_sessions"
    family: Family = ANTHROPIC
    tells_sessions = True
    peeks = False

    def matches(self, method: str, path: str) -> bool:
        """True for every call about sessions."""
        return _CALLS.fullmatch(path) is not None

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """None: the session's agent has a model, the call names none."""
        return None

    def session(self, path: str) -> str | None:
        found = _CALLS.fullmatch(path)
        return None if found is None else found[1]

    def gives_work(self, method: str, path: str) -> bool:
        return method == "POST" and _INPUT.fullmatch(path) is not None

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """None: what the agent has done is not the call's own."""
        return Facts()

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The input that a call sends, and the error if the answer is one. Events in the answer are not repeated here:
        they are spans."""
        sent = objs(obj(loads(request)).get("events"))
        error = None if stream else error_message(obj(loads(response)))
        return Turn(dialect=self.name, stream=stream, messages=[*_messages(sent)], error=error)

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        for message in self.read(request, b"", False).messages:
            yield from message_passages(message, False)


# -- what an answer tells ------------------------------------------------------------------------------------------

EventKind: TypeAlias = Literal[
    "input", "output", "call", "result", "start", "end", "grading", "graded", "state", "note"
]
"""The part of an event in a session: what a turn gets and makes (`input`, `output`, `call` and `result` of a tool), the
bounds of a turn or of an evaluation of the outcome, a change of the session's state after which no turn goes on, or
anything else."""
_KINDS: Final[Mapping[str, EventKind]] = {
    "user.message": "input",
    "system.message": "input",
    "agent.thread_message_received": "input",
    "agent.message": "output",
    "agent.thinking": "output",
    "agent.thread_message_sent": "output",
    "agent.tool_use": "call",
    "agent.mcp_tool_use": "call",
    "agent.custom_tool_use": "call",
    "agent.tool_result": "result",
    "agent.mcp_tool_result": "result",
    "user.tool_result": "result",
    "user.custom_tool_result": "result",
    "span.model_request_start": "start",
    "span.model_request_end": "end",
    "span.outcome_evaluation_start": "grading",
    "span.outcome_evaluation_end": "graded",
    "session.status_idle": "state",
    "session.status_terminated": "state",
    "session.deleted": "state",
    "session.thread_status_idle": "state",
    "session.thread_status_terminated": "state",
}
THREAD_CREATED: Final = "session.thread_created"
USAGE_TOLD: Final = "session.usage"
_UNTOLD: Final = frozenset({"event_start", "event_delta", "span.outcome_evaluation_ongoing"})
"""Types of events that tell nothing of their own: previews of an event that follows, and signs of life."""
_OF: Final = (
    "model_request_start_id", "outcome_evaluation_start_id", "tool_use_id", "mcp_tool_use_id", "custom_tool_use_id",
)  # fmt: skip
"""Fields with the id of the event that this one completes."""


class SessionEvent(msgspec.Struct):
    """An event of a session, whichever way it was told."""

    id: str
    kind: EventKind
    at_ns: int
    """Its time; ns since the epoch."""
    thread: str
    """The thread that it belongs to; empty for the session's own."""
    of: str
    """The id of the event that it completes; its own id if others complete it; empty for none."""
    data: Json
    """The event as it came."""

    @property
    def type(self) -> str:
        """The provider's name for its kind."""
        return text(self.data.get("type")) or ""


class SessionAgent(NamedTuple):
    """An agent that works in a session, as far as an answer tells of it."""

    thread: str
    """The thread that it runs in; empty for the session's own."""
    name: str | None
    model: str | None
    parent: str = ""
    """The thread that has made its thread."""
    is_main: bool = False
    """True if its thread is the session's own, which also has an id."""


class SessionFacts(NamedTuple):
    """The facts about a session in one answer."""

    session: str
    """Its id, behind the provider's name."""
    events: tuple[SessionEvent, ...] = ()
    """In the order of the session."""
    agents: tuple[SessionAgent, ...] = ()
    models: Mapping[str, str] = {}
    """Models of agents that may be called, by the name of the agent."""


def session_facts(path: str, response: bytes, stream: bool) -> SessionFacts | None:
    """The facts about a session in a call's answer; None if it tells of none. `path`: with its query."""
    found = _CALLS.fullmatch(path.partition("?")[0])
    if found is None:
        return None
    thread, answer = found[2] or "", Json() if stream else obj(loads(response))
    listed = isinstance(answer.get("data"), list)
    told = [*chunks(response, [])] if stream else objs(answer["data"]) if listed else [answer]
    whole = [one for one in told if one.get("type") == "session"]
    session = found[1] or next((None if listed else label(one.get("id")) for one in whole), None)
    if session is None:
        return None  # a list of sessions
    events = [it for one in told if (it := _event(one, thread)) is not None]
    if events and not stream and events[0].at_ns > events[-1].at_ns:
        events.reverse()
    agents = [it for one in told for it in _agents(one)]
    models = {name: model for one in whole for name, model in _callable_agents(obj(one.get("agent")))}
    return SessionFacts(f"{ANTHROPIC.name}/{session}", tuple(events), tuple(agents), models)


def _event(one: Json, thread: str) -> SessionEvent | None:
    """An event; None for an object that is none, is queued, or tells nothing of its own. `thread`: whose list or stream
    it stands in."""
    id, at, type_ = label(one.get("id")), _time(one.get("processed_at")), text(one.get("type")) or ""
    if id is None or at is None or "." not in type_ or type_ in _UNTOLD:
        return None
    kind: EventKind = _KINDS.get(type_, "note")
    of = next((name for field in _OF if (name := label(one.get(field)))), "")
    if kind in ("call", "start", "grading"):
        of = id
    elsewhere = None if type_ == THREAD_CREATED else label(one.get("session_thread_id"))
    return SessionEvent(id, kind, at, elsewhere or thread, of, one)


@lru_cache(maxsize=1024)
def _time(written: Any) -> int | None:
    """A time of RFC 3339 as ns since the epoch; None if it is none."""
    try:
        at = datetime.fromisoformat(written)
    except (TypeError, ValueError):
        return None
    return None if at.tzinfo is None else round(at.timestamp() * 10**6) * 1000


def _agents(one: Json) -> Iterator[SessionAgent]:
    agent, id = obj(one.get("agent")), label(one.get("id"))
    name, model = label(agent.get("name")), label(obj(agent.get("model")).get("id"))
    match one.get("type"):
        case "session":
            yield SessionAgent("", name, model, is_main=True)
        case "session_thread" if id is not None:
            parent = label(one.get("parent_thread_id"))
            yield SessionAgent(id, name, model, parent or "", is_main=parent is None)
        case "session.thread_created" if (made := label(one.get("session_thread_id"))) is not None:
            yield SessionAgent(made, label(one.get("agent_name")), None)
        case _:
            return


def _callable_agents(agent: Json) -> Iterator[tuple[str, str]]:
    """(name, model) of an agent, and of those that it may call, wherever these stand in its settings."""
    rest: list[Any] = [agent]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif wire := obj(one):
            name, model = label(wire.get("name")), label(obj(wire.get("model")).get("id"))
            if name is not None and model is not None:
                yield name, model
            rest += [value for key, value in wire.items() if key in ("multiagent", "agents", "subagents", "workflows")]


# -- spans made of events ------------------------------------------------------------------------------------------


def turn_bodies(
    model: str | None, before: Iterable[SessionEvent], made: Iterable[SessionEvent], end: SessionEvent
) -> tuple[bytes, bytes]:
    """The request and the answer of a model turn: the events that came before it, and those that it has made."""
    sent: Json = {"model": model, "events": [one.data for one in before]}
    return dumps(sent).encode(), dumps({"events": [one.data for one in made], "end": end.data}).encode()


def turn_usage(end: SessionEvent) -> Usage | None:
    """The tokens of a turn or an evaluation."""
    used = end.data.get("usage" if end.kind == "graded" else "model_usage")
    return messages_usage({"usage": used})


def list_cost(event: SessionEvent) -> float | None:
    """The cost of a session so far, in US dollars, as an event of `USAGE_TOLD` says it; None if it does not."""
    amount = obj(obj(event.data.get("usage")).get("list_cost"))
    cents = text(amount.get("amount")) or ""
    return int(cents) / 100 if cents.isdecimal() and amount.get("currency") == "USD" else None


def event_text(event: SessionEvent) -> str:
    """The text of an event's content, its error, or its reason; empty for none."""
    data = event.data
    said = flat(content_parts(data.get("content")))
    why = obj(data.get("error")).get("message") or obj(data.get("stop_reason")).get("type")
    return said or text(why) or text(data.get("explanation")) or text(data.get("description")) or ""


def _messages(events: Iterable[Json]) -> Iterator[Message]:
    """Events as messages; consecutive ones of the assistant are one."""
    held: list[Part] = []
    for one in events:
        kind = _KINDS.get(text(one.get("type")) or "")
        if kind in ("output", "call"):
            held += _made(one)
            continue
        if held:
            yield Message(role="assistant", parts=held)
            held = []
        if kind == "result":
            of = next((one[name] for name in _OF if name in one), None)
            wire = one if one.get("is_error") else None
            yield Message(role="tool", parts=[result_part(of, one.get("content"), wire=wire)])
        elif kind == "input":
            role = "system" if one.get("type") == "system.message" else "user"
            yield Message(role=role, parts=content_parts(one.get("content")))
    if held:
        yield Message(role="assistant", parts=held)


def _made(one: Json) -> list[Part]:
    if one.get("type") == "agent.thinking":
        return [Part(type="reasoning", data=one)]
    if "input" in one:
        name, given = text(one.get("name")), one.get("input")
        return [Part(type="tool_call", id=text(one.get("id")), name=name, arguments=dumps(given))]
    return content_parts(one.get("content"))


class SessionTurnDialect(Dialect):
    """A model turn of a session: one request of the agent to its model."""

    name = "managed_turn"
    family: Family = ANTHROPIC
    generates = uses_tokens = hosted = True
    peeks = False
    otel: GenAiNames | None = GenAiNames("chat", "anthropic")

    def matches(self, method: str, path: str) -> bool:
        """False: no client makes such a call."""
        return False

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        return label(obj(loads(request)).get("model"))

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        answer, model = obj(loads(response)), self.model(request)
        end, made = obj(answer.get("end")), objs(answer.get("events"))
        calls = sum(_KINDS.get(text(one.get("type")) or "") == "call" for one in made)
        return Facts(
            model=model,
            model_served=model,
            response_id=label(end.get("model_request_start_id")),
            usage=messages_usage({"usage": end.get("model_usage", end.get("usage"))}),
            tool_calls=calls,
            choices=int(bool(made)),
            failed="error_body" if end.get("is_error") else None,
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The events before the turn as the conversation, those that it has made as its answer. Earlier turns have the
        rest of the conversation."""
        found, answer = self.facts(request, response, stream), obj(loads(response))
        made = [*_messages(objs(answer.get("events")))] or [*_verdict(obj(answer.get("end")))]
        return Turn(
            dialect=self.name,
            model=found.model,
            model_served=found.model_served,
            response_id=found.response_id,
            messages=[*_messages(objs(obj(loads(request)).get("events")))],
            choices=[Choice(message=one) for one in made],
            usage=found.usage,
            error="the model request failed" if found.failed else None,
        )


def _verdict(end: Json) -> Iterator[Message]:
    """The verdict of an evaluation of the outcome."""
    if isinstance(end.get("result"), str):
        said = f"{end['result']}: {end.get('explanation') or ''}"
        yield Message(role="assistant", parts=[Part(type="text", text=said)])


class SessionToolDialect(Dialect):
    """A run of a tool: the event that asks for it, and the one with its result."""

    name = "managed_tool"
    family: Family = ANTHROPIC
    peeks = False

    def matches(self, method: str, path: str) -> bool:
        """False: no client makes such a call."""
        return False

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """None: no model is called."""
        return None

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        return Facts(failed="tool_error" if obj(loads(response)).get("is_error") else None)

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        asked, told = [*_messages([obj(loads(request))])], [*_messages([obj(loads(response))])]
        return Turn(dialect=self.name, messages=asked, choices=[Choice(message=one) for one in told])

    def tool_run(self, request: bytes, response: bytes, stream: bool) -> tuple[Any, Any, str | None]:
        told = obj(loads(response))
        result = {"content": told.get("content"), "isError": bool(told.get("is_error"))} if told else None
        return obj(loads(request)).get("input"), result, None
