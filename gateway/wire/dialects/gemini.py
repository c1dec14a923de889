"""Google's Gemini: `POST /v1beta/models/{model}:generateContent` and its like, also below a Vertex project.

The model stands in the path. A stream is a list of answers, each with the next parts: as events with `?alt=sse`, else
as one JSON array, which HTTP does not mark as a stream. Fields are camelCase or snake_case, since protobuf's JSON reads
either, and one object may stand for a list. Thoughts are parts marked as such; they are not in `candidatesTokenCount`.
Function calls have an id only in newer versions. Tool results stay in a user's message, as they are sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar
from urllib.parse import unquote

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool
from penstock.gateway.wire.dialects.base import Facts, GenAiNames
from penstock.gateway.wire.dialects.failures import ErrorFields, Failure, body_failure, is_error
from penstock.gateway.wire.dialects.family import GEMINI, VERTEX, Family
from penstock.gateway.wire.dialects.gemini_wire import FunctionCallBuilder, field, folded, items, message_of, tools_of
from penstock.gateway.wire.dialects.items import ConversationItems, cutter
from penstock.gateway.wire.dialects.json_post import JsonPostDialect, choices_of
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    chunks,
    count,
    document,
    label,
    loads,
    obj,
    objs,
)
from penstock.gateway.wire.dialects.parts import fingerprint, with_instructions
from penstock.gateway.wire.dialects.stream_events import StreamReader, as_struct
from penstock.gateway.wire.dialects.text_spans import (
    Path,
    TextPointer,
    TextPointers,
    ToolDescription,
    text_pointers,
    tool_pointers,
)
from penstock.gateway.wire.dialects.usage import gemini_usage

_ROUTE = re.compile(
    r"(?:/v1(?:alpha|beta|beta1)?)?(?:/projects/[^/]+/locations/[^/]+)?(?:/publishers/[^/]+)?"
    r"/(models|tunedModels|endpoints)/([^/:]+):([A-Za-z]+)"
)


class _Part(msgspec.Struct):
    text: msgspec.Raw = msgspec.Raw()


class _Content(msgspec.Struct):
    parts: list[_Part] | _Part | None = None


class _Tool(msgspec.Struct):
    functionDeclarations: list[ToolDescription] | ToolDescription | None = None
    function_declarations: list[ToolDescription] | ToolDescription | None = None


class _GeminiSystemFields(msgspec.Struct):
    """The fields of a request whose texts may be prompts: the system instruction and the tools' descriptions."""

    systemInstruction: _Content | None = None
    system_instruction: _Content | None = None
    tools: list[_Tool] | _Tool | None = None
    generateContentRequest: _GeminiSystemFields | None = None


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


_request = msgspec.json.Decoder(_GeminiSystemFields).decode
_reader = StreamReader(_GeminiHead)


class GeminiDialect(JsonPostDialect):
    name = "gemini"
    family = GEMINI
    families: tuple[Family, ...] = (VERTEX,)
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

    def peek(self, request: bytes) -> RequestFields | None:
        """None: the model stands in the path."""
        return None

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The model in the path; a tuned model with its collection, as in its resource name."""
        found = _ROUTE.fullmatch(path.partition("?")[0])
        if found is None:
            return None
        name = unquote(found[2])
        return label(name if found[1] == "models" else f"{found[1]}/{name}")

    def asks_stream(self, request: bytes, path: str) -> bool:
        return ":streamGenerateContent" in path

    def system_pointers(self, request: bytes) -> TextPointers:
        """The parts of the system instruction."""
        return _instructions(request), None

    def description_pointers(self, request: bytes) -> Iterator[TextPointer]:
        """The descriptions of function declarations."""
        for asked, path in _requests(request):
            for tool, at in _listed(asked.tools, (*path, "tools")):
                for key in ("functionDeclarations", "function_declarations"):
                    declared: list[ToolDescription] | ToolDescription | None = getattr(tool, key)
                    for function, place in _listed(declared, (*at, key)):
                        yield from tool_pointers(function, place)

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


def _instructions(request: bytes) -> Iterator[TextPointer]:
    for asked, path in _requests(request):
        for key in ("systemInstruction", "system_instruction"):
            content: _Content | None = getattr(asked, key)
            for part, at in _listed(content and content.parts, (*path, key, "parts")):
                yield from text_pointers(part.text, (*at, "text"), "system")


def _requests(request: bytes) -> Iterator[tuple[_GeminiSystemFields, Path]]:
    asked = _request(request)
    yield asked, ()
    if asked.generateContentRequest is not None:
        yield asked.generateContentRequest, ("generateContentRequest",)


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
