"""Amazon Bedrock's Converse: `POST /model/{modelId}/converse` and `.../converse-stream`.

The model stands in the path, percent-encoded, since it may be an ARN. A stream comes as AWS's binary frames
(`event_stream`): messageStart, the content blocks each with their deltas, messageStop with the stop reason, metadata
with the usage; an exception is a frame of its own and ends it. Content blocks are objects of one key, which is their
type. System text stands apart from the messages, and newer models also take messages of the role system. Tool results
are blocks of a user's message and are left there. `inputTokens` does not count cached ones; a Turn's does.

Signatures (SigV4) are the client's: its bytes and headers pass as they are.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode, b64encode
from binascii import Error, crc32
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool
from penstock.gateway.wire.dialects.base import Facts, GenAiNames, JsonPostDialect
from penstock.gateway.wire.dialects.choices import folded_arguments
from penstock.gateway.wire.dialects.family import BEDROCK, Failure, Family
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    count,
    dumps,
    entries,
    error_message,
    joined,
    label,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.parts import tool_of, with_instructions
from penstock.gateway.wire.dialects.request_body import (
    SYSTEM,
    MessageFields,
    TextPointer,
    TextPointers,
    ToolDescription,
    cutter,
    text_pointers,
    tool_pointers,
)
from penstock.gateway.wire.dialects.tokens import converse_usage

# Converse's wire objects as the parts of a Turn, the deltas of a content block as one block, and a tool's result as a
# block.

MEDIA = ("image", "document", "video", "audio", "searchResult")
SERVER = "server_tool_use"
"""The type of a call that Bedrock answers itself."""


def message_of(wire: Json) -> Message:
    """A message; its role is `user` where none is given."""
    parts = [part for item in arr(wire.get("content")) for part in _parts(item)]
    return Message(role=text(wire.get("role")) or "user", parts=parts)


def _parts(item: Any) -> list[Part]:
    block = obj(item)
    if (said := text(block.get("text"))) is not None:
        return [Part(type="text", text=said)] if said else []
    if call := obj(block.get("toolUse")):
        return [Part(type="unknown", data=item) if call.get("type") == SERVER else _call(call)]
    if result := obj(block.get("toolResult")):
        return [_result(result)]
    if thought := obj(block.get("reasoningContent")):
        said = text(obj(thought.get("reasoningText")).get("text"))
        return [Part(type="reasoning", text=said) if said is not None else Part(type="reasoning", data=item)]
    if (guarded := text(obj(obj(block.get("guardContent")).get("text")).get("text"))) is not None:
        return [Part(type="text", text=guarded)]
    if cited := obj(block.get("citationsContent")):
        return [Part(type="text", text=it) for one in objs(cited.get("content")) if (it := text(one.get("text")))]
    if "cachePoint" in block:
        return []
    return [Part(type="media" if any(name in block for name in MEDIA) else "unknown", data=item)]


def _call(call: Json) -> Part:
    given = call.get("input")
    arguments = given if isinstance(given, str) else dumps({} if given is None else given)
    return Part(type="tool_call", id=text(call.get("toolUseId")), name=text(call.get("name")), arguments=arguments)


def _result(result: Json) -> Part:
    """A tool's result. JSON becomes text; the wire object is kept where it holds more than that text."""
    content = objs(result.get("content"))
    said = "".join(it["text"] if text(it.get("text")) is not None else _json(it) for it in content)
    whole = all(it.keys() <= {"text"} for it in content)
    data = result if result.get("status") == "error" else None if whole else result.get("content")
    return Part(type="tool_call_response", id=text(result.get("toolUseId")), text=said, data=data)


def _json(item: Json) -> str:
    return dumps(item["json"]) if "json" in item else ""


def result_of(call: Json, result: Part) -> Json:
    """A result as the block that answers a call."""
    kept = result.data
    if isinstance(kept, dict):
        # A failed result is kept whole.
        return {"toolResult": obj(kept) | {"toolUseId": call.get("toolUseId")}}
    content = [{"text": result.text or ""}] if kept is None else kept
    return {"toolResult": {"toolUseId": call.get("toolUseId"), "content": content, "status": "success"}}


def calls_of(message: Json) -> list[Json]:
    """The tool calls of a message that its client has to answer."""
    calls = (obj(block.get("toolUse")) for block in objs(message.get("content")))
    return [call for call in calls if call and call.get("type") != SERVER]


def tools_of(offered: Any) -> list[Tool]:
    """The client's tools by the name of their specification, Bedrock's own by theirs."""
    found: list[Tool] = []
    for tool in objs(offered):
        spec, own = obj(tool.get("toolSpec")), obj(tool.get("systemTool"))
        if spec:
            found.append(tool_of(spec, "tool", obj(spec.get("inputSchema")).get("json")))
        elif own:
            found.append(Tool(name=text(own.get("name")) or "systemTool"))
    return found


def block_of(start: Json, deltas: list[Json]) -> Json:
    """A content block of a stream as a plain answer would have it: its start, and its deltas put together."""
    call, called = obj(start.get("toolUse")), [obj(it["toolUse"]) for it in deltas if it.get("toolUse")]
    if call or (called and not start):
        # The pieces count before the input in the start.
        given = folded_arguments(it.get("input") for it in called)
        value: Any = loads(given) if given else {} if call.get("input") is None else call["input"]
        return {"toolUse": call | {"input": given if value is None else value}}
    if result := obj(start.get("toolResult")):
        return {"toolResult": result | {"content": [one for it in deltas for one in arr(it.get("toolResult"))]}}
    if image := obj(start.get("image")):
        for delta in deltas:
            image = image | obj(delta.get("image"))
        return {"image": image}
    thoughts = [thought for it in deltas if (thought := obj(it.get("reasoningContent")))]
    if thoughts:
        return {"reasoningContent": _reasoning(thoughts)}
    said, citations = joined(deltas, "text"), [it["citation"] for it in deltas if "citation" in it]
    if citations:
        return {"citationsContent": {"content": [{"text": said or ""}], "citations": citations}}
    if said is not None:
        return {"text": said}
    return dict(start) | {key: value for it in deltas for key, value in it.items() if value is not None}


def _reasoning(thoughts: list[Json]) -> Json:
    said, signature = joined(thoughts, "text"), joined(thoughts, "signature")
    if said is None and signature is None:
        return {"redactedContent": _blob([it for it in (text(one.get("redactedContent")) for one in thoughts) if it])}
    return {"reasoningText": {"text": said or ""} | ({} if signature is None else {"signature": signature})}


def _blob(pieces: list[str]) -> str:
    """Join pieces of binary data, each base64 by itself."""
    try:
        return b64encode(b"".join(b64decode(piece, validate=True) for piece in pieces)).decode()
    except (Error, ValueError):
        return "".join(pieces)


# Frames of `application/vnd.amazon.eventstream`, in which AWS sends streams: bytes in, frames out. Pure.
#
#     4 bytes   length of the whole frame            4 bytes   length of its headers
#     4 bytes   CRC-32 of these eight bytes          headers, payload
#     4 bytes   CRC-32 of all that stands before it
#
# A header is the length of its name (1 byte), the name, the type of its value (1 byte) and the value. Numbers are
# big-endian. Where a frame's lengths do not match their checksum, its end is unknown, and reading ends there. A frame
# whose payload does not match its checksum is read and noted as a problem, since a secret in it may have been masked
# on the tape.

PRELUDE: Final = 12
LEAST: Final = PRELUDE + 4
"""Bytes of a frame without headers and payload."""
_prelude = struct.Struct(">III").unpack_from
_checksum = struct.Struct(">I").unpack_from
_FIXED: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value, by its type: booleans, numbers, a time, a UUID."""
_BYTES, _TEXT = 6, 7
"""The types of values that begin with their length in two bytes."""


class EventStreamFrame(NamedTuple):
    """One message of the stream."""

    headers: Mapping[str, str]
    """The headers whose values are texts; only these say what the frame is."""
    payload: bytes

    @property
    def kind(self) -> str:
        """The message type: `event`, `exception` or `error`."""
        return self.headers.get(":message-type", "event")

    @property
    def name(self) -> str:
        """The type of the event or exception."""
        names = (self.headers.get(name) for name in (":event-type", ":exception-type", ":error-code"))
        return next(filter(None, names), "")


class HeaderValue(NamedTuple):
    """A header of a frame, and the offsets of its value."""

    name: bytes
    long: bool
    """True for a text or bytes, which begin with their length."""
    text: bool
    start: int
    end: int


def begins_frame(body: bytes) -> bool | None:
    """True if a body begins with a frame; None while there are too few bytes to tell."""
    if len(body) < PRELUDE:
        return None
    size, headers, checksum = _prelude(body, 0)
    return crc32(body[:8]) == checksum and size >= LEAST + headers


def frame_bounds(body: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(start, start of the headers, of the payload, end of the payload) of each complete frame of a body; raises
    `ValueError` behind a place that begins no frame."""
    at = 0
    while len(body) - at >= PRELUDE:
        size, headers, checksum = _prelude(body, at)
        if crc32(body[at : at + 8]) != checksum or size < LEAST + headers:
            raise ValueError(f"what stands at byte {at} is no frame of an event stream")
        if len(body) - at < size:
            return
        yield at, at + PRELUDE, at + PRELUDE + headers, at + size - 4
        at += size


def header_values(block: bytes) -> Iterator[HeaderValue]:
    """The headers of a frame; raises `ValueError` behind one that cannot be read."""
    at = 0
    while at < len(block):
        name_end = at + 1 + block[at]
        kind, start = block[name_end] if name_end < len(block) else -1, name_end + 1
        if long := kind in (_BYTES, _TEXT):
            size, start = int.from_bytes(block[start : start + 2]), start + 2
        else:
            size = _FIXED.get(kind, len(block))
        if start + size > len(block):
            raise ValueError("a frame of an event stream has headers that cannot be read")
        yield HeaderValue(block[at + 1 : name_end], long, kind == _TEXT, start, start + size)
        at = start + size


def frames(body: bytes, problems: list[str], skipped: bytes | None = None) -> Iterator[EventStreamFrame]:
    """Yield the complete frames of a body, and note in `problems` why the rest cannot be read. `skipped`: frames with
    these bytes among their headers are passed over unread."""
    over = 0
    try:
        for start, headers, payload, end in frame_bounds(body):
            over = end + 4
            if skipped is not None and body.find(skipped, headers, payload) >= 0:
                continue
            if crc32(body[start:end]) != _checksum(body, end)[0]:
                problems.append(f"response: the frame at byte {start} does not match its checksum")
            yield EventStreamFrame(_headers(body[headers:payload]), body[payload:end])
    except ValueError as error:
        problems.append(f"response: {error}")
        return
    if over < len(body):
        problems.append("response: the stream ends within a frame")


@lru_cache(maxsize=256)
def _headers(block: bytes) -> Mapping[str, str]:
    """The headers whose values are texts, as far as they can be read. Events of one kind have the same headers each
    time."""
    found: dict[str, str] = {}
    with suppress(ValueError):
        for one in header_values(block):
            if one.text:
                found[one.name.decode("utf-8", "replace")] = block[one.start : one.end].decode("utf-8", "replace")
    return found


_ROUTE: Final = re.compile(r"/model/(.+)/converse(?:-stream)?")
_LAST: Final = ("messageStop", "metadata")
_CLIENT_TOOLS: Final = frozenset({"toolSpec", "cachePoint"})
"""The keys of entries in a list of tools that are no tools of Bedrock's own."""


class _Text(msgspec.Struct):
    text: msgspec.Raw = msgspec.Raw()


class _ConverseSystemFields(msgspec.Struct):
    system: list[_Text] | None = None
    messages: list[MessageFields] | None = None


class _ConverseTool(msgspec.Struct):
    toolSpec: ToolDescription | None = None


class _ToolConfig(msgspec.Struct):
    tools: list[_ConverseTool] | None = None


class _ConverseToolFields(msgspec.Struct):
    toolConfig: _ToolConfig | None = None


class _ConverseConversationFields(RequestFields):
    system: msgspec.Raw = msgspec.Raw()
    messages: list[msgspec.Raw] | None = None


_asked = msgspec.json.Decoder(_ConverseSystemFields).decode
_texts = msgspec.json.Decoder(list[_Text]).decode
_offers = msgspec.json.Decoder(_ConverseToolFields).decode


class ConverseDialect(JsonPostDialect):
    name = "converse"
    peeks = False
    family: Family = BEDROCK
    routes: ClassVar[frozenset[str]] = frozenset()
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset(
        {"messages", "system", "toolConfig", "inferenceConfig", "additionalModelRequestFields"}
    )
    instructions: tuple[str, ...] = ("system",)
    conversation_field = "messages"
    streaming_content_type = b"application/vnd.amazon.eventstream"
    otel: GenAiNames | None = GenAiNames("chat", "aws.bedrock")
    cut = staticmethod(cutter(_ConverseConversationFields))
    model_field: ClassVar[str] = ""
    id_field: ClassVar[str] = ""

    def matches(self, method: str, path: str) -> bool:
        """True for a POST to one of the two operations of a model."""
        return method == "POST" and _ROUTE.fullmatch(path) is not None

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The model id, the inference profile or the ARN in the path."""
        found = _ROUTE.fullmatch(path.partition("?")[0])
        return None if found is None else label(unquote(found[1]))

    def renamed(self, path: str, model: str) -> str:
        found = _ROUTE.fullmatch(path.partition("?")[0])
        return path if found is None else path[: found.start(1)] + quote(model, safe="") + path[found.end(1) :]

    def asks_stream(self, request: bytes, path: str) -> bool:
        return path.partition("?")[0].endswith("/converse-stream")

    def begins_stream(self, body: bytes) -> bool | None:
        return begins_frame(body)

    def system_pointers(self, request: bytes) -> TextPointers:
        """The system texts, then messages of the role system."""
        asked = _asked(request)
        return chain(_quoted(asked.system, ("system",)), _quoted_messages(asked.messages)), None

    def description_pointers(self, request: bytes) -> Iterator[TextPointer]:
        """The descriptions of the client's tools."""
        config = _offers(request).toolConfig
        for at, offer in enumerate((config and config.tools) or ()):
            yield from tool_pointers(offer.toolSpec, ("toolConfig", "tools", at, "toolSpec"))

    def is_complete(self, response: bytes) -> bool:
        """True after the metadata, or an exception."""
        last = next(iter(list(frames(response, []))[-1:]), None)
        return last is not None and (last.kind != "event" or last.name == "metadata")

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The facts of a plain answer, or of a stream: from all frames but deltas; from deltas too where a call's start
        is missing."""
        answer = _with_error(_ends(response) if stream else obj(loads(response)))
        if stream and not calls_of(_message(answer)) and b'"toolUse"' in response:
            answer = self.answer(response, stream, [])
        failed: Failure | None = None
        if error_message(answer) is not None:
            failed = "stream_error" if stream else "error_body"
        elif stream and "stopReason" not in answer:
            failed = "ended_early"
        message = _message(answer)
        return Facts(
            finish=label(answer.get("stopReason")) if message else None,
            usage=converse_usage(answer),
            tool_calls=len(calls_of(message)),
            choices=1 if message else 0,
            failed=failed,
        )

    def answer(self, response: bytes, stream: bool, problems: list[str]) -> Json:
        """The body of a plain answer; an error has the shape that other dialects' have."""
        return _with_error(super().answer(response, stream, problems))

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """The message, its content blocks put together from their deltas, and the fields that come at the end."""
        answer: Json = {}
        message: Json = {}
        blocks: list[list[Json]] = []
        places: dict[int, int] = {}
        for frame in frames(body, problems):
            said = _payload(frame, problems)
            index = count(said.get("contentBlockIndex")) or 0
            if frame.kind != "event":
                answer["error"] = exception_error(frame, said)
            elif frame.name == "messageStart":
                message = {"role": text(said.get("role")) or "assistant", "content": []}
            elif frame.name == "contentBlockStart":
                places[index] = len(blocks)
                blocks.append([obj(said.get("start"))])
            elif frame.name == "contentBlockDelta":
                if index not in places:
                    places[index] = len(blocks)
                    blocks.append([{}])
                blocks[places[index]].append(obj(said.get("delta")))
            elif frame.name in _LAST:
                answer |= {key: value for key, value in said.items() if value is not None}
        if message or blocks:
            content = [block_of(pieces[0], pieces[1:]) for pieces in blocks]
            answer["output"] = {"message": {"role": "assistant"} | message | {"content": content}}
        if not ("stopReason" in answer or "error" in answer):
            problems.append("response: the stream ended early")
        return answer

    def sampling(self, asked: Json) -> Json:
        """Parameters common to all models, the model's own, the choice of a tool, and all other fields of the
        request."""
        choice = obj(asked.get("toolConfig")).get("toolChoice")
        said = obj(asked.get("additionalModelRequestFields")) | obj(asked.get("inferenceConfig"))
        return said | super().sampling(asked) | ({} if choice is None else {"toolChoice": choice})

    def forcing_field(self, asked: Json) -> str | None:
        """A tool that must be called, a schema for the answer, or one for a tool's input."""
        config = obj(asked.get("toolConfig"))
        for kind in ("any", "tool"):
            if kind in obj(config.get("toolChoice")):
                return f"toolChoice {kind}"
        if (form := obj(obj(asked.get("outputConfig")).get("textFormat")).get("type")) is not None:
            return f"textFormat {form}" if isinstance(form, str) else "textFormat of a kind that is not known"
        strict = any(obj(tool.get("toolSpec")).get("strict") is True for tool in objs(config.get("tools")))
        return "a strict tool" if strict else None

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The system texts, then each message of the request."""
        system = message_of({"content": asked.get("system")})
        return with_instructions(system.parts, [message_of(item) for item in entries(asked, "messages", problems)])

    def tools(self, asked: Json) -> list[Tool]:
        """The client's tools by name, and Bedrock's own."""
        return tools_of(obj(asked.get("toolConfig")).get("tools"))

    def choices(self, answer: Json) -> list[Choice]:
        """One choice, once a message has begun."""
        message = _message(answer)
        return [Choice(message=message_of(message), finish=text(answer.get("stopReason")))] if message else []

    def usage(self, answer: Json) -> Usage | None:
        """Usage as reported, cached tokens added to the input."""
        return converse_usage(answer)

    def server_tools(self, asked: Json) -> list[str]:
        """The kinds of listed tools that are no specifications (`toolSpec`)."""
        offered = objs(obj(asked.get("toolConfig")).get("tools"))
        return [kind for tool in offered for kind in tool if kind not in _CLIENT_TOOLS]

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The answer's message, and one user's message with all results."""
        message = _message(answer)
        calls = calls_of(message)
        content = [result_of(call, result) for call, result in zip(calls, results, strict=False)]
        return [message, {"role": "user", "content": content}] if len(calls) == len(results) else None


def _quoted(texts: list[_Text] | None, path: tuple[str | int, ...]) -> Iterator[TextPointer]:
    for at, one in enumerate(texts or ()):
        yield from text_pointers(one.text, (*path, at, "text"), "system")


def _quoted_messages(messages: list[MessageFields] | None) -> Iterator[TextPointer]:
    for at, item in enumerate(messages or ()):
        if item.role in SYSTEM and bytes(memoryview(item.content)[:1]) == b"[":
            yield from _quoted(_texts(item.content), ("messages", at, "content"))


def _message(answer: Json) -> Json:
    """The message of a plain answer; empty while none has begun."""
    message = obj(obj(answer.get("output")).get("message"))
    return message if isinstance(message.get("content"), list) else {}


def _ends(body: bytes) -> Json:
    """A stream as a plain answer with only the fields that the summary needs: its tool calls have no input."""
    answer: Json = {}
    content: list[Any] = []
    begun = b"contentBlockDelta" in body
    for frame in frames(body, [], skipped=b"contentBlockDelta"):
        said = obj(loads(frame.payload))
        begun = begun or frame.name in ("messageStart", "contentBlockStart")
        if frame.kind != "event":
            answer["error"] = exception_error(frame, said)
        elif frame.name == "contentBlockStart":
            content.append(obj(said.get("start")))
        elif frame.name in _LAST:
            answer |= {key: value for key, value in said.items() if value is not None}
    return answer | {"output": {"message": {"content": content}}} if begun else answer


def _payload(frame: EventStreamFrame, problems: list[str]) -> Json:
    value = loads(frame.payload)
    if frame.payload and not isinstance(value, dict):
        problems.append(f"response: the payload of {frame.name or 'a frame'} is not a readable JSON object")
    return obj(value)


def exception_error(frame: EventStreamFrame, said: Json) -> Json:
    """An exception as an error: its name and message. Errors of the connection have their message in a header."""
    what = text(said.get("message")) or frame.headers.get(":error-message") or frame.payload.decode("utf-8", "replace")
    return {"message": f"{frame.name or 'error'}: {what}"}


def _with_error(answer: Json) -> Json:
    """A body with nothing but an error message, as an error in the shape that other dialects have. Its kind stands in a
    header of the answer (`x-amzn-errortype`)."""
    said = text(answer.get("message")) or text(answer.get("Message"))
    return answer if said is None or "output" in answer else answer | {"error": {"message": said}}
