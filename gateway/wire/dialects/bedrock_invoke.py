"""Bedrock's InvokeModel: `POST /model/{modelId}/invoke`, `.../invoke-with-response-stream`, `.../count-tokens`.

Bodies are in the format of the model's vendor. The body tells which (an ARN names no vendor): Messages of Anthropic,
Converse of Amazon's Nova, a prompt of Meta's Llama and others, else chat completions. A stream comes as AWS's binary
frames, each with one event of that format in base64; the last one also has the counts of tokens. `InvokeDialect` takes
the events out of their frames and lets the format's own dialect read them. Where the format is unknown, it reads only
counts and errors.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode
from binascii import Error, crc32
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import unquote

import msgspec
import orjson

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Passage, Turn
from penstock.gateway.wire.dialects.base import STRING, Dialect, Facts, GenAiNames, JsonPostDialect, routes
from penstock.gateway.wire.dialects.bedrock import LEAST, ConverseDialect, begins_frame, exception_error, frames
from penstock.gateway.wire.dialects.chat import ChatDialect, prompts
from penstock.gateway.wire.dialects.family import ANTHROPIC, BEDROCK, Family
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    dumps,
    earliest,
    error_message,
    joined,
    label,
    lenient,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.messages import MessagesDialect
from penstock.gateway.wire.dialects.parts import body_passages, turn_passages
from penstock.gateway.wire.dialects.request_body import ConversationItems, RequestTexts, TextLocation
from penstock.gateway.wire.dialects.sse import chunks
from penstock.gateway.wire.dialects.tokens import converse_usage, quantity, with_tier

_ROUTE: Final = re.compile(r"/model/(.+)/(invoke|invoke-with-response-stream|count-tokens)")
_METRICS: Final = "amazon-bedrock-invocationMetrics"
_OURS: Final = "amazon-bedrock-"
"""The beginning of names that Bedrock itself adds to an answer: counts of tokens, and what a guardrail did."""
_MARK: Final = b'"amazon-bedrock-'
_REFUSAL: Final = frozenset(
    {"message", "Message", "__type", "code", "originalMessage", "originalStatusCode", "resourceName"}
)
"""The names in the body of an error."""


# -- prompts: one text in, one text out --------------------------------------------------------------------------------


class PromptDialect(JsonPostDialect):
    """Text completions as Llama (`generation`), Mistral (`outputs`), DeepSeek (`choices`) and the first Claude
    (`completion`) write them."""

    name = "prompt"
    family = BEDROCK
    routes: ClassVar[frozenset[str]] = frozenset()
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"prompt", "images"})

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        problems: list[str] = []
        answer = self.answer(response, stream, problems)
        choices, failed = self.choices(answer), None
        if self.error(answer) is not None:
            failed = "stream_error" if stream else "error_body"
        elif stream and _EARLY in problems:
            failed = "ended_early"
        finish = label(choices[0].finish) if choices else None
        return Facts(finish=finish, usage=self.usage(answer), choices=len(choices), failed=failed)

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """The texts of all events as one answer, with the counts and the stop reason that came last."""
        answer, texts = Json(), list[list[Json]]()
        for event in chunks(body, problems):
            answer |= {key: value for key, value in event.items() if value is not None}
            for at, piece in enumerate(_texts(event)):
                texts += [[]] if at == len(texts) else []
                texts[at].append(piece)
        folded = [{"text": joined(it, "text"), "stop_reason": earliest(it[::-1], "stop_reason")} for it in texts]
        if not ("error" in answer or any(it["stop_reason"] for it in folded)):
            problems.append(_EARLY)
        answer = {key: value for key, value in answer.items() if key not in _TEXTS}
        return answer | {"outputs": folded} if folded else answer

    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """One user's message: the prompt."""
        return [Message(role="user", parts=[part]) for part in prompts(asked.get("prompt"))]

    def choices(self, answer: Json) -> list[Choice]:
        return [
            Choice(
                index=at,
                message=Message(role="assistant", parts=[Part(type="text", text=said)] if said else []),
                finish=text(one.get("stop_reason")) or text(one.get("finish_reason")),
            )
            for at, one in enumerate(_texts(answer))
            for said in (text(one.get("text")),)
        ]

    def usage(self, answer: Json) -> Usage | None:
        """Usage as Llama reports it; other models do not."""
        asked, said = quantity(answer.get("prompt_token_count")), quantity(answer.get("generation_token_count"))
        return None if asked is None and said is None else Usage(input_tokens=asked, output_tokens=said)


class TextCompletionsDialect(PromptDialect):
    """Anthropic's first API, `POST /v1/complete`, which its SDK had until 1.0. Nobody counts its tokens."""

    name = "text_completions"
    family = ANTHROPIC
    routes: ClassVar[frozenset[str]] = routes("/complete")
    non_sampling_fields: ClassVar[frozenset[str]] = frozenset({"prompt", "model", "stream"})
    otel: GenAiNames | None = GenAiNames("text_completion", "anthropic")

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        answer = self.answer(response, stream, [])
        return replace(
            super().facts(request, response, stream, asked),
            model=self.model(request, asked=asked),
            model_served=label(answer.get("model")),
            response_id=label(answer.get("id")),
        )

    def answer_text_pattern(self, stream: bool) -> re.Pattern[bytes]:
        return _COMPLETION


_COMPLETION: Final = re.compile(rb'"completion' + STRING)
_EARLY: Final = "response: the stream ended early"
_TEXTS: Final = ("generation", "completion", "outputs", "choices")


def _texts(answer: Json) -> list[Json]:
    """The generated texts of an answer, or of an event of it: objects with `text` and `stop_reason`."""
    for name in ("generation", "completion"):
        if isinstance(answer.get(name), str):
            return [{"text": answer[name], "stop_reason": answer.get("stop_reason")}]
    return objs(answer.get("outputs")) or objs(answer.get("choices"))


# -- the format of a body ----------------------------------------------------------------------------------------------

MESSAGES: Final[JsonPostDialect] = MessagesDialect()
CONVERSE: Final[JsonPostDialect] = ConverseDialect()
CHAT: Final[JsonPostDialect] = ChatDialect()
PROMPT: Final[JsonPostDialect] = PromptDialect()


class _RequestShape(msgspec.Struct):
    """The members of a request that tell its format."""

    anthropic_version: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    schemaVersion: msgspec.Raw = msgspec.Raw()
    inferenceConfig: msgspec.Raw = msgspec.Raw()
    toolConfig: msgspec.Raw = msgspec.Raw()


class _MessageContent(msgspec.Struct):
    content: Any = None


_shape = lenient(_RequestShape)
_content = lenient(_MessageContent)
_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def request_format(request: bytes) -> JsonPostDialect | None:
    """The format of a request; None if it is not known."""
    asked = _shape(request)
    if _begin(asked.messages) == b"[":
        if asked.anthropic_version:
            return MESSAGES
        nova = asked.schemaVersion or asked.inferenceConfig or asked.toolConfig
        return CONVERSE if nova or _has_converse_blocks(_raw_items(asked.messages)[:1]) else CHAT
    return PROMPT if _begin(asked.prompt) == b'"' else None


def _begin(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _has_converse_blocks(items: Iterable[msgspec.Raw | bytes]) -> bool:
    """True if messages have content blocks without a type."""
    return any("type" not in block for item in items for block in objs(_content(bytes(item)).content))


def _answer_format(answer: Json) -> JsonPostDialect:
    """The format of a plain answer, or of the first event of a stream."""
    if "generation" in answer or "outputs" in answer or "completion" in answer:
        return PROMPT
    if "output" in answer or any(name in answer for name in _CONVERSE_EVENTS):
        return CONVERSE
    return CHAT if "choices" in answer else MESSAGES


_CONVERSE_EVENTS: Final = (
    "messageStart", "contentBlockStart", "contentBlockDelta", "contentBlockStop", "messageStop", "metadata",
)  # fmt: skip


def _item_format(item: bytes) -> JsonPostDialect:
    """The format of a message in a request."""
    wire = obj(loads(item))
    if wire.get("role") in ("tool", "function") or "tool_calls" in wire:
        return CHAT
    return CONVERSE if _has_converse_blocks([item]) else MESSAGES


# -- the envelope of an answer -----------------------------------------------------------------------------------------


class _Chunk(msgspec.Struct):
    """The payload of a frame: an event."""

    event: bytes | None = msgspec.field(name="bytes", default=None)


class BareAnswer(NamedTuple):
    """An answer without Bedrock's envelope."""

    body: bytes
    """The plain answer, or the stream, as the vendor's own API would send it."""
    metrics: Json
    """The counts that Bedrock has added."""


_chunk = lenient(_Chunk)


def bare_answer(
    of: JsonPostDialect | None, response: bytes, stream: bool, problems: list[str] | None = None
) -> BareAnswer:
    """Take an answer of a format out of its envelope; an error gets the shape that all formats read."""
    if stream:
        return _bare_stream(of, response, [] if problems is None else problems)
    if _MARK in response and (value := obj(loads(response))):
        return BareAnswer(_without_additions(value), obj(value.get(_METRICS)))
    if b'essage"' in response[:_LONGEST_REFUSAL] and of is not CONVERSE:
        value = obj(loads(response))
        said = text(value.get("message")) or text(value.get("Message"))
        if said is not None and value.keys() <= _REFUSAL:
            return BareAnswer(orjson.dumps({"error": {"message": said}}), {})
    return BareAnswer(response, {})


_LONGEST_REFUSAL: Final = 512


def _bare_stream(of: JsonPostDialect | None, body: bytes, problems: list[str]) -> BareAnswer:
    """The events of a stream as server-sent ones, or for Converse as frames."""
    pieces, metrics, write = list[bytes](), Json(), _converse_frame if of is CONVERSE else _server_sent_event
    for frame in frames(body, problems):
        if frame.kind != "event":
            error = {"type": "error", "error": exception_error(frame, obj(loads(frame.payload)))}
            pieces.append(_frame(frame.headers, frame.payload) if of is CONVERSE else write(orjson.dumps(error)))
            continue
        event = _chunk(frame.payload).event
        if event is None:
            problems.append(f"response: a frame ({frame.name or 'without a name'}) holds no event")
            continue
        if _MARK in event:
            value = obj(loads(event))
            metrics |= obj(value.get(_METRICS))
            event = _without_additions(value)
        if event != b"{}":
            pieces.append(write(event))
    return BareAnswer(b"".join(pieces), metrics)


def _without_additions(value: Json) -> bytes:
    return dumps({key: it for key, it in value.items() if not key.startswith(_OURS)}).encode()


def _server_sent_event(event: bytes) -> bytes:
    return b"data: %b\n\n" % event.replace(b"\n", b" ").replace(b"\r", b" ")


def _converse_frame(event: bytes) -> bytes:
    """An event (`{"messageStart": {...}}`) as a frame of Converse."""
    name, value = next(iter(obj(loads(event)).items()), ("", None))
    return _frame({":event-type": name}, dumps(value).encode())


def _frame(headers: Mapping[str, str], payload: bytes) -> bytes:
    block = b""
    for name, value in headers.items():
        key, said = name.encode(), value.encode()
        block += b"%c%b\x07%b%b" % (len(key), key, struct.pack(">H", len(said)), said)
    start = struct.pack(">II", LEAST + len(block) + len(payload), len(block))
    whole = start + struct.pack(">I", crc32(start)) + block + payload
    return whole + struct.pack(">I", crc32(whole))


def _completed(usage: Usage | None, metrics: Mapping[str, Any]) -> Usage | None:
    """Usage with the counts that only Bedrock tells. `metrics`: counts by their names in `_METRICS`."""
    if usage is not None and usage.input_tokens is not None and usage.output_tokens is not None:
        return usage
    names = {"inputTokens": metrics.get("inputTokenCount"), "outputTokens": metrics.get("outputTokenCount")}
    told = converse_usage({"usage": {**metrics, **names}}) if metrics else None
    if usage is None or told is None or (told.input_tokens is None and told.output_tokens is None):
        return usage if told is None or told == Usage() else told
    return usage.model_copy(
        update={
            "input_tokens": told.input_tokens if usage.input_tokens is None else usage.input_tokens,
            "output_tokens": told.output_tokens if usage.output_tokens is None else usage.output_tokens,
        }
    )


# -- the dialects ------------------------------------------------------------------------------------------------------


class InvokeDialect(Dialect):
    """A call of a model in its vendor's format."""

    name = "invoke"
    family: Family = BEDROCK
    answers = generates = uses_tokens = nested = uses_headers = True
    peeks = False
    conversation_field = "messages"
    instructions: tuple[str, ...] = ("system",)
    streaming_content_type = ConverseDialect.streaming_content_type
    otel: GenAiNames | None = GenAiNames("chat", "aws.bedrock")
    operations: ClassVar[frozenset[str]] = frozenset({"invoke", "invoke-with-response-stream"})

    def matches(self, method: str, path: str) -> bool:
        """True for a POST to one of these operations of a model."""
        found = _ROUTE.fullmatch(path)
        return method == "POST" and found is not None and found[2] in self.operations

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The model id, the inference profile or the ARN in the path, whatever the body says."""
        found = _ROUTE.fullmatch(path.partition("?")[0])
        return None if found is None else label(unquote(found[1]))

    def asks_stream(self, request: bytes, path: str) -> bool:
        return path.partition("?")[0].endswith("/invoke-with-response-stream")

    def begins_stream(self, body: bytes) -> bool | None:
        return begins_frame(body)

    def unwrap(self, request: bytes, response: bytes, stream: bool) -> tuple[Dialect, bytes] | None:
        """The vendor's format, and the answer out of its envelope; None if the format is not known."""
        of = request_format(request)
        return None if of is None else (of, bare_answer(of, response, stream).body)

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        of = request_format(request)
        bare = bare_answer(of, response, stream)
        if of is not None:
            found = of.facts(request, bare.body, stream)
        elif error_message(_error_of(bare.body, stream)) is not None:
            found = Facts(failed="stream_error" if stream else "error_body")
        else:
            found = Facts(failed="ended_early" if stream and not bare.metrics else None)
        found.model, found.usage = None, _completed(found.usage, bare.metrics)
        return found

    def with_headers(self, facts: Facts, headers: Iterable[tuple[bytes, bytes]]) -> Facts:
        """The facts with the counts of tokens and the service tier that the answer's headers tell."""
        begin = b"x-amzn-bedrock-"
        said = {low[15:]: value.decode("latin-1") for name, value in headers if (low := name.lower()).startswith(begin)}
        counts = {name: said[key] for key, name in _COUNT_HEADERS.items() if key in said}
        facts.usage = with_tier(_completed(facts.usage, counts), said.get(b"service-tier"))
        return facts

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        problems: list[str] = []
        of = request_format(request)
        bare = bare_answer(of, response, stream, problems)
        if of is None:
            turn = Turn(dialect=self.name, stream=stream, error=error_message(_error_of(bare.body, stream)))
            problems.append("request: a body of no known format, of which only counts and errors are read")
        else:
            turn = of.read(request, bare.body, stream)
            turn.dialect, turn.model = self.name, None
        turn.usage, turn.problems = _completed(turn.usage, bare.metrics), problems + turn.problems
        return turn

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """The passages that the format reads; of an unknown one both bodies, as far as they are text."""
        of = request_format(request)
        bare = bare_answer(of, response, stream)
        if of is None:
            return [*body_passages(request, False), *body_passages(bare.body, True)]
        return of.passages(request, bare.body, stream, whole)

    def system_texts(self, request: bytes) -> RequestTexts:
        of = request_format(request)
        return super().system_texts(request) if of is None else of.system_texts(request)

    def tool_texts(self, request: bytes) -> list[TextLocation]:
        of = request_format(request)
        return [] if of is None else of.tool_texts(request)

    def is_complete(self, response: bytes) -> bool:
        """True after the chunk with Bedrock's own counts, which ends a stream of any format, or after an exception."""
        last = next(iter(list(frames(response, []))[-1:]), None)
        if last is None or last.kind != "event":
            return last is not None
        return _METRICS.encode() in (_chunk(last.payload).event or b"")

    def message_fingerprints(self, request: bytes) -> list[bytes]:
        of = request_format(request)
        return [] if of is None else of.message_fingerprints(request)

    def reply_fingerprint(self, response: bytes, stream: bool) -> bytes:
        of, body = _answer(response, stream)
        return of.reply_fingerprint(body, stream)

    def items(self, request: bytes) -> ConversationItems:
        of = request_format(request)
        return ConversationItems(None, []) if of is None else of.items(request)

    def item_fingerprint(self, item: bytes) -> bytes:
        return _item_format(item).item_fingerprint(item)

    def reply_fingerprints(self, response: bytes, stream: bool) -> list[bytes]:
        said = self.reply_fingerprint(response, stream)
        return [said] if said else []

    def server_tools(self, asked: Json) -> list[str]:
        of = request_format(orjson.dumps(asked))
        return [] if of is None else of.server_tools(asked)

    def continuation(self, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json] | None:
        of, body = _answer(response, stream)
        return of.continuation(body, stream, results)


_COUNT_HEADERS: Final = {
    b"input-token-count": "inputTokenCount",
    b"output-token-count": "outputTokenCount",
    b"cache-read-input-token-count": "cacheReadInputTokenCount",
    b"cache-write-input-token-count": "cacheWriteInputTokenCount",
}
"""The ends of headers with counts, and the names of these counts in `_METRICS`."""


class BedrockCountDialect(InvokeDialect):
    """Token counting: a request of InvokeModel, in base64, or of Converse inside; the answer is one number."""

    name = "bedrock_count_tokens"
    answers = generates = uses_tokens = nested = uses_headers = False
    conversation_field = ""
    otel: GenAiNames | None = None
    operations: ClassVar[frozenset[str]] = frozenset({"count-tokens"})

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """No more than the failure: nothing is generated."""
        failed = error_message(_error_of(bare_answer(None, response, False).body, False)) is not None
        return Facts(failed="error_body" if failed else None)

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The request that is counted."""
        problems: list[str] = []
        of, counted = _counted(request)
        asked = obj(loads(counted))
        turn = Turn(dialect=self.name, stream=stream)
        if of is None:
            problems.append("request: a body of no known format, which is not read")
        else:
            turn.messages, turn.tools = of.messages(asked, problems), of.tools(asked)
        turn.error = error_message(_error_of(bare_answer(None, response, False).body, False))
        turn.problems = problems
        return turn

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        return turn_passages(self.read(request, response, stream))

    def system_texts(self, request: bytes) -> RequestTexts:
        """None: those in base64 could not be replaced in their place."""
        return RequestTexts([])

    def tool_texts(self, request: bytes) -> list[TextLocation]:
        return []

    def items(self, request: bytes) -> ConversationItems:
        """None: a count is no turn of a conversation."""
        return ConversationItems(None, [])

    def message_fingerprints(self, request: bytes) -> list[bytes]:
        return []


def _counted(request: bytes) -> tuple[JsonPostDialect | None, bytes]:
    """The format of the request that is counted, and its bytes."""
    asked = obj(obj(loads(request)).get("input"))
    if converse := obj(asked.get("converse")):
        return CONVERSE, dumps(converse).encode()
    try:
        body = b64decode(text(obj(asked.get("invokeModel")).get("body")) or "", validate=True)
    except (Error, ValueError):
        return None, b""
    return request_format(body), body


def _error_of(body: bytes, stream: bool) -> Json:
    """The error in an answer out of its envelope; empty if there is none."""
    if not stream:
        return obj(loads(body))
    return next((event for event in chunks(body, []) if "error" in event), Json())


def _answer(response: bytes, stream: bool) -> tuple[JsonPostDialect, bytes]:
    """The format of an answer, and the answer out of its envelope."""
    if not stream:
        of = _answer_format(obj(loads(response)))
        return of, bare_answer(of, response, stream).body
    first = next((one for frame in frames(response, []) if (one := _chunk(frame.payload).event) is not None), b"")
    of = _answer_format(obj(loads(first)))
    return of, bare_answer(of, response, stream).body
