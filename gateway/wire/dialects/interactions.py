"""Google's Interactions: `POST /v1beta/interactions`, also below a Vertex project.

A request names a model, or an agent in its place. Its input is a text, contents, or a list of steps: what the user
says, what the model has said, thought and called, and the results of its calls. It may name an earlier interaction
(`previous_interaction_id`) in place of the conversation. An answer is a list of steps too. Tools of type `function` are
the client's; calls and results of all others are steps of the provider, of type unknown in a Turn.

A stream names its events in `event_type`. A step begins with `step.start`, continues with deltas and ends with
`step.stop`; several may run at once, each has its index. The last event, `interaction.completed`, often has no steps. A
client that was cut off asks for the rest by the id of its last event, so an event that comes twice counts once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, product
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool, Turn
from penstock.gateway.wire.dialects.base import Facts, GenAiNames, JsonPostDialect
from penstock.gateway.wire.dialects.family import GEMINI, ErrorFields, Failure, body_failure
from penstock.gateway.wire.dialects.gemini import PREFIX, ROLES
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    count,
    dumps,
    label,
    lenient,
    loads,
    obj,
    objs,
    peek,
    text,
)
from penstock.gateway.wire.dialects.parts import (
    content_parts,
    fingerprint,
    flat_tools,
    merged_messages,
    result_content,
    result_part,
    with_instructions,
)
from penstock.gateway.wire.dialects.request_body import (
    ConversationItems,
    RequestMembers,
    TextPointer,
    TextPointers,
    content_pointers,
    cutter,
    flat_tool_pointers,
    member_json,
)
from penstock.gateway.wire.dialects.responses import ID, STARTED
from penstock.gateway.wire.dialects.sse import StreamReader, chunks, first_data, last_data
from penstock.gateway.wire.dialects.tokens import gemini_usage, quantity

_CREATED, _COMPLETED, _UPDATE = "interaction.created", "interaction.completed", "interaction.status_update"
_START, _DELTA = "step.start", "step.delta"
_ROUTE = re.compile(f"{PREFIX}/interactions")
RETRIEVAL: Final = rf"{PREFIX}/interactions/(?!live\b){ID}(?::stream)?"
"""Matches the path of an earlier interaction."""
_LOST: Final = ("failed", "cancelled")
"""States of an interaction that has no answer."""
CONTENT: Final = frozenset({"text", "image", "audio", "document", "video"})
"""Types of contents; all other objects of an input are steps."""
_STEP_OF: Final = {
    "arguments_delta": "function_call", "thought_summary": "thought", "thought_signature": "thought",
} | dict.fromkeys((*CONTENT, "text_annotation_delta"), "model_output")  # fmt: skip
"""The type of the step that a delta continues, for steps whose start never came; else it has the delta's own type."""


class _TypeField(msgspec.Struct, gc=False):
    type: Any = None


class _InteractionHead(ErrorFields, gc=False):
    """The fields of an interaction that the summary needs."""

    id: Any = None
    model: Any = None
    agent: Any = None
    status: Any = None
    usage: Any = None
    service_tier: Any = None
    steps: list[_TypeField] | None = None
    outputs: Any = None


class _EventHead(ErrorFields, gc=False):
    event_type: Any = None
    event_id: Any = None
    index: Any = None
    step: _TypeField | None = None
    delta: _TypeField | None = None
    metadata: Any = None
    usage: Any = None
    status: Any = None
    interaction_id: Any = None
    interaction: _InteractionHead | None = None


class _AskedFields(RequestFields):
    agent: Any = None
    system_instruction: msgspec.Raw = msgspec.Raw()


class _InteractionConversationFields(RequestFields):
    system_instruction: msgspec.Raw = msgspec.Raw()
    input: list[msgspec.Raw] | dict[str, msgspec.Raw] | str | None = None
    previous_interaction_id: msgspec.Raw = msgspec.Raw()
    continuation_token: msgspec.Raw = msgspec.Raw()


class _NamesFields(msgspec.Struct):
    """The fields of an interaction, or of an event, by which a later request may name the interaction."""

    id: Any = None
    continuation_token: Any = None
    interaction: _NamesFields | None = None


_fields = lenient(_AskedFields)
_asked = msgspec.json.Decoder(_AskedFields).decode
_named = lenient(_NamesFields)
_kind = lenient(_TypeField)
_plain = StreamReader(_InteractionHead).body
_events = StreamReader(_EventHead).events


def _request_fields(request: bytes) -> RequestFields:
    """The fields that a request's head needs: an agent that it names stands for its model."""
    found = peek(request)
    if found.model is None:
        found.model = _fields(request).agent
    return found


class InteractionsDialect(JsonPostDialect):
    name = "interactions"
    family = GEMINI
    end_marker = _COMPLETED.encode()
    stateful = True
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset(
        {"input", "system_instruction", "tools", "model", "agent", "stream", "generation_config"}
    )
    instructions: tuple[str, ...] = ("system_instruction",)
    conversation_field = "input"
    otel: GenAiNames | None = GenAiNames("generate_content", "gcp.gemini")
    request_fields: Callable[[bytes], RequestFields] = staticmethod(_request_fields)
    cut = staticmethod(cutter(_InteractionConversationFields))
    client_tools: ClassVar[tuple[str, ...]] = ("function",)

    def matches(self, method: str, path: str) -> bool:
        """True for a POST to the list of interactions, under any version and project."""
        return method == "POST" and _ROUTE.fullmatch(path) is not None

    def system_pointers(self, request: bytes) -> TextPointers:
        """Point at the system instruction."""
        asked = _asked(request)
        asked.model = asked.agent if asked.model is None else asked.model
        return content_pointers(asked.system_instruction, ("system_instruction",), "system"), asked

    def description_pointers(self, request: bytes) -> Iterable[TextPointer]:
        """Point at the descriptions of functions."""
        return flat_tool_pointers(request)

    def is_complete(self, response: bytes) -> bool:
        """True after the event that ends the interaction; `[DONE]` may follow."""
        ends = (label(obj(loads(data)).get("event_type")) for data in last_data(response, 2))
        return _COMPLETED in ends

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        answer, ended = _summary(response) if stream else (_plain(response), True)
        lost = body_failure(answer) is not None or answer.status in _LOST
        failed: Failure | None = "error_body" if lost else None
        if stream:
            failed = "stream_error" if lost else None if ended else "ended_early"
        own = [step.type for step in answer.steps or () if step.type != "user_input"]
        return Facts(
            model=self.model(request, asked=asked),
            model_served=label(answer.model or answer.agent),
            response_id=label(answer.id),
            finish=_finish(answer.status),
            usage=interactions_usage({"usage": answer.usage, "service_tier": answer.service_tier}),
            tool_calls=own.count("function_call"),
            choices=1 if (own if answer.steps else answer.outputs) else 0,
            failed=failed,
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The exchange; an agent stands for its model."""
        found = super().read(request, response, stream)
        return found.model_copy(update={"model": self.model(request)}) if found.model is None else found

    def answer(self, response: bytes, stream: bool, problems: list[str]) -> Json:
        """The body of a plain answer; an agent stands for its model."""
        found = super().answer(response, stream, problems)
        return found if found.get("model") else found | {"model": found.get("agent")}

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """Fold events into one interaction."""
        return folded(body, problems)

    def items(self, request: bytes) -> ConversationItems:
        """The system instruction, then each step of the input."""
        asked, values = self.cut(request)
        names = (values.get("previous_interaction_id"), values.get("continuation_token"))
        previous = next((it for name in names if (it := text(loads(member_json(name))))), None)
        if asked.model is None:
            asked.model = _fields(request).agent
        return ConversationItems(asked, self.conversation_items(values), previous)

    def conversation_items(self, values: RequestMembers) -> list[msgspec.Raw]:
        """The items; contents that make up one message are one item."""
        said = values.get("input")
        if isinstance(said, list) and said and _kind(said[0]).type in CONTENT:
            values["input"] = msgspec.Raw(b'{"type":"user_input","content":' + member_json(said) + b"}")
        return super().conversation_items(values)

    def is_model_item(self, item: msgspec.Raw) -> bool:
        """True if the model, or the provider, made the step."""
        kind = (one := _kind(item)).type
        if kind is None:
            return super().is_model_item(item)
        return one.type not in CONTENT and kind not in ("user_input", "function_result")

    def reply_fingerprints(self, response: bytes, stream: bool) -> list[bytes]:
        """The fingerprint source of each step of the answer."""
        made = (fingerprint(_message(step)) for step in _own_steps(self.answer(response, stream, [])))
        return [said for said in made if said]

    def continuation_names(self, response: bytes, stream: bool) -> list[str]:
        """The interaction's id, which the first event has, and the token that continues a long one."""
        ends = [*first_data(response, 1), *last_data(response, 2)] if stream else [response]
        told = [one for data in ends for it in [_named(data)] for one in (it, it.interaction) if one is not None]
        found = (label(it) for one in told for it in (one.id, one.continuation_token))
        return [*dict.fromkeys(filter(None, found))]

    def resumed(self, begun: bytes, rest: bytes, path: str) -> bytes | None:
        """Put the rest behind the event that the path names (`last_event_id`)."""
        after = parse_qs(path.partition("?")[2]).get("last_event_id", [""])[-1]
        ids = [text(event.get("event_id")) for event in chunks(begun, [])]
        if after not in ids or any(event.get("event_type") == _CREATED for event in islice(chunks(rest, []), 1)):
            return None
        blank = b"\r\n\r\n" if b"\r\n\r\n" in begun else b"\n\n"
        return begun[: begun.rfind(blank) + len(blank)] + rest

    def sampling(self, asked: Json) -> Json:
        """The generation's configuration, and all other fields of the request that are no content."""
        return obj(asked.get("generation_config")) | super().sampling(asked)

    def forcing_field(self, asked: Json) -> str | None:
        """The choice of tools, or the format of the answer, that forces tokens."""
        chosen = obj(asked.get("generation_config")).get("tool_choice")
        mode = obj(obj(chosen).get("allowed_tools")).get("mode") if isinstance(chosen, dict) else chosen
        if mode in ("any", "validated"):
            return f"tool_choice {mode}"
        format = asked.get("response_format")
        schemas = [obj(it).get("schema") for it in (arr(format) if isinstance(format, list) else [format])]
        return "response_format" if any(schemas) or asked.get("response_mime_type") == "application/json" else None

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The system instruction, then the input; consecutive steps of the model are one message."""
        given: Any = asked.get("input")
        said: list[Any] = [given] if isinstance(given, str | dict) else arr(given)
        odd = [at for at, it in enumerate(said) if not isinstance(it, str | dict)]
        problems += [f"request: input[{at}] is no step and no content" for at in odd]
        grouped: list[Message] = []
        after_content = False
        for item in said:
            contents = isinstance(item, str) or obj(item).get("type") in CONTENT
            message = _message(item)
            if contents and after_content:
                grouped[-1].parts += message.parts
            else:
                grouped.append(message)
            after_content = contents
        return with_instructions(content_parts(asked.get("system_instruction")), merged_messages(grouped))

    def tools(self, asked: Json) -> list[Tool]:
        """Functions by name, Google's own tools by type."""
        return flat_tools(asked.get("tools"), "parameters")

    def choices(self, answer: Json) -> list[Choice]:
        """One choice, of all steps."""
        steps = _own_steps(answer)
        parts = [part for step in steps for part in _message(step).parts]
        message = Message(role="assistant", parts=parts)
        return [Choice(message=message, finish=_finish(answer.get("status")))] if steps else []

    def usage(self, answer: Json) -> Usage | None:
        return interactions_usage(answer)

    def error(self, answer: Json) -> str | None:
        """The error message; where there is none, the state of an interaction that failed or was cancelled."""
        status = answer.get("status")
        if (found := super().error(answer)) is not None or status not in _LOST:
            return found
        told = [*objs(answer.get("errors")), *(obj(step.get("error")) for step in objs(answer.get("steps")))]
        return next((it for one in told if (it := text(one.get("message")))), f"the interaction is {status}")

    def conversation(self, asked: Json) -> list[Any]:
        """The steps of the input: a list may not hold contents beside steps."""
        given: Any = asked.get("input")
        listed: list[Any] = arr(given) if isinstance(given, list) else [] if given is None else [given]
        if not listed or (isinstance(listed[0], dict) and obj(listed[0]).get("type") not in CONTENT):
            return listed
        contents = [{"type": "text", "text": it} if isinstance(it, str) else it for it in listed]
        return [{"type": "user_input", "content": contents}]

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The answer's steps, and a step for each result."""
        steps = _own_steps(answer)
        calls = [step for step in steps if step.get("type") == "function_call"]
        answered = [_result(call, it) for call, it in zip(calls, results, strict=False)]
        return [*steps, *answered] if len(calls) == len(results) else None


def _finish(status: Any) -> str | None:
    return None if status in STARTED else label(status)


def _result(call: Json, result: Part) -> Json:
    if obj(result.data).get("type") == "function_result":
        return obj(result.data) | {"call_id": call.get("id")}
    named = {"type": "function_result", "name": call.get("name"), "call_id": call.get("id")}
    return named | {"result": result_content(result)}


def _own_steps(answer: Json) -> list[Json]:
    """The steps of an answer that are not the user's; models of the first beta list contents only."""
    listed = answer.get("outputs")
    steps = objs(answer.get("steps")) or ([{"type": "model_output", "content": listed}] if listed else [])
    return [step for step in steps if step.get("type") != "user_input"]


def _message(item: Any) -> Message:
    """A step, a content or a text as a message."""
    wire = obj(item)
    match text(wire.get("type")):
        case None if "role" in wire:
            role = text(wire["role"]) or "user"
            return Message(role=ROLES.get(role, role), parts=content_parts(wire.get("content")))
        case None | "text" | "image" | "audio" | "document" | "video":
            return Message(role="user", parts=content_parts([item]))
        case "user_input":
            return Message(role="user", parts=content_parts(wire.get("content")))
        case "function_result":
            return Message(role="tool", parts=[_result_part(wire)])
        case _:
            return Message(role="assistant", parts=_made(wire))


def _made(step: Json) -> list[Part]:
    match step.get("type"):
        case "model_output":
            return content_parts(step.get("content"))
        case "thought":
            parts = [Part(type="reasoning", text=it.text) for it in content_parts(step.get("summary")) if it.text]
            return parts or [Part(type="reasoning", data=step)]
        case "function_call":
            given = step.get("arguments")
            arguments = given if isinstance(given, str) else dumps(obj(given))
            return [Part(type="tool_call", id=text(step.get("id")), name=text(step.get("name")), arguments=arguments)]
        case _:
            return [Part(type="unknown", data=step)]


def _result_part(step: Json) -> Part:
    given = step.get("result")
    said = dumps(obj(given)) if isinstance(given, dict) else given
    wire = step if step.get("is_error") is True else None
    return result_part(step.get("call_id"), said, name=step.get("name"), wire=wire)


# -- usage -------------------------------------------------------------------------------------------------------------

_COUNTS: Final = ("input_tokens", "output_tokens", "thought_tokens", "tool_use_tokens", "cached_tokens", "tokens")
_DETAILS: Final = {"input": "promptTokensDetails", "output": "candidatesTokensDetails", "cached": "cacheTokensDetails"}
_TOOLS: Final = 16
"""Most tools whose runs are counted."""


def interactions_usage(answer: Json) -> Usage | None:
    """Usage as that of generateContent: thoughts are beside the output, results of Google's tools beside the input, and
    cached tokens within it; unless the total says otherwise."""
    fields = obj(answer.get("usage"))
    if not fields:
        return None
    asked, said, thought, results, cached, total = (quantity(fields.get(f"total_{name}")) for name in _COUNTS)
    extra, tools, kept = thought or 0, results or 0, cached or 0
    ways = product((0, extra), (0, tools), (0, kept))
    fits = (way for way in ways if total == (asked or 0) + (said or 0) + extra - way[0] + tools - way[1] + way[2])
    within_output, within_input, beside_input = next(fits, (0, 0, 0))
    told: Json = {
        "promptTokenCount": None if asked is None else asked - within_input + beside_input,
        "candidatesTokenCount": None if said is None else max(0, said - within_output),
        "thoughtsTokenCount": thought,
        "toolUsePromptTokenCount": results,
        "cachedContentTokenCount": cached,
        "serviceTier": answer.get("service_tier"),
    }
    for of, name in _DETAILS.items():
        listed = objs(fields.get(f"{of}_tokens_by_modality"))
        told[name] = [{"modality": it.get("modality"), "tokenCount": it.get("tokens")} for it in listed]
    found = gemini_usage({"usageMetadata": told})
    calls = _searches(objs(fields.get("grounding_tool_count"))[:_TOOLS])
    if found is None or not calls:
        return found
    return found.model_copy(update={"billed": {**(found.billed or {}), "calls": calls}})


def _searches(counted: list[Json]) -> dict[str, int]:
    """Runs of Google's tools. A search is billed for itself, or for the answer that has searched: by the model."""
    runs = {name: times for it in counted if (name := label(it.get("type"))) and (times := quantity(it.get("count")))}
    searches = runs.pop("google_search", 0)
    return runs | ({"grounding": 1, "web_search": searches} if searches else {})


# -- streams -----------------------------------------------------------------------------------------------------------


_PIECES: Final[Any] = object()
"""The key of pieces until the stream ends: no key on the wire."""


class _StepIndex:
    """The places of a stream's steps: an event without an index is about the newest one."""

    __slots__ = ("newest",)

    def __init__(self) -> None:
        self.newest = -1

    def of(self, index: Any, begins: bool = False) -> int:
        at = count(index)
        self.newest = max(0, self.newest + begins) if at is None else at
        return self.newest


def _summary(body: bytes) -> tuple[_InteractionHead, bool]:
    """(the events of a stream as a plain answer, True if one says that it ends). No function is called for a delta of a
    known step."""
    answer, ended, begun, error = _InteractionHead(), False, False, None
    steps: dict[int, _TypeField] = {}
    places = _StepIndex()
    for event in chain.from_iterable(_events(body)):
        kind = event.event_type
        if event.error or "error" in (kind, event.type, event.object):
            error = event.error or True
        if kind == _DELTA:
            if event.metadata:
                answer.usage = _usage_beside(event.metadata) or answer.usage
            answer.usage = event.usage or answer.usage
            if type(event.index) is int and event.index in steps:
                places.newest = event.index
                continue
            known_as = None if event.delta is None else event.delta.type
            step = _TypeField(_STEP_OF.get(known_as, known_as) if isinstance(known_as, str) else None)
            steps.setdefault(places.of(event.index), step)
        elif kind == _START:
            steps.setdefault(places.of(event.index, True), event.step or _TypeField())
        elif (said := event.interaction) is not None:
            begun = begun or kind == _CREATED
            for name in ("id", "model", "agent", "service_tier", "steps", "outputs", "usage", "error"):
                if value := getattr(said, name):
                    setattr(answer, name, value)
            answer.status = said.status or answer.status
        elif kind == _UPDATE:
            answer.id, answer.status = answer.id or event.interaction_id, event.status or answer.status
        answer.usage = event.usage or answer.usage
        if kind == _COMPLETED:
            ended, answer.status = True, answer.status if _finish(answer.status) else "completed"
    answer.error = error or answer.error
    listed, made = answer.steps or [], [steps[at] for at in sorted(steps)]
    answer.steps = listed if len(listed) > len(made) or (listed and not begun) else made
    return answer, ended or _finish(answer.status) is not None


def _usage_beside(metadata: Any) -> Any:
    return obj(metadata).get("total_usage")


def folded(body: bytes, problems: list[str]) -> Json:
    """A stream as a plain answer: the newest value of each field of the interaction, and its steps."""
    answer: Json = {}
    steps: dict[int, Json] = {}
    places, seen = _StepIndex(), set[str]()
    ended = begun = False
    for event in chunks(body, problems):
        kind, known_as = text(event.get("event_type")), text(event.get("event_id"))
        if known_as in seen:
            continue
        seen |= {known_as} if known_as else set()
        if kind == _START:
            # The copy is changed by the deltas.
            steps.setdefault(places.of(event.get("index"), True), dict(obj(event.get("step"))))
        elif kind == _DELTA:
            delta = obj(event.get("delta"))
            of = text(delta.get("type")) or ""
            _add(steps.setdefault(places.of(event.get("index")), {"type": _STEP_OF.get(of, of)}), of, delta)
            answer |= {"usage": it} if (it := _usage_beside(event.get("metadata"))) else {}
        elif isinstance(event.get("interaction"), dict):
            begun = begun or kind == _CREATED
            answer |= {key: value for key, value in obj(event["interaction"]).items() if value}
        elif kind == _UPDATE:
            answer |= {"status": event["status"]} if event.get("status") else {}
            answer["id"] = answer.get("id") or event.get("interaction_id")
        answer |= {"usage": event["usage"]} if event.get("usage") else {}
        if kind == _COMPLETED:
            ended, answer["status"] = True, _finish(answer.get("status")) or "completed"
        if "error" in event or kind == "error":
            answer["error"] = event.get("error") or event
    if not (ended or _finish(answer.get("status")) or answer.get("error")):
        problems.append("response: the stream ended early")
    listed, made = objs(answer.get("steps")), [_whole(steps[at]) for at in sorted(steps)]
    if made and not begun:
        problems.append("response: the stream begins in the middle")
    return answer | {"steps": listed if len(listed) > len(made) or (listed and not begun) else made}


def _add(step: Json, of: str, delta: Json) -> None:
    """Add a delta to its step."""
    match of:
        case "arguments_delta":
            step.setdefault(_PIECES, []).append(text(delta.get("arguments")) or "")
        case "thought_summary":
            _extend(step, "summary", delta.get("content"))
        case "thought_signature":
            step["signature"] = delta.get("signature")
        case "text_annotation_delta":
            last = obj(next(iter(arr(step.get("content"))[::-1]), None))
            last["annotations"] = arr(last.get("annotations")) + arr(delta.get("annotations"))
        case _ if of in CONTENT:
            _extend(step, "content", delta)
        case _:
            told = {key: value for key, value in delta.items() if value is not None}
            if "result" in told:
                told["result"] = _joined(step.get("result"), told["result"])
            step |= told


def _extend(step: Json, name: str, content: Any) -> None:
    """Put a content behind those of a step; a text continues the text before it."""
    contents = step[name] = arr(step.get(name))
    last, wire = obj(contents[-1] if contents else None), obj(content)
    if wire.keys() == {"type", "text"} and last.get("type") == "text" == wire["type"] and not last.get("annotations"):
        last.setdefault(_PIECES, [text(last.get("text")) or ""]).append(text(wire["text"]) or "")
    elif wire:
        contents.append(dict(wire))


def _joined(before: Any, more: Any) -> Any:
    """The result of a tool of the provider's, after a delta that has more of it."""
    if isinstance(before, str) and isinstance(more, str):
        return before + more
    return arr(before) + arr(more) if isinstance(before, list) and isinstance(more, list) else more


def _whole(step: Json) -> Json:
    """A step as plain answers have it: pieces of a text are one, those of arguments an object, or a text if they are
    none."""
    for content in (*objs(step.get("content")), *objs(step.get("summary"))):
        if _PIECES in content:
            content["text"] = "".join(content.pop(_PIECES))
    pieces = step.pop(_PIECES, None)
    if not pieces:
        return step
    said = "".join(pieces)
    value = loads(said)
    return step | {"arguments": value if isinstance(value, dict) else said}
