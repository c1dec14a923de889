"""Nouns of the tape as spans of OpenTelemetry: their attributes, content and place. Pure; `semconv` has the names.

| on the tape | span | kind | parent |
|---|---|---|---|
| an attempt that ended | `invoke_agent` | internal | none: the root of the attempt's trace |
| `llm` | `{operation} {model}` | client | the caller's (`traceparent`), else the agent's span around it, or the root |
| `tool` | `{method} {target}` | client | the same |
| `reward` | `gen_ai.evaluation.result` | internal | the call that it judges, else the root |
| `event` | its own name | internal | the root |
| `otel` | as it came, resource and scope too | its own | its own; the root when it has none |

The root of an attempt is span 0 of its derived trace, the one that a runner gives its agent as `TRACEPARENT`. It can
only be sent when the attempt has ended. An attempt that the queue has not handed out may never end, so its spans have
no parent, instead of one that may never come.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Outgoing
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.model.rollout import Attempt, Reward
from penstock.gateway.model.span import ParentGuess, Span, SpanNode, guess_parents, span_id, trace_id
from penstock.gateway.model.turn import Message, Part, Tool, Turn
from penstock.gateway.reading.diagnosis.sub_agents import told_callers
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.loose_json import obj, text

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

Pairs: TypeAlias = "RepeatedCompositeFieldContainer[KeyValue]"
"""A list of attributes in protobuf, to which others are added."""
INTERNAL: Final = Outgoing.SPAN_KIND_INTERNAL
CLIENT: Final = Outgoing.SPAN_KIND_CLIENT
_OWN = (
    *(
        semconv.SPAN_KIND,
        semconv.STATUS_CODE,
        semconv.STATUS_DESCRIPTION,
        semconv.SCOPE_NAME,
        semconv.SCOPE_VERSION,
        semconv.RESOURCE,
    ),
    *(semconv.EVENTS, semconv.LINKS, semconv.TRACE_STATE, semconv.DROPPED),
)


def of_attempt(attempt: Attempt) -> Outgoing:
    """The root span of an attempt that has ended."""
    found = _span(trace_id(attempt.rollout, attempt.id), root_id(attempt.rollout, attempt.id), None)
    found.name, found.kind = semconv.INVOKE_AGENT, INTERNAL
    found.start_time_unix_nano, found.end_time_unix_nano = attempt.created_ns, attempt.ended_ns or attempt.created_ns
    if semconv.attempt_error(attempt):
        reason = attempt.outcome.reason if attempt.outcome is not None else None
        found.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=reason or attempt.status.value))
    fill(found.attributes, semconv.attributes(semconv.OF_AN_ATTEMPT, attempt))
    return found


def of_call(span: Span, server: str | None, place: SpanPlacement) -> Outgoing:
    """The span of a model call. `server`: base URL of the upstream."""
    found = _begun(span, place)
    rows = semconv.OF_EVERY_SPAN + semconv.OF_A_CALL
    otel = by_name(span.dialect).otel
    attributes = _of_server(server)
    if otel is not None:
        rows += semconv.OF_A_MODEL_CALL
        attributes[semconv.PROVIDER] = semconv.provider(otel, attributes.get(semconv.ADDRESS))
    said = (span.method,) if otel is None else (otel.operation, span.model)
    found.name, found.kind = " ".join(filter(None, said)), CLIENT
    fill(found.attributes, attributes | _attributes(span, place, rows))
    return found


def _of_server(server: str | None) -> dict[str, Any]:
    url = urlsplit(server or "")
    port = url.port or (443 if url.scheme == "https" else 80)
    return {} if url.hostname is None else {semconv.ADDRESS: url.hostname, semconv.PORT: port}


def of_tool(span: Span, server: str | None, place: SpanPlacement) -> Outgoing:
    """The span of a tool call: its attributes are the conventions' own. `server`: the server's URL; None for one
    without."""
    found, attributes = _begun(span, place), span.attributes or {}
    target = attributes.get(semconv.TOOL) or attributes.get(semconv.PROMPT)
    named = " ".join(str(part) for part in (attributes.get(semconv.METHOD), target) if part)
    found.name, found.kind = span.name or named or "tool", CLIENT
    fill(found.attributes, _of_server(server) | attributes | _attributes(span, place))
    return found


def of_reward(span: Span, judged: Span | None, place: SpanPlacement) -> Outgoing:
    """The span of a reward: the conventions define evaluations as events, so it has an event for each score. `judged`:
    the call that it judges, if it is one call."""
    reward = Reward.of(span)
    found = _begun(span, place)
    attributes = semconv.attributes(semconv.OF_A_REWARD, reward)
    if judged is not None and judged.response_id is not None:
        attributes[semconv.EVALUATED] = judged.response_id
    found.name = semconv.EVALUATION
    for name, score in semconv.evaluations(reward):
        said = {semconv.EVALUATION_NAME: name, semconv.EVALUATION_VALUE: score}
        event = found.events.add(name=semconv.EVALUATION, time_unix_nano=span.start_ns)
        fill(event.attributes, attributes | said)
    fill(found.attributes, _attributes(span, place) | attributes)
    return found


def of_event(span: Span, place: SpanPlacement) -> Outgoing:
    """The span of an event, without a duration."""
    found = _begun(span, place)
    found.name = span.name or "event"
    fill(found.attributes, (span.attributes or {}) | _attributes(span, place))
    return found


def of_otel(span: Span, place: SpanPlacement) -> tuple[Outgoing, dict[str, Any], InstrumentationScope]:
    """A span that came in, as it was, with its resource and its scope."""
    found, said = _begun(span, place), dict(span.attributes or {})
    own = {name: said.pop(name, None) for name in _OWN}
    kind = own[semconv.SPAN_KIND]
    found.name = span.name or ""
    known = isinstance(kind, str) and kind in semconv.SPAN_KINDS
    found.kind = Outgoing.SpanKind.Value(f"SPAN_KIND_{kind.upper()}") if known else Outgoing.SPAN_KIND_UNSPECIFIED
    found.trace_state = own[semconv.TRACE_STATE] or ""
    found.dropped_attributes_count = own[semconv.DROPPED] or 0
    found.status.message = own[semconv.STATUS_DESCRIPTION] or ""
    if own[semconv.STATUS_CODE] == semconv.STATUS_OK:
        found.status.code = Status.STATUS_CODE_OK
    for event in own[semconv.EVENTS] or ():
        made = found.events.add(name=event["name"], time_unix_nano=event["time_ns"])
        fill(made.attributes, event["attributes"])
    for link in own[semconv.LINKS] or ():
        trace = place.trace if link["trace_id"] in place.moved else link["trace_id"]
        ids = {"trace_id": bytes.fromhex(trace), "span_id": bytes.fromhex(link["span_id"])}
        fill(found.links.add(**ids).attributes, link["attributes"])
    fill(found.attributes, said | _attributes(span, place, semconv.OF_AN_AGENTS_SPAN))
    scope = InstrumentationScope(name=own[semconv.SCOPE_NAME] or "", version=own[semconv.SCOPE_VERSION] or "")
    return found, own[semconv.RESOURCE] or {}, scope


def _begun(span: Span, place: SpanPlacement) -> Outgoing:
    """The parts that all spans have."""
    trace = span.trace_id or trace_id(span.rollout, span.attempt)
    own = span.span_id or span_id(trace, span.rollout, span.attempt, span.sequence)
    found = _span(place.trace, own, place.parent)
    found.kind = INTERNAL
    found.start_time_unix_nano, found.end_time_unix_nano = span.start_ns, span.end_ns or span.start_ns
    if (error := semconv.error_type(span)) is not None:
        found.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=error))
    for linked_trace, linked in place.links:
        link = found.links.add(trace_id=bytes.fromhex(linked_trace), span_id=bytes.fromhex(linked))
        fill(link.attributes, {semconv.LINK: semconv.PROBABLE_PARENT})
    for linked_trace, linked, kind, known in place.causes:
        link = found.links.add(trace_id=bytes.fromhex(linked_trace), span_id=bytes.fromhex(linked))
        fill(link.attributes, {semconv.LINK_TYPE: kind} | ({} if known is None else {semconv.KNOWN: known}))
    return found


def _attributes(
    span: Span, place: SpanPlacement, rows: tuple[semconv.Row, ...] = semconv.OF_EVERY_SPAN
) -> dict[str, Any]:
    """The attributes of a table, and those about the place."""
    found = semconv.attributes(rows, span)
    if place.inferred:
        found[semconv.INFERRED] = True
    if span.trace_id not in (None, place.trace, trace_id(span.rollout, span.attempt)):
        found[semconv.ORIGINAL_TRACE] = span.trace_id
    return found


def _span(trace: str, own: str, parent: str | None) -> Outgoing:
    return Outgoing(
        trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(own), parent_span_id=bytes.fromhex(parent or "")
    )


def fill(pairs: Pairs, attributes: Mapping[str, Any]) -> None:
    """Add attributes in place: making each message by itself costs four times as much."""
    for key, value in attributes.items():
        pair = pairs.add()
        try:
            pair.key = key
        except UnicodeEncodeError:
            pair.key = _whole(key)
        _set(pair.value, value)


def _set(into: AnyValue, value: Any) -> None:
    """Set a plain value; None becomes an empty value, a number that is too large becomes text."""
    if isinstance(value, str):
        _set_text(into, value)
    elif isinstance(value, bool):
        into.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        into.int_value = value
    elif isinstance(value, float):
        into.double_value = value
    elif isinstance(value, dict):
        into.kvlist_value.SetInParent()
        fill(into.kvlist_value.values, cast(dict[str, Any], value))
    elif isinstance(value, list):
        into.array_value.SetInParent()
        for one in cast(list[Any], value):
            _set(into.array_value.values.add(), one)
    elif value is not None:
        into.string_value = str(value)


def _set_text(into: AnyValue, text: str) -> None:
    try:
        into.string_value = text
    except UnicodeEncodeError:
        into.string_value = _whole(text)


def _whole(text: str) -> str:
    """A text with a replacement character for half a surrogate pair, which JSON can hold."""
    return text.encode("utf-8", "replace").decode()


# The content of a call in the shape of the GenAI conventions: messages, instructions, tools, sampling.
#
# The content is only read and sent when `otlp.capture_content` is set. The shapes are the JSON schemas beside the
# conventions: `gen-ai-input-messages.json` and others.


def turn_content(turn: Turn) -> dict[str, Any]:
    """The content as attributes of a call's span."""
    instructions, messages = _split(turn)
    found = _sampling(turn.sampling) | {
        semconv.PREVIOUS: turn.previous_response or [],
        semconv.INSTRUCTIONS: [part for message in instructions for part in map(_part, message.parts)],
        semconv.INPUT: [_message(message) for message in messages],
        semconv.TOOLS: [_tool(tool) for tool in turn.tools],
        semconv.OUTPUT: [
            _message(choice.message) | {"finish_reason": _finish(choice.finish)} for choice in turn.choices
        ],
    }
    return {name: value for name, value in found.items() if value != []}


def _split(turn: Turn) -> tuple[list[Message], list[Message]]:
    """(instructions, conversation): in dialects that send instructions as messages, these stay in the conversation."""
    if not by_name(turn.dialect).instructions or not turn.messages or turn.messages[0].role != "system":
        return [], turn.messages
    return turn.messages[:1], turn.messages[1:]


def _sampling(said: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in said.items():
        known = semconv.SAMPLING.get(name)
        if known is not None and isinstance(value, int | float) and not isinstance(value, bool):
            found[known[0]] = known[1](value)
    levels = (_at(said, path) for path in semconv.LEVELS)
    if (level := next(filter(None, levels), None)) is not None:
        found[semconv.REASONING_LEVEL] = level
    stops = next((said[name] for name in semconv.STOPS if said.get(name)), None)
    if stops is not None:
        found[semconv.STOP] = [str(one) for one in stops] if isinstance(stops, list) else [str(stops)]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return found


def _at(said: Any, path: Sequence[str]) -> str | None:
    """The text at a path of keys; None if there is none."""
    for name in path:
        said = obj(said).get(name)
    return text(said)


def _message(message: Message) -> dict[str, Any]:
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "parts": [_part(part) for part in message.parts]} | name


def _part(part: Part) -> dict[str, Any]:
    match part.type:
        case "tool_call":
            return {"type": part.type, "id": part.id, "name": part.name or "", "arguments": _arguments(part.arguments)}
        case "tool_call_response":
            return {"type": part.type, "id": part.id, "response": part.data if part.text is None else part.text}
        case "text" | "reasoning" | "refusal":
            return {"type": part.type, "content": part.text or ""}
        case "media" | "unknown":
            return {"type": part.type, "data": part.data}


def _arguments(text: str | None) -> Any:
    """Arguments as a JSON value wherever they are JSON, else as text: models write broken JSON too."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _tool(tool: Tool) -> dict[str, Any]:
    found = {"description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "name": tool.name} | {key: value for key, value in found.items() if value is not None}


def _finish(finish: str | None) -> str:
    return "error" if finish is None else semconv.FINISHES.get(finish, finish)


# The place of an exported span: its trace, its parent and its links.
#
# An attempt that a worker ran is exported as one trace of its own, whose root is the attempt. SDKs that do not read
# `TRACEPARENT` begin a trace for each of their outermost spans. Those spans, and calls that were made in them, move
# into the trace of the attempt: trace ids change, span ids do not. A call whose `traceparent` names a trace that the
# agent reports elsewhere stays there. A span whose parent has never come is placed under the root and linked to that
# parent.
#
# Other attempts have no root and may be part of somebody's larger trace: their spans stay in the traces they came in.
# A call that named no caller joins the trace of the span that it was made in.

MOST_LINKS = 8
"""Most candidates that a call is linked to."""


class SpanPlacement(NamedTuple):
    """The place of a span in a trace."""

    trace: str
    parent: str | None
    inferred: bool = False
    """True if the parent is inferred, not named."""
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of spans it may belong to."""
    causes: tuple[tuple[str, str, str, str | None], ...] = ()
    """(trace id, span id, type of link, grade of certainty) of the spans that caused it."""
    moved: frozenset[str] = frozenset()
    """Traces that became part of `trace`: links to them become links to it."""


def root_id(rollout: str, attempt: str) -> str:
    """The span id of an attempt's root."""
    return span_id(trace_id(rollout, attempt), rollout, attempt, 0)


def original_placement(span: Span, root: str | None) -> SpanPlacement:
    """The place of a span in the trace that it came in. `root`: the parent of the gateway's own spans; None where there
    will be no root."""
    trace = trace_id(span.rollout, span.attempt)
    own = span.trace_id or trace
    return SpanPlacement(own, span.parent_id or (root if own == trace and span.kind != "otel" else None))


def guessed_placement(call: Span, guess: ParentGuess | None) -> SpanPlacement:
    """The place of a call of an attempt without a root, where the call named no caller."""
    if guess is None:
        return original_placement(call, None)
    links = tuple((node.trace_id, node.span_id) for node in guess.candidates[:MOST_LINKS])
    if guess.parent is None:
        return original_placement(call, None)._replace(links=links)
    return SpanPlacement(guess.parent.trace_id, guess.parent.span_id, True, links)


class AttemptTrace:
    """The trace of an attempt that has a root."""

    def __init__(self, rollout: str, attempt: str, agent: Sequence[SpanNode], calls: Iterable[Span]) -> None:
        """`agent`: the agent's spans; `calls`: the attempt's calls that named no caller."""
        self._trace, self._root = trace_id(rollout, attempt), root_id(rollout, attempt)
        self._moved = frozenset(node.trace_id for node in agent) - {self._trace}
        self._known = {node.span_id for node in agent}
        calls = list(calls)
        self._guesses = guess_parents(agent, calls)
        ids = {span.sequence: span.span_id for span in calls}
        self._callers = {call: ids[caller] for call, caller in told_callers(calls).items()}

    def place(self, span: Span) -> SpanPlacement:
        """The place of any span of the attempt."""
        own = span.trace_id or self._trace
        # A span of the agent may come after all others have been sent.
        moved = self._moved | {own} - {self._trace} if span.kind == "otel" else self._moved
        if own != self._trace and own not in moved:
            return original_placement(span, None)
        found = self._under_parent(span, own) if span.parent_id is not None else self._guessed(span)
        return found._replace(moved=moved)

    def _under_parent(self, span: Span, own: str) -> SpanPlacement:
        if own == self._trace or span.parent_id in self._known:
            return SpanPlacement(self._trace, span.parent_id)
        return SpanPlacement(self._trace, self._root, True, ((own, span.parent_id or ""),))

    def _guessed(self, span: Span) -> SpanPlacement:
        guess = self._guesses.get(span.sequence, ParentGuess(None))
        links = tuple((self._trace, node.span_id) for node in guess.candidates[:MOST_LINKS])
        if guess.parent is None:
            # A sub-agent's call is below the one that started it.
            caller = self._callers.get(span.sequence)
            return SpanPlacement(self._trace, caller or self._root, caller is not None, links)
        return SpanPlacement(self._trace, guess.parent.span_id, True, links)
