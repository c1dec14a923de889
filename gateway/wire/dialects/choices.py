"""The frame around the choices of chat and text completions, plain and streamed.

A stream is folded twice by the same rules: whole, for a Turn (`ChoicesDialect.assemble`), and for the summary from the
few fields of each event that it needs (`_streamed`). A field in several events is taken from the newest that has it, a
choice's finish reason from the first. Some servers send `message` in place of `delta`; each of its fields counts where
no delta has it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Final

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.failures import ErrorFields, Failure, body_failure, is_done, is_error
from penstock.gateway.wire.dialects.family import OPENAI
from penstock.gateway.wire.dialects.json_post import JsonPostDialect, choices_of
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    chunks,
    count,
    error_message,
    label,
    obj,
    objs,
    peek,
)
from penstock.gateway.wire.dialects.sse import last_data
from penstock.gateway.wire.dialects.stream_events import StreamReader
from penstock.gateway.wire.dialects.tool_calls import call_list, folded_calls
from penstock.gateway.wire.dialects.usage import decoded_fields, latest_usage_fields, openai_usage, usage_fields

FAILED: Final = "error"
"""The finish reason by which model routers say that the model failed in the middle of its answer."""
NEWEST: Final = ("id", "model", "error")
"""Fields of the answer that every chunk repeats."""


class _MessageHead(msgspec.Struct, gc=False):
    """The fields of a message or a delta that the summary needs: text is skipped."""

    tool_calls: Any = None
    function_call: Any = None


class _ChoiceHead(msgspec.Struct, gc=False):
    """The fields of a choice that the summary needs: log-probabilities and token ids are skipped."""

    index: Any = None
    finish_reason: Any = None
    error: Any = None
    usage: Any = None
    message: _MessageHead | None = None
    delta: _MessageHead | None = None


class _CompletionHead(ErrorFields, gc=False):
    """The fields of a plain body, or of a chunk, that the summary needs."""

    id: Any = None
    model: Any = None
    usage: Any = None
    x_groq: Any = None
    service_tier: Any = None
    choices: list[_ChoiceHead] | None = None


class _ChoicePieces:
    """The fields of one choice of a stream that the summary needs."""

    __slots__ = ("deltas", "error", "finish_reason", "messages")

    def __init__(self) -> None:
        self.finish_reason: Any = None
        self.error: Any = None
        self.deltas: list[_MessageHead] = []
        """The deltas that have tool calls."""
        self.messages: list[_MessageHead] = []


_reader = StreamReader(_CompletionHead)
_function_call = attrgetter("function_call")


class ChoicesDialect(JsonPostDialect):
    """A dialect whose answers are choices in OpenAI's frame."""

    family = OPENAI
    end_marker = b"[DONE]"
    calls_tools: ClassVar[bool] = False
    """True if a choice may hold tool calls."""

    def is_complete(self, response: bytes) -> bool:
        return last_data(response, 1) == [b"[DONE]"]

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        asked = asked or peek(request)
        answer, pieces = _streamed(response) if stream else (_reader.body(response), list[_ChoicePieces]())
        ends: Sequence[_ChoicePieces | _ChoiceHead] = pieces if stream else answer.choices or ()
        failed = False
        for end in ends:
            failed = failed or bool(end.error) or end.finish_reason == FAILED
        if not stream:
            why: Failure | None = "error_body" if failed else body_failure(answer)
        elif failed or is_error(answer):
            why = "stream_error"
        else:
            enough = len(ends) >= (count(asked.n) or 1) and all(end.finish_reason for end in ends)
            why = None if enough or is_done(response) else "ended_early"
        return Facts(
            model=label(asked.model),
            model_served=label(answer.model),
            response_id=label(answer.id),
            finish=label(ends[0].finish_reason) if ends else None,
            usage=self.usage(decoded_fields(answer)),
            tool_calls=sum(map(_called, ends)) if self.calls_tools else 0,
            choices=len(ends),
            failed=why,
        )

    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """Put chunks together as a plain answer: each repeats the answer's own fields and brings pieces of its
        choices."""
        answer: Json = {}
        pieces: dict[int, list[Json]] = {}
        for chunk in chunks(body, problems):
            answer |= {key: value for key in NEWEST if (value := chunk.get(key))} | usage_fields(chunk)
            for piece in objs(chunk.get("choices")):
                pieces.setdefault(count(piece.get("index")) or 0, []).append(piece)
        answer["choices"] = [self.fold(index, pieces[index]) for index in sorted(pieces)]
        if not (_complete(answer["choices"]) or self.error(answer) or is_done(body)):
            problems.append("response: the stream ended early")
        return answer

    @abstractmethod
    def fold(self, index: int, pieces: list[Json]) -> Json:
        """Put the pieces of one choice together as a choice of a plain answer."""

    @abstractmethod
    def message(self, choice: Json) -> Message: ...

    def choices(self, answer: Json) -> list[Choice]:
        """The choices, ordered by index."""
        return choices_of(answer.get("choices"), self.message, "finish_reason")

    def usage(self, answer: Json) -> Usage | None:
        return openai_usage(answer)

    def error(self, answer: Json) -> str | None:
        """The error of the answer or of a choice, or that a finish reason says that there was one; None if there is
        none."""
        choices = objs(answer.get("choices"))
        told = (error_message({"error": choice.get("error")}) for choice in choices)
        found = error_message(answer) or next(filter(None, told), None)
        ends = any(choice.get("finish_reason") == FAILED for choice in choices)
        return found or ("the answer ended with finish_reason 'error'" if ends else None)


def _streamed(response: bytes) -> tuple[_CompletionHead, list[_ChoicePieces]]:
    """The chunks of a stream as one, and its choices. No function is called for a chunk."""
    choices = {0: _ChoicePieces()}
    id = model = tier = error = None
    counted: list[_CompletionHead] = []
    at, choice, met = 0, choices[0], set[int]()
    for chunk in chain.from_iterable(_reader.events(response)):
        if chunk.id:
            id = chunk.id
        if chunk.model:
            model = chunk.model
        if chunk.usage or chunk.x_groq or chunk.service_tier != tier:
            tier = chunk.service_tier
            counted.append(chunk)
        if chunk.error or chunk.type == "error" or chunk.object == "error":
            error = chunk.error or True
        for piece in chunk.choices or ():
            index: int = piece.index if type(piece.index) is int and piece.index > 0 else 0
            if index != at:
                at, choice = index, choices.setdefault(index, _ChoicePieces())
            met.add(index)
            if piece.finish_reason and not choice.finish_reason:
                choice.finish_reason = piece.finish_reason
            if piece.error and not choice.error:
                choice.error = piece.error
            if piece.usage:
                counted.append(chunk)
            if (said := piece.delta) is not None and (said.tool_calls or said.function_call):
                choice.deltas.append(said)
            if (said := piece.message) is not None and (said.tool_calls or said.function_call):
                choice.messages.append(said)
    told = latest_usage_fields(map(decoded_fields, counted))
    usage, tier = told.get("usage"), told.get("service_tier")
    whole = _CompletionHead(id=id, model=model, usage=usage, service_tier=tier, error=error)
    return whole, [choices[index] for index in sorted(met)]


def _called(choice: _ChoicePieces | _ChoiceHead) -> int:
    """The number of tool calls of a choice."""
    if isinstance(choice, _ChoiceHead):
        said = choice.message
        if said is None or not (said.tool_calls or said.function_call):
            return 0
        return len(call_list(said.tool_calls)) + bool(obj(said.function_call))
    calls = [it.tool_calls for it in choice.deltas if it.tool_calls] or [it.tool_calls for it in choice.messages]
    functions = [it for it in (*choice.deltas, *choice.messages) if it.function_call.__class__ is dict]
    return len(folded_calls(calls)) + any(map(_function_call, functions))


def _complete(choices: list[Json]) -> bool:
    return bool(choices) and all(choice["finish_reason"] for choice in choices)
