"""The parts of a Turn that all dialects read in the same way: content, tools and tool results, the passages of a
message and its fingerprint, and the sampling parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import orjson

from penstock.gateway.model.turn import Message, Part, Passage, Sampling, Tool, Turn
from penstock.gateway.wire.dialects.loose_json import Json, arr, count, dumps, loads, obj, objs, text

TEXT = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text"})
MEDIA = frozenset(
    {"image_url", "input_image", "image_file", "input_audio", "audio_url", "video_url", "input_video", "input_file"}
    | {"audio", "file", "image", "document", "search_result", "video", "container_upload"}
)
HASHED: Final = b"penstock:media sha256="
"""The beginning of a `MediaHash`."""
_HASH: Final = re.compile(r"penstock:media sha256=([0-9a-f]{64}) bytes=([0-9]{1,15}) type=([\w.+/-]{1,100})")
_ODD: Final = re.compile(r"[^\w.+/-]", re.ASCII)
_BEGINNINGS: Final = (
    (b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"%PDF", "application/pdf"),
    (b"ID3", "audio/mpeg"), (b"\xff\xfb", "audio/mpeg"), (b"\xff\xf3", "audio/mpeg"), (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"), (b"\x1aE\xdf\xa3", "video/webm"),
)  # fmt: skip
_THINKING = frozenset({"thinking", "reasoning", "reasoning.text", "reasoning.summary"})
_THOUGHTS = ("text", "thinking", "summary", "content", "reasoning")
"""The fields in which servers put the text of reasoning."""
_PIECES = {"text": "text", "thinking": "thinking", "reasoning": "text"} | {
    "reasoning.text": "text", "reasoning.summary": "summary",
}  # fmt: skip
"""Types of parts that a stream sends in pieces, and the field that the pieces continue."""
_SAYING = ("system", "developer", "user", "assistant")


class MediaHash(NamedTuple):
    """Stands on the tape for the bytes of media that it does not hold (`wire.media_hashes`)."""

    sha256: str
    """64 hexadecimal digits."""
    bytes: int
    """Size of the media."""
    type: str
    """Media type, such as audio/wav."""

    def __str__(self) -> str:
        kind = _ODD.sub("", self.type)[:100] or "application/octet-stream"
        return f"penstock:media sha256={self.sha256} bytes={self.bytes} type={kind}"

    @classmethod
    def read(cls, text: str) -> MediaHash | None:
        """The hash that a text is; None if it is none."""
        found = _HASH.fullmatch(text)
        return None if found is None else cls(found[1], int(found[2]), found[3])


def media_type(begin: bytes, told: str = "") -> str | None:
    """The type of media: the one that is told, if that is a media type; else by their first 12 bytes; None if these do
    not tell either."""
    if "/" in told and not told.endswith("/octet-stream"):
        return told
    if begin[:4] == b"RIFF":
        return "image/webp" if begin[8:12] == b"WEBP" else "audio/wav"
    if begin[4:8] == b"ftyp":
        return "audio/mp4" if begin[8:11] == b"M4A" else "video/mp4"
    return next((kind for mark, kind in _BEGINNINGS if begin.startswith(mark)), None)


def flat_tools(offered: Any, schema: str) -> list[Tool]:
    """The tools of APIs that write them without an envelope: by name, the provider's own by type. `schema` is the field
    that holds the arguments' schema."""
    return [tool_of(item, text(item.get("type")) or "tool", item.get(schema)) for item in objs(offered)]


def tool_of(wire: Json, unnamed: str, parameters: Any) -> Tool:
    """A tool from the object that holds its name and description. `unnamed`: its name if it has none."""
    return Tool(
        name=text(wire.get("name")) or unnamed, description=text(wire.get("description")), parameters=parameters
    )


def with_instructions(instructions: list[Part], messages: list[Message]) -> list[Message]:
    """Messages of APIs whose requests hold instructions apart: these come first, if there are any."""
    return [Message(role="system", parts=instructions), *messages] if instructions else messages


def merged_messages(messages: list[Message]) -> list[Message]:
    """Messages with the assistant's consecutive ones joined."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "assistant":
            merged[-1].parts += message.parts
        else:
            merged.append(message)
    return merged


def content_parts(content: Any) -> list[Part]:
    """The parts of a message's content: a string, a list of typed parts, or nothing."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [Part(type="text", text=content)]
    items = arr(content) if isinstance(content, list) else [content]
    return [_content_part(item) for item in items]


def _content_part(item: Any) -> Part:
    if isinstance(item, str):
        return Part(type="text", text=item)
    fields = obj(item)
    kind = text(fields.get("type"))
    if kind in TEXT and isinstance(fields.get("text"), str):
        return Part(type="text", text=fields["text"])
    if kind in _THINKING and (said := thought_text(fields)):
        return Part(type="reasoning", text=said)
    if kind == "refusal" and isinstance(fields.get("refusal"), str):
        return Part(type="refusal", text=fields["refusal"])
    return Part(type="media" if kind in MEDIA else "unknown", data=item)


def thought_text(value: Any) -> str:
    """Reasoning as text: a string, or the texts of nested parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(thought_text, arr(value)))
    fields = obj(value)
    return next((said for name in _THOUGHTS if fields and (said := thought_text(fields.get(name)))), "")


def join_pieces(pieces: list[Any]) -> Any:
    """The pieces of a field as one: a string, or, where there are parts among them, a list of parts, in which a piece
    that continues the one before is joined to it. None where there are no pieces."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces) if pieces else None
    listed = [item for piece in pieces for item in (arr(piece) if isinstance(piece, list) else [piece])]
    groups: list[list[Any]] = []
    for item in listed:
        part = {"type": "text", "text": item} if isinstance(item, str) else item
        if groups and _goes_on(obj(groups[-1][-1]), obj(part)):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [_whole(group) if len(group) > 1 else group[0] for group in groups]


def _goes_on(one: Json, other: Json) -> bool:
    same = all(other.get(name) in (None, one.get(name)) for name in ("index", "id"))
    return same and one.get("type") == other.get("type") and one.get("type") in _PIECES


def _whole(group: list[Json]) -> Json:
    field, whole = _PIECES[group[0]["type"]], Json()
    for piece in group:
        whole |= {key: value for key, value in piece.items() if value is not None}
    return whole | {field: join_pieces([value for piece in group if (value := piece.get(field))])}


def flat(parts: list[Part]) -> str:
    """The text of the text parts."""
    return "".join(part.text or "" for part in parts if part.type == "text")


def result_part(id: Any, content: Any, *, name: Any = None, wire: Any = None) -> Part:
    """A tool's answer. `wire` is kept where it holds more than the text: media, or the mark of an error."""
    parts = content_parts(content)
    if wire is None and any(part.type != "text" for part in parts):
        wire = content
    return Part(type="tool_call_response", id=text(id), name=text(name), text=flat(parts), data=wire)


def result_content(result: Part) -> Any:
    """The content from which a tool's answer was read, for a request that sends it again."""
    return (result.text or "") if result.data is None else result.data


def fingerprint(message: Message) -> bytes:
    """Equal bytes for equal messages, however they were written: only role, text, tool calls and results count.

    Reasoning, media, markers and unknown parts do not: clients drop and move them. Nor does white space at the edges of
    the assistant's texts: clients strip it, and drop texts of white space only. An assistant message with nothing else
    in it has no fingerprint. Claude Code's stamp does not count: it may change with each call.
    """
    said = message.parts
    if said and said[0].text is not None and said[0].text.startswith(STAMP):
        said = said[1:]
    calls = [
        [part.id, part.name, same_arguments(part.arguments or "")] for part in message.parts if part.type == "tool_call"
    ]
    results = [[part.id, part.text] for part in message.parts if part.type == "tool_call_response"]
    return compose_fingerprint(message.role, flat(said), calls, results)


STAMP: Final = "x-anthropic-billing-header:"
"""Beginning of the text that Claude Code puts before its system text, with its version and a checksum of the call."""


def stamped(parts: Sequence[Part]) -> bool:
    """True if the first part is Claude Code's stamp."""
    return bool(parts) and (parts[0].text or "").startswith(STAMP)


def compose_fingerprint(role: str, said: str, calls: list[list[str | None]], results: list[list[str | None]]) -> bytes:
    """The fingerprint of a message, from the fields that count."""
    if role != "assistant":
        return orjson.dumps([role, said, calls, results])
    said = said.strip()
    return orjson.dumps([role, said, calls, results]) if said or calls or results else b""


def plain_fingerprint(wire: Any) -> bytes:
    """The fingerprint of the commonest messages, which have a role and a text only, without making a `Message`; else
    empty."""
    fields = obj(wire)
    role, said = fields.get("role"), fields.get("content")
    if len(fields) != 2 or not said or not isinstance(said, str) or role not in _SAYING:
        return b""
    return compose_fingerprint(role, said, [], [])


def flat_text(content: Any) -> str:
    """The text of a content, as the text parts of `content_parts` would give it."""
    if content is None or isinstance(content, str):
        return content or ""
    items = arr(content) if isinstance(content, list) else [content]
    return "".join(item if isinstance(item, str) else _text_of(obj(item)) for item in items)


def _text_of(fields: Json) -> str:
    return (text(fields.get("text")) or "") if text(fields.get("type")) in TEXT else ""


def same_arguments(given: str) -> str:
    """A call's arguments as they are compared: many clients parse them and write them anew when they send them back."""
    value = loads(given or "{}")
    return given if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


_SAID: Final = ("text", "title", "context", "reason", "stdout", "stderr", "output")
"""The fields that hold texts in data that is no text itself."""


# -- passages ----------------------------------------------------------------------------------------------------------


def turn_passages(turn: Turn) -> Iterator[Passage]:
    """All passages of a turn."""
    for message in turn.messages:
        yield from message_passages(message, False)
    for choice in turn.choices:
        yield from message_passages(choice.message, True)
    if turn.error:
        yield error_passage(turn.error)


def message_passages(message: Message, answer: bool) -> Iterator[Passage]:
    """The passages of a message's parts that have a text."""
    for part in message.parts:
        yield from part_passages(part, message.role, answer)


def part_passages(part: Part, role: str, answer: bool) -> Iterator[Passage]:
    """The passage of a part, if it has a text."""
    if said := _text(part):
        yield Passage(answer, role, part.type, part.name, part.id, said)


def error_passage(text: str) -> Passage:
    """The error message of a failed call as a passage."""
    return Passage(True, "", "error", None, None, text)


def body_passages(body: bytes, answer: bool) -> Iterator[Passage]:
    """The body of a call in no known format, if it is text."""
    try:
        if said := body.decode():
            yield Passage(answer, "", "body", None, None, said)
    except UnicodeDecodeError:
        return


def _text(part: Part) -> str | None:
    match part.type:
        case "tool_call":
            return f"{part.name or ''}({part.arguments or ''})"
        case "unknown":
            return None if part.data is None or _is_numbers(part.data) else dumps(part.data)
        case "tool_call_response" | "media":
            said = part.text or ""
            return "\n".join(filter(None, (said, *(text for text in _texts(part.data) if text not in said))))
        case _:
            return part.text


def _texts(data: Any) -> Iterator[str]:
    """The texts in data that is no text itself: documents, resources, a shell's output; no images."""
    rest = [data]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            wire = obj(one)
            if wire.get("structuredContent") is not None:
                yield dumps(wire["structuredContent"])
            named = [*_SAID, "data"] if wire.get("type") == "text" else _SAID
            yield from (text for name in named if isinstance(text := wire.get(name), str) and text)
            rest += [value for name, value in wire.items() if name != "structuredContent"][::-1]
        elif isinstance(one, list):
            rest += arr(one)[::-1]


def _is_numbers(data: Any) -> bool:
    """True for a token id or a list of them."""
    return isinstance(data, int) or (isinstance(data, list) and all(map(_is_numbers, arr(data)[:1])))


# -- sampling parameters, read from the request, and from answers that repeat them -------------------------------------

# Two things matter for training. First, tokens that are sampled from another distribution than the model's own
# (temperature 1, nothing cut off) have another probability than the one that engines report: vLLM's log-probabilities
# are those before temperature and top-p, unless it was started to give the others. Second, a grammar (a tool that must
# be called, a schema, an expression) forces tokens: it is applied before the log-probabilities are taken.

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "temperature": ("temperature",),
    "top_p": ("top_p", "topP"),
    "top_k": ("top_k", "topK"),
    "max_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens", "maxTokens"),
    "seed": ("seed",),
    "n": ("n", "candidateCount"),
}
"""The names of a parameter in the APIs, the one that counts first."""
_STOPS: Final = ("stop", "stop_sequences", "stopSequences")
_REPEATED: Final = ("temperature", "top_p", "max_output_tokens")
"""The parameters that answers of the responses API repeat."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0,),
}
"""Fields that change the distribution, and the values with which they do not."""
_FORMATS: Final = (("response_format", None), ("format", "text"), ("format", "output_config"), ("output_format", None))
"""The fields that hold a format of the answer: in chat, in responses, in messages."""
_GRAMMARS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The keys of vLLM's `structured_outputs`."""
_FIELDS: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf")
"""Fields of older vLLMs, and of SGLang."""
_FREE: Final = frozenset({"auto", "none", "text", "allowed_tools"})


def sampling_parameters(said: Json, answer: Json) -> Sampling:
    """The sampling parameters. `said`: those that the request set; a value that the answer repeats counts before it."""
    known = said | {name: answer[name] for name in _REPEATED if answer.get(name) is not None}
    found = {name: _first(known, names) for name, names in _NAMES.items()}
    return Sampling(
        temperature=_number(found["temperature"]),
        top_p=_number(found["top_p"]),
        top_k=_integer(found["top_k"]),
        max_tokens=_integer(found["max_tokens"]),
        seed=_integer(found["seed"]),
        n=count(found["n"]) or 1,
        stop=_strings(_first(known, _STOPS)),
    )


def distribution_fields(asked: Json) -> Json:
    """Only those fields of a request that may change the distribution."""
    return {name: asked[name] for name in _NEUTRAL if asked.get(name) is not None}


def distribution_changes(asked: Json, temperature: float = 1.0) -> list[str]:
    """The fields of a request that make it sample from another distribution than the model's at this temperature, as
    `name value`. A request without a temperature samples at 1."""
    known = {"temperature": 1} | distribution_fields(asked)
    return [
        f"{name} {known[name]}" if isinstance(known[name], int | float | str) else name
        for name, neutral in (_NEUTRAL | {"temperature": (temperature,)}).items()
        if name in known and known[name] not in neutral
    ]


def forcing_field(asked: Json) -> str | None:
    """The field of a request that makes a grammar force tokens; None when nothing does."""
    return next(_forces(asked), None)


def _forces(asked: Json) -> Iterator[str]:
    choice = asked.get("tool_choice")
    kind = obj(choice).get("type", "function") if isinstance(choice, dict) else choice
    allowed = obj(obj(choice).get("allowed_tools")).get("mode", obj(choice).get("mode"))
    if kind not in (None, *_FREE) or (kind == "allowed_tools" and allowed == "required"):
        yield f"tool_choice {kind if isinstance(kind, str) else 'of a kind that is not known'}"
    for name, where in _FORMATS:
        format = obj(obj(asked.get(where) if where else asked).get(name)).get("type")
        if format not in (None, "text"):
            yield f"{where or name} {format if isinstance(format, str) else 'of a kind that is not known'}"
    structured = obj(asked.get("structured_outputs"))
    yield from (f"structured_outputs.{name}" for name in _GRAMMARS if structured.get(name) not in (None, False))
    yield from (name for name in _FIELDS if asked.get(name) is not None)
    if choice != "none" and any(
        obj(tool.get("function", tool)).get("strict") is True for tool in objs(asked.get("tools"))
    ):
        yield "a strict tool"


def _first(known: Json, names: tuple[str, ...]) -> Any:
    return next((known[name] for name in names if known.get(name) is not None), None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 63 else None


def _strings(value: Any) -> list[str]:
    return [one for one in ([value] if isinstance(value, str) else arr(value)) if isinstance(one, str)]
