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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool, Turn
from penstock.gateway.wire.dialects.base import DELTA_TEXT, Facts, GenAiNames
from penstock.gateway.wire.dialects.failures import Failure, body_failure
from penstock.gateway.wire.dialects.family import CHATGPT, OPENAI, Family
from penstock.gateway.wire.dialects.items import ANSWER_TYPE_SUFFIXES, ConversationItems, cutter, member_json
from penstock.gateway.wire.dialects.json_post import JsonPostDialect, routes
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    dumps,
    entries,
    label,
    lenient,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.parts import (
    content_parts,
    fingerprint,
    flat_tools,
    result_content,
    result_part,
    with_instructions,
)
from penstock.gateway.wire.dialects.responses_stream import LOST, EventHead, ResponseHead, assembled, stream_summary
from penstock.gateway.wire.dialects.sse import first_data, last_data
from penstock.gateway.wire.dialects.stream_events import StreamReader
from penstock.gateway.wire.dialects.text_spans import (
    MessageFields,
    Path,
    TextPointer,
    TextPointers,
    ToolDescription,
    content_pointers,
    message_pointers,
    tool_pointers,
)
from penstock.gateway.wire.dialects.usage import decoded_fields, openai_usage
from penstock.gateway.wire.dialects.websocket_messages import (
    ENDS,
    merge_messages,
    read_client_message,
    read_server_message,
)

STARTED = ("queued", "in_progress")
ADDITIONAL_TOOLS = "additional_tools"
"""The type of an input item that offers tools, which Codex sends in place of the request's field."""
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
    families: tuple[Family, ...] = (CHATGPT,)
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
            if item.type == ADDITIONAL_TOOLS:
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
        failed: Failure | None = "error_body" if _fails(answer) else None
        if stream:
            failed = "stream_error" if _fails(answer) else None if ended else "ended_early"
        return Facts(
            model=self.model(request, asked=asked),
            model_served=label(answer.model),
            response_id=label(answer.id),
            finish=label(_finish(answer.status, answer.incomplete_details)),
            usage=self.usage(decoded_fields(answer)),
            tool_calls=sum(_is_call(item.type, item.call_id) for item in answer.output or ()),
            choices=1 if answer.output else 0,
            failed=failed,
        )

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """The newest value of each field of the response; its items as they were done, or as far as they came."""
        return assembled(body, problems)

    def items(self, request: bytes) -> ConversationItems:
        """The instructions, then each item of the input."""
        asked, values = self.cut(merge_messages(request))
        return ConversationItems(
            asked, self.conversation_items(values), text(loads(member_json(values.get("previous_response_id"))))
        )

    def is_model_item(self, item: msgspec.Raw) -> bool:
        """True if the model made the item, as its role or its type tells."""
        asked = (one := _kind(item)).type in (None, "message", ADDITIONAL_TOOLS) or str(one.type).endswith(
            ANSWER_TYPE_SUFFIXES
        )
        return not asked or one.role == "assistant"

    def reply_fingerprints(self, response: bytes, stream: bool) -> list[bytes]:
        """The fingerprint source of each item of the answer."""
        made = (
            fingerprint(_message(item, "assistant")) for item in objs(self.answer(response, stream, []).get("output"))
        )
        return [said for said in made if said]

    def response_id(self, response: bytes, stream: bool) -> str | None:
        """The id in the first event, which holds the response as it began, or in a plain answer."""
        answer = next((_event(data).response for data in first_data(response, 1)), None) if stream else _plain(response)
        return label(answer.id) if answer else None

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The instructions, then the input."""
        given = asked.get("input")
        items = (item for item in entries(asked, "input", problems) if item.get("type") != ADDITIONAL_TOOLS)
        said = _merged([_message(item, "user") for item in items])
        if isinstance(given, str):
            said = [Message(role="user", parts=content_parts(given))]
        return with_instructions(content_parts(asked.get("instructions")), said)

    def tools(self, asked: Json) -> list[Tool]:
        """Functions and custom tools by name, the provider's own by type; a namespace is the tools in it."""
        return flat_tools(_flat(_offers(asked)), "parameters")

    def server_tools(self, asked: Json) -> list[str]:
        """The types of tools that clients do not run, also of those that the input adds."""
        return super().server_tools({"tools": _flat(_offers(asked))})

    def choices(self, answer: Json) -> list[Choice]:
        """One choice, of all items."""
        parts = [part for item in objs(answer.get("output")) for part in _message(item, "assistant").parts]
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
    added = [item.get("tools") for item in objs(asked.get("input")) if item.get("type") == ADDITIONAL_TOOLS]
    return [tool for tools in (asked.get("tools"), *added) for tool in objs(tools)]


def _flat(tools: Iterable[Json]) -> list[Json]:
    """Tools with each namespace replaced by the tools in it."""
    return [one for tool in tools for one in (objs(tool.get("tools")) if tool.get("type") == "namespace" else [tool])]


def _fails(answer: ResponseHead) -> bool:
    return body_failure(answer) is not None or f"response.{answer.status}" in LOST


def _finish(status: Any, details: Any) -> Any:
    return obj(details).get("reason") or (None if status in STARTED else status)


def _is_call(kind: Any, call_id: Any) -> bool:
    return isinstance(kind, str) and kind.endswith("_call") and isinstance(call_id, str)


def _message(item: Json, role: str) -> Message:
    kind = text(item.get("type")) or "message"
    if kind == "message":
        return Message(role=text(item.get("role")) or role, parts=content_parts(item.get("content")))
    if kind.endswith("_call_output"):
        return Message(role="tool", parts=[result_part(item.get("call_id"), item.get("output"))])
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


def _merged(messages: list[Message]) -> list[Message]:
    """Messages with the assistant's consecutive ones joined."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "assistant":
            merged[-1].parts += message.parts
        else:
            merged.append(message)
    return merged
