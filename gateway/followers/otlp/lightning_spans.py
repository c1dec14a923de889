"""Spans in the words of Agent Lightning 0.3: those that come as entries of the tape, and those of the tape as it reads
them.

A span that comes is kept twice: within the bounds of heads, as any span of OpenTelemetry (`span_import`), so that it is
shown, filtered and exported like one; and whole (less secrets), for Agent Lightning. Its token ids may be many more
than a head may hold, and reading a head must stay cheap.

Of the gateway's own spans a model call becomes what Agent Lightning's instrumentation would have made of it: a span
`openai.chat.completion` whose attributes hold messages, tools and sampling, and token ids where they were captured.
Tool calls that the model asked for are spans below it (`TraceToMessages` looks for them there), and so are token ids
once more under the name that its proxy gives them (`LlmProxyTraceToTriplet`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.followers.otlp.signals import ItemRejectedError
from penstock.gateway.followers.otlp.span_import import (
    LATEST,
    LONGEST_KEY,
    LONGEST_NAME,
    MOST_ATTRIBUTES,
    MOST_EVENTS,
    MOST_ITEMS,
    Bounds,
    has_reward,
    hex_id,
    is_span_id,
    is_trace_id,
    judgement_of,
    linked_calls,
    links_of,
)
from penstock.gateway.model.answers import Exchange
from penstock.gateway.model.lightning import Json, nanoseconds, seconds
from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.span import Span as TapeSpan
from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.reading.turns import plain_bodies, read_exchange
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.tokens import WIDTH, read_logprobs, read_tokens
from penstock.gateway.work.lightning import SpanArrival

if TYPE_CHECKING:
    from penstock.gateway.followers.otlp.span_import import AnyValue, KeyValue, Span

NUMBER: Final = "agentlightning.span_sequence_id"
COMPLETION, RAW, ANNOTATION = "openai.chat.completion", "raw_gen_ai_request", "agentlightning.annotation"
"""Names that Agent Lightning's adapters know: a model call, the request of its proxy, a reward."""
_CHATS: Final = frozenset({"chat", "generate_content", "text_completion"})
_CODES: Final = ("UNSET", "OK", "ERROR")

# -- in ----------------------------------------------------------------------------------------------------------------


def arrival_of(span: Json) -> SpanArrival:
    """A checked span of Agent Lightning as it arrives."""
    arrived = _arrival(span, _entry_of(span))
    arrived.again = _entry_of
    return arrived


def _entry_of(span: Json) -> SpanEntry:
    bounds, resource, status = _PlainBounds(), span["resource"]["attributes"], span["status"]
    start = nanoseconds(span["start_time"] or 0)
    entry = SpanEntry(span["rollout_id"], span["attempt_id"], kind="otel", method="")
    entry.name = bounds.text(span["name"], LONGEST_NAME) or None
    failed = status["status_code"] == "ERROR"
    entry.status, entry.start_ns = "error" if failed else "ok", start if 0 < start < LATEST else 0
    entry.end_ns = max(entry.start_ns, min(nanoseconds(span["end_time"] or 0), LATEST - 1))
    entry.trace_id, entry.span_id, entry.parent_id = _ids(span["trace_id"], span["span_id"], span["parent_id"])
    attributes = bounds.mapping(span["attributes"])
    _add_details(attributes, span, bounds)
    if bounds.clipped:
        attributes[semconv.TRUNCATED] = True
    if resource:
        attributes[semconv.RESOURCE] = _PlainBounds().mapping(resource)
    entry.attributes = attributes
    named = attributes.get(semconv.AGENT)
    entry.agent = named[:LONGEST_NAME] if isinstance(named, str) and named else None
    if failed:
        said = attributes.get(semconv.ERROR)
        entry.error = said[:LONGEST_NAME] if isinstance(said, str) and said else "otel"
    return entry


def _arrival(span: Json, entry: SpanEntry) -> SpanArrival:
    arrived = SpanArrival(span, entry)
    if has_reward(entry):
        try:
            arrived.judgement = judgement_of(entry, "user")
        except ItemRejectedError as error:
            arrived.problem = str(error)
        if arrived.judgement is not None and (links := links_of(entry)):
            arrived.judged = lambda spans: linked_calls(spans, links, entry.span_id)
    return arrived


def _ids(trace: str, own: str, parent: str | None) -> tuple[str | None, str | None, str | None]:
    """The ids, where they are ones of OpenTelemetry; others are kept in the whole span only."""
    low = [_hex(one) for one in (trace, own, parent or "")]
    if not is_trace_id(low[0]) or not is_span_id(low[1]):
        return None, None, None
    return low[0], low[1], low[2] if is_span_id(low[2]) else None


def _hex(given: str) -> str:
    found = given.lower()
    return found if set(found) <= set("0123456789abcdef") else ""


def _add_details(attributes: Json, span: Json, bounds: _PlainBounds) -> None:
    status = span["status"]
    if status["status_code"] == "OK":
        attributes[semconv.STATUS_CODE] = semconv.STATUS_OK
    if status.get("description"):
        attributes[semconv.STATUS_DESCRIPTION] = bounds.text(status["description"])
    if events := span["events"]:
        attributes[semconv.EVENTS] = [_event(one, bounds) for one in events[:MOST_EVENTS]]
    links = [(*_ids(one["context"]["trace_id"], one["context"]["span_id"], None), one) for one in span["links"]]
    if links := [one for one in links if one[0]][:MOST_EVENTS]:
        attributes[semconv.LINKS] = [
            {"trace_id": trace, "span_id": own, "attributes": bounds.mapping(one.get("attributes") or {})}
            for trace, own, _, one in links
        ]
    bounds.clipped |= len(events) > MOST_EVENTS or len(links) < min(len(span["links"]), MOST_EVENTS)


def _event(event: Json, bounds: _PlainBounds) -> Json:
    at = max(0, min(nanoseconds(event.get("timestamp") or 0), LATEST - 1))
    found = {"name": bounds.text(event["name"], LONGEST_NAME), "time_ns": at}
    return found | {"attributes": bounds.mapping(event["attributes"])}


class _PlainBounds(Bounds):
    """The bounds of plain values."""

    __slots__ = ()

    def mapping(self, found: Mapping[str, Any]) -> Json:
        """Attributes as a head may hold them."""
        kept: Json = {}
        for key, value in found.items():
            size = len(key)
            if size > self.left or size > LONGEST_KEY or len(kept) >= MOST_ATTRIBUTES or not self.looks:
                self.clipped = True
            else:
                self.looks -= 1
                self.left -= size
                kept[key] = self.plain(value)
        return kept

    def plain(self, value: Any) -> Any:
        """A value as a head may hold it."""
        if isinstance(value, str):
            return self.text(value)
        if not isinstance(value, list):
            return value
        items = cast(list[Any], value)
        most = min(len(items), MOST_ITEMS, self.looks, self.left)
        self.clipped |= most < len(items)
        self.looks, self.left = self.looks - most, self.left - most
        return [self.plain(one) for one in items[:most]]


def arrival_of_otlp(span: Span, resource: Sequence[KeyValue], entry: SpanEntry) -> SpanArrival:
    """A span that came by OTLP, with the attempt's ids in `entry`, as Agent Lightning would have kept it."""
    of_resource, attributes = _mapping(resource), _mapping(span.attributes or ())
    number = attributes.get(NUMBER, of_resource.get(NUMBER))
    sequence = int(number) if isinstance(number, int | str) and str(number).isdigit() else None
    status, parent = span.status, hex_id(span.parent_span_id)
    code = status.code if status is not None and status.code is not None else 0
    address = _address(hex_id(span.trace_id), hex_id(span.span_id))
    found: Json = {
        "rollout_id": entry.rollout,
        "attempt_id": entry.attempt,
        "sequence_id": sequence,
        "trace_id": address["trace_id"],
        "span_id": address["span_id"],
        "parent_id": parent or None,
        "name": span.name or "",
        "status": {
            "status_code": _CODES[code] if 0 <= code < len(_CODES) else _CODES[0],
            "description": (status.message if status is not None else None) or None,
        },
        "attributes": attributes,
        "events": [
            {"name": one.name or "", "attributes": _mapping(one.attributes or ()), "timestamp": _time(one)}
            for one in span.events or ()
        ],
        "links": [
            {
                "context": _address(hex_id(one.trace_id), hex_id(one.span_id)),
                "attributes": _mapping(one.attributes or ()) or None,
            }
            for one in span.links or ()
        ],
        "start_time": seconds(span.start_time_unix_nano or 0),
        "end_time": seconds(span.end_time_unix_nano or 0),
        "context": address,
        "parent": None,
        "resource": {"attributes": of_resource, "schema_url": ""},
    }
    arrived = _arrival(found, entry)
    arrived.numbered = sequence is not None
    return arrived


def _time(event: Any) -> float | None:
    return seconds(event.time_unix_nano or 0)


def _mapping(pairs: Iterable[KeyValue]) -> Json:
    return {pair.key or "": _value(pair.value) for pair in pairs}


def _value(value: AnyValue | None) -> Any:
    """A value, whole; bytes are hex digits, as in Agent Lightning."""
    kind = None if value is None else value.WhichOneof("value")
    if value is None or kind is None:
        return None
    inner = getattr(value, kind)
    if kind == "array_value":
        return [_value(one) for one in (inner.values or ())]
    if kind == "kvlist_value":
        return _mapping(inner.values or ())
    return inner.hex() if isinstance(inner, bytes) else inner


# -- out ---------------------------------------------------------------------------------------------------------------


def answers_of(span: TapeSpan, number: int, exchange: Exchange | None) -> Iterator[Json]:
    """A span of the tape in Agent Lightning's words, with those below it; none for what another span tells already.
    `number`: its place in the rollout; `exchange`: the bytes of a model call."""
    if span.kind == "reward" and (Reward.of(span).key or "").startswith("otel-"):
        return
    found = _bare(span, number)
    if span.kind == "reward":
        found["name"], found["attributes"] = ANNOTATION, _reward(Reward.of(span))
    elif span.kind == "otel":
        _restore(found, span)
    elif span.kind == "llm":
        yield from _model_call(found, span, exchange)
        return
    else:
        named = (span.attributes or {}).get(semconv.TOOL)
        parts = (span.method, named) if span.kind != "event" else ()
        found["name"] = span.name or " ".join(filter(None, parts)) or span.kind
        found["attributes"] = flat((span.attributes or {}) | semconv.attributes(semconv.OF_EVERY_SPAN, span))
    yield found


def _bare(span: TapeSpan, number: int) -> Json:
    """The parts that all spans have."""
    error = semconv.error_type(span)
    address = _address(span.trace_id or "0" * 32, span.span_id or "0" * 16)
    names = {"agentlightning.rollout_id": span.rollout, "agentlightning.attempt_id": span.attempt, NUMBER: str(number)}
    return {
        "rollout_id": span.rollout,
        "attempt_id": span.attempt,
        "sequence_id": number,
        "trace_id": address["trace_id"],
        "span_id": address["span_id"],
        "parent_id": span.parent_id,
        "name": span.name or span.kind,
        "status": {"status_code": "OK" if error is None else "ERROR", "description": error},
        "attributes": {},
        "events": [],
        "links": [],
        "start_time": seconds(span.start_ns),
        "end_time": seconds(span.end_ns),
        "context": address,
        "parent": None,
        "resource": {"attributes": names | {"service.name": "penstock"}, "schema_url": ""},
    }


def _address(trace: str, own: str) -> Json:
    return {"trace_id": trace, "span_id": own, "is_remote": False, "trace_state": {}}


def _reward(reward: Reward) -> Json:
    scores = semconv.evaluations(reward)
    found: Json = {}
    for at, (name, score) in enumerate(scores):
        found[f"{semconv.LIGHTNING_REWARD}{at}.name"] = "primary" if at == 0 and reward.value is not None else name
        found[f"{semconv.LIGHTNING_REWARD}{at}.value"] = score
    return found | flat(semconv.attributes(semconv.OF_A_REWARD, reward))


def _restore(found: Json, span: TapeSpan) -> None:
    """Fill in a span of OpenTelemetry that did not come from Agent Lightning, as its head has it."""
    said = dict(span.attributes or {})
    events, links = said.pop(semconv.EVENTS, ()), said.pop(semconv.LINKS, ())
    resource, code = said.pop(semconv.RESOURCE, {}), said.pop(semconv.STATUS_CODE, None)
    if span.status == "ok":
        found["status"]["status_code"] = "OK" if code == semconv.STATUS_OK else "UNSET"
    found["status"]["description"] = said.pop(semconv.STATUS_DESCRIPTION, None)
    found["events"] = [
        {"name": one["name"], "attributes": flat(one["attributes"]), "timestamp": seconds(one["time_ns"])}
        for one in events
    ]
    found["links"] = [
        {"context": _address(one["trace_id"], one["span_id"]), "attributes": flat(one["attributes"])} for one in links
    ]
    found["attributes"] = flat(said)
    found["resource"]["attributes"] |= flat(resource)


def _model_call(found: Json, span: TapeSpan, exchange: Exchange | None) -> Iterator[Json]:
    names, below = by_name(span.dialect).otel, list[Json]()
    rows = semconv.OF_EVERY_SPAN + semconv.OF_A_CALL + (() if names is None else semconv.OF_A_MODEL_CALL)
    attributes = semconv.attributes(rows, span)
    if names is None or names.operation not in _CHATS:
        found["name"] = " ".join(filter(None, (span.method if names is None else names.operation, span.model)))
    else:
        found["name"] = COMPLETION
        attributes[semconv.PROVIDER] = attributes["gen_ai.system"] = semconv.provider(names, None)
        if exchange is not None:
            turn = read_exchange(span.dialect, exchange, span)
            attributes |= _content(turn)
            below += [_below(found, at, *tool) for at, tool in enumerate(_tool_calls(turn))]
            tokens = _tokens(span, plain_bodies(exchange)[1])
            attributes |= tokens
            if tokens:
                raw = {
                    "llm.hosted_vllm.prompt_token_ids": json.dumps(tokens["prompt_token_ids"]),
                    "llm.hosted_vllm.response_token_ids": json.dumps([tokens["response_token_ids"]]),
                    "llm.hosted_vllm.id": span.response_id or found["span_id"],
                }
                below.append(_below(found, len(below), RAW, raw))
    found["attributes"] = flat(attributes)
    yield found
    yield from below


def _below(found: Json, at: int, name: str, attributes: Json) -> Json:
    """A span below a call, of the same time."""
    own = blake2b(f"{found['span_id']}/{at}".encode(), digest_size=8, person=b"penstock.below").hexdigest()
    ids = {"span_id": own, "parent_id": found["span_id"], "context": _address(found["trace_id"], own)}
    return found | ids | {"name": name, "attributes": attributes}


def _tokens(span: TapeSpan, response: bytes) -> Json:
    """Token ids and log-probabilities of the first choice; nothing where they were not captured."""
    tokens = read_tokens(response, span.stream)
    if not tokens.prompt or 0 not in tokens.outputs or not tokens.outputs[0].ids:
        return {}
    found: Json = {
        "prompt_token_ids": _numbers(tokens.prompt),
        "response_token_ids": _numbers(tokens.outputs[0].ids),
    }
    said = [{"token": one.text, "logprob": one.logprob} for one in read_logprobs(response, span.stream)]
    if said and all(one["logprob"] is not None for one in said):
        found["logprobs.content"] = json.dumps(said)
    return found


def _numbers(ids: bytes) -> list[int]:
    found = array("i")
    found.frombytes(ids[: len(ids) // WIDTH * WIDTH])
    return found.tolist()


# The content of a call as OpenLLMetry's attributes: one for each part of each message, numbered.


def _content(turn: Turn) -> Json:
    found: Json = {}
    for at, said in enumerate(one for message in turn.messages for one in _spoken(message)):
        _number(found, f"gen_ai.prompt.{at}", said)
    for choice in turn.choices:
        said = next(_spoken(choice.message), {"role": "assistant", "content": ""})
        _number(found, f"gen_ai.completion.{choice.index}", said | {"finish_reason": choice.finish or "stop"})
    for at, tool in enumerate(turn.tools):
        parameters = json.dumps(tool.parameters if tool.parameters is not None else {})
        told = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
        _number(found, f"gen_ai.request.functions.{at}", told)
    for name, value in turn.sampling.items():
        known = semconv.SAMPLING.get(name)
        if known is not None and isinstance(value, int | float) and not isinstance(value, bool):
            found[known[0]] = known[1](value)
    return found


def _number(into: Json, prefix: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, one in cast(Json, value).items():
            _number(into, f"{prefix}.{name}", one)
    elif isinstance(value, list):
        for at, one in enumerate(cast(list[Any], value)):
            _number(into, f"{prefix}.{at}", one)
    elif value is not None:
        into[prefix] = value


def _spoken(message: Message) -> Iterator[Json]:
    """The messages of the chat format that a message is: results of tools are messages of their own there."""
    results = [part for part in message.parts if part.type == "tool_call_response"]
    for part in results:
        text = json.dumps(part.data) if part.text is None else part.text
        yield {"role": "tool", "tool_call_id": part.id or "", "content": text}
    rest = [part for part in message.parts if part.type not in ("tool_call_response", "reasoning")]
    if not rest and results:
        return
    calls = [
        {"id": part.id or "", "name": part.name or "", "arguments": part.arguments or "{}"}
        for part in rest
        if part.type == "tool_call"
    ]
    said: Json = {"role": message.role, "content": _text([part for part in rest if part.type != "tool_call"])}
    yield said | ({"tool_calls": calls} if calls else {})


def _text(parts: Sequence[Part]) -> str:
    if all(part.text is not None for part in parts):
        return "".join(part.text or "" for part in parts)
    return json.dumps([part.data if part.text is None else {"type": "text", "text": part.text} for part in parts])


def _tool_calls(turn: Turn) -> Iterator[tuple[str, Json]]:
    """(Name, attributes) of a span for each tool call that the first choice asks for."""
    for part in turn.choices[0].message.parts if turn.choices else ():
        if part.type == "tool_call":
            call = {"tool.call.id": part.id or "", "tool.call.type": "function"}
            told = {"tool.name": part.name or "", "tool.parameters": part.arguments or "{}"}
            yield f"tool_call.{part.name}", told | call


def flat(attributes: Mapping[str, Any]) -> Json:
    """Attributes as OpenTelemetry has them: scalars and lists of scalars; other values are JSON text."""
    return {name: _flat(value) for name, value in attributes.items() if value is not None}


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        items = list(cast(Iterable[Any], value))
        return items if all(isinstance(one, str | int | float) for one in items) else json.dumps(items)
    return value
