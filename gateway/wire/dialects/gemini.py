"""Google's Gemini: `POST /v1beta/models/{model}:generateContent` and its like, also below a Vertex project.

The model stands in the path. A stream is a list of answers, each with the next parts: as events with `?alt=sse`, else
as one JSON array, which HTTP does not mark as a stream. Fields are camelCase or snake_case, since protobuf's JSON reads
either, and one object may stand for a list. Thoughts are parts marked as such; they are not in `candidatesTokenCount`.
Function calls have an id only in newer versions. Tool results stay in a user's message, as they are sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, Final
from urllib.parse import quote, unquote

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool
from penstock.gateway.wire.dialects.base import Facts, GenAiNames, JsonPostDialect, choices_of
from penstock.gateway.wire.dialects.family import GEMINI, ErrorFields, Failure, body_failure, is_error
from penstock.gateway.wire.dialects.loose_json import (
    DEEPEST,
    Json,
    RequestFields,
    arr,
    count,
    document,
    dumps,
    label,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.parts import fingerprint, result_part, tool_of, with_instructions
from penstock.gateway.wire.dialects.request_body import (
    ConversationItems,
    Path,
    TextPointer,
    TextPointers,
    ToolDescription,
    cutter,
    text_pointers,
    tool_pointers,
)
from penstock.gateway.wire.dialects.sse import StreamReader, as_struct, chunks
from penstock.gateway.wire.dialects.tokens import gemini_usage

# Gemini's wire objects as the parts of a Turn, and the pieces of a stream as one answer.

_SNAKE = re.compile(r"(?<=[a-z])[A-Z]")
ROLES = {"model": "assistant", "function": "tool"}
MEDIA = ("inlineData", "fileData")
_PIECE = frozenset({"args", "partialArgs", "partial_args", "willContinue", "will_continue"})
_STEP = re.compile(r"""\.([^.\[\]]+)|\[(\d{1,6})\]|\[(["'])(.*?)\3\]""")
"""A step of a JSONPath: a name after a dot, an index of a list, or a name in quotes."""
_VALUES = ("stringValue", "numberValue", "boolValue", "structValue", "listValue", "value")
"""The fields that hold a partial argument's value; without any of them it is null."""


def folded(answers: list[Json], problems: list[str]) -> Json:
    """The answers of a stream as one: the newest value of each field, and all parts of each candidate."""
    whole: Json = {}
    pieces: dict[int, list[Json]] = {}
    for answer in answers:
        whole |= {key: value for key, value in answer.items() if key != "candidates" and value}
        for at, piece in enumerate(objs(answer.get("candidates"))):
            index = count(piece.get("index"))
            pieces.setdefault(at if index is None else index, []).append(piece)
    candidates = [_candidate(index, pieces[index]) for index in sorted(pieces)]
    blocked = obj(whole.get("promptFeedback")).get("blockReason")
    if not ("error" in whole or blocked or (candidates and all(map(_finished, candidates)))):
        problems.append("response: the stream ended early")
    return whole | ({"candidates": candidates} if candidates else {})


def _finished(candidate: Json) -> bool:
    return bool(candidate.get("finishReason"))


def _candidate(index: int, pieces: list[Json]) -> Json:
    whole: Json = {}
    parts: list[list[Json]] = []
    calls = FunctionCallBuilder()
    for piece in pieces:
        whole |= {key: value for key, value in piece.items() if value}
        for item in items(obj(piece.get("content")).get("parts")):
            part = obj(item)
            given = field(part, "functionCall")
            call = calls.add(obj(given)) if isinstance(given, dict) else None
            if call is not None:
                parts += [[{**_without_call(part), "functionCall": call}]] if call is calls.begun else []
            elif parts and _goes_on(obj(parts[-1][-1]), part):
                parts[-1].append(part)
            else:
                parts.append([part or item])
    return whole | {"index": index, "content": {"role": "model", "parts": [_joined(group) for group in parts]}}


def _without_call(part: Json) -> Json:
    return {key: value for key, value in part.items() if key not in ("functionCall", "function_call")}


def _joined(group: list[Any]) -> Any:
    return group[0] if len(group) == 1 else group[0] | {"text": "".join(part["text"] for part in group)}


def _goes_on(one: Json, other: Json) -> bool:
    """True if two parts are pieces of one text."""
    alone = {*one, *other} <= {"text", "thought"} and one.get("thought") == other.get("thought")
    return alone and isinstance(one.get("text"), str) and isinstance(other.get("text"), str)


class FunctionCallBuilder:
    """The function calls of a candidate. An incomplete call says so (`willContinue`); the next ones without a name, or
    with the same name, continue it: their `partialArgs` set values of its arguments, each by its path."""

    __slots__ = ("_open", "_paths", "begun", "made")

    def __init__(self) -> None:
        self.made: list[Json] = []
        """All calls, as plain answers have them."""
        self.begun: Json | None = None
        """The newest call, until a piece continues it."""
        self._open: Json | None = None
        self._paths: set[str] = set()
        """The paths whose text the next piece continues."""

    def add(self, piece: Json) -> Json | None:
        """Return the call that a piece begins or continues; None where the piece is no call."""
        call, self.begun = self._open, None
        names = (None, "", call.get("name")) if call is not None else ()
        if call is None or piece.get("name") not in names or piece.get("id") not in (None, call.get("id")):
            if not piece:
                return None
            call = self.begun = {key: value for key, value in piece.items() if key not in _PIECE} | {"args": {}}
            self.made.append(call)
            self._paths.clear()
        given = piece.get("args")
        if given:
            both = isinstance(given, dict) and isinstance(call["args"], dict)
            call["args"] = call["args"] | given if both else given
        for one in objs(field(piece, "partialArgs")):
            self._set(call, one)
        self._open = call if field(piece, "willContinue") is True else None
        return call

    def _set(self, call: Json, one: Json) -> None:
        path = text(field(one, "jsonPath")) or ""
        keys = [int(at) if at else name or quoted for name, at, _, quoted in _STEP.findall(path)]
        if keys and isinstance(call["args"], dict):
            value = next((it for name in _VALUES if (it := field(one, name)) is not None), None)
            set_at(obj(call["args"]), keys[:DEEPEST], value, path in self._paths)
        if field(one, "willContinue") is True:
            self._paths.add(path)
        else:
            self._paths.discard(path)


def set_at(root: Json, keys: list[str | int], value: Any, more: bool) -> None:
    """Set the value at a path, making the objects and lists that are missing. `more`: a text is appended to the text at
    that path."""
    place: Any = root
    for key, below in zip(keys, [*keys[1:], None], strict=True):
        listed = isinstance(place, list)
        at: Any = min(key if isinstance(key, int) else len(arr(place)), len(arr(place))) if listed else str(key)
        if listed and at == len(arr(place)):
            arr(place).append(None)
        there: Any = arr(place)[at] if listed else obj(place).get(at)
        if below is None:
            place[at] = there + value if more and isinstance(there, str) and isinstance(value, str) else value
            return
        wanted: type = list if isinstance(below, int) else dict
        place[at] = there if isinstance(there, wanted) else wanted()
        place = place[at]


def items(value: Any) -> Iterable[Any]:
    """The items of a list; one object stands for a list of one, None for an empty one."""
    return arr(value) if isinstance(value, list) else [] if value is None else [value]


def field(wire: Json, name: str) -> Any:
    """A field by its camelCase or its snake_case name."""
    return wire[name] if name in wire else wire.get(snake(name))


@lru_cache
def snake(name: str) -> str:
    """A camelCase name in snake_case."""
    return _SNAKE.sub(lambda it: "_" + it[0].lower(), name)


def message_of(wire: Json, role: str) -> Message:
    """A content as a message."""
    role = text(wire.get("role")) or role
    parts = [part for item in items(wire.get("parts")) for part in parts_of(item)]
    return Message(role=ROLES.get(role, role), parts=parts)


def parts_of(item: Any) -> list[Part]:
    """A wire part as message parts; none for an empty text."""
    wire = obj(item)
    call, result = obj(field(wire, "functionCall")), obj(field(wire, "functionResponse"))
    said = text(wire.get("text"))
    if call:
        given: Any = (FunctionCallBuilder().add(call) or call).get("args") or {}
        arguments = given if isinstance(given, str) else dumps(given)
        return [Part(type="tool_call", id=text(call.get("id")), name=text(call.get("name")), arguments=arguments)]
    if result:
        return [result_part(result.get("id"), dumps(result.get("response")), name=result.get("name"))]
    if any(field(wire, name) is not None for name in MEDIA):
        return [Part(type="media", data=item)]
    if wire.get("thought") is True:
        return [Part(type="reasoning", text=said)]
    if said is None:
        return [Part(type="unknown", data=item)]
    return [Part(type="text", text=said)] if said else []


def tools_of(wire: Json) -> list[Tool]:
    """Functions by name, Google's own tools by their field."""
    declared = objs(items(field(wire, "functionDeclarations")))
    own = [name for name in wire if name not in ("functionDeclarations", "function_declarations")]
    return [
        *[
            tool_of(it, "tool", it["parameters"] if "parameters" in it else field(it, "parametersJsonSchema"))
            for it in declared
        ],
        *[Tool(name=name) for name in own],
    ]


PREFIX: Final = r"(?:/v1(?:alpha|beta|beta1)?)?(?:/projects/[^/]+/locations/[^/]+)?"
"""Matches what stands before an operation's path: the version, and a Vertex project."""
_ROUTE = re.compile(
    PREFIX + r"(?:/publishers/[^/]+)?"
    r"/(models|tunedModels|endpoints)/([^/:]+):([A-Za-z]+)"
)


class _Part(msgspec.Struct):
    text: msgspec.Raw = msgspec.Raw()


class _Content(msgspec.Struct):
    parts: list[_Part] | _Part | None = None


class _Tool(msgspec.Struct):
    functionDeclarations: list[ToolDescription] | ToolDescription | None = None
    function_declarations: list[ToolDescription] | ToolDescription | None = None


class GeminiSystemFields(msgspec.Struct):
    """The fields of a request whose texts may be prompts: the system instruction and the tools' descriptions."""

    systemInstruction: _Content | None = None
    system_instruction: _Content | None = None
    tools: list[_Tool] | _Tool | None = None
    generateContentRequest: GeminiSystemFields | None = None


class _GeminiConversationFields(RequestFields):
    systemInstruction: msgspec.Raw = msgspec.Raw()
    system_instruction: msgspec.Raw = msgspec.Raw()
    contents: list[msgspec.Raw] | dict[str, msgspec.Raw] | None = None


class _FunctionCallPart(msgspec.Struct, gc=False):
    functionCall: Any = None
    function_call: Any = None


class _CandidateContent(msgspec.Struct, gc=False):
    parts: list[_FunctionCallPart] | _FunctionCallPart | None = None


class _Candidate(msgspec.Struct, gc=False):
    index: Any = None
    finishReason: Any = None
    groundingMetadata: Any = None
    content: _CandidateContent | None = None


class _GeminiHead(ErrorFields, gc=False):
    """The fields of an answer that the summary needs."""

    responseId: Any = None
    modelVersion: Any = None
    usageMetadata: Any = None
    candidates: list[_Candidate] | None = None
    promptFeedback: Any = None


class _CandidatePieces:
    """The fields of one candidate of a stream that the summary needs."""

    __slots__ = ("calls", "finish", "grounded")

    def __init__(self) -> None:
        self.finish: Any = None
        self.grounded: Any = None
        self.calls = FunctionCallBuilder()


_request = msgspec.json.Decoder(GeminiSystemFields).decode
_reader = StreamReader(_GeminiHead)


class GeminiDialect(JsonPostDialect):
    name = "gemini"
    peeks = False
    family = GEMINI
    routes: ClassVar[frozenset[str]] = frozenset({"generateContent", "streamGenerateContent"})
    """The methods of a model in the path."""
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset(
        {"contents", "systemInstruction", "system_instruction", "tools", "model", "generationConfig"}
    )
    instructions: tuple[str, ...] = ("systemInstruction", "system_instruction")
    conversation_field = "contents"
    otel: GenAiNames | None = GenAiNames("generate_content", "gcp.gemini")
    cut = staticmethod(cutter(_GeminiConversationFields))
    model_field: ClassVar[str] = "modelVersion"
    id_field: ClassVar[str] = "responseId"

    def matches(self, method: str, path: str) -> bool:
        """True for a POST to one of these methods of a model."""
        found = _ROUTE.fullmatch(path)
        return method == "POST" and found is not None and found[3] in self.routes

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The model in the path; a tuned model with its collection, as in its resource name."""
        found = _ROUTE.fullmatch(path.partition("?")[0])
        if found is None:
            return None
        name = unquote(found[2])
        return label(name if found[1] == "models" else f"{found[1]}/{name}")

    def renamed(self, path: str, model: str) -> str:
        found = _ROUTE.fullmatch(path.partition("?")[0])
        if found is None:
            return path
        kind, _, name = model.rpartition("/")
        head, end = path[: found.start(1)], path[found.end(2) :]
        return f"{head}{kind or 'models'}/{quote(name, safe='@')}{end}"

    def asks_stream(self, request: bytes, path: str) -> bool:
        return ":streamGenerateContent" in path

    def system_pointers(self, request: bytes) -> TextPointers:
        """The parts of the system instruction."""
        return _instructions(self.requests(request)), None

    def description_pointers(self, request: bytes) -> Iterator[TextPointer]:
        """The descriptions of function declarations."""
        for asked, path in self.requests(request):
            for tool, at in _listed(asked.tools, (*path, "tools")):
                for key in ("functionDeclarations", "function_declarations"):
                    declared: list[ToolDescription] | ToolDescription | None = getattr(tool, key)
                    for function, place in _listed(declared, (*at, key)):
                        yield from tool_pointers(function, place)

    def requests(self, request: bytes) -> Iterator[tuple[GeminiSystemFields, Path]]:
        """The requests in a body, each with its path."""
        asked = _request(request)
        yield asked, ()
        if asked.generateContentRequest is not None:
            yield asked.generateContentRequest, ("generateContentRequest",)

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        if stream:
            answer, candidates = _streamed(chain.from_iterable(_reader.events(response)))
        else:
            plain = _is_plain(response)
            answer, candidates = _streamed([_reader.body(response)] if plain else _array(response), plain)
        failed: Failure | None = None
        if is_error(answer):
            failed = "stream_error" if stream or not _is_plain(response) else "error_body"
        elif stream:
            failed = None if self._ended(request, answer, candidates) else "ended_early"
        else:
            failed = body_failure(answer) or (None if _is_plain(response) or _array(response) else "ended_early")
        grounded = [{"groundingMetadata": candidate.grounded} for candidate in candidates]
        return Facts(
            model_served=label(answer.modelVersion),
            response_id=label(answer.responseId),
            finish=label(candidates[0].finish) if candidates else None,
            usage=self.usage({"usageMetadata": answer.usageMetadata, "candidates": grounded}),
            tool_calls=sum(len(candidate.calls.made) for candidate in candidates),
            choices=len(candidates),
            failed=failed,
        )

    def _ended(self, request: bytes, answer: _GeminiHead, candidates: list[_CandidatePieces]) -> bool:
        """True if the stream is complete. There is no last event: it is complete when every candidate has a finish
        reason, or when the prompt was blocked."""
        if obj(answer.promptFeedback).get("blockReason"):
            return True
        asked = obj(obj(loads(request)).get("generationConfig")) if b'"candidateCount"' in request else Json()
        wanted = count(asked.get("candidateCount")) or 1
        return len(candidates) >= wanted and all(candidate.finish for candidate in candidates)

    def answer(self, response: bytes, stream: bool, problems: list[str]) -> Json:
        """A plain answer, or a stream of either kind folded into one."""
        if stream:
            return self.assemble(response, problems)
        if _is_plain(response):
            return document(response, "response", problems)
        value = loads(response)
        if not isinstance(value, list):
            problems.append("response: a JSON array that ended early or cannot be read")
        return folded(objs(value), problems)

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """Fold events, each an answer with the next parts, into one answer."""
        return folded(list(chunks(body, problems)), problems)

    def instruction_item(self, said: bytes) -> bytes:
        """Instructions as an item: an object that is in none of the request's lists."""
        return b'{"systemInstruction":' + said + b"}"

    def item_fingerprint(self, item: bytes) -> bytes:
        """Fingerprint source of the message in an item."""
        wire = obj(loads(item))
        told = wire if "systemInstruction" in wire else {"contents": [wire]}
        return b"".join(map(fingerprint, GeminiDialect.messages(self, told, [])))

    def sampling(self, asked: Json) -> Json:
        """The generation's configuration, and all other fields of the request that are no content."""
        return obj(asked.get("generationConfig")) | super().sampling(asked)

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The system instruction, then each content of the request."""
        instruction = message_of(obj(field(asked, "systemInstruction")), "system")
        return with_instructions(
            instruction.parts, [message_of(obj(it), "user") for it in items(asked.get("contents"))]
        )

    def tools(self, asked: Json) -> list[Tool]:
        """Functions by name, Google's own tools by their field."""
        return [it for tool in items(asked.get("tools")) for it in tools_of(obj(tool))]

    def choices(self, answer: Json) -> list[Choice]:
        return choices_of(
            answer.get("candidates"), lambda it: message_of(obj(it.get("content")), "model"), "finishReason"
        )

    def usage(self, answer: Json) -> Usage | None:
        """Usage as reported, thoughts added to the output."""
        return gemini_usage(answer)

    def server_tools(self, asked: Json) -> list[str]:
        """All tools but functions, by their field."""
        return [key for tool in objs(items(asked.get("tools"))) for key in tool if "unction" not in key]

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The first candidate's content, and one user's content with all results."""
        content = obj(next(iter(objs(answer.get("candidates"))), Json()).get("content"))
        calls = [obj(part.get("functionCall") or part.get("function_call")) for part in objs(content.get("parts"))]
        calls = [call for call in calls if call]
        parts = [{"functionResponse": _response(call, it)} for call, it in zip(calls, results, strict=False)]
        turns: list[Json] = [{"role": "model"} | content, {"role": "user", "parts": parts}]
        return turns if len(calls) == len(results) else None


class GeminiCountDialect(GeminiDialect):
    """Token counting: the request has contents, or a whole request inside; the answer is one number."""

    name = "gemini_count_tokens"
    answers = generates = uses_tokens = False
    otel: GenAiNames | None = None
    routes: ClassVar[frozenset[str]] = frozenset({"countTokens"})

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """No more than the failure: nothing is generated."""
        return Facts(failed=None if stream else body_failure(_reader.body(response)))

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The messages that are counted."""
        return super().messages(obj(field(asked, "generateContentRequest")) or asked, problems)

    def usage(self, answer: Json) -> Usage | None:
        """None: no tokens are used."""
        return None


class GeminiEmbeddingsDialect(GeminiDialect):
    """Embeddings of one content or of several; the vectors are left alone."""

    name = "gemini_embeddings"
    generates = False
    otel: GenAiNames | None = None
    routes: ClassVar[frozenset[str]] = frozenset({"embedContent", "batchEmbedContents"})
    non_sampling_fields: ClassVar[frozenset[str]] = GeminiDialect.non_sampling_fields | {"content", "requests"}

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """Usage, where it is reported, and failure."""
        answer = _reader.body(response)
        return Facts(
            usage=gemini_usage({"usageMetadata": answer.usageMetadata}), failed=None if stream else body_failure(answer)
        )

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """One user's message per content."""
        items = [obj(it.get("content")) for it in [asked, *objs(asked.get("requests"))] if it.get("content")]
        return [message_of(item, "user") for item in items]

    def message_fingerprints(self, request: bytes) -> list[bytes]:
        """None: embedded texts are no conversation."""
        return []

    def items(self, request: bytes) -> ConversationItems:
        """None, for the same reason."""
        return ConversationItems(None, [])


def _response(call: Json, result: Part) -> Json:
    said = {"name": call.get("name"), "response": obj(loads(result.text or ""))}
    return said if call.get("id") is None else said | {"id": call["id"]}


def _instructions(requests: Iterable[tuple[GeminiSystemFields, Path]]) -> Iterator[TextPointer]:
    for asked, path in requests:
        for key in ("systemInstruction", "system_instruction"):
            content: _Content | None = getattr(asked, key)
            for part, at in _listed(content and content.parts, (*path, key, "parts")):
                yield from text_pointers(part.text, (*at, "text"), "system")


def _listed(items: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """Items and their paths; one object stands for a list of one."""
    if isinstance(items, list):
        yield from ((item, (*path, at)) for at, item in enumerate(arr(items)))
    elif items is not None:
        yield items, path


def _streamed(answers: Iterable[_GeminiHead], plain: bool = False) -> tuple[_GeminiHead, list[_CandidatePieces]]:
    """The answers of a stream as one, and its candidates. No function is called for a text. `plain`: there is one
    answer, all of whose candidates count."""
    whole, candidates = _GeminiHead(), dict[int, _CandidatePieces]()
    for answer in answers:
        whole.responseId, whole.modelVersion = (
            answer.responseId or whole.responseId,
            answer.modelVersion or whole.modelVersion,
        )
        whole.usageMetadata = answer.usageMetadata or whole.usageMetadata
        whole.promptFeedback = answer.promptFeedback or whole.promptFeedback
        whole.detail = answer.detail
        if answer.error or answer.type == "error" or answer.object == "error":
            whole.error = answer.error or True
        for at, piece in enumerate(answer.candidates or ()):
            index: int = piece.index if type(piece.index) is int and piece.index >= 0 and not plain else at
            candidate = candidates.get(index)
            if candidate is None:
                candidate = candidates[index] = _CandidatePieces()
            candidate.finish = piece.finishReason or candidate.finish
            candidate.grounded = piece.groundingMetadata or candidate.grounded
            parts = None if piece.content is None else piece.content.parts
            for part in parts if isinstance(parts, list) else () if parts is None else (parts,):
                call = part.function_call if part.functionCall is None else part.functionCall
                if isinstance(call, dict):
                    candidate.calls.add(obj(call))
    return whole, [candidates[index] for index in (candidates if plain else sorted(candidates))]


def _array(response: bytes) -> list[_GeminiHead]:
    """The answers of a stream that is one JSON array; empty where the array ended early."""
    value = loads(response)
    return [as_struct(_GeminiHead, it) for it in objs(value)] if isinstance(value, list) else []


def _is_plain(response: bytes) -> bool:
    return response.lstrip()[:1] != b"["
