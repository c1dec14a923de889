"""The frame around the choices of chat and text completions, plain and streamed.

A stream is folded twice by the same rules: whole, for a Turn (`Framed.assemble`), and for the summary from the few
fields of each event that it needs (`_streamed`). A field in several events is taken from the newest that has it, a
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

from penstock.gateway.dialects.base import Facts
from penstock.gateway.dialects.ending import Failed, Said, body_failed, is_done, is_error
from penstock.gateway.dialects.family import OPENAI
from penstock.gateway.dialects.json_post import Post, choices_of
from penstock.gateway.dialects.loose_json import (
    Json,
    Peek,
    chunks,
    count,
    error_message,
    label,
    obj,
    objs,
    peek,
)
from penstock.gateway.dialects.sse import last
from penstock.gateway.dialects.stream_events import StreamReader
from penstock.gateway.dialects.tool_calls import folded_calls, listed
from penstock.gateway.dialects.usage import newest, openai_usage, placed, shown
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message

FAILED: Final = "error"
"""The finish reason by which model routers say that the model failed in the middle of its answer."""
NEWEST: Final = ("id", "model", "error")
"""Fields of the answer that every chunk repeats."""


class _Calls(msgspec.Struct, gc=False):
    """The fields of a message or a delta that the summary needs: text is skipped."""

    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct, gc=False):
    """The fields of a choice that the summary needs: log-probabilities and token ids are skipped."""

    index: Any = None
    finish_reason: Any = None
    error: Any = None
    usage: Any = None
    message: _Calls | None = None
    delta: _Calls | None = None


class _Answer(Said, gc=False):
    """The fields of a plain body, or of a chunk, that the summary needs."""

    id: Any = None
    model: Any = None
    usage: Any = None
    x_groq: Any = None
    service_tier: Any = None
    choices: list[_Choice] | None = None


class _Pieces:
    """The fields of one choice of a stream that the summary needs."""

    __slots__ = ("deltas", "error", "finish_reason", "messages")

    def __init__(self) -> None:
        self.finish_reason: Any = None
        self.error: Any = None
        self.deltas: list[_Calls] = []
        """The deltas that have tool calls."""
        self.messages: list[_Calls] = []


_reader = StreamReader(_Answer)
_function_call = attrgetter("function_call")


class Framed(Post):
    """A dialect whose answers are choices in OpenAI's frame."""

    family = OPENAI
    last_mark = b"[DONE]"
    calls_tools: ClassVar[bool] = False
    """True if a choice may hold tool calls."""

    def over(self, response: bytes) -> bool:
        return last(response, 1) == [b"[DONE]"]

    def facts(self, request: bytes, response: bytes, stream: bool, asked: Peek | None = None) -> Facts:
        asked = asked or peek(request)
        answer, pieces = _streamed(response) if stream else (_reader.body(response), list[_Pieces]())
        ends: Sequence[_Pieces | _Choice] = pieces if stream else answer.choices or ()
        failed = False
        for end in ends:
            failed = failed or bool(end.error) or end.finish_reason == FAILED
        if not stream:
            why: Failed | None = "error_body" if failed else body_failed(answer)
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
            usage=self.usage(shown(answer)),
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
            answer |= {key: value for key in NEWEST if (value := chunk.get(key))} | placed(chunk)
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


def _streamed(response: bytes) -> tuple[_Answer, list[_Pieces]]:
    """The chunks of a stream as one, and its choices. No function is called for a chunk."""
    choices = {0: _Pieces()}
    id = model = tier = error = None
    counted: list[_Answer] = []
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
                at, choice = index, choices.setdefault(index, _Pieces())
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
    told = newest(map(shown, counted))
    usage, tier = told.get("usage"), told.get("service_tier")
    whole = _Answer(id=id, model=model, usage=usage, service_tier=tier, error=error)
    return whole, [choices[index] for index in sorted(met)]


def _called(choice: _Pieces | _Choice) -> int:
    """The number of tool calls of a choice."""
    if isinstance(choice, _Choice):
        said = choice.message
        if said is None or not (said.tool_calls or said.function_call):
            return 0
        return len(listed(said.tool_calls)) + bool(obj(said.function_call))
    calls = [it.tool_calls for it in choice.deltas if it.tool_calls] or [it.tool_calls for it in choice.messages]
    functions = [it for it in (*choice.deltas, *choice.messages) if it.function_call.__class__ is dict]
    return len(folded_calls(calls)) + any(map(_function_call, functions))


def _complete(choices: list[Json]) -> bool:
    return bool(choices) and all(choice["finish_reason"] for choice in choices)
