"""Anthropic messages: `POST /v1/messages`, and `POST /v1/messages/count_tokens`, which shares its requests.

System text stands apart from the messages and comes first in a Turn. A request that continues a thread
(`thread.previous_message_id`) has the newest messages only. Tool results are blocks of a user's message and
are left there. `input_tokens` does not count cached ones; a Turn's does, as everywhere else. Calls of tools that
Anthropic runs itself (`server_tool_use`) are parts of type unknown: the client does not answer them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool
from penstock.gateway.wire.dialects.base import Facts, GenAiNames, JsonPostDialect, routes
from penstock.gateway.wire.dialects.choices import folded_arguments
from penstock.gateway.wire.dialects.family import ANTHROPIC, ErrorFields, Failure, body_failure, is_error
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    count,
    dumps,
    entries,
    joined,
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
    flat_tools,
    result_content,
    result_part,
    with_instructions,
)
from penstock.gateway.wire.dialects.request_body import (
    ConversationItems,
    MessageFields,
    TextPointer,
    TextPointers,
    content_pointers,
    cutter,
    flat_tool_pointers,
    member_json,
    message_pointers,
)
from penstock.gateway.wire.dialects.sse import StreamReader, chunks, first_data, last_data
from penstock.gateway.wire.dialects.tokens import messages_usage

_BEGUN = {
    "text_delta": "text", "citations_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking",
    "input_json_delta": "tool_use", "compaction_delta": "compaction",
}  # fmt: skip
"""The type of a block by its delta's, for blocks whose start never came."""
_APART = frozenset({"type", "citation", "partial_json"})
"""Fields of a delta that are not fields of the block."""


class _BlockHead(msgspec.Struct, gc=False):
    type: Any = None


class _AnthropicMessageHead(ErrorFields, gc=False):
    """The fields of a plain body, or of a stream's message_start, that the summary needs."""

    id: Any = None
    model: Any = None
    stop_reason: Any = None
    usage: Any = None
    content: list[_BlockHead] | None = None


class _DeltaHead(msgspec.Struct, gc=False):
    type: Any = None
    stop_reason: Any = None


class _AnthropicEventHead(ErrorFields, gc=False):
    """The fields of an event that the summary needs: the message of message_start, all of message_delta, the types of
    blocks."""

    index: Any = None
    message: _AnthropicMessageHead | None = None
    content_block: _BlockHead | None = None
    delta: _DeltaHead | None = None
    usage: Any = None


class _MessagesSystemFields(RequestFields):
    system: msgspec.Raw = msgspec.Raw()
    messages: list[MessageFields] | None = None


class _MessagesConversationFields(RequestFields):
    system: msgspec.Raw = msgspec.Raw()
    messages: list[msgspec.Raw] | None = None
    thread: msgspec.Raw = msgspec.Raw()


_asked = msgspec.json.Decoder(_MessagesSystemFields).decode
_event = lenient(_AnthropicEventHead)
_plain = StreamReader(_AnthropicMessageHead).body
_events = StreamReader(_AnthropicEventHead).events


class MessagesDialect(JsonPostDialect):
    name = "messages"
    family = ANTHROPIC
    end_marker = b"message_stop"
    routes: ClassVar[frozenset[str]] = routes("/messages")
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"messages", "system", "tools", "model", "stream"})
    client_tools: ClassVar[tuple[str, ...]] = ("custom", "bash_", "text_editor_", "computer_", "memory_")
    untyped_tool: ClassVar[str] = "custom"
    instructions: tuple[str, ...] = ("system",)
    conversation_field = "messages"
    state_field = b'"thread"'
    otel: GenAiNames | None = GenAiNames("chat", "anthropic")
    cut = staticmethod(cutter(_MessagesConversationFields))

    def system_pointers(self, request: bytes) -> TextPointers:
        """The system text, then messages of the role system, which newer models take in mid-conversation."""
        asked = _asked(request)
        return chain(
            content_pointers(asked.system, ("system",), "system"), message_pointers(asked.messages, "messages")
        ), asked

    def description_pointers(self, request: bytes) -> Iterable[TextPointer]:
        """The descriptions of the client's tools."""
        return flat_tool_pointers(request)

    def items(self, request: bytes) -> ConversationItems:
        """The system text, then each message; the newest messages only where the request continues a thread."""
        asked, values = self.cut(request)
        thread = obj(loads(member_json(values["thread"]))) if "thread" in values else {}
        return ConversationItems(asked, self.conversation_items(values), text(thread.get("previous_message_id")))

    def continuation_names(self, response: bytes, stream: bool) -> list[str]:
        """The id of the message, by which a request may continue its thread."""
        answer = next((_event(data).message for data in first_data(response, 1)), None) if stream else _plain(response)
        name = None if answer is None else label(answer.id)
        return [] if name is None else [name]

    def is_complete(self, response: bytes) -> bool:
        return any(label(obj(loads(data)).get("type")) == "message_stop" for data in last_data(response, 1))

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        asked = asked or peek(request)
        answer, ended = _streamed(response) if stream else (_plain(response), True)
        failed: Failure | None = body_failure(answer)
        if stream:
            ended = ended or bool(answer.stop_reason)
            failed = "stream_error" if is_error(answer) else None if ended else "ended_early"
        return Facts(
            model=label(asked.model),
            model_served=label(answer.model),
            response_id=label(answer.id),
            finish=label(answer.stop_reason),
            usage=self.usage({"usage": answer.usage}),
            tool_calls=sum(block.type == "tool_use" for block in answer.content or ()),
            choices=0 if answer.content is None else 1,
            failed=failed,
        )

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """The message, its content blocks put together from their deltas, and the fields that come at the end."""
        answer: Json = {}
        blocks: list[list[Json]] = []
        places: dict[int, int] = {}
        ended = False
        for event in chunks(body, problems):
            kind, index = event.get("type"), count(event.get("index"))
            ended = ended or kind == "message_stop"
            if "error" in event:
                answer = answer | {"error": event["error"]}
            if kind == "message_start":
                said = obj(event.get("message"))
                if not isinstance(said.get("content"), list):
                    said = said | {"content": None}
                answer |= {key: value for key, value in said.items() if value not in (None, "")}
                answer["usage"] = _begun(answer.get("usage"))
            elif kind == "content_block_start":
                places[len(blocks) if index is None else index] = len(blocks)
                blocks.append([obj(event.get("content_block"))])
            elif kind == "content_block_delta":
                delta = obj(event.get("delta"))
                place = len(blocks) - 1 if index is None else places.get(index, -1)
                if place < 0:
                    place = places[index or 0] = len(blocks)
                    blocks.append([{"type": _BEGUN.get(text(delta.get("type")) or "")}])
                blocks[place].append(delta)
            elif kind == "message_delta":
                answer = _end(answer, event)
        if blocks:
            answer["content"] = [_block(pieces) for pieces in blocks]
        if not (ended or answer.get("stop_reason") or answer.get("error")):
            problems.append("response: the stream ended early")
        return answer

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The system text, then each message of the request."""
        items = entries(asked, "messages", problems)
        said = [Message(role=text(it.get("role")) or "user", parts=_parts(it.get("content"))) for it in items]
        return with_instructions(content_parts(asked.get("system")), said)

    def tools(self, asked: Json) -> list[Tool]:
        """The client's tools and Anthropic's own."""
        return flat_tools(asked.get("tools"), "input_schema")

    def choices(self, answer: Json) -> list[Choice]:
        """One choice, once a message has begun."""
        if not isinstance(answer.get("content"), list):
            return []
        message = Message(role=text(answer.get("role")) or "assistant", parts=_parts(answer["content"]))
        return [Choice(message=message, finish=text(answer.get("stop_reason")))]

    def usage(self, answer: Json) -> Usage | None:
        """Usage as reported, cached tokens added to the input."""
        return messages_usage(answer)

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The answer's blocks, and one user's message with all results."""
        blocks = arr(answer.get("content"))
        calls = [block for block in objs(blocks) if block.get("type") == "tool_use"]
        answered = [_result(call, result) for call, result in zip(calls, results, strict=False)]
        turns: list[Json] = [{"role": "assistant", "content": blocks}, {"role": "user", "content": answered}]
        return turns if len(calls) == len(results) else None


class CountTokensDialect(MessagesDialect):
    """Token counting: the request has messages, the answer is one number. No tokens are used, so there is no usage."""

    name = "count_tokens"
    answers = generates = uses_tokens = False
    otel: GenAiNames | None = None
    routes: ClassVar[frozenset[str]] = routes("/messages/count_tokens")

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The requested model, and the failure."""
        return Facts(model=self.model(request), failed=None if stream else body_failure(_plain(response)))


def _result(call: Json, result: Part) -> Json:
    named = {"type": "tool_result", "tool_use_id": call.get("id")}
    if obj(result.data).get("type") == "tool_result":
        # A failed result is kept whole.
        return {key: value for key, value in obj(result.data).items() if key != "cache_control"} | named
    return named | {"content": result_content(result)}


def _streamed(body: bytes) -> tuple[_AnthropicMessageHead, bool]:
    """(the events of a stream as a plain answer whose blocks have only their types, True if the stream says that it
    ends). No function is called for a delta."""
    answer, ended = _AnthropicMessageHead(usage={}), False
    blocks: list[_BlockHead] = []
    indexes: set[int] = set()
    for event in chain.from_iterable(_events(body)):
        kind, delta, index = event.type, event.delta, event.index
        if event.error or kind == "error" or event.object == "error":
            answer.error = event.error or True
        if kind == "content_block_delta":
            known = bool(blocks) if type(index) is not int or index < 0 else index in indexes
            if not known:
                indexes.add(count(index) or 0)
                blocks.append(_BlockHead(_BEGUN.get(text(delta.type) or "") if delta is not None else None))
        elif kind == "content_block_start":
            place = count(index)
            indexes.add(len(blocks) if place is None else place)
            blocks.append(event.content_block or _BlockHead())
        elif kind == "message_start":
            said = event.message or _AnthropicMessageHead()
            answer.id, answer.model = said.id or answer.id, said.model or answer.model
            answer.content = answer.content if said.content is None else said.content
            answer.stop_reason = said.stop_reason or answer.stop_reason
            answer.usage = _begun(said.usage or answer.usage)
        elif kind == "message_delta":
            answer.stop_reason = (delta.stop_reason if delta is not None else None) or answer.stop_reason
            answer.usage = _later(answer.usage, event.usage)
        ended = ended or kind == "message_stop"
    answer.content = blocks or answer.content
    return answer, ended


def _end(answer: Json, event: Json) -> Json:
    """The answer with the fields that a message_delta adds."""
    known = {key: value for key, value in obj(event.get("delta")).items() if value}
    return answer | known | {"usage": _later(answer.get("usage"), event.get("usage"))}


def _begun(usage: Any) -> Json:
    """The counts of message_start without the output's: that is not known yet, whatever message_start says."""
    return {key: value for key, value in obj(usage).items() if key != "output_tokens"}


def _later(usage: Any, newer: Any) -> Json:
    """The counts of the start, replaced by those of the end where it has them: these are cumulative."""
    return obj(usage) | {key: value for key, value in obj(newer).items() if value is not None}


def _block(pieces: list[Json]) -> Json:
    """A content block of a stream as a plain answer would have it: its start, and its deltas put together. A text
    continues that of the start; of fields that are no text the newest counts."""
    start, deltas = pieces[0], pieces[1:]
    whole = dict(start)
    for key in dict.fromkeys(key for delta in deltas for key in delta if key not in _APART):
        newest = next((it[key] for it in reversed(deltas) if it.get(key) is not None), None)
        if isinstance(newest, str):
            whole[key] = (text(start.get(key)) or "") + (joined(deltas, key) or "")
        elif newest is not None:
            whole[key] = newest
    citations = [delta["citation"] for delta in deltas if "citation" in delta]
    if citations:
        whole["citations"] = arr(start.get("citations")) + citations
    return whole | _input([it for delta in deltas if (it := delta.get("partial_json"))])


def _input(pieces: list[Any]) -> Json:
    """The input of a call in its deltas, which counts before the input in the start; empty where the deltas have
    none."""
    said = folded_arguments(pieces)
    value = loads(said)
    return {"input": said if value is None else value} if said else {}


def _parts(content: Any) -> list[Part]:
    items = arr(content) if isinstance(content, list) else [content]
    return [part for item in items for part in _block_parts(item)]


def _block_parts(item: Any) -> list[Part]:
    block = obj(item)
    match block.get("type"):
        case "tool_use":
            return [_call_part(block)]
        case "tool_result":
            wire = block if block.get("is_error") else None
            return [result_part(block.get("tool_use_id"), block.get("content"), wire=wire)]
        case "thinking":
            return [Part(type="reasoning", text=text(block.get("thinking")))]
        case "redacted_thinking":
            return [Part(type="reasoning", data=block)]
        case "text":
            return content_parts(block.get("text"))
        case _:
            return content_parts(item if isinstance(item, str) else [item] if item is not None else None)


def _call_part(block: Json) -> Part:
    given = block.get("input")
    arguments = given if isinstance(given, str) else dumps({} if given is None else given)
    return Part(type="tool_call", id=text(block.get("id")), name=text(block.get("name")), arguments=arguments)
