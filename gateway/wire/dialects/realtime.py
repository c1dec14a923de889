"""OpenAI's realtime API: a session on the WebSocket `/v1/realtime?model=...`, also Azure's.

The conversation is at the server. A client adds items to it, or sound, and asks for responses (`response.create`); with
voice detection the server also begins responses by itself. Every event of a response names it (`response_id`), so each
response is a call. Its request is all that the client has sent since the call before, its answer the response's events,
and what the server has said meanwhile. Both are streams of events on the tape.

A transcription of what a user has said is made by a model of its own, with usage of its own: it is a call too, which
the user's item tells apart (`item_id`). A call without either holds the rest of a session; it uses nothing.

Live (`/v1/live/sessions`) has neither turns nor responses: both sides speak all the time, and are billed by the second.
Of a session, or a part of it, the transcripts of both sides are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from penstock.gateway.model.known_secrets import may_be_secret
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.gateway.wire.dialects.base import STRING, Dialect, Facts, GenAiNames
from penstock.gateway.wire.dialects.family import OPENAI, ErrorFields, Failure
from penstock.gateway.wire.dialects.loose_json import (
    UNREADABLE,
    Json,
    RequestFields,
    error_message,
    is_bulky,
    label,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.opaque import SocketDialect
from penstock.gateway.wire.dialects.parts import content_parts, flat_tools, sampling_parameters, with_instructions
from penstock.gateway.wire.dialects.responses import ItemHead, assembled, item_message
from penstock.gateway.wire.dialects.sse import StreamReader, as_struct, chunks
from penstock.gateway.wire.dialects.tokens import openai_usage
from penstock.gateway.wire.dialects.websocket_messages import (
    ClientMessageFacts,
    ClientMessageKind,
    ServerMessageFacts,
    ServerMessageKind,
)

CREATE, CREATED, DONE = "response.create", "response.created", "response.done"
_TRANSCRIPTION: Final = "conversation.item.input_audio_transcription."
_TRANSCRIBED: Final = ("completed", "failed")
"""Ends of the types of a transcription's last event."""
_ROUTE: Final = re.compile(r"(?:/v1)?/realtime")
GIVES_KEYS: Final = re.compile(
    r".*/realtime/(?:[a-z]+/)?(?:client_secrets|sessions|transcription_sessions)|.*/realtimeapi/sessions|.*/chatkit/sessions"
)
"""Matches the paths, without a query, whose answers give a key for the client of one session."""
_GIVEN: Final = re.compile(rb'"(?:value|client_secret)"\s*:\s*"([^"\\]+)')
_CONFLICT: Final = "conversation_already_has_active_response"
_STATUS: Final = {"invalid_request_error": 400, "rate_limit_error": 429}
_NON_SAMPLING: Final = frozenset(
    {"type", "model", "instructions", "tools", "input", "id", "object", "client_secret", "expires_at", "prompt"}
)
"""Fields of a session, or of a request in it, that are no sampling parameters."""
_SOUND: Final = frozenset({"input_audio", "output_audio", "audio"})
_ACTIONS: Final = frozenset(
    {"response.cancel", "conversation.item.truncate", "conversation.item.delete", "output_audio_buffer.clear"}
)
"""Types of messages that change what the conversation holds without adding to it."""


def given_keys(answer: bytes) -> Iterator[bytes]:
    """The keys in an answer of a path of `GIVES_KEYS`, also in one that was cut off: no JSON then."""
    return filter(may_be_secret, _GIVEN.findall(answer))


# -- messages, as they pass --------------------------------------------------------------------------------------------


class _Transcriber(msgspec.Struct):
    model: Any = None


class _InputAudio(msgspec.Struct):
    transcription: _Transcriber | None = None


class _Audio(msgspec.Struct):
    input: _InputAudio | None = None


class _SessionSettings(msgspec.Struct):
    model: Any = None
    audio: _Audio | None = None
    input_audio_transcription: _Transcriber | None = None
    """Its place in the beta."""


class _Response(msgspec.Struct):
    id: Any = None
    max_output_tokens: Any = None


class _Error(msgspec.Struct):
    type: Any = None
    code: Any = None
    message: Any = None
    event_id: Any = None


class _RealtimeMessage(msgspec.Struct):
    """A message of either side."""

    type: Any = None
    event_id: Any = None
    response_id: Any = None
    item_id: Any = None
    response: _Response | None = None
    session: _SessionSettings | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_RealtimeMessage).decode


def _read(message: bytes) -> _RealtimeMessage | None:
    """A message; None if it is no JSON object."""
    try:
        return _decode(message)
    except UNREADABLE:
        said = None if is_bulky(message) else loads(message)
        return as_struct(_RealtimeMessage, obj(said)) if isinstance(said, dict) else None


def read_client_message(message: bytes) -> ClientMessageFacts:
    """Read a message of the client."""
    said = _read(message)
    if said is None:
        return ClientMessageFacts(ClientMessageKind.UNREADABLE)
    kind = ClientMessageKind.CREATE if said.type == CREATE else ClientMessageKind.OTHER
    model = None if said.session is None else label(said.session.model)
    most = None if said.response is None else said.response.max_output_tokens
    return ClientMessageFacts(kind, model=model, event=label(said.event_id), most=most)


def read_server_message(message: bytes) -> ServerMessageFacts:
    """Read a message of the server."""
    said = _read(message)
    if said is None:
        return ServerMessageFacts(ServerMessageKind.UNREADABLE)
    kind = said.type if isinstance(said.type, str) else ""
    if kind.startswith("response."):
        response = label(said.response_id) or (None if said.response is None else label(said.response.id))
        of = ServerMessageKind.BEGIN if kind == CREATED else ServerMessageKind.PART
        return ServerMessageFacts(ServerMessageKind.END if kind == DONE else of, response=response)
    if kind.startswith(_TRANSCRIPTION):
        ends = kind.endswith(_TRANSCRIBED)
        of = ServerMessageKind.END if ends else ServerMessageKind.PART
        return ServerMessageFacts(of, response=label(said.item_id), transcribes=True)
    if kind == "error":
        return _error(said.error or _Error())
    session = said.session
    if session is None:
        return ServerMessageFacts(ServerMessageKind.OTHER)
    return ServerMessageFacts(ServerMessageKind.OTHER, model=label(session.model), transcriber=_transcriber(session))


def _error(error: _Error) -> ServerMessageFacts:
    status = _STATUS.get(error.type if isinstance(error.type, str) else "", 500)
    # The code was added later than the message.
    conflict = error.code == _CONFLICT or "already has an active response" in str(error.message)
    event = label(error.event_id)
    return ServerMessageFacts(ServerMessageKind.ERROR, status=status, event=event, conflict=conflict)


def _transcriber(session: _SessionSettings) -> str | None:
    sound = None if session.audio is None or session.audio.input is None else session.audio.input.transcription
    found = session.input_audio_transcription if sound is None else sound
    return None if found is None else label(found.model)


# -- the summary -------------------------------------------------------------------------------------------------------


class _RealtimeResponseHead(msgspec.Struct, gc=False):
    id: Any = None
    status: Any = None
    status_details: Any = None
    usage: Any = None
    output: list[ItemHead] | None = None


class _SessionHead(msgspec.Struct, gc=False):
    model: Any = None


class _RealtimeEventHead(ErrorFields, gc=False):
    response: _RealtimeResponseHead | None = None
    item: ItemHead | None = None
    session: _SessionHead | None = None
    usage: Any = None


_events = StreamReader(_RealtimeEventHead).events


class _RealtimeSummary:
    """The summary's facts, read from the events of one call."""

    def __init__(self, events: Iterable[_RealtimeEventHead]) -> None:
        self.response: _RealtimeResponseHead | None = None
        self.model: str | None = None
        self.ended = self.transcribes = self.transcribed = False
        self.usage: Any = None
        self.error: Any = None
        self.items: list[ItemHead] = []
        for event in events:
            kind = event.type if isinstance(event.type, str) else ""
            if event.response is not None:
                self.response, self.ended = event.response, kind == DONE
            elif kind == "response.output_item.done" and event.item is not None:
                self.items.append(event.item)
            elif kind.startswith(_TRANSCRIPTION):
                self.transcribes, self.usage = True, event.usage or self.usage
                self.transcribed = self.transcribed or kind.endswith("completed")
                self.ended = self.ended or kind.endswith(_TRANSCRIBED)
                self.error = event.error or self.error
            elif kind == "error":
                self.error = event.error or True
            elif event.session is not None:
                self.model = label(event.session.model) or self.model
        if self.response is not None:
            self.usage, self.items = self.response.usage, self.response.output or self.items

    @property
    def empty(self) -> bool:
        """True if there is neither a response nor a transcription."""
        return self.response is None and not self.transcribes

    @property
    def failed(self) -> Failure | None:
        if self.response is not None and self.ended:
            return "stream_error" if self.response.status == "failed" else None
        if self.error or self.empty:
            return "stream_error" if self.error else None
        return None if self.ended else "ended_early"


def _finish(status: Any, details: Any) -> Any:
    return obj(details).get("reason") or (None if status == "in_progress" else status)


# -- the dialect -------------------------------------------------------------------------------------------------------


class RealtimeDialect(Dialect):
    name = "realtime"
    family = OPENAI
    answers = generates = uses_tokens = websocket = session = True
    peeks = False
    otel: GenAiNames | None = GenAiNames("chat", "openai")
    read_client_message = staticmethod(read_client_message)
    read_server_message = staticmethod(read_server_message)
    _texts = re.compile(rb'"(?:transcript|text|arguments)' + STRING)

    def matches(self, method: str, path: str) -> bool:
        """True for the opening of a session."""
        return method == "WEBSOCKET" and _ROUTE.fullmatch(path) is not None

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The session's model, or the model that the opening names; Azure names a deployment."""
        named = dict(parse_qsl(path.partition("?")[2]))
        return label(asked.model if asked is not None else None) or label(named.get("model") or named.get("deployment"))

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        said = _RealtimeSummary(chain.from_iterable(_events(response)))
        head = said.response or _RealtimeResponseHead()
        usage = openai_usage({"usage": said.usage})
        if said.empty and CREATE.encode() not in request:
            usage = Usage(input_tokens=0, output_tokens=0)
        transcribed = "completed" if said.transcribed else "failed" if said.transcribes and said.ended else None
        return Facts(
            model=label(asked.model) if asked is not None else None,
            model_served=None if said.transcribes and said.response is None else said.model,
            response_id=label(head.id),
            finish=label(_finish(head.status, head.status_details)) or transcribed,
            usage=usage,
            tool_calls=sum(it.type == "function_call" and isinstance(it.call_id, str) for it in said.items),
            choices=1 if said.items or said.transcribed else 0,
            failed=said.failed,
        )

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        problems: list[str] = []
        asked = _RealtimeRequest(chunks(request, problems, "request"))
        events = list(chunks(response, problems))
        sessions = (obj(it.get("session")) for it in events if str(it.get("type")).startswith("session."))
        known = next((it for it in reversed(list(sessions)) if it), Json())
        settings = known | asked.settings | asked.create
        answer = _answer(events, problems)
        said = {key: value for key, value in settings.items() if key not in _NON_SAMPLING}
        return Turn(
            dialect=self.name,
            model=text(asked.settings.get("model")),
            model_served=text(known.get("model")),
            response_id=text(answer.get("id")),
            stream=True,
            sampling=said,
            effective=sampling_parameters(said, answer),
            messages=with_instructions(content_parts(settings.get("instructions")), asked.messages),
            tools=flat_tools(settings.get("tools"), "parameters"),
            choices=_choices(answer),
            usage=openai_usage(answer),
            error=error_message(answer) or error_message(obj(answer.get("status_details"))),
            problems=problems,
        )

    def answer_text_pattern(self, stream: bool) -> re.Pattern[bytes]:
        """The pattern of whole texts; deltas may be sound."""
        return self._texts


class _RealtimeRequest:
    """The request of a call, read from the client's messages."""

    def __init__(self, events: Iterable[Json]) -> None:
        self.settings: Json = {}
        """Its settings of the session."""
        self.create: Json = {}
        """Its settings of the response."""
        self.messages: list[Message] = []
        self._sound = 0
        for event in events:
            self._add(text(event.get("type")) or "", event)
        self._end_sound()

    def _add(self, kind: str, event: Json) -> None:
        if kind == "input_audio_buffer.append":
            self._sound += len(text(event.get("audio")) or "")
        elif kind == "input_audio_buffer.clear":
            self._sound = 0
        elif kind == "input_audio_buffer.commit":
            self._end_sound()
        elif kind == "session.update":
            self.settings |= obj(event.get("session"))
        elif kind == "conversation.item.create":
            self.messages.append(item_message(_told(obj(event.get("item"))), "user"))
        elif kind == CREATE:
            self._end_sound()
            self.create = obj(event.get("response"))
            self.messages += [item_message(_told(it), "user") for it in objs(self.create.get("input"))]
        elif kind in _ACTIONS:
            self.messages.append(Message(role="user", parts=[Part(type="unknown", data=event)]))

    def _end_sound(self) -> None:
        if self._sound:
            heard: Json = {"type": "input_audio_buffer", "base64_bytes": self._sound}
            self.messages.append(Message(role="user", parts=[Part(type="media", data=heard)]))
        self._sound = 0


def _told(item: Json) -> Json:
    """An item whose parts of sound have their words before them."""
    content = [part for it in objs(item.get("content")) for part in _words(it)]
    return item | {"content": content} if content else item


def _words(part: Json) -> Iterator[Json]:
    if part.get("type") not in _SOUND:
        yield part
        return
    if isinstance(part.get("transcript"), str):
        yield {"type": "text", "text": part["transcript"]}
    if part.get("audio"):
        yield part | {"type": "input_audio"}


def _answer(events: list[Json], problems: list[str]) -> Json:
    """The response of a call, or the transcription, as a plain answer; only an error where there is neither."""
    mine = [it for it in events if str(it.get("type")).startswith("response.")]
    if mine:
        return assembled(map(_renamed, mine), problems)
    heard = [it for it in events if str(it.get("type")).startswith(_TRANSCRIPTION)]
    error: Json = next(({"error": it["error"]} for it in reversed(events) if it.get("error")), Json())
    if not heard:
        return error
    last = next((it for it in heard if it["type"].endswith("completed")), Json())
    said = text(last.get("transcript")) or "".join(text(it.get("delta")) or "" for it in heard)
    item: Json = {"type": "message", "content": [{"type": "text", "text": said}]}
    return error | {"usage": last.get("usage"), "status": "completed" if last else None, "output": [item]}


def _renamed(event: Json) -> Json:
    """The last event of a response by the name that it has in responses."""
    if event.get("type") != DONE:
        return event
    return event | {"type": f"response.{text(obj(event.get('response')).get('status')) or 'completed'}"}


def _choices(answer: Json) -> list[Choice]:
    items = objs(answer.get("output"))
    parts = [part for item in items for part in item_message(_told(item), "assistant").parts]
    finish = text(_finish(answer.get("status"), answer.get("status_details")))
    return [Choice(message=Message(role="assistant", parts=parts), finish=finish)] if items else []


# -- Live --------------------------------------------------------------------------------------------------------------

_LIVE_ROUTE: Final = re.compile(r"(?:/v1)?/live(?:/.*)?")
_SPOKEN: Final = {"session.input_transcript.delta": "user", "session.output_transcript.delta": "assistant"}
_ADDED: Final = {"session.instructions.append": "developer", "session.thinking.append": "developer"}


class LiveDialect(SocketDialect):
    name = "live"
    otel: GenAiNames | None = GenAiNames("chat", "openai")

    def matches(self, method: str, path: str) -> bool:
        """True for the opening of a session, and for one beside it."""
        return method == "WEBSOCKET" and _LIVE_ROUTE.fullmatch(path) is not None

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The instructions, and what both sides said, each as one text: nothing tells where a turn ends."""
        problems: list[str] = []
        sent = list(chunks(request, problems, "request"))
        said = {"user": "", "assistant": ""}
        error: str | None = None
        for event in chunks(response, problems):
            error = error_message(event) or error
            if (role := _SPOKEN.get(text(event.get("type")) or "")) is not None:
                said[role] += text(event.get("delta")) or ""
        settings = next((it for event in sent if (it := obj(event.get("session")))), Json())
        more = [
            Message(role=_ADDED[kind], parts=content_parts(event.get("content")))
            for event in sent
            if (kind := text(event.get("type")) or "") in _ADDED
        ]
        spoken = {
            role: Message(role=role, parts=[Part(type="text", text=words)]) for role, words in said.items() if words
        }
        asked = [*more, *([spoken["user"]] if "user" in spoken else [])]
        return Turn(
            dialect=self.name,
            model=text(settings.get("model")),
            stream=True,
            messages=with_instructions(content_parts(settings.get("instructions")), asked),
            choices=[Choice(message=spoken["assistant"])] if "assistant" in spoken else [],
            error=error,
            problems=problems,
        )
