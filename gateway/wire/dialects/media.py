"""OpenAI's calls with media: `/audio/transcriptions`, `/audio/translations`, `/audio/speech`, `/images/...`, `/videos`.

Requests are JSON or forms with files (`multipart/form-data`). Answers are JSON, events, or for sound and transcripts
the bare content. In a turn a file, or media in base64, is a part that says where its bytes stand (`body`, `at` or
`path`), their size and type; the bytes are not copied. What a call used is counted in tokens, or where its model has no
tokens, in `seconds` of sound or video, `characters` that were spoken, or `images` (`Usage.billed`).

No answer here can be trained on, or continues a conversation.
"""

from __future__ import annotations

import binascii
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from math import ceil
from typing import Any, ClassVar, Final
from urllib.parse import unquote_plus

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Passage, Turn
from penstock.gateway.wire.dialects.base import Facts, GenAiNames, JsonPostDialect, routes
from penstock.gateway.wire.dialects.family import OPENAI, ErrorFields, Failure, body_failure, is_error
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    document,
    joined,
    label,
    lenient,
    loads,
    obj,
    objs,
    peek,
    text,
)
from penstock.gateway.wire.dialects.parts import MediaHash, media_type, sampling_parameters, turn_passages
from penstock.gateway.wire.dialects.request_body import (
    ConversationItems,
    FormField,
    form_fields,
    form_type,
    peek_form,
)
from penstock.gateway.wire.dialects.sse import StreamReader, chunks
from penstock.gateway.wire.dialects.tokens import number, openai_usage

_HASH: Final = 300
"""Most bytes of a file that may be a `MediaHash`."""
_LONGEST: Final = 1 << 20
"""Most bytes of a form's field that are read."""
_BEGIN: Final = 24
"""Characters of base64 that tell the type of media."""
_JSON: Final = b"{"

_VIDEO: Final = 20.0
"""Seconds of a video whose request does not say how many, at most."""
_THIN: Final = 2000
"""Bytes of a second of sound whose length is not known, at least: 16 kbit/s."""
_SAMPLES: Final = (b"\1\0", b"\3\0")
"""Formats of WAV files that hold samples: whole numbers, or floating ones."""
_PER_SECOND: Final = 10
"""Tokens of a second of sound that is heard."""
_SPOKEN: Final = 4
"""Tokens of sound for a byte of text that is spoken, at most."""
_IMAGE: Final = 8192
"""Tokens of an image, at most."""
_ANSWER: Final = 8192
"""Tokens of a transcript, at most."""


class _Nothing(msgspec.Struct):
    """An object of which only the number is of interest."""


class _MediaHead(ErrorFields):
    """The few fields of an answer, or of an event, that its summary needs; media are skipped."""

    id: Any = None
    model: Any = None
    usage: Any = None
    svg_usage: Any = None
    duration: Any = None
    seconds: Any = None
    data: list[_Nothing] | None = None


class _SpokenText(msgspec.Struct):
    input: Any = None


_reader = StreamReader(_MediaHead)
_spoken = lenient(_SpokenText)


class MediaDialect(JsonPostDialect):
    """Base of the dialects whose requests or answers are media."""

    family = OPENAI
    answers = generates = False
    media = True
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset(
        {"model", "stream", "prompt", "input", "instructions", "file", "image", "images", "mask", "video"}
        | {"input_reference", "known_speaker_references"}
    )
    ends: ClassVar[tuple[str, ...]] = ()
    """The types of the events that end a stream."""

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        return label((asked or _peek(request)).model)

    def asks_stream(self, request: bytes, path: str) -> bool:
        if form_type(request) is None:
            return super().asks_stream(request, path)
        return request_fields(request, []).get("stream") == "true"

    def items(self, request: bytes) -> ConversationItems:
        """None: there is no conversation."""
        return ConversationItems(None, [])

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """The texts of the turn."""
        return turn_passages(self.read(request, response, stream))

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        why: Failure | None
        if stream:
            events = list(chain.from_iterable(_reader.events(response)))
            ended = [event for event in events if event.type in self.ends]
            answer, choices = ended[-1] if ended else _MediaHead(), len(ended)
            why = "stream_error" if any(map(is_error, events)) else None if ended else "ended_early"
        else:
            answer, ended = _reader.body(response) if _is_json(response) else _MediaHead(), []
            why, choices = body_failure(answer), self.choice_count(answer, response)
        told = msgspec.structs.asdict(answer) | ({"data": ended} if stream else {})
        usage = None if why in ("error_body", "stream_error") else self.used(request, told)
        model, id = label(answer.model), label(answer.id)
        return Facts(self.model(request, asked=asked), model, id, None, usage, 0, 0 if why else choices, why)

    def choice_count(self, answer: _MediaHead, response: bytes) -> int:
        """The number of choices of a plain answer."""
        return 1 if response else 0

    def used(self, request: bytes, answer: Json) -> Usage | None:
        """The use of a call. `answer`: its fields, of a stream those of its last event."""
        return media_usage(answer, {})

    def usage(self, answer: Json) -> Usage | None:
        return media_usage(answer, {})

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        problems: list[str] = []
        asked = request_fields(request, problems)
        answer = self.answer(response, stream, problems)
        error, said = self.error(answer), self.sampling(asked)
        return Turn(
            dialect=self.name,
            model=text(asked.get("model")),
            model_served=text(answer.get("model")),
            response_id=text(answer.get("id")),
            stream=stream,
            sampling=said,
            effective=sampling_parameters(said, {}),
            messages=self.messages(asked, problems),
            choices=[] if error else self.choices(answer),
            usage=None if error else self.used(request, answer),
            error=error,
            problems=problems,
        )

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """Instructions, and one message with the text and the files."""
        told, said = text(asked.get("instructions")), text(asked.get("input")) or text(asked.get("prompt"))
        parts = [Part(type="text", text=said)] if said else []
        parts += [
            Part(type="media", data=it) for name in sorted(self.non_sampling_fields) for it in _given(asked, name)
        ]
        before = [Message(role="system", parts=[Part(type="text", text=told)])] if told else []
        return [*before, *([Message(role="user", parts=parts)] if parts else [])]

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """The last event that ends the stream, which has the usage; in `data` all such events."""
        events = list(chunks(body, problems))
        ends = [it for it in events if it.get("type") in self.ends]
        error = next((it for it in events if it.get("error")), None)
        problems += [] if ends or error else ["response: the stream ended early"]
        return self.content(events) | (ends[-1] if ends else {}) | {"data": ends} | (error or {})

    def content(self, events: list[Json]) -> Json:
        """The content of the events of a stream, put together."""
        return {}

    @abstractmethod
    def most(self, request: bytes, form: str = "") -> Usage: ...


def _peek(request: bytes) -> RequestFields:
    form = form_type(request)
    return peek(request) if form is None else peek_form(request, form)


def _is_json(body: bytes) -> bool:
    return body[:64].lstrip().startswith(_JSON)


# -- requests ----------------------------------------------------------------------------------------------------------


def request_fields(request: bytes, problems: list[str], form: str | None = None) -> Json:
    """The fields of a request of JSON or of a form. A file is an object that says where it stands; fields that are
    named several times, or `NAME[]`, are a list. `form`: the content type of a form, empty for JSON; None if only the
    body tells, which may begin with what is no part of the form."""
    form = form_type(request) if form is None else form
    if not form:
        return document(request, "request", problems)
    found: Json = {}
    try:
        for one in form_fields(request, form):
            name, value = one.name.removesuffix("[]"), _field(request, one)
            if name in found or name != one.name:
                found[name] = [*(known if isinstance(known := found.get(name, []), list) else [known]), value]
            else:
                found[name] = value
    except ValueError as error:
        problems.append(f"request: {error}")
    return found


def _field(request: bytes, one: FormField) -> Any:
    size = one.end - one.start
    if one.file is None:
        return request[one.start : min(one.end, one.start + _LONGEST)].decode("utf-8", "replace")
    hashed = MediaHash.read(request[one.start : one.end].decode("latin-1")) if size <= _HASH else None
    begin = request[one.start : one.start + _BEGIN]
    return _reference("request", hashed, size, media_type(begin, one.kind)) | (
        {"file": one.file, "field": one.name} | ({} if hashed else {"at": [one.start, one.end]})
    )


def _reference(body: str, hashed: MediaHash | None, size: int, kind: str | None) -> Json:
    """Media by reference. `body`: `request` or `response`, in which it stands; `size`: bytes."""
    if hashed is not None:
        return {"body": body, "type": hashed.type, "bytes": hashed.bytes, "sha256": hashed.sha256}
    return {"body": body, "bytes": size} | ({"type": kind} if kind else {})


def _given(asked: Json, name: str) -> Iterator[Any]:
    """The media of a field: files, URLs, ids, or `data:` URLs, which are left out but for their type and size."""
    value = asked.get(name)
    for at, one in enumerate(arr(value) if isinstance(value, list) else [value]):
        if name in ("model", "stream", "prompt", "input", "instructions") or one is None:
            continue
        path = f"{name}[{at}]" if isinstance(value, list) else name
        if isinstance(one, str):
            yield _url("request", one, path)
        elif isinstance(one, dict):
            fields = obj(one)
            yield {key: _url("request", it, f"{path}.{key}") if _is_data(it) else it for key, it in fields.items()}


def _is_data(value: Any) -> bool:
    return isinstance(value, str) and (value.startswith("data:") or MediaHash.read(value) is not None)


def _url(body: str, value: str, path: str) -> Json:
    head, comma, data = value.partition(",")
    if not value.startswith("data:") or not comma:
        hashed = MediaHash.read(value) if len(value) <= _HASH else None
        return {"url": value} if hashed is None else _reference(body, hashed, 0, None)
    return in_base64(body, data, path, head[5:].partition(";")[0])


def in_base64(body: str, data: str, path: str, kind: str | None = None) -> Json:
    """Media in base64, by reference. `path`: its place in the body's JSON."""
    hashed = MediaHash.read(data) if len(data) <= _HASH else None
    with contextlib.suppress(ValueError):
        kind = media_type(binascii.a2b_base64(data[:_BEGIN]), kind or "")
    return _reference(body, hashed, _decoded_size(data), kind) | ({} if hashed else {"path": path})


def _decoded_size(data: str) -> int:
    return len(data) * 3 // 4 - data[-2:].count("=")


def _highest(value: Any) -> float | None:
    """The highest of the numbers of a field that may be named several times; None if there is none."""
    given = arr(value) if isinstance(value, list) else [value]
    found = [number(unquote_plus(it).strip() if isinstance(it, str) else it) for it in given]
    return max((it for it in found if it is not None), default=None)


def seconds_of(begin: bytes, size: int) -> float:
    """Seconds of some sound: a WAV file of samples says how many; of others the most that so many bytes may be.
    `begin`: its first 34 bytes."""
    told = begin[:4] == b"RIFF" and begin[8:16] == b"WAVEfmt " and begin[20:22] in _SAMPLES
    # Decoders go by samples a second and bytes a sample, and by no other number there.
    rate = int.from_bytes(begin[24:28], "little") * int.from_bytes(begin[32:34], "little") if told else 0
    return size / (rate or _THIN)


def media_usage(answer: Json, counted: Mapping[str, float], made: str = "") -> Usage | None:
    """Usage of calls with media: tokens, and in `billed` seconds, characters or images. `counted`: the units that
    follow from the call itself; `made`: what all of its output is, `audio` or `image`, where the answer does not
    say."""
    fields, usage = obj(answer.get("usage")), openai_usage(answer) if answer.get("usage") else None
    usage = usage or Usage()
    seconds = number(fields.get("seconds"))
    if seconds is None and usage.input_tokens is None:
        seconds = number(answer.get("duration"))
    units = {name: it for name, it in ({"seconds": seconds} | dict(counted)).items() if it}
    if made and usage.output_tokens and not fields.get("output_tokens_details"):
        units[f"output_{made}"] = usage.output_tokens
    billed = (usage.billed or {}) | units
    usage = usage.model_copy(update={"billed": billed or None})
    if drawn := obj(answer.get("svg_usage")):
        usage = _with_svg(usage, drawn)
    return None if usage == Usage() else usage


def _with_svg(usage: Usage, drawn: Json) -> Usage:
    """Usage with the tokens of the model that wrote an SVG, which its provider counts apart."""
    made = openai_usage({"usage": drawn}) or Usage()
    part = [label(drawn.get("model")), made.input_tokens, made.output_tokens, None, None, None]
    sums = {
        "input_tokens": (usage.input_tokens or 0) + (made.input_tokens or 0),
        "output_tokens": (usage.output_tokens or 0) + (made.output_tokens or 0),
    }
    return usage.model_copy(update=sums | {"billed": (usage.billed or {}) | {"parts": [part]}})


# -- sound -------------------------------------------------------------------------------------------------------------


class TranscriptionDialect(MediaDialect):
    """Sound in, text out; the text is JSON, bare, or a file of subtitles (srt, vtt)."""

    name = "transcription"
    routes: ClassVar[frozenset[str]] = routes("/audio/transcriptions", "/audio/translations")
    otel: GenAiNames | None = GenAiNames("generate_content", "openai")
    ends: ClassVar[tuple[str, ...]] = ("transcript.text.done",)
    end_marker = b"transcript.text.done"

    def answer(self, response: bytes, stream: bool, problems: list[str]) -> Json:
        if stream or _is_json(response):
            return super().answer(response, stream, problems)
        return {"text": response.decode("utf-8", "replace")} if response else {}

    def content(self, events: list[Json]) -> Json:
        """The text so far; the last event has all of it."""
        return {"text": joined(events, "delta")}

    def choices(self, answer: Json) -> list[Choice]:
        said = text(answer.get("text"))
        return [Choice(message=Message(role="assistant", parts=[Part(type="text", text=said)]))] if said else []

    def most(self, request: bytes, form: str = "") -> Usage:
        """The seconds that the files may have, their tokens, and those of a transcript."""
        try:
            files = [(it.start, it.end) for it in form_fields(request, form) if it.file is not None]
        except ValueError:
            # A file of an unreadable form may be all of it.
            files = [(0, len(request))]
        seconds = sum(seconds_of(request[start : start + 34], end - start) for start, end in files)
        others = len(request) - sum(end - start for start, end in files)
        tokens = ceil(seconds * _PER_SECOND) + others
        return Usage(input_tokens=tokens, output_tokens=_ANSWER, billed={"seconds": seconds})


class SpeechDialect(MediaDialect):
    """Text in, sound out: bare, or in events."""

    name = "speech"
    routes: ClassVar[frozenset[str]] = routes("/audio/speech")
    otel: GenAiNames | None = GenAiNames("generate_content", "openai")
    ends: ClassVar[tuple[str, ...]] = ("speech.audio.done",)
    end_marker = b"speech.audio.done"

    def asks_stream(self, request: bytes, path: str) -> bool:
        return text(obj(loads(request)).get("stream_format")) == "sse"

    def used(self, request: bytes, answer: Json) -> Usage | None:
        """Tokens where the answer has them, and the characters that were spoken."""
        return media_usage(answer, {"characters": len(text(_spoken(request).input) or "")}, "audio")

    def answer(self, response: bytes, stream: bool, problems: list[str]) -> Json:
        if stream or (_is_json(response) and isinstance(loads(response), dict)):
            return super().answer(response, stream, problems)
        hashed = MediaHash.read(response.decode("latin-1")) if len(response) <= _HASH else None
        made = _reference("response", hashed, len(response), media_type(response[:_BEGIN]))
        return {"sound": made} if response else {}

    def content(self, events: list[Json]) -> Json:
        pieces = [in_base64("response", piece, "") for event in events if (piece := text(event.get("audio")))]
        if not pieces:
            return {}
        return {"sound": _reference("response", None, sum(it["bytes"] for it in pieces), pieces[0].get("type"))}

    def choices(self, answer: Json) -> list[Choice]:
        made = answer.get("sound")
        return [Choice(message=Message(role="assistant", parts=[Part(type="media", data=made)]))] if made else []

    def most(self, request: bytes, form: str = "") -> Usage:
        said = text(_spoken(request).input) or ""
        made = _SPOKEN * len(said.encode("utf-8", "replace"))
        return Usage(input_tokens=len(request), output_tokens=made, billed={"characters": len(said)})


# -- images and video --------------------------------------------------------------------------------------------------


class ImagesDialect(MediaDialect):
    """Images from a text, from other images, or both."""

    name = "images"
    routes: ClassVar[frozenset[str]] = routes("/images/generations", "/images/edits", "/images/variations")
    otel: GenAiNames | None = GenAiNames("generate_content", "openai")
    ends: ClassVar[tuple[str, ...]] = ("image_generation.completed", "image_edit.completed")
    end_marker = b".completed"

    def choice_count(self, answer: _MediaHead, response: bytes) -> int:
        return len(answer.data or ())

    def used(self, request: bytes, answer: Json) -> Usage | None:
        """Tokens, and the number of images."""
        return media_usage(answer, {"images": len(arr(answer.get("data")))}, "image")

    def choices(self, answer: Json) -> list[Choice]:
        return [Choice(index=at, message=self._image(it, at)) for at, it in enumerate(objs(answer.get("data")))]

    def _image(self, item: Json, at: int) -> Message:
        said, made = text(item.get("revised_prompt")), text(item.get("b64_json"))
        path = "b64_json" if item.get("type") else f"data[{at}].b64_json"
        part = {"url": item.get("url")} if made is None else in_base64("response", made, path)
        told = [Part(type="text", text=said)] if said else []
        return Message(role="assistant", parts=[*told, Part(type="media", data=part)])

    def most(self, request: bytes, form: str = "") -> Usage:
        """The images that are asked for, their tokens, and those of the given images and of the text."""
        asked = request_fields(request, [], form)
        given = sum(1 for name in ("image", "images", "mask") for _ in _given(asked, name))
        images = max(1, ceil(_highest(asked.get("n")) or 1))
        prompt = len((text(asked.get("prompt")) or "").encode("utf-8", "replace")) + _IMAGE * given
        return Usage(input_tokens=prompt, output_tokens=_IMAGE * images, billed={"images": images})


class VideosDialect(MediaDialect):
    """Videos from a text, an image or another video. The answer is a job; its calls that wait and fetch use nothing."""

    name = "videos"
    creates = True
    routes: ClassVar[frozenset[str]] = routes("/videos", "/videos/edits", "/videos/extensions")
    otel: GenAiNames | None = GenAiNames("generate_content", "openai")

    def matches(self, method: str, path: str) -> bool:
        """True for the calls that make a video."""
        return super().matches(method, path) or (
            method == "POST" and path.startswith(("/videos/", "/v1/videos/")) and path.endswith("/remix")
        )

    def used(self, request: bytes, answer: Json) -> Usage | None:
        """The seconds of the video that will be made."""
        return media_usage(answer, {"seconds": number(answer.get("seconds")) or 0.0})

    def choices(self, answer: Json) -> list[Choice]:
        known = {name: answer[name] for name in ("id", "status", "seconds", "size") if answer.get(name) is not None}
        return [Choice(message=Message(role="assistant", parts=[Part(type="media", data=known)]))] if known else []

    def most(self, request: bytes, form: str = "") -> Usage:
        seconds = _highest(request_fields(request, [], form).get("seconds")) or _VIDEO
        return Usage(input_tokens=0, output_tokens=0, billed={"seconds": seconds})
