"""OpenAI chat completions: `POST /v1/chat/completions`, as OpenAI, vLLM, SGLang and most others speak it.

Streams come as deltas per choice; a choice's text and its tool calls' arguments are put together piece by piece
(`tool_calls`). Content is a string or a list of parts. Servers put the model's reasoning into different fields
(`_THOUGHTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import orjson

from penstock.gateway.model.turn import Message, Part, Passage, Tool
from penstock.gateway.wire.dialects.base import GenAiNames, routes
from penstock.gateway.wire.dialects.choices import (
    ChoicesDialect,
    ToolCallBuilder,
    argument_text,
    body_of,
    call_list,
    folded_calls,
)
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    count,
    earliest,
    entries,
    joined,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.parts import (
    compose_fingerprint,
    content_parts,
    flat_text,
    join_pieces,
    message_passages,
    part_passages,
    result_content,
    result_part,
    same_arguments,
    thought_text,
)
from penstock.gateway.wire.dialects.request_body import (
    MessageFields,
    TextPointer,
    TextPointers,
    ToolDescription,
    cutter,
    message_pointers,
    tool_pointers,
)
from penstock.gateway.wire.dialects.tokens import IDS, LOGPROBS

_COMMON = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""The fields of common messages; a message with others is read in full."""
_TEXTS = ("content", "refusal", "reasoning_content", "reasoning", "reasoning_text", "thinking", "reasoning_details")
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_text", "thinking", "reasoning_details", "thinking_blocks")
"""The fields in which servers put reasoning; where a message has several, they say the same."""
_PIECED = (*_TEXTS, "thinking_blocks", "images")
"""Fields of a delta that come in pieces, as strings or as lists of parts."""


class _ChatSystemFields(RequestFields):
    messages: list[MessageFields] | None = None


class _ChatConversationFields(RequestFields):
    messages: list[msgspec.Raw] | None = None


class _ChatTool(msgspec.Struct):
    function: ToolDescription | None = None
    custom: ToolDescription | None = None


class _ChatToolFields(msgspec.Struct):
    tools: list[_ChatTool] | None = None


_asked = msgspec.json.Decoder(_ChatSystemFields).decode
_offers = msgspec.json.Decoder(_ChatToolFields).decode


class ChatDialect(ChoicesDialect):
    name = "chat"
    routes: ClassVar[frozenset[str]] = routes("/chat/completions")
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"messages", "tools", "functions", "model", "stream"})
    client_tools: ClassVar[tuple[str, ...]] = ("function", "custom")
    conversation_field = "messages"
    token_fields: Mapping[str, bytes] = MappingProxyType({IDS: b"true", LOGPROBS: b"true"})
    otel: GenAiNames | None = GenAiNames("chat", "openai", "chat_completions")
    cut = staticmethod(cutter(_ChatConversationFields))
    calls_tools: ClassVar[bool] = True

    def system_pointers(self, request: bytes) -> TextPointers:
        """Messages of the roles system and developer."""
        asked = _asked(request)
        return message_pointers(asked.messages, "messages"), asked

    def description_pointers(self, request: bytes) -> Iterator[TextPointer]:
        """The descriptions of functions and custom tools."""
        for at, offer in enumerate(_offers(request).tools or ()):
            yield from tool_pointers(offer.function, ("tools", at, "function"))
            yield from tool_pointers(offer.custom, ("tools", at, "custom"))

    def fold(self, index: int, pieces: list[Json]) -> Json:
        """Put the pieces of one choice together as a choice of a plain answer."""
        deltas, whole = ([obj(piece.get(key)) for piece in pieces] for key in ("delta", "message"))
        said = {key: _first(deltas, whole, key, join_pieces) for key in _PIECED}
        calls: list[Any] = _first(deltas, whole, "tool_calls", list)
        return {
            "index": index,
            "finish_reason": earliest(pieces, "finish_reason"),
            "error": earliest(pieces, "error"),
            "message": {key: value for key, value in said.items() if value is not None}
            | {"role": earliest([*deltas, *whole], "role"), "audio": _audio(deltas)}
            | {
                "tool_calls": [call.build() for call in folded_calls(calls)],
                "function_call": _function(deltas + whole),
            },
        }

    def message(self, choice: Json) -> Message:
        return _message(obj(choice.get("message")), "assistant")

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        return [_message(item, "user") for item in entries(asked, "messages", problems)]

    def request_passages(self, asked: Json) -> Iterator[Passage]:
        """The same passages as those of the messages, without making messages: an index reads every call."""
        return (passage for item in objs(asked.get("messages")) for passage in _passages(item, "user", False))

    def answer_passages(self, answer: Json) -> Iterator[Passage]:
        """The same passages as those of the choices."""
        choices = objs(answer.get("choices"))
        return (passage for it in choices for passage in _passages(obj(it.get("message")), "assistant", True))

    def item_fingerprint(self, item: bytes) -> bytes:
        """The message's fingerprint source, read without making a `Message`: every call brings new items."""
        wire = loads(item)
        return _source(obj(wire)) if isinstance(wire, dict) else b""

    def tools(self, asked: Json) -> list[Tool]:
        """Functions, custom tools, and the entries of `functions`, which preceded `tools`."""
        tools = [_tool(item) for item in objs(asked.get("tools"))]
        return tools + [_named(item, "function") for item in objs(asked.get("functions"))]

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The first choice's message, and a message for each result."""
        choice = min(objs(answer.get("choices")), key=lambda one: count(one.get("index")) or 0, default=Json())
        message = {key: value for key, value in obj(choice.get("message")).items() if value not in (None, [])}
        if audio := obj(message.get("audio")):
            message["audio"] = {"id": audio.get("id")}
        calls = call_list(message.get("tool_calls"))
        said: Json = {"role": "assistant", "content": None} | message
        if calls:
            said["tool_calls"] = [{"type": "custom" if "custom" in call else "function"} | call for call in calls]
        answered = [_result(call, result) for call, result in zip(calls, results, strict=False)]
        function = obj(message.get("function_call"))
        if function and len(results) > len(calls):
            content = results[len(calls)].text or ""
            answered.append({"role": "function", "name": function.get("name"), "content": content})
        return [said, *answered] if len(answered) == len(results) else None


def _first(deltas: list[Json], whole: list[Json], key: str, fold: Callable[[list[Any]], Any]) -> Any:
    """A field of the deltas; that of whole messages where no delta has it."""
    return fold([it[key] for it in deltas if it.get(key)] or [it[key] for it in whole if it.get(key)])


def _audio(deltas: list[Json]) -> Json | None:
    pieces = [audio for delta in deltas if (audio := obj(delta.get("audio")))]
    whole = {key: joined(pieces, key) for key in ("data", "transcript")}
    return {"id": earliest(pieces, "id"), **whole} if pieces else None


def _function(deltas: list[Json]) -> Json | None:
    pieces = [call for delta in deltas if (call := obj(delta.get("function_call")))]
    whole = ToolCallBuilder()
    for piece in pieces:
        whole.add({"function": piece})
    return whole.build()["function"] if pieces else None


def _result(call: Json, result: Part) -> Json:
    named = {} if result.name is None else {"name": result.name}
    return {"role": "tool", "tool_call_id": call.get("id"), "content": result_content(result)} | named


def _message(wire: Json, role: str) -> Message:
    role = text(wire.get("role")) or role
    return Message(role=role, parts=_parts(wire, role), name=text(wire.get("name")))


def _parts(wire: Json, role: str) -> list[Part]:
    if role in ("tool", "function"):
        return [result_part(wire.get("tool_call_id"), wire.get("content"), name=wire.get("name"))]
    thought = next((said for name in _THOUGHTS if (said := thought_text(wire.get(name)))), "")
    hidden = [it for it in objs(wire.get("reasoning_details")) if not thought_text(it)]
    refusal, audio, function = text(wire.get("refusal")), obj(wire.get("audio")), obj(wire.get("function_call"))
    return [
        *([Part(type="reasoning", text=thought)] if thought else []),
        *[Part(type="reasoning", data=it) for it in hidden],
        *content_parts(wire.get("content")),
        *([Part(type="refusal", text=refusal)] if refusal else []),
        *([Part(type="media", data=it) for it in [*([audio] if audio else []), *arr(wire.get("images"))]]),
        *[_call_part(call) for call in call_list(wire.get("tool_calls"))],
        *([_call_part({"function": function})] if function else []),
    ]


def _passages(wire: Json, role: str, answer: bool) -> Iterator[Passage]:
    """The passages of a common message (texts, calls, results) without making a `Message`; any other is read as one
    first."""
    said, calls = wire.get("content"), wire.get("tool_calls")
    role = text(wire.get("role")) or role
    if wire.keys() - _COMMON or not (said is None or isinstance(said, str)):
        yield from message_passages(_message(wire, role), answer)
    elif role in ("tool", "function"):
        if said:
            yield Passage(
                answer, role, "tool_call_response", text(wire.get("name")), text(wire.get("tool_call_id")), said
            )
    else:
        if said:
            yield Passage(answer, role, "text", None, None, said)
        for call in call_list(calls) if calls else ():
            yield from part_passages(_call_part(call), role, answer)


def _call_part(call: Json) -> Part:
    body, _ = body_of(call)
    name, arguments = text(body.get("name")), argument_text(body)
    return Part(type="tool_call", id=text(call.get("id")), name=name, arguments=arguments)


def _source(wire: Json) -> bytes:
    role = text(wire.get("role")) or "user"
    said = flat_text(wire.get("content"))
    if role in ("tool", "function"):
        return orjson.dumps([role, "", [], [[text(wire.get("tool_call_id")), said]]])
    calls = [_call_source(call) for call in call_list(wire.get("tool_calls"))]
    if function := obj(wire.get("function_call")):
        calls.append(_call_source({"function": function}))
    return compose_fingerprint(role, said, calls, [])


def _call_source(call: Json) -> list[str | None]:
    body, _ = body_of(call)
    return [text(call.get("id")), text(body.get("name")), same_arguments(argument_text(body))]


def _tool(item: Json) -> Tool:
    kind = text(item.get("type")) or "function"
    return _named(obj(item.get(kind)) or item, kind)


def _named(item: Json, kind: str) -> Tool:
    return Tool(
        name=text(item.get("name")) or kind,
        description=text(item.get("description")),
        parameters=item.get("parameters"),
    )


# OpenAI completions: `POST /v1/completions`, text in and text out, still the endpoint of base models.
#
# The answer has chat's frame with `text` where chat has `message`. There is no conversation to follow in it.


class CompletionsDialect(ChoicesDialect):
    name = "completions"
    routes: ClassVar[frozenset[str]] = routes("/completions")
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"prompt", "model", "stream"})
    token_fields: Mapping[str, bytes] = MappingProxyType({IDS: b"true", LOGPROBS: b"0"})
    otel: GenAiNames | None = GenAiNames("text_completion", "openai")

    def fold(self, index: int, pieces: list[Json]) -> Json:
        """Put the pieces of one choice together as a choice of a plain answer."""
        said = {key: earliest(pieces, key) for key in ("finish_reason", "error")}
        return {"index": index, **said, "text": joined(pieces, "text")}

    def message(self, choice: Json) -> Message:
        said = text(choice.get("text"))
        return Message(role="assistant", parts=[Part(type="text", text=said)] if said else [])

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """One user's message per prompt."""
        return [Message(role="user", parts=[part]) for part in prompts(asked.get("prompt"))]


def prompts(value: Any) -> list[Part]:
    """The texts of a prompt or an embedding's input: one or several, each a string or a list of token ids."""
    if value is None or value == []:
        return []
    items: list[Any] = (
        [value] if not isinstance(value, list) or all(type(it) is int for it in arr(value)) else arr(value)
    )
    return [Part(type="text", text=it) if isinstance(it, str) else Part(type="unknown", data=it) for it in items]
