"""OpenAI responses: `POST /v1/responses`. Calls below that path are `retrieval`, or opaque.

Input and output are flat lists of items: a message, a function call, its output, a piece of reasoning are one item
each. Consecutive items of the model are one assistant message, in a Turn and in a fingerprint, as they would be in the
other dialects. An item is a tool call when the client has to answer it, which is to say when its type ends in `_call`
and it has a `call_id`; a call that the provider runs itself is of type unknown.

The last event of a stream holds the whole answer. The answer is put together from the events before it only if it is
missing, or empty (Codex's server leaves the items out).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, ClassVar, Final

import msgspec

from penstock.gateway.model.facts import CACHE_MISS, REASONING_REMOVED
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool, Turn
from penstock.gateway.wire.dialects.base import DELTA_TEXT, Dialect, Facts, GenAiNames, JsonPostDialect, routes
from penstock.gateway.wire.dialects.choices import folded_arguments
from penstock.gateway.wire.dialects.family import OPENAI, ErrorFields, Failure, body_failure
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    count,
    dumps,
    entries,
    label,
    lenient,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.opaque import OpaqueDialect
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
    ANSWER_TYPE_SUFFIXES,
    COMPACTED,
    ConversationItems,
    MessageFields,
    Path,
    TextPointer,
    TextPointers,
    ToolDescription,
    content_pointers,
    cutter,
    member_json,
    message_pointers,
    tool_pointers,
)
from penstock.gateway.wire.dialects.sse import StreamReader, chunks, first_data, last_data
from penstock.gateway.wire.dialects.tokens import decoded_fields, openai_usage, usage_fields
from penstock.gateway.wire.dialects.websocket_messages import (
    ENDS,
    is_steering_event,
    merge_messages,
    read_client_message,
    read_server_message,
)

# The stream of a response: its items, put together from the events that servers send, and the fields of its summary.
#
# An item begins with `output_item.added`, continues with deltas and `.done` events, which repeat its texts and
# arguments, and ends with `output_item.done`. Servers leave out any of these, the `output_index` too: an event
# belongs to the item that it names (`item_id`, which is not the `call_id`), else to that of its index, else to the
# newest. A `.done` counts before the deltas. The last event holds the whole answer, unless its server leaves the
# items out.

_NEWEST = (
    "id", "model", "status", "incomplete_details", "usage", "service_tier", "tool_usage", "output", "error",
    "input_transformations", "prompt_cache_diagnostics",
)  # fmt: skip
LOST = ("response.failed", "response.cancelled")
"""Events that end a response without an answer."""
LISTS = {
    "response.output_text": ("content", "content_index", "output_text", "text"),
    "response.refusal": ("content", "content_index", "refusal", "refusal"),
    "response.reasoning_text": ("content", "content_index", "reasoning_text", "text"),
    "response.reasoning_summary_text": ("summary", "summary_index", "summary_text", "text"),
    "response.output_audio_transcript": ("content", "content_index", "output_audio", "transcript"),
    # The names of the beta of realtime.
    "response.audio_transcript": ("content", "content_index", "audio", "transcript"),
    "response.text": ("content", "content_index", "text", "text"),
}
"""Events of an item's lists, each `.delta` or `.done`: the list, the field that holds the index in it, the part's type,
and the part's text field, which is also that of its `.done`."""
FIELDS = {
    "response.function_call_arguments": ("function_call", "arguments"),
    "response.custom_tool_call_input": ("custom_tool_call", "input"),
}
"""Events of an item's own fields, `.delta` or `.done`: the item's type, the field."""
PARTS = {
    "response.content_part": ("content", "content_index"),
    "response.reasoning_summary_part": ("summary", "summary_index"),
}
"""Events that hold a part of an item's list, `.added` or `.done`."""
ITEMS = ("response.output_item.added", "response.output_item.done")
_TEXT_OF = {of: field for _, _, of, field in LISTS.values()}
ITEM_OF = {
    "response.output_text": "message",
    "response.refusal": "message",
    "response.content_part": "message",
    "response.reasoning_text": "reasoning",
    "response.reasoning_summary_text": "reasoning",
    "response.reasoning_summary_part": "reasoning",
    "response.output_audio_transcript": "message",
    "response.audio_transcript": "message",
    "response.text": "message",
} | {kind: of for kind, (of, _) in FIELDS.items()}
"""The type of the item that an event continues, for items whose start never came."""
_MORE = {f"{kind}.{end}": of for kind, of in ITEM_OF.items() for end in ("added", "delta", "done")}


class ItemHead(msgspec.Struct, gc=False):
    type: Any = None
    id: Any = None
    call_id: Any = None
    action: Any = None


class ResponseHead(ErrorFields, gc=False):
    """The fields of a response that the summary needs."""

    id: Any = None
    model: Any = None
    status: Any = None
    incomplete_details: Any = None
    usage: Any = None
    service_tier: Any = None
    tool_usage: Any = None
    conversation: Any = None
    input_transformations: Any = None
    prompt_cache_diagnostics: Any = None
    output: list[ItemHead] | None = None


class EventHead(ErrorFields, gc=False):
    output_index: Any = None
    item_id: Any = None
    item: ItemHead | None = None
    usage: Any = None
    response: ResponseHead | None = None


_events = StreamReader(EventHead).events


def assembled(events: Iterable[Json], problems: list[str]) -> Json:
    """The events of a stream as a plain answer: the newest value of each field of the response, and its items."""
    answer: Json = {}
    beside: Json = {}
    places = _ItemIndex()
    items: dict[_ItemPosition, list[Json]] = {}
    ended = False
    for event in events:
        kind, index = text(event.get("type")) or "", event.get("output_index")
        ended = ended or kind in ENDS
        beside |= usage_fields({"usage": event.get("usage")})
        if isinstance(event.get("response"), dict):
            said = {
                key: value
                for key, value in obj(event["response"]).items()
                if (objs(value) if key == "output" else value)
            }
            answer |= ({"status": kind.removeprefix("response.")} if kind in ENDS else {}) | said
        elif kind in ITEMS:
            item = obj(event.get("item"))
            items.setdefault(places.of(index, item.get("id"), kind == ITEMS[0]), []).append(event)
        elif kind in _MORE:
            items.setdefault(places.of(index, event.get("item_id")), []).append(event)
        if "error" in event and not is_steering_event(kind):
            answer["error"] = event["error"]
    if not (ended or answer.get("error")):
        problems.append("response: the stream ended early")
    return beside | answer | {"output": arr(answer.get("output")) or [_item(items[place]) for place in sorted(items)]}


def stream_summary(body: bytes) -> tuple[ResponseHead, bool]:
    """(the events of a stream as a plain answer, True if one says that it ends). No function is called for a delta of a
    known item."""
    answer, ended, error = ResponseHead(), False, None
    beside: Json = {}
    places = _ItemIndex()
    items: dict[_ItemPosition, ItemHead] = {}
    for event in chain.from_iterable(_events(body)):
        kind: str = event.type if type(event.type) is str else ""
        if (event.error or kind == "error" or event.object == "error") and not is_steering_event(kind):
            error = event.error or True
        if event.usage:
            beside |= usage_fields({"usage": event.usage})
        if (said := event.response) is not None:
            ended = ended or kind in ENDS
            for name in _NEWEST:
                value = getattr(said, name)
                if not value and name == "status" and kind in ENDS:
                    value = kind.removeprefix("response.")
                if value:
                    setattr(answer, name, value)
        elif kind in _MORE:
            known_as, index = event.item_id, event.output_index
            if type(known_as) is str and type(index) is int and known_as in places.ids:
                place = places.ids[known_as]
                if places.indexes.get(index) == place and items[place].type:
                    places.newest = place
                    continue
            before = items.setdefault(place := places.of(index, known_as), ItemHead())
            if not before.type:
                implied = (text(known_as) or "") if _MORE[kind].endswith("_call") else None
                items[place] = ItemHead(_MORE[kind], None, before.call_id or implied, before.action)
        elif kind in ITEMS:
            item = event.item or ItemHead()
            place = places.of(event.output_index, item.id, kind == ITEMS[0])
            before = items.setdefault(place, item)
            call_id = item.call_id if item.call_id or before.call_id is None else before.call_id
            items[place] = ItemHead(item.type or before.type, item.id, call_id, item.action or before.action)
        else:
            ended = ended or kind in ENDS
    answer.error = error or answer.error
    answer.usage = answer.usage or beside.get("usage")
    answer.output = answer.output or [items[place] for place in sorted(items)]
    return answer, ended


_ItemPosition = tuple[int, int]
"""The index of an item, and the number of items before it."""


class _ItemIndex:
    """The places of a stream's items: an event finds its item by id, else by index, else it is the newest."""

    def __init__(self) -> None:
        self.ids: dict[str, _ItemPosition] = {}
        self.indexes: dict[int, _ItemPosition] = {}
        self.newest: _ItemPosition | None = None
        self._known = 0

    def of(self, index: Any, known_as: Any, begins: bool = False) -> _ItemPosition:
        """The place of the item that an event is about. `begins`: the event says that the item is new."""
        at, id = count(index), text(known_as)
        place = None if id is None else self.ids.get(id)
        if place is None and not begins:
            place = self.newest if at is None else self.indexes.get(at)
        if place is None:
            beside = 0 if self.newest is None else self.newest[0]
            place, self._known = (beside if at is None else at, self._known), self._known + 1
        self.newest = place
        if at is not None:
            self.indexes[at] = place
        if id is not None:
            self.ids[id] = place
        return place


class _ItemPart:
    """A part of an item's list, as far as it has come."""

    def __init__(self) -> None:
        self.known: Json = {}
        self.texts: list[str] = []

    def add(self, said: Any, whole: bool) -> None:
        """Add a piece of its text; replace the text where the piece is `whole`."""
        if isinstance(said, str) and said:
            if whole:
                self.texts.clear()
            self.texts.append(said)

    def made(self) -> Json:
        """The part as a plain answer has it."""
        field = _TEXT_OF.get(text(self.known.get("type")) or "", "text")
        return self.known | ({field: "".join(self.texts)} if self.texts or field not in self.known else {})


def _item(events: list[Json]) -> Json:
    """An item, as far as it came: of each field the newest value that is not empty. Its fields in `output_item.done`
    count before what the deltas say. Until an item has told its type, the first event that continues it does."""
    more = [event for event in events if event["type"] in _MORE]
    item, done = Json(), set[str]()
    for event in events:
        if event["type"] in _MORE:
            item = item if item.get("type") else _implied(event, more) | {key: it for key, it in item.items() if it}
            continue
        said = {key: it for key, it in obj(event.get("item")).items() if it or item.get(key) is None}
        item |= said
        if event["type"] == ITEMS[1]:
            done.update(key for key, it in said.items() if it)
    return item | {key: it for key, it in _pieces(more).items() if key not in done}


def _implied(event: Json, more: list[Json]) -> Json:
    """An item of which only events that continue it are known, `more`, of which `event` is the first."""
    kind, known_as = _MORE[event["type"]], event.get("item_id")
    if not kind.endswith("_call"):
        return {"type": kind, "id": known_as}
    name = next((it["name"] for it in more if it.get("name")), None)
    return {"type": kind, "id": known_as, "call_id": text(known_as) or "", "name": name}


def _pieces(events: list[Json]) -> Json:
    """The lists and fields of an item that its events hold."""
    lists: defaultdict[str, defaultdict[int, _ItemPart]] = defaultdict(lambda: defaultdict(_ItemPart))
    fields: defaultdict[str, list[Any]] = defaultdict(list)
    for event in events:
        kind, _, end = event["type"].rpartition(".")
        if kind in LISTS:
            name, place, of, field = LISTS[kind]
            part = lists[name][count(event.get(place)) or 0]
            part.known.setdefault("type", of)
            part.add(event.get(field if end == "done" else "delta"), end == "done")
        elif kind in PARTS:
            name, place = PARTS[kind]
            part, said = lists[name][count(event.get(place)) or 0], obj(event.get("part"))
            part.known |= {key: value for key, value in said.items() if value or key not in part.known}
            part.add(said.get(_TEXT_OF.get(text(said.get("type")) or "", "text")), end == "done")
        elif kind in FIELDS and (said := event.get("delta" if end == "delta" else FIELDS[kind][1])):
            if end == "done":
                fields[kind].clear()
            fields[kind].append(said)
    made = {name: [parts[at].made() for at in sorted(parts)] for name, parts in lists.items()}
    return made | {FIELDS[kind][1]: _argument(kind, pieces) for kind, pieces in fields.items()}


def _argument(kind: str, pieces: list[Any]) -> str:
    """The arguments of a function, or the text input of a custom tool."""
    if FIELDS[kind][0] == "function_call":
        return folded_arguments(pieces)
    return "".join(piece for piece in pieces if isinstance(piece, str))


STARTED = ("queued", "in_progress")
ADDITIONAL_TOOLS = "additional_tools"
"""The type of an input item that offers tools, which Codex sends in place of the request's field."""
_OFFERS = (ADDITIONAL_TOOLS, "tool_search_output")
_SETTINGS = "configuration_update"
"""The type of an input item that changes how the next answers are made."""
_FROM_CLIENT = (None, "message", ADDITIONAL_TOOLS, _SETTINGS)
_COMPACTION = b'"compaction"'
OUTPUTS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""The types of calls, each with the type of the items that answer it."""


class _KindFields(msgspec.Struct):
    """The fields of a message on a WebSocket, or of an item, by which its kind is told."""

    type: Any = None
    role: Any = None
    generate: Any = None
    prompt_cache_options: Any = None


class _ResponsesTool(ToolDescription):
    type: Any = None
    tools: list[ToolDescription] | None = None
    """The tools of a namespace."""


class _AdditionalTools(msgspec.Struct):
    type: Any = None
    tools: list[_ResponsesTool] | None = None


class _ResponsesToolFields(msgspec.Struct):
    tools: list[_ResponsesTool] | None = None
    input: list[_AdditionalTools] | str | None = None


class _ResponsesSystemFields(RequestFields):
    instructions: msgspec.Raw = msgspec.Raw()
    input: list[MessageFields] | str | None = None


class _ResponsesConversationFields(RequestFields):
    instructions: msgspec.Raw = msgspec.Raw()
    input: list[msgspec.Raw] | str | None = None
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()


_asked = msgspec.json.Decoder(_ResponsesSystemFields).decode
_offered = msgspec.json.Decoder(_ResponsesToolFields).decode
_kind = lenient(_KindFields)
_plain = StreamReader(ResponseHead).body
_event = lenient(EventHead)


class ResponsesDialect(JsonPostDialect):
    name = "responses"
    family = OPENAI
    end_marker = b"response.completed"
    stateful = True
    websocket = True
    routes: ClassVar[frozenset[str]] = routes("/responses") | {"/backend-api/codex/responses"}
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset(
        {"input", "instructions", "tools", "model", "stream", "type"}
    )
    client_tools: ClassVar[tuple[str, ...]] = ("function", "custom", "local_shell", "apply_patch", "computer")
    instructions: tuple[str, ...] = ("instructions",)
    conversation_field = "input"
    otel: GenAiNames | None = GenAiNames("chat", "openai", "responses")
    cut = staticmethod(cutter(_ResponsesConversationFields))
    read_client_message = staticmethod(read_client_message)
    read_server_message = staticmethod(read_server_message)

    def matches(self, method: str, path: str) -> bool:
        """True for a POST to one of the routes, and for a WebSocket there."""
        return method in ("POST", "WEBSOCKET") and path in self.routes

    def system_pointers(self, request: bytes) -> TextPointers:
        """The instructions, then messages of the roles system and developer."""
        asked = _asked(request)
        items = asked.input if isinstance(asked.input, list) else None
        instructions = content_pointers(asked.instructions, ("instructions",), "system")
        return chain(instructions, message_pointers(items, "input")), asked

    def description_pointers(self, request: bytes) -> Iterable[TextPointer]:
        """The descriptions of functions and custom tools, also of those in namespaces and those that an input item
        adds."""
        asked = _offered(request)
        yield from _described(asked.tools, ("tools",))
        for at, item in enumerate(asked.input if isinstance(asked.input, list) else ()):
            if item.type in _OFFERS:
                yield from _described(item.tools, ("input", at, "tools"))

    def is_prewarm(self, request: bytes) -> bool:
        """True for the first of the two requests that Codex begins with: it has the provider cache the prompt before
        there is any input."""
        return (one := _kind(request)).generate is False or obj(one.prompt_cache_options).get("prewarm") is True

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """Read the exchange; the messages of a request that came in several are joined first."""
        return super().read(merge_messages(request), response, stream)

    def without_history(self, request: bytes, whole: Callable[[], bool]) -> Json | None:
        """The request with what it adds; the messages of a request that came in several are joined first."""
        return super().without_history(merge_messages(request), whole)

    def is_complete(self, response: bytes) -> bool:
        """True after the event that holds the whole response."""
        return any(label(obj(loads(data)).get("type")) in ENDS for data in last_data(response, 1))

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        answer, ended = stream_summary(response) if stream else (_plain(response), True)
        failed: Failure | None = None if ended else "ended_early"
        if body_failure(answer) is not None or f"response.{answer.status}" in LOST:
            failed = "stream_error" if stream else "error_body"
        return Facts(
            model=self.model(request, asked=asked),
            model_served=label(answer.model),
            response_id=label(answer.id),
            finish=label(_finish(answer.status, answer.incomplete_details)),
            usage=self.usage(decoded_fields(answer)),
            tool_calls=sum(_is_call(item.type, item.call_id) for item in answer.output or ()),
            choices=1 if answer.output else 0,
            failed=failed,
            attributes=_diagnostics(answer) if answer.input_transformations or answer.prompt_cache_diagnostics else {},
        )

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """The newest value of each field of the response; its items as they were done, or as far as they came."""
        return assembled(chunks(body, problems), problems)

    def items(self, request: bytes) -> ConversationItems:
        """The instructions, then each item of the input."""
        asked, values = self.cut(body := merge_messages(request))
        previous = text(loads(member_json(values.get("previous_response_id"))))
        if previous is None and "conversation" in values:
            given = loads(member_json(values["conversation"]))
            previous = text(obj(given).get("id") if isinstance(given, dict) else given)
        if previous is None and _COMPACTION in body:
            items = [loads(bytes(it)) for it in arr(values.get("input")) if _COMPACTION in bytes(it)]
            previous = next(iter(compaction_names(items)[::-1]), None)
        return ConversationItems(asked, self.conversation_items(values), previous)

    def is_model_item(self, item: msgspec.Raw) -> bool:
        """True if the model made the item, as its role or its type tells."""
        asked = (one := _kind(item)).type in _FROM_CLIENT or str(one.type).endswith(ANSWER_TYPE_SUFFIXES)
        return not asked or one.role == "assistant"

    def reply_fingerprints(self, response: bytes, stream: bool) -> list[bytes]:
        """The fingerprint source of each item of the answer."""
        made = (
            fingerprint(item_message(item, "assistant"))
            for item in objs(self.answer(response, stream, []).get("output"))
        )
        return [said for said in made if said]

    def continuation_names(self, response: bytes, stream: bool) -> list[str]:
        """The ids of response and conversation in the first event, which holds the response as it began, or in a plain
        answer; and the names of compactions."""
        answer = next((_event(data).response for data in first_data(response, 1)), None) if stream else _plain(response)
        names = [label(answer.id), label(obj(answer.conversation).get("id"))] if answer else []
        if _COMPACTION in response:
            names += compaction_names(self.answer(response, stream, []).get("output"))
        return [name for name in names if name]

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The instructions, then the input."""
        given = asked.get("input")
        items = (item for item in entries(asked, "input", problems) if item.get("type") != ADDITIONAL_TOOLS)
        said = merged_messages([item_message(item, "user") for item in items])
        if isinstance(given, str):
            said = [Message(role="user", parts=content_parts(given))]
        return with_instructions(content_parts(asked.get("instructions")), said)

    def tools(self, asked: Json) -> list[Tool]:
        """Functions and custom tools by name, the provider's own by type; a namespace is the tools in it."""
        return flat_tools(_flat(_offers(asked)), "parameters")

    def server_tools(self, asked: Json) -> list[str]:
        """The types of tools that clients do not run, also of those that the input adds."""
        return super().server_tools({"tools": [tool for tool in _flat(_offers(asked)) if not _is_local(tool)]})

    def choices(self, answer: Json) -> list[Choice]:
        """One choice, of all items."""
        parts = [part for item in objs(answer.get("output")) for part in item_message(item, "assistant").parts]
        finish = text(_finish(answer.get("status"), answer.get("incomplete_details")))
        return [Choice(message=Message(role="assistant", parts=parts), finish=finish)] if answer.get("output") else []

    def usage(self, answer: Json) -> Usage | None:
        return openai_usage(answer)

    def error(self, answer: Json) -> str | None:
        """The error message; where none is given, the status of a response that failed or was cancelled."""
        status = answer.get("status")
        return super().error(answer) or (f"the response is {status}" if f"response.{status}" in LOST else None)

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The answer's items, and an item for each result."""
        items = objs(answer.get("output"))
        calls = [item for item in items if text(item.get("type")) in OUTPUTS]
        answered = [
            {"type": OUTPUTS[call["type"]], "call_id": call.get("call_id"), "output": result_content(result)}
            for call, result in zip(calls, results, strict=False)
        ]
        return [*items, *answered] if len(calls) == len(results) else None

    def answer_text_pattern(self, stream: bool) -> re.Pattern[bytes]:
        """The pattern for the deltas of a stream, which has all texts twice, as deltas and whole."""
        return DELTA_TEXT if stream else super().answer_text_pattern(stream)


def _described(offers: list[_ResponsesTool] | None, path: Path) -> Iterator[TextPointer]:
    for at, offer in enumerate(offers or ()):
        if offer.type != "namespace":
            yield from tool_pointers(offer, (*path, at))
        for inner, tool in enumerate(offer.tools or ()):
            yield from tool_pointers(tool, (*path, at, "tools", inner))


def _offers(asked: Json) -> list[Json]:
    """The offered tools, in the request's field and in its input."""
    added = [item.get("tools") for item in objs(asked.get("input")) if item.get("type") in _OFFERS]
    return [tool for tools in (asked.get("tools"), *added) for tool in objs(tools)]


def _flat(tools: Iterable[Json]) -> list[Json]:
    """Tools with each namespace replaced by the tools in it."""
    return [one for tool in tools for one in (objs(tool.get("tools")) if tool.get("type") == "namespace" else [tool])]


def _is_local(tool: Json) -> bool:
    """True if the client runs a tool that the provider may run too."""
    return obj(tool.get("environment")).get("type") == "local" or tool.get("execution") == "client"


def compaction_names(items: Any) -> list[str]:
    """The names of the compactions among items: these may lose their ids when the client sends them back."""
    said = [text(item.get("encrypted_content")) for item in objs(items) if item.get("type") == "compaction"]
    return [COMPACTED + blake2b(it.encode("utf-8", "replace"), digest_size=16).hexdigest() for it in said if it]


def _diagnostics(answer: ResponseHead) -> dict[str, Any]:
    """Remarks of the provider on its handling of the prompt."""
    removed = {reason for it in objs(answer.input_transformations) if (reason := label(it.get("reason")))}
    missed = label(obj(answer.prompt_cache_diagnostics).get("reason"))
    return ({REASONING_REMOVED: sorted(removed)} if removed else {}) | ({CACHE_MISS: missed} if missed else {})


def _finish(status: Any, details: Any) -> Any:
    return obj(details).get("reason") or (None if status in STARTED else status)


def _is_call(kind: Any, call_id: Any) -> bool:
    return isinstance(kind, str) and kind.endswith("_call") and isinstance(call_id, str)


def item_message(item: Json, role: str) -> Message:
    """An item as a message; `role`: of one that names none."""
    kind = text(item.get("type")) or "message"
    if kind == "message":
        return Message(role=text(item.get("role")) or role, parts=content_parts(item.get("content")))
    if kind.endswith("_call_output"):
        return Message(role="tool", parts=[result_part(item.get("call_id"), item.get("output"))])
    if kind == "tool_search_output" and item.get("call_id") is not None:
        return Message(role="tool", parts=[result_part(item["call_id"], dumps(item.get("tools")))])
    if kind == _SETTINGS:
        return Message(role="developer", parts=[Part(type="unknown", data=item)])
    return Message(role="assistant", parts=_made(item, kind))


def _made(item: Json, kind: str) -> list[Part]:
    if _is_call(kind, item.get("call_id")):
        return [_call_part(item, kind)]
    if kind != "reasoning":
        return [Part(type="unknown", data=item)]
    thoughts = content_parts(item.get("content")) or content_parts(item.get("summary"))
    return [Part(type="reasoning", text=it.text) for it in thoughts] or [Part(type="reasoning", data=item)]


def _call_part(item: Json, kind: str) -> Part:
    given = next((item[key] for key in ("arguments", "input", "action", "operation") if key in item), "")
    arguments = given if isinstance(given, str) else dumps(given)
    name = text(item.get("name")) or kind.removesuffix("_call")
    return Part(type="tool_call", id=text(item.get("call_id")), name=name, arguments=arguments)


# Deferred answers: one call asks for an answer in the background, others fetch it, or cancel it, by its id.
#
# Whoever fetches an answer, and however often, it belongs to the call that asked for it (`tape.background_answers`),
# so it is read in that call's format. The call that fetches it uses no tokens.

ID: Final = "[A-Za-z0-9_-]{1,256}"
"""Matches the id of an answer: it is a segment of a path, and a key on the tape."""


class _BackgroundField(msgspec.Struct):
    background: Any = None


_retrieval_asked = lenient(_BackgroundField)
_id = re.compile(ID)


class RetrievalDialect(OpaqueDialect):
    """Calls that fetch answers of one format."""

    retrieves = True

    def __init__(self, name: str, of: Dialect, path: str) -> None:
        """`of`: the format of the calls that ask; `path`: a pattern of the path of an answer."""
        self.name, self._of = name, of
        self._calls = re.compile(f"GET {path}|POST {path}/cancel")

    def matches(self, method: str, path: str) -> bool:
        """True for calls whose response is the state of an earlier call."""
        return self._calls.fullmatch(f"{method} {path}") is not None

    def fetched_response(self, path: str) -> str | None:
        return path.partition("?")[0].removesuffix("/cancel").rpartition("/")[2]

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The id and the state of the answer, and the answer's facts once it is there."""
        found = self._of.facts(b"", response, stream)
        name = None if found.finish is None else answer_name(self._of, found.response_id)
        return Facts(
            model_served=found.model_served,
            response_id=found.response_id,
            finish=found.finish,
            # An answer that is an error is no failure of the call that fetches it.
            failed=found.failed if name is None else None,
            answers=None if name is None else (name, found),
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The id and the model of the fetched answer. Its content is in the turn of the call that asked for it."""
        found = self._of.read(b"", response, stream)
        seen = {"model_served": found.model_served, "response_id": found.response_id, "stream": stream}
        return super().read(request, response, stream).model_copy(update=seen)


def deferred_answer_name(dialect: Dialect, request: bytes, facts: Facts) -> str | None:
    """The name under which an answer will be fetched (`answer_name`); None where the answer is complete. `facts`:
    those of the call that asked for it, as far as its response came."""
    ended = facts.finish is not None or facts.usage is not None
    if not dialect.stateful or ended or _retrieval_asked(request).background is not True:
        return None
    return answer_name(dialect, facts.response_id)


def answer_name(dialect: Dialect, response: str | None) -> str | None:
    """The name of an answer of this format; None where its id is not valid."""
    return None if response is None or not _id.fullmatch(response) else f"{dialect.name}/{response}"
