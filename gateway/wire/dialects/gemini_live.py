"""Gemini Live: a session on a WebSocket, `BidiGenerateContent` of Google's Gemini API and of Vertex AI.

The first message (`setup`) names the model, the instruction and the tools. Then the client sends content, sound and
results of tools as it likes, and the model speaks in turns: a turn begins with the first content or tool call, and ends
with `turnComplete`, also where the user has interrupted it. Each turn is a call. Its request is all that the client has
sent since the turn before, its answer the server's messages meanwhile; both are streams of events on the tape.

Usage is reported once or several times in a turn, each time for what was generated since: the reports are added up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.gateway.wire.dialects.base import Dialect, Facts, GenAiNames
from penstock.gateway.wire.dialects.family import GEMINI, Failure
from penstock.gateway.wire.dialects.gemini import field, folded, items, message_of, parts_of, snake, tools_of
from penstock.gateway.wire.dialects.loose_json import (
    UNREADABLE,
    Json,
    RequestFields,
    arr,
    error_message,
    is_bulky,
    label,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.parts import sampling_parameters, with_instructions
from penstock.gateway.wire.dialects.sse import as_struct, chunks
from penstock.gateway.wire.dialects.tokens import gemini_usage, quantity
from penstock.gateway.wire.dialects.websocket_messages import (
    ClientMessageFacts,
    ClientMessageKind,
    ServerMessageFacts,
    ServerMessageKind,
)

_ROUTE: Final = re.compile(
    r"(?:/v1)?/ws/google\.(?:ai\.generativelanguage|cloud\.aiplatform)\.v[0-9a-z]+\.(?:GenerativeService|LlmBidiService)"
    r"[./]BidiGenerateContent(?:Constrained)?"
)
_COUNTS: Final = ("promptTokenCount", "responseTokenCount", "cachedContentTokenCount", "toolUsePromptTokenCount",
                  "thoughtsTokenCount", "totalTokenCount")  # fmt: skip
_DETAILS: Final = ("promptTokensDetails", "responseTokensDetails", "cacheTokensDetails", "toolUsePromptTokensDetails")
_RENAMED: Final = {"responseTokenCount": "candidatesTokenCount", "responseTokensDetails": "candidatesTokensDetails"}
_HEARD: Final = ("audio", "video", "media", "mediaChunks")
"""The fields of realtime input that hold sound or pictures."""


# -- messages, as they pass --------------------------------------------------------------------------------------------


class _Setup(msgspec.Struct):
    model: Any = None


class _ServerContent(msgspec.Struct):
    modelTurn: msgspec.Raw = msgspec.Raw()
    model_turn: msgspec.Raw = msgspec.Raw()
    outputTranscription: msgspec.Raw = msgspec.Raw()
    output_transcription: msgspec.Raw = msgspec.Raw()
    turnComplete: Any = None
    turn_complete: Any = None


class _LiveMessage(msgspec.Struct):
    """A message of either side; protobuf's JSON reads names in camelCase and in snake_case."""

    setup: _Setup | None = None
    serverContent: _ServerContent | None = None
    server_content: _ServerContent | None = None
    toolCall: msgspec.Raw = msgspec.Raw()
    tool_call: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_LiveMessage).decode


def _read(message: bytes) -> _LiveMessage | None:
    try:
        return _decode(message)
    except UNREADABLE:
        said = None if is_bulky(message) else loads(message)
        if not isinstance(said, dict):
            return None
        made, given = as_struct(_LiveMessage, obj(said)), obj(said)
        called = field(given, "toolCall")
        made.toolCall = msgspec.Raw(b"{}") if isinstance(called, dict) else msgspec.Raw()
        made.tool_call = msgspec.Raw()
        return made


def read_client_message(message: bytes) -> ClientMessageFacts:
    """Read a message of the client: none is a request by itself."""
    said = _read(message)
    model = None if said is None or said.setup is None else _model(label(said.setup.model))
    return ClientMessageFacts(ClientMessageKind.OTHER, model=model)


def read_server_message(message: bytes) -> ServerMessageFacts:
    """Read a message of the server."""
    said = _read(message)
    if said is None:
        return ServerMessageFacts(ServerMessageKind.UNREADABLE)
    content = said.serverContent or said.server_content
    if content is not None and (content.turnComplete is True or content.turn_complete is True):
        return ServerMessageFacts(ServerMessageKind.END)
    spoken = [said.toolCall, said.tool_call]
    if content is not None:
        spoken += content.modelTurn, content.model_turn, content.outputTranscription, content.output_transcription
    speaks = any(bytes(raw) not in (b"", b"null") for raw in spoken)
    return ServerMessageFacts(ServerMessageKind.PART if speaks else ServerMessageKind.OTHER)


def _model(name: str | None) -> str | None:
    """A model as it is named elsewhere, without the path before it."""
    return None if name is None else name.rpartition("/")[2] or None


# -- the dialect -------------------------------------------------------------------------------------------------------


class GeminiLiveDialect(Dialect):
    name = "gemini_live"
    family = GEMINI
    answers = generates = uses_tokens = websocket = session = True
    error_events = peeks = False
    otel: GenAiNames | None = GenAiNames("generate_content", "gcp.gemini")
    read_client_message = staticmethod(read_client_message)
    read_server_message = staticmethod(read_server_message)

    def matches(self, method: str, path: str) -> bool:
        """True for the opening of a session."""
        return method == "WEBSOCKET" and _ROUTE.fullmatch(path) is not None

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The session's model, which its first message names."""
        return label(asked.model if asked is not None else None)

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        said = _LiveAnswer(chunks(response, []))
        usage, calls = said.usage, [it for it in said.parts if isinstance(field(obj(it), "functionCall"), dict)]
        if usage is None and not said.parts and not said.transcript:
            usage = Usage(input_tokens=0, output_tokens=0)
        failed: Failure | None = None
        if said.error is not None or (said.spoke and not said.finish):
            failed = "ended_early" if said.error is None else "stream_error"
        return Facts(
            model=label(asked.model) if asked is not None else None,
            finish=said.finish,
            usage=usage,
            tool_calls=len(calls),
            choices=int(said.spoke),
            failed=failed,
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        problems: list[str] = []
        asked = _LiveRequest(chunks(request, problems, "request"))
        said = _LiveAnswer(chunks(response, problems))
        setup, config = asked.setup, obj(field(asked.setup, "generationConfig"))
        sampling = config | {
            key: value for key, value in setup.items() if snake(key) not in ("system_instruction", "tools", "model")
        }
        messages = [*asked.messages]
        if said.heard:
            messages.append(Message(role="user", parts=[Part(type="text", text=said.heard)]))
        return Turn(
            dialect=self.name,
            model=_model(text(setup.get("model"))),
            stream=True,
            sampling=sampling,
            effective=sampling_parameters(sampling, {}),
            messages=with_instructions(message_of(obj(field(setup, "systemInstruction")), "system").parts, messages),
            tools=[it for tool in items(setup.get("tools")) for it in tools_of(obj(tool))],
            choices=[Choice(message=said.message, finish=said.finish)] if said.spoke else [],
            usage=said.usage,
            error=said.error,
            problems=problems,
        )


class _LiveRequest:
    """The request of a turn, read from the client's messages."""

    def __init__(self, events: Iterable[Json]) -> None:
        self.setup: Json = {}
        self.messages: list[Message] = []
        self._sound: dict[str, int] = {}
        for event in events:
            self._add(event)
        self._end_sound()

    def _add(self, event: Json) -> None:
        self.setup = obj(event.get("setup")) or self.setup
        heard = obj(field(event, "realtimeInput"))
        for name in _HEARD:
            for blob in objs(items(field(heard, name))):
                self._sound[name] = self._sound.get(name, 0) + len(text(blob.get("data")) or "")
        content = obj(field(event, "clientContent"))
        answers = [
            {"functionResponse": it} for it in objs(field(obj(field(event, "toolResponse")), "functionResponses"))
        ]
        said = [message_of(it, "user") for it in objs(items(content.get("turns")))]
        if answers:
            said.append(message_of({"parts": answers}, "user"))
        if words := text(heard.get("text")):
            said.append(Message(role="user", parts=[Part(type="text", text=words)]))
        if said:
            self._end_sound()
            self.messages += said

    def _end_sound(self) -> None:
        parts = [Part(type="media", data={"type": it, "base64_bytes": size}) for it, size in self._sound.items()]
        if parts:
            self.messages.append(Message(role="user", parts=parts))
        self._sound = {}


class _LiveAnswer:
    """The answer of a turn, read from the server's messages."""

    def __init__(self, events: Iterable[Json]) -> None:
        self.finish: str | None = None
        self.parts: list[Any] = []
        self.error: str | None = None
        self.transcript = self.heard = ""
        self._interrupted = False
        self._reports: list[Json] = []
        self._searches: list[Json] = []
        for event in events:
            self._add(event)

    def _add(self, event: Json) -> None:
        self.error = error_message(event) or self.error
        content = obj(field(event, "serverContent"))
        self.parts += items(obj(field(content, "modelTurn")).get("parts"))
        called = obj(field(event, "toolCall"))
        self.parts += [{"functionCall": it} for it in objs(field(called, "functionCalls"))]
        self.transcript += text(obj(field(content, "outputTranscription")).get("text")) or ""
        self.heard += text(obj(field(content, "inputTranscription")).get("text")) or ""
        self._interrupted = self._interrupted or content.get("interrupted") is True
        if found := obj(field(content, "groundingMetadata")):
            self._searches = [{"groundingMetadata": found}]
        if field(content, "turnComplete") is True:
            reason = label(field(content, "turnCompleteReason"))
            self.finish = "interrupted" if self._interrupted else reason or "turnComplete"
        if (report := obj(field(event, "usageMetadata"))) and report not in self._reports[-1:]:
            self._reports.append(report)

    @property
    def spoke(self) -> bool:
        """True if the model said or called anything."""
        return bool(self.parts or self.transcript)

    @property
    def message(self) -> Message:
        """The model's message. The words of sound come first; the sound itself is one part."""
        answer = folded([{"candidates": [{"content": {"parts": self.parts}, "finishReason": "STOP"}]}], [])
        content = obj(objs(answer.get("candidates"))[0].get("content"))
        parts = [part for it in arr(content.get("parts")) for part in parts_of(it)]
        sound = [part for part in parts if part.type == "media"]
        said = [Part(type="text", text=self.transcript)] if self.transcript else []
        size = sum(len(text(obj(field(obj(part.data), "inlineData")).get("data")) or "") for part in sound)
        heard = [Part(type="media", data={"type": "audio", "base64_bytes": size})] if sound else []
        return Message(role="assistant", parts=[*said, *(it for it in parts if it.type != "media"), *heard])

    @property
    def usage(self) -> Usage | None:
        """The sum of all reports."""
        if not self._reports:
            return None
        whole: Json = {
            _RENAMED.get(name, name): sum(count for count in counts if count is not None)
            for name in _COUNTS
            if (counts := [quantity(field(it, name)) for it in self._reports]) and any(it is not None for it in counts)
        }
        for name in _DETAILS:
            totals: dict[str, int] = {}
            for detail in (it for report in self._reports for it in objs(field(report, name))):
                kind = label(detail.get("modality")) or ""
                totals[kind] = totals.get(kind, 0) + (quantity(field(detail, "tokenCount")) or 0)
            if totals:
                listed = [{"modality": kind, "tokenCount": count} for kind, count in totals.items()]
                whole[_RENAMED.get(name, name)] = listed
        for name in ("trafficType", "serviceTier"):
            whole[name] = field(self._reports[-1], name)
        return gemini_usage({"usageMetadata": whole, "candidates": self._searches})
