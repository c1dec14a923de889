"""Reads the engine's answer: each chunk of a chat stream becomes pieces that say one thing each. Pure.

A chunk may bring nothing at all (the tokens of a tool call's frame), text with a finish reason, or two tool calls at
once. The pieces come in the order in which an answer is written: a tool call first has its head (id and name), then its
arguments; an older call is not continued. `wire.dialects.choices` tells which call a piece belongs to.

A plain answer becomes the same pieces, so it is written like a streamed one.

`TranslationError` is raised for an answer that cannot be written: an engine that was stopped in the middle (`abort`)
has not answered, and an answer that was cut must not pass as a complete one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, Protocol

import orjson

from penstock.gateway.model.span import KIND
from penstock.gateway.wire.dialects.choices import ToolCallBuilder, call_list, find_or_begin_call
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    arr,
    count,
    error_message,
    loads,
    obj,
    objs,
    replace_invalid_characters,
    strict,
    text,
)
from penstock.gateway.wire.http.request import ClientFault

PieceKind = Literal["reasoning", "text", "refusal", "call", "arguments"]
FINISHES: Final = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Finish reasons that the agents' formats can express."""
_REASONING: Final = ("reasoning", "reasoning_content")


class TranslationError(Exception):
    """The engine's answer cannot be written in the agent's format; the message says why."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """One part of an answer: text, reasoning, a refusal, the head of a tool call, or some of its arguments."""

    kind: PieceKind
    text: str = ""
    """The text; for the kind `call`, the call's id."""
    name: str = ""
    """The name of the tool, for the kind `call`."""


@dataclass(slots=True)
class ChatAnswer:
    """The facts of an answer besides its pieces, updated chunk by chunk."""

    id: str = ""
    model: str = ""
    created: int = 0
    finish: str | None = None
    stop: str | None = None
    """The stop sequence that ended it."""
    usage: Json | None = None
    ids: bool = False
    """True once there were token ids."""
    calls: list[ToolCallBuilder] = field(default_factory=list[ToolCallBuilder])
    """Tool calls so far; only the newest may be continued."""

    def chunk(self, data: str | bytes) -> list[AnswerPiece]:
        """Return the pieces that a chunk of a stream adds; raises `TranslationError`."""
        chunk = self._document(data)
        return [piece for choice in objs(chunk.get("choices"))[:1] for piece in self._choice(choice, "delta")]

    def plain(self, data: bytes) -> list[AnswerPiece]:
        """Return the pieces of a plain answer; raises `TranslationError`."""
        answer = self._document(data)
        if not objs(answer.get("choices")):
            raise TranslationError("the engine's answer has no choices")
        pieces = self._choice(objs(answer["choices"])[0], "message")
        self.check()
        return pieces

    def check(self) -> None:
        """Raise `TranslationError` unless the answer has an end that can be written."""
        if self.finish is None:
            raise TranslationError("the engine's answer ended early")
        if self.finish not in FINISHES:
            raise TranslationError(f"the engine ended its answer with finish_reason {self.finish!r}")

    def _document(self, data: str | bytes) -> Json:
        found = obj(loads(data))
        if problem := error_message(found):
            raise TranslationError(problem)
        if not found:
            raise TranslationError("the engine's answer is not readable JSON")
        self.id, self.model = text(found.get("id")) or self.id, text(found.get("model")) or self.model
        self.created = count(found.get("created")) or self.created
        self.usage = obj(found.get("usage")) or self.usage
        return found

    def _choice(self, choice: Json, key: str) -> list[AnswerPiece]:
        self.finish = text(choice.get("finish_reason")) or self.finish
        self.stop = text(choice.get("stop_reason")) or self.stop
        self.ids = self.ids or bool(choice.get("token_ids"))
        said = obj(choice.get(key))
        thought = next((found for name in _REASONING if (found := text(said.get(name)))), None)
        return [
            *([AnswerPiece("reasoning", thought)] if thought else []),
            *([AnswerPiece("text", found)] if (found := text(said.get("content"))) else []),
            *([AnswerPiece("refusal", found)] if (found := text(said.get("refusal"))) else []),
            *self._called(call_list(said.get("tool_calls")), whole=key == "message"),
        ]

    def _called(self, pieces: list[Json], whole: bool) -> list[AnswerPiece]:
        """The pieces of tool calls. In a `whole` message each entry is a complete call."""
        made: list[AnswerPiece] = []
        touched: set[int] = set()
        for piece in pieces:
            begun = len(self.calls)
            if whole:
                self.calls.append(ToolCallBuilder())
            call = self.calls[-1] if whole else find_or_begin_call(self.calls, piece, touched)
            if call is not self.calls[-1]:
                raise TranslationError("the engine's tool calls come out of order")
            touched.add(id(call))
            made += self._more(call, piece, len(self.calls) > begun)
        return made

    def _more(self, call: ToolCallBuilder, piece: Json, begins: bool) -> list[AnswerPiece]:
        """The pieces that a chunk's entry adds to the newest call."""
        name, begun = call.name, len(call.pieces)
        call.replaced = None
        call.add(piece)
        if not call.name or (not begins and call.name != name):
            raise TranslationError("the engine's tool calls come without a name, or it comes late")
        if begins:
            # Some engines give no id, and the agent needs one to answer.
            call.id = call.id or f"call_{self.id}_{len(self.calls)}"
        added = "".join(call.pieces[begun:])
        if call.replaced is not None:
            # Arguments that the engine repeats are nothing new.
            said = "".join(call.pieces)
            if not said.startswith(call.replaced):
                raise TranslationError("the engine said other arguments of a tool call, once more")
            added = said[len(call.replaced) :]
        head = [AnswerPiece("call", call.id or "", call.name)] if begins else []
        return head + ([AnswerPiece("arguments", added)] if added else [])


def joined_text(pieces: list[AnswerPiece], kind: PieceKind) -> str | None:
    """The joined text of all pieces of a kind; None if there is none."""
    return "".join([piece.text for piece in pieces if piece.kind == kind]) or None


def tool_calls(pieces: list[AnswerPiece]) -> list[tuple[AnswerPiece, str]]:
    """Tool calls, each with its arguments."""
    found: list[tuple[AnswerPiece, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            found.append((piece, ""))
        elif piece.kind == "arguments":
            found[-1] = found[-1][0], found[-1][1] + piece.text
    return found


# The interface of answers in an agent's own format, whole or event by event.


class AnswerConverter(Protocol):
    """Writes one answer for its agent. Either `whole` is called, or the other methods in their order."""

    def whole(self, answer: ChatAnswer, pieces: list[AnswerPiece]) -> Json:
        """Return the body of an answer that is not streamed."""
        ...

    def begin(self, answer: ChatAnswer) -> list[Json]:
        """Return the first events of a stream."""
        ...

    def feed(self, piece: AnswerPiece) -> list[Json]:
        """Return the events that a piece adds."""
        ...

    def end(self, answer: ChatAnswer) -> list[Json]:
        """Return the last events of a complete answer."""
        ...

    def broken(self, message: str) -> list[Json]:
        """Return the last events of an answer that will not be completed."""
        ...


def encode_events(events: Iterable[Json]) -> bytes:
    """Events as they go over the wire, each under the name of its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


# Checks whether a request can be translated. Pure; whatever cannot is refused, with its place, rather than left out.
#
# Chat completions cannot express much of what messages and responses can ask: tools that the provider runs, documents,
# conversations that it keeps. A request that asks for one of these would get an answer to another question. Fields that
# only say how to serve a request (caching, tiers, storing) are left out: the answer is the same without them. The
# tables of `messages` and `responses`, and docs/translation.md, list both kinds of fields.

_ABSENT: Final[tuple[Any, ...]] = (None, False, [], {}, "")


def refuse(field: str, message: str) -> NoReturn:
    """Raise `ClientFault` for a request that cannot be translated."""
    raise ClientFault(400, KIND, message, field)


def document(body: bytes) -> Json:
    """The request; refused unless it is a JSON object that loses nothing in reading but halves of characters."""
    asked = obj(strict(body) or strict(replace_invalid_characters(body)))
    if not asked:
        refuse("body", "the request is no readable JSON object")
    if not text(asked.get("model")):
        refuse("model", "the request names no model")
    return asked


def only(asked: Json, known: Collection[str], left_out: Collection[str], where: str = "") -> Json:
    """The fields of an object in `known`; any other that is not in `left_out` is refused."""
    for name, value in asked.items():
        if name not in known and name not in left_out and value not in _ABSENT:
            refuse(where + name, "it cannot be said in chat completions, which is all that this model's engine speaks")
    return {name: value for name, value in asked.items() if name in known and value is not None}


def one_of(value: Any, allowed: Collection[str | None], where: str) -> str:
    """The value, or "" for None; refused unless it is one of `allowed`."""
    if not (isinstance(value, str) or value is None) or value not in allowed:
        shown = ", ".join(repr(one) for one in allowed if one is not None)
        refuse(where, f"{value!r} cannot be said in chat completions; allowed: {shown}")
    return value or ""


def object_field(asked: Json, name: str, where: str = "") -> Json:
    """A field that must be an object if it is there; else {}."""
    value = asked.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(where + name, "it must be an object")
    return obj(value)


def items(value: Any, where: str) -> Iterator[tuple[Json, str]]:
    """Yield the objects in an array, each with its place."""
    if not isinstance(value, list):
        refuse(where, "it must be an array")
    for at, item in enumerate(arr(value)):
        place = f"{where}[{at}]"
        if not isinstance(item, dict):
            refuse(place, "it must be an object")
        yield obj(item), place


def non_empty_text(value: Any, where: str) -> str:
    """The value; refused unless it is a string that is not empty."""
    found = text(value)
    if not found:
        refuse(where, "it must be a string that is not empty")
    return found
