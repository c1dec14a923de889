"""Writes an answer of chat completions as one of messages.

litellm makes the events and the plain answer. It gets the answer piece by piece, because it takes a chunk that says
nothing for the beginning of a text and mixes the arguments of two calls in one chunk. Ids are the engine's, to the
letter, also where Anthropic's would look different: the agent's next request brings them back. The stop sequence is
named.

Arguments that are no JSON object come below the key `INVALID_JSON`, as Anthropic advises; litellm would repair them,
and hide what the model wrote. In a stream, arguments that begin like an object are passed on as they come. Arguments
that begin otherwise, even with blanks, cannot be read by Anthropic's own SDK, and are held until they are complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.gateway.traffic.proxy.translation.chat_pieces import (
    AnswerPiece,
    ChatAnswer,
    PieceKind,
    joined_text,
    tool_calls,
)
from penstock.gateway.traffic.proxy.translation.iterator_driver import IteratorDriver
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.wire.dialects.loose_json import Json, dumps, loads

INVALID: Final = "INVALID_JSON"
_UNCACHED: Final = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
"""Fields that Anthropic's answers always have, and litellm's plain ones only if something was cached."""
_DELTAS: Final[dict[PieceKind, str]] = {"reasoning": "reasoning_content", "text": "content", "refusal": "refusal"}


class MessagesConverter:
    """Writes one answer of messages."""

    def __init__(self, library: LiteLlmApi, asked: Json) -> None:
        self._library = library
        self._steps = IteratorDriver(lambda feed: library.events(feed, asked["model"]))
        self._about: Json = {}
        self._arguments = _ArgumentBuffer()
        self._empty = True

    def whole(self, answer: ChatAnswer, pieces: list[AnswerPiece]) -> Json:
        calls = tool_calls(pieces)
        choice = {"index": 0, "message": _message(pieces), "finish_reason": _finish(answer)}
        chat = self._library.answer(**_about(answer), choices=[choice], usage=_usage(answer))
        told: Json = dict(self._library.messages.translate_openai_response_to_anthropic(chat))
        ids = iter([call.text for call, _ in calls])
        told["content"] = [_mended(block, ids) for block in told["content"] if block.get("text") != ""]
        told["usage"] = _UNCACHED | told["usage"]
        return told | _stopped(answer)

    def begin(self, answer: ChatAnswer) -> list[Json]:
        """Return the begin of a message, under the engine's id."""
        self._about = _about(answer)
        events = self._put({})
        events[0]["message"] |= {"id": answer.id, "model": answer.model}
        return events

    def feed(self, piece: AnswerPiece) -> list[Json]:
        """Return a delta, and the begin of its block."""
        self._empty = False
        if piece.kind == "arguments":
            return self._argued(self._arguments.feed(piece.text))
        events = self._argued(self._arguments.flush())
        if piece.kind == "call":
            begun = self._put({"tool_calls": [_function(piece, "")]})
            return [*events, *(_named(event, piece) for event in begun)]
        return [*events, *self._put({_DELTAS[piece.kind]: piece.text})]

    def end(self, answer: ChatAnswer) -> list[Json]:
        """Return the ends of the last block and of the message."""
        events = self._argued(self._arguments.flush())
        events += [*self._put({}, _finish(answer)), *self._feed(choices=[], usage=_usage(answer)), *self._steps.close()]
        # litellm makes an empty text of an answer without content, which no agent may send back.
        kept = [event for event in events if not (self._empty and event["type"].startswith("content_block"))]
        return [_ended(event, answer) for event in kept]

    def broken(self, message: str) -> list[Json]:
        """Return an error event."""
        return [{"type": "error", "error": {"type": "api_error", "message": message}}]

    def _argued(self, arguments: str) -> list[Json]:
        return self._put({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}) if arguments else []

    def _put(self, delta: Json, finish: str | None = None) -> list[Json]:
        return self._feed(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])

    def _feed(self, **said: Any) -> list[Json]:
        return self._steps.put(self._library.chunk(**self._about, **said))


class _ArgumentBuffer:
    """The arguments of one tool call, as they come."""

    def __init__(self) -> None:
        self._held = ""
        self._is_object = False

    def feed(self, text: str) -> str:
        """Take a piece and return the text that can be passed on now."""
        if self._is_object:
            return text
        self._held += text
        self._is_object = self._held.lstrip().startswith("{")
        return self._held if self._is_object else ""

    def flush(self) -> str:
        """Return the held text of a call that is over."""
        held, told = self._held, self._is_object
        self._held, self._is_object = "", False
        return "" if told or not held.strip() else _object(held)


def _about(answer: ChatAnswer) -> Json:
    return {"id": answer.id, "created": answer.created, "model": answer.model}


def _message(pieces: list[AnswerPiece]) -> Json:
    """The message of a plain answer. Arguments that are no object come below `INVALID_JSON`."""
    said = {name: joined_text(pieces, kind) for kind, name in _DELTAS.items()}
    calls = [_function(call, _object(arguments)) for call, arguments in tool_calls(pieces)]
    return {"role": "assistant", **said, "tool_calls": calls or None}


def _function(call: AnswerPiece, arguments: str) -> Json:
    return {"index": 0, "id": call.text, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _object(arguments: str) -> str:
    return arguments if isinstance(loads(arguments.strip() or "{}"), dict) else dumps({INVALID: arguments})


def _usage(answer: ChatAnswer) -> Json:
    return answer.usage or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _finish(answer: ChatAnswer) -> str | None:
    """The finish reason. Engines end a prescribed tool call with `stop`, which becomes `tool_calls`."""
    return "tool_calls" if answer.calls and answer.finish in ("stop", "function_call") else answer.finish


def _stopped(answer: ChatAnswer) -> Json:
    """The stop sequence that ended the answer, and the stop reason for it."""
    if answer.stop is None or answer.calls:
        return {"stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}


def _mended(block: Json, ids: Iterator[str]) -> Json:
    """A block with the engine's id, or with the signature of reasoning left empty: only Anthropic can give one."""
    if block["type"] == "tool_use":
        return block | {"id": next(ids)}
    return block | {"signature": ""} if block["type"] == "thinking" else block


def _named(event: Json, call: AnswerPiece) -> Json:
    """The begin of a call with the engine's id."""
    if event["type"] == "content_block_start":
        event["content_block"] |= {"id": call.text}
    return event


def _ended(event: Json, answer: ChatAnswer) -> Json:
    if event["type"] == "message_delta":
        event["delta"] |= _stopped(answer)
    return event
