"""Reads the engine's answer: each chunk of a chat stream becomes pieces that say one thing each. Pure.

A chunk may bring nothing at all (the tokens of a tool call's frame), text with a finish reason, or two tool calls at
once. The pieces come in the order in which an answer is written: a tool call first has its head (id and name), then its
arguments; an older call is not continued. `dialects.tool_calls` tells which call a piece belongs to.

A plain answer becomes the same pieces, so it is written like a streamed one.

`TranslationError` is raised for an answer that cannot be written: an engine that was stopped in the middle (`abort`)
has not answered, and an answer that was cut must not pass as a complete one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.gateway.wire.dialects.loose_json import Json, count, error_message, loads, obj, objs, text
from penstock.gateway.wire.dialects.tool_calls import ToolCallBuilder, call_list, find_or_begin_call

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
