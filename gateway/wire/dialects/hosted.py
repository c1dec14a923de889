"""Hosted agents: sessions whose loop runs at the provider. Clients send input to a session and read its events. Pure.

The calls themselves use no tokens (`SessionDialect`). Their answers tell what the agent has done: `session_facts` reads
them into events, whichever way they came: an answer to POST, a stream, or a page of a list. Each event has an id.
`tape.hosted_sessions` makes a span of each model turn and of each run of a tool, once. The bytes of such a span are the
events that it is made of; `SessionTurnDialect` and `SessionToolDialect` read them.

Source: the types of the official SDKs (`beta.sessions` of Anthropic's, `beta.agents.sessions` of OpenAI's).

    anthropic   An event has a time (`processed_at`); without one it is queued, and told again later. Events
                `span.model_request_start` and `_end` enclose a model turn. A thread is a sub-agent: it has lists and
                streams of its own, and some of its events also stand in those of the session, with the thread's id.
    openai      A turn is an object with an id, times and usage; the agent may have asked its model several times in it.
                Items name their turn and have no time: theirs is when they were told. Turns and items of a sub-agent
                have paths of their own.
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
from penstock.gateway.wire.dialects.clouds import cloud_path
from penstock.gateway.wire.dialects.family import OPENAI, Family
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    count,
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
from penstock.gateway.wire.dialects.tokens import messages_usage, openai_usage

# -- calls ---------------------------------------------------------------------------------------------------------

_ID: Final = r"[A-Za-z0-9._~-]{1,128}"
_NAME: Final = re.compile(_ID)
_LATEST: Final = 2**63
_CENTS: Final = re.compile("[0-9]{1,15}")


class SessionFormats(NamedTuple):
    """The dialects of a session's spans, and their path up to its id."""

    turn: str
    tool: str
    path: str


class SessionDialect(OpaqueDialect):
    """A call about sessions: it makes one, sends it input, or reads of it."""

    tells_sessions = True
    peeks = False

    def __init__(self, name: str, family: Family, root: str, threads: str) -> None:
        """`name`: the beginning of the names of this format and those of its spans; `root`: the path of all sessions;
        `threads`: the segment before the id of a sub-agent."""
        self.name, self.family = f"{name}_sessions", family
        self.formats = SessionFormats(f"{name}_turn", f"{name}_tool", f"/v1{root}/")
        self._calls = re.compile(rf"(?:/v1)*{root}(?:/({_ID})(?:/{threads}/({_ID}))?(/.*)?)?")
        self._gives_work = re.compile(rf"(?:/v1)*{root}(?:/{_ID}/events)?")
        self._idle = re.compile(rf"(?:/v1)*{root}/{_ID}(?:/archive|/resources(?:/{_ID})?|/{threads}/{_ID}/archive)?")

    def matches(self, method: str, path: str) -> bool:
        """True for every call about sessions."""
        return self._calls.fullmatch(path) is not None

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """None: the session's agent has a model, the call names none."""
        return None

    def session_id(self, path: str) -> str | None:
        return self.place(path)[0]

    def place(self, path: str) -> tuple[str | None, str]:
        """(session, thread) that a path names (no query); the thread is empty for the session's own."""
        found = self._calls.fullmatch(_own_path(path))
        return (None, "") if found is None else (found[1], found[2] or "")

    def gives_work(self, method: str, path: str) -> bool:
        return method == "POST" and self._gives_work.fullmatch(_own_path(path)) is not None

    def is_idle(self, path: str) -> bool:
        return self._idle.fullmatch(_own_path(path)) is not None and ".." not in path

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """None: what the agent has done is not the call's own."""
        return Facts()

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The input that a call sends, and the error if the answer is one. Events in the answer are not repeated here:
        they are spans."""
        asked = obj(loads(request))
        sent = [*_input(asked.get("input")), *(it for one in objs(asked.get("events")) for it in _sent(one))]
        error = None if stream else error_message(obj(loads(response)))
        return Turn(dialect=self.name, stream=stream, messages=[*_messages(sent)], error=error)

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        for message in self.read(request, b"", False).messages:
            yield from message_passages(message, False)


def _own_path(path: str) -> str:
    """A path without the beginning that a cloud puts before it."""
    cloud = cloud_path(path)
    return path if cloud is None else cloud.path


# -- what an answer tells ------------------------------------------------------------------------------------------

EventKind: TypeAlias = Literal[
    "input", "output", "call", "result", "ran", "start", "end", "turn", "grading", "graded", "state", "note"
]
"""The part of an event in a session: what a turn gets and makes (`input`, `output`; `call` and `result` of a tool, or
both, `ran`), the bounds of a turn or all of it, the bounds of an evaluation of the outcome, a change of the session's
state after which no turn goes on, or anything else."""
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
    "function_call": "call",
    "function_call_output": "result",
    "mcp_call": "ran",
    "command_execution": "ran",
    "web_search_call": "ran",
    "computer_use_call": "ran",
}
_THREAD_CREATED: Final = "session.thread_created"
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
    turn: str = ""
    """The id of its turn, if it names that; else its time decides."""
    end_ns: int | None = None
    """The end of what is told at once."""
    opens: str = ""
    """The thread that begins with it."""

    @property
    def type(self) -> str:
        """The provider's name for its kind."""
        return text(self.data.get("type")) or text(self.data.get("object")) or ""


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


class SessionTrace(NamedTuple):
    """The trace of a turn, as the provider keeps it."""

    turn: str
    otlp: Json
    """A request of OTLP with spans, in JSON."""


class SessionFacts(NamedTuple):
    """The facts about a session in one answer."""

    session: str
    """Its id, behind the provider's name."""
    formats: SessionFormats
    events: tuple[SessionEvent, ...] = ()
    """In the order of the session."""
    agents: tuple[SessionAgent, ...] = ()
    models: Mapping[str, str] = {}
    """Models of agents that may be called, by the name of the agent."""
    traces: tuple[SessionTrace, ...] = ()


class _ObjectFacts(NamedTuple):
    """The facts in one object of an answer."""

    session: str
    """The id of the session if the object is or holds one; else empty."""
    events: tuple[SessionEvent, ...] = ()
    agents: tuple[SessionAgent, ...] = ()
    models: Mapping[str, str] = {}


def session_facts(
    dialect: Dialect, path: str, response: bytes, stream: bool, at_ns: int, known: str = ""
) -> SessionFacts | None:
    """The facts about a session in a call's answer, or a part of it; None if it tells of none. `path`: with its query;
    `at_ns`: when the answer was there; `known`: the session's id, if an earlier part has told it."""
    if not isinstance(dialect, SessionDialect):
        return None
    session, thread = dialect.place(path.partition("?")[0])
    answer = Json() if stream else obj(loads(response))
    listed = isinstance(answer.get("data"), list)
    told = [*chunks(response, [])] if stream else objs(answer["data"]) if listed else [answer]
    if dialect.family is OPENAI:
        if listed and "order=asc" not in path:
            told.reverse()  # the newest comes first
        found = [_of_openai(one, thread, at_ns) for one in told]
    else:
        found = [_of_anthropic(one, thread) for one in told]
    made = next((None if listed else it.session for it in found if it.session), None)
    if not (session := session or known or made):
        return None  # a list of sessions
    events = [one for it in found for one in it.events]
    if events and not stream and events[0].at_ns > events[-1].at_ns:
        events.reverse()
    models = {name: model for it in found for name, model in it.models.items()}
    agents = tuple(one for it in found for one in it.agents)
    traces = tuple(_traces(told)) if dialect.family is OPENAI else ()
    return SessionFacts(f"{dialect.family.name}/{session}", dialect.formats, tuple(events), agents, models, traces)


def _traces(told: Iterable[Json]) -> Iterator[SessionTrace]:
    for one in told:
        if (
            one.get("object") == "agent.session.trace"
            and (turn := _id(one.get("id")))
            and (otlp := obj(one.get("otlp")))
        ):
            yield SessionTrace(turn, otlp)


def _of_anthropic(one: Json, thread: str) -> _ObjectFacts:
    is_whole, event = one.get("type") == "session", _event(one, thread)
    models = dict(_callable_agents(obj(one.get("agent")))) if is_whole else {}
    session = _id(one.get("id")) if is_whole else ""
    return _ObjectFacts(session, () if event is None else (event,), tuple(_agents(one)), models)


def _event(one: Json, thread: str) -> SessionEvent | None:
    """An event; None for an object that is none, is queued, or tells nothing of its own. `thread`: whose list or stream
    it stands in."""
    id, at, type_ = label(one.get("id")), _time(text(one.get("processed_at")) or ""), text(one.get("type")) or ""
    if id is None or at is None or "." not in type_ or type_ in _UNTOLD:
        return None
    kind: EventKind = _KINDS.get(type_, "note")
    of = next((name for field in _OF if (name := label(one.get(field)))), "")
    if kind in ("call", "start", "grading"):
        of = id
    named = _id(one.get("session_thread_id"))
    if type_ == _THREAD_CREATED:
        return SessionEvent(id, kind, at, thread, of, one, opens=named)
    return SessionEvent(id, kind, at, named or thread, of, one)


@lru_cache(maxsize=1024)
def _time(written: str) -> int | None:
    """A time of RFC 3339 as ns since the epoch; None if it is none."""
    try:
        at = datetime.fromisoformat(written)
    except ValueError:
        return None
    found = -1 if at.tzinfo is None else round(at.timestamp() * 10**6) * 1000
    return found if 0 <= found < _LATEST else None


def _id(value: Any) -> str:
    """The id of a session, a thread or a turn, which is a part of a key on the tape; empty if it is not valid."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""


def _agents(one: Json) -> Iterator[SessionAgent]:
    agent, id = obj(one.get("agent")), _id(one.get("id"))
    name, model = label(agent.get("name")), label(obj(agent.get("model")).get("id"))
    match one.get("type"):
        case "session":
            yield SessionAgent("", name, model, is_main=True)
        case "session_thread" if id:
            parent = _id(one.get("parent_thread_id"))
            yield SessionAgent(id, name, model, parent, is_main=not parent)
        case "session.thread_created" if made := _id(one.get("session_thread_id")):
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


_ENDED: Final = frozenset({"completed", "failed", "cancelled"})
_SENT_ITEMS: Final = frozenset({"function_call_output", "agent_message", "computer_use_approval_request_result"})
"""Types of items that no agent makes: they are complete when they are added to a turn."""
_NOTES: Final = frozenset({"error", "agent.session.failed", "agent.session.idle", "agent.session.requires_action"})


def _of_openai(one: Json, thread: str, at_ns: int) -> _ObjectFacts:
    kind = text(one.get("type")) or text(one.get("object")) or ""
    whole = one if kind == "agent.session" else obj(one.get("session"))
    agent = obj(whole.get("agent"))
    agents = [SessionAgent("", label(agent.get("name")), label(agent.get("model")), is_main=True)] if agent else []
    child = one if kind == "agent.session.subagent" else obj(one.get("subagent"))
    events = list[SessionEvent]()
    if id := _id(child.get("id")):
        agents.append(SessionAgent(id, label(child.get("name")), label(agent.get("model"))))
        at = _seconds(child.get("opened_at")) or at_ns
        events.append(SessionEvent(f"subagent {id}", "note", at, thread, "", child, opens=id))
    turn = one if kind == "agent.session.turn" else obj(one.get("turn"))
    if text(turn.get("status")) in _ENDED and (id := _id(turn.get("id"))):
        begin = _seconds(turn.get("started_at")) or _seconds(turn.get("created_at")) or at_ns
        data = {"type": "agent.session.turn", **turn, "usage": one.get("usage") or turn.get("usage")}
        own, end = _id(turn.get("subagent_id")) or thread, _seconds(turn.get("completed_at")) or at_ns
        events.append(SessionEvent(id, "turn", begin, own, "", data, id, end))
    item = obj(one.get("item")) if kind.startswith("agent.session.turn.item.") else one
    if (turn_id := _id(item.get("turn_id"))) and (id := label(item.get("id"))) is not None:
        sent = item.get("type") in _SENT_ITEMS or item.get("role") == "user"
        if item is one or sent == kind.endswith(".added"):
            events += _item_event(item, id, turn_id, thread, at_ns)
    if kind in _NOTES and (id := label(one.get("event_id"))) is not None:
        events.append(SessionEvent(id, "note", at_ns, thread, "", one))
    return _ObjectFacts(_id(whole.get("id")), tuple(events), tuple(agents))


def _item_event(item: Json, id: str, turn: str, thread: str, at_ns: int) -> Iterator[SessionEvent]:
    kind = _kind_of(item)
    if item.get("status") != "in_progress" and kind is not None:
        of = label(item.get("call_id")) or "" if kind in ("call", "result") else ""
        yield SessionEvent(id, kind, at_ns, thread, of, item, turn)


def _seconds(written: Any) -> int | None:
    """A time in seconds since the epoch as ns; None if it is none."""
    whole = count(written)
    return None if whole is None or whole * 10**9 >= _LATEST else whole * 10**9


# -- spans made of events ------------------------------------------------------------------------------------------


def turn_bodies(
    model: str | None, before: Iterable[SessionEvent], made: Iterable[SessionEvent], end: SessionEvent
) -> tuple[bytes, bytes]:
    """The request and the answer of a model turn: the events that came before it, and those that it has made."""
    sent: Json = {"model": model, "events": [one.data for one in before]}
    return dumps(sent).encode(), dumps({"events": [one.data for one in made], "end": end.data}).encode()


def turn_usage(end: Json) -> Usage | None:
    """The tokens of a turn or an evaluation. `end`: the event that ends it, or tells all of it."""
    if end.get("type") == "agent.session.turn":
        return openai_usage(end) if obj(end.get("usage")) else None
    return messages_usage({"usage": end.get("model_usage", end.get("usage"))})


def turn_failed(end: Json) -> bool:
    """True if a turn failed."""
    return bool(end.get("is_error")) or end.get("status") == "failed"


def list_cost(event: SessionEvent) -> float | None:
    """The cost of a session so far, in US dollars, as an event of `USAGE_TOLD` says it; None if it does not."""
    amount = obj(obj(event.data.get("usage")).get("list_cost"))
    cents = text(amount.get("amount")) or ""
    return int(cents) / 100 if _CENTS.fullmatch(cents) and amount.get("currency") == "USD" else None


def event_text(event: SessionEvent) -> str:
    """The text of an event's content, its error, or its reason; empty for none."""
    data = event.data
    said = flat(content_parts(data.get("content")))
    why = obj(data.get("error")).get("message") or obj(data.get("stop_reason")).get("type")
    return said or text(why) or text(data.get("explanation")) or text(data.get("description")) or ""


def _kind_of(one: Json) -> EventKind | None:
    """The part of an event or an item in its turn; None for an item of no known type."""
    kind = text(one.get("type")) or ""
    if kind == "message":
        return "input" if one.get("role") == "user" else "output"
    return _KINDS.get(kind) or ("output" if kind == "reasoning" or kind.endswith("_call") else None)


def _sent(one: Json) -> Iterator[Json]:
    """The events in what a client sends; OpenAI's input as items."""
    match one.get("type"):
        case "agent.session.input.message":
            yield from _input(one.get("input"))
        case "agent.session.input.tool_result":
            yield {**one, "type": "function_call_output"}
        case _:
            yield one


def _input(given: Any) -> Iterator[Json]:
    """The input with which a session is made, as items."""
    for one in [{"content": given}] if isinstance(given, str) else objs(given):
        yield {"role": "user", **one, "type": "message"}


def _messages(events: Iterable[Json]) -> list[Message]:
    """Events as messages; consecutive ones of the assistant are one."""
    made = list[Message]()
    for message in (message for one in events for message in _said(one)):
        if made and message.role == made[-1].role == "assistant":
            made[-1].parts += message.parts
        else:
            made.append(message)
    return made


def _said(one: Json) -> Iterator[Message]:
    kind = _kind_of(one)
    if kind == "input":
        role = "system" if one.get("type") == "system.message" else "user"
        yield Message(role=role, parts=content_parts(one.get("content")))
    if kind in ("output", "call", "ran"):
        yield Message(role="assistant", parts=_made(one))
    if kind in ("result", "ran"):
        of = next((one[name] for name in (*_OF, "call_id", "id") if name in one), None)
        failed = bool(one.get("is_error") or one.get("error"))
        content = next((one[name] for name in ("content", "output", "error") if one.get(name) is not None), None)
        told = dumps(content) if isinstance(content, dict) else content
        yield Message(role="tool", parts=[result_part(of, told, wire=one if failed else None)])


def _made(one: Json) -> list[Part]:
    kind = text(one.get("type")) or ""
    if kind in ("agent.thinking", "reasoning"):
        thoughts = content_parts(one.get("summary"))
        return [Part(type="reasoning", text=it.text) for it in thoughts] or [Part(type="reasoning", data=one)]
    if kind in ("message", "agent.message", "agent.thread_message_sent"):
        return content_parts(one.get("content"))
    id = text(one.get("call_id")) or text(one.get("id"))
    return [Part(type="tool_call", id=id, name=tool_name(one), arguments=_arguments(one))]


def run_ns(one: Json) -> int:
    """The duration of a run that one item tells; ns."""
    return (count(one.get("duration_ms")) or 0) * 10**6


def tool_name(one: Json) -> str:
    """The name of the tool that an event or an item calls, or that it is."""
    return text(one.get("name")) or (text(one.get("type")) or "").removesuffix("_call")


def _arguments(one: Json) -> str:
    if "command" in one:
        return dumps({"command": one["command"]})
    given = next((one[name] for name in ("input", "arguments", "action", "content") if name in one), None)
    return given if isinstance(given, str) else dumps(given)


class SessionTurnDialect(Dialect):
    """A model turn of a session: one request of the agent to its model."""

    generates = uses_tokens = hosted = True
    peeks = False

    def __init__(self, name: str, family: Family) -> None:
        self.name, self.family = name, family
        self.otel: GenAiNames | None = GenAiNames("chat", family.name)

    def matches(self, method: str, path: str) -> bool:
        """False: no client makes such a call."""
        return False

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        return label(obj(loads(request)).get("model"))

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        answer, model = obj(loads(response)), self.model(request)
        end, made = obj(answer.get("end")), objs(answer.get("events"))
        calls = sum(_kind_of(one) in ("call", "ran") for one in made)
        return Facts(
            model=model,
            model_served=model,
            response_id=label(end.get("model_request_start_id")) or label(end.get("id")),
            usage=turn_usage(end),
            tool_calls=calls,
            choices=int(bool(made)),
            failed="error_body" if turn_failed(end) else None,
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The events up to the turn's last answer as the conversation. Earlier turns have the rest of it."""
        found, answer = self.facts(request, response, stream), obj(loads(response))
        end = obj(answer.get("end"))
        said = _messages([*objs(obj(loads(request)).get("events")), *objs(answer.get("events"))])
        said += [] if found.choices else _verdict(end)
        last = [said.pop()] if said and said[-1].role == "assistant" else []
        error = text(obj(end.get("error")).get("message")) or "the model request failed"
        return Turn(
            dialect=self.name,
            model=found.model,
            model_served=found.model_served,
            response_id=found.response_id,
            messages=said,
            choices=[Choice(message=one) for one in last],
            usage=found.usage,
            error=error if found.failed else None,
        )


def _verdict(end: Json) -> Iterator[Message]:
    """The verdict of an evaluation of the outcome."""
    if isinstance(end.get("result"), str):
        said = f"{end['result']}: {end.get('explanation') or ''}"
        yield Message(role="assistant", parts=[Part(type="text", text=said)])


class SessionToolDialect(Dialect):
    """A run of a tool: the event that asks for it, and the one with its result."""

    peeks = False

    def __init__(self, name: str, family: Family) -> None:
        self.name, self.family = name, family

    def matches(self, method: str, path: str) -> bool:
        """False: no client makes such a call."""
        return False

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """None: no model is called."""
        return None

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        return Facts(
            failed="tool_error" if (told := obj(loads(response))).get("is_error") or told.get("error") else None
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        asked, told = obj(loads(request)), obj(loads(response))
        made = _messages([asked] if told == asked else [asked, told])
        messages, choices = made[:1], [Choice(message=one) for one in made[1:]]
        return Turn(dialect=self.name, messages=messages, choices=choices)

    def tool_run(self, request: bytes, response: bytes, stream: bool) -> tuple[Any, Any, str | None]:
        asked, told = obj(loads(request)), obj(loads(response))
        content = next((told[name] for name in ("content", "output") if told.get(name) is not None), None)
        failed = bool(told.get("is_error") or told.get("error"))
        return loads(_arguments(asked)), {"content": content, "isError": failed} if told else None, None
