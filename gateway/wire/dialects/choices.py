"""The frame around the choices of chat and text completions, plain and streamed.

A stream is folded twice by the same rules: whole, for a Turn (`ChoicesDialect.assemble`), and for the summary from the
few fields of each event that it needs (`_streamed`). A field in several events is taken from the newest that has it, a
choice's finish reason from the first. Some servers send `message` in place of `delta`; each of its fields counts where
no delta has it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Final

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message
from penstock.gateway.wire.dialects.base import Facts, JsonPostDialect, choices_of
from penstock.gateway.wire.dialects.family import OPENAI, ErrorFields, Failure, body_failure, is_done, is_error
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    count,
    dumps,
    error_message,
    labels,
    loads,
    obj,
    objs,
    peek,
    text,
)
from penstock.gateway.wire.dialects.sse import StreamReader, chunks, last_data
from penstock.gateway.wire.dialects.tokens import decoded_fields, latest_usage_fields, openai_usage, usage_fields

# Tool calls of a chat stream, put together from the pieces that servers send, by index and id, or whichever of these
# is given.
#
#     OpenAI                   an index, with the first piece an id and a name, then pieces of the arguments
#     Gemini's OpenAI endpoint index 0 for all of them, each with an id of its own, whole
#     several                  no index, no id or an empty one
#     Hermes, MiniMax          the name with every piece; others send it in pieces, or again as a whole
#     proxies                  the whole arguments once more behind their pieces, or `{}` in front of them
#     Ollama and its like      arguments as an object, or before the name
#
# The call of a piece is looked up (`_LOOKUPS`); `_begins` then tells if the piece begins another call. A new shape is a
# row of one of the two. A summary counts the calls that a Turn shows, since both use these functions, and a piece that
# only continues a call costs no function call.

BODIES: Final = ("function", "custom")
"""The keys of the object with name and arguments; some servers leave this envelope out."""
ARGUMENTS: Final = ("arguments", "input", "parameters", "args")
"""The servers' names for the arguments."""
_OPEN: Final = "{"
_SLOW: Final = "{ \t\r\n"
"""Beginnings of a piece that may begin an object, after white space; an empty piece counts too."""
_OWN: Final = frozenset({"index", "id", *BODIES, "name", *ARGUMENTS})


class ToolCallBuilder:
    """One call, as far as it has come."""

    __slots__ = ("body", "id", "index", "more", "name", "pieces", "replaced")

    def __init__(self, index: int | None = None) -> None:
        self.index = index
        self.id: str | None = None
        self.name: str | None = None
        self.body: str = "function"
        self.pieces: list[str] = []
        self.replaced: str | None = None
        """Earlier arguments, which newer ones have replaced."""
        self.more: Json = {}
        """Other fields of its pieces."""

    @property
    def is_complete(self) -> bool:
        """True if the arguments are complete: they are an object, as far as can be told."""
        return is_whole("".join(self.pieces))

    def add(self, piece: Json) -> None:
        body, kind = body_of(piece)
        self.body = kind or self.body
        self.id = self.id or text(piece.get("id"))
        self.more |= {key: value for key, value in piece.items() if key not in _OWN and value is not None}
        self._add_name(text(body.get("name")))
        self._add_arguments(argument_of(body))

    def _add_name(self, name: str | None) -> None:
        """Add a piece of the name: names come in pieces until arguments begin. A piece that repeats the name so far,
        with or without more, replaces it."""
        if name and (not self.name or name.startswith(self.name)):
            self.name = name
        elif name and self.name and not any(self.pieces):
            self.name += name

    def _add_arguments(self, given: Any) -> None:
        """Add a piece of the arguments. An object that follows complete arguments replaces them, unless it is empty."""
        if given is None or given == "":
            return
        piece = given if isinstance(given, str) else dumps(given)
        anew = not isinstance(given, str) or (self.body != "custom" and piece.lstrip().startswith(_OPEN))
        if anew and self.pieces and (self.is_complete or not isinstance(given, str)):
            if loads(piece) in ({}, []):
                return
            self.replaced = "".join(self.pieces)
            self.pieces.clear()
        self.pieces.append(piece)

    def build(self) -> Json:
        """The call as a plain answer has it."""
        said = "".join(self.pieces)
        if self.body != "custom" and len(self.pieces) > 1 and not is_whole(said) and is_whole(self.pieces[-1]):
            said = self.pieces[-1]
        fields = {"name": self.name, "input" if self.body == "custom" else "arguments": said}
        return {"id": self.id, **self.more, self.body: fields}


def is_whole(arguments: str) -> bool:
    """True if arguments are a JSON object."""
    edges = arguments.strip()
    return edges[:1] == _OPEN and edges[-1:] == "}" and isinstance(loads(edges), dict)


def body_of(piece: Json) -> tuple[Json, str | None]:
    """(the object that holds the name and arguments of a call or a piece, its key); the key is None where there is no
    envelope."""
    kind = next((name for name in BODIES if obj(piece.get(name))), None)
    return (piece, None) if kind is None else (obj(piece[kind]), kind)


def argument_of(body: Json) -> Any:
    """The arguments in a body, of any type; None if it has none."""
    return next((body[name] for name in ARGUMENTS if body.get(name) is not None), None)


def argument_text(body: Json) -> str:
    """The arguments in a body, as text."""
    given = argument_of(body)
    return given if isinstance(given, str) else "" if given is None else dumps(given)


def folded_arguments(pieces: Iterable[Any]) -> str:
    """The arguments of one call from its pieces."""
    call = ToolCallBuilder()
    for piece in pieces:
        call.add({"function": {"arguments": piece}})
    return call.build()["function"]["arguments"]


def call_list(calls: Any) -> list[Json]:
    """The calls of an answer, or of one delta; one object stands for a list of one."""
    return objs([calls] if isinstance(calls, dict) else calls)


def folded_calls(deltas: Iterable[Any]) -> list[ToolCallBuilder]:
    """The calls in the `tool_calls` of some deltas, in the order in which they began."""
    calls: list[ToolCallBuilder] = []
    newest = ToolCallBuilder()
    for pieces in deltas:
        touched: set[int] = set()
        given: list[Any] = pieces if pieces.__class__ is list else [pieces]
        for piece in given:
            if piece.__class__ is not dict:
                continue
            # Most pieces only continue a call.
            body: Any = piece.get("function")
            if calls and body.__class__ is dict and not body.get("name") and not piece.get("id"):
                said: Any = body.get("arguments")
                if isinstance(said, str) and said[:1] not in _SLOW and piece.get("index") == newest.index:
                    newest.pieces.append(said)
                    continue
            newest = find_or_begin_call(calls, piece, touched)
            newest.add(piece)
            touched.add(id(newest))
    return calls


def find_or_begin_call(calls: list[ToolCallBuilder], piece: Json, touched: set[int]) -> ToolCallBuilder:
    """The call that a piece belongs to; a new one where the piece begins one. `touched`: `id()` of the calls that have
    had a piece of the same delta."""
    index, known_as = count(piece.get("index")), text(piece.get("id")) or None
    looked = (look(calls, index, known_as) for look in _LOOKUPS[index is not None, known_as is not None])
    call = next((found for found in looked if found is not None), None)
    if call is None or _begins(call, piece, index, known_as, id(call) in touched):
        call = ToolCallBuilder(index)
        calls.append(call)
    return call


def _begins(call: ToolCallBuilder, piece: Json, index: int | None, known_as: str | None, touched: bool) -> bool:
    """True if a piece begins another call than the one that was looked up. `touched`: that call has had a piece of the
    same delta."""
    body, _ = body_of(piece)
    name, given = text(body.get("name")), argument_text(body)
    other_id = bool(known_as and call.id and known_as != call.id)
    if not name or not call.name:
        # Where the piece or the call has no name, only another id begins a call, if the piece has a name or the call is
        # complete.
        return other_id and (bool(name) or call.is_complete)
    if other_id or (index is not None and call.index is not None and index != call.index):
        # Ids that are made anew for every piece do not begin calls.
        goes_on = (
            any(call.pieces) and name == call.name and not call.is_complete and not given.lstrip().startswith(_OPEN)
        )
        return not goes_on
    if touched and (name != call.name or (index is None and known_as is None)):
        return True
    if not any(call.pieces):
        return False
    if known_as and call.id:
        return name != call.name and call.is_complete
    if name != call.name:
        return True
    known: Any = loads("".join(call.pieces)) if given.startswith(_OPEN) and call.is_complete else {}
    return bool(known) and loads(given) not in (known, {})


def _by_both(calls: Sequence[ToolCallBuilder], index: int | None, known_as: str | None) -> ToolCallBuilder | None:
    return next((one for one in reversed(calls) if one.index == index and one.id == known_as), None)


def _by_index(calls: Sequence[ToolCallBuilder], index: int | None, known_as: str | None) -> ToolCallBuilder | None:
    return next((one for one in reversed(calls) if one.index == index), None)


def _by_id(calls: Sequence[ToolCallBuilder], index: int | None, known_as: str | None) -> ToolCallBuilder | None:
    return next((one for one in reversed(calls) if one.id == known_as), None)


def _newest(calls: Sequence[ToolCallBuilder], index: int | None, known_as: str | None) -> ToolCallBuilder | None:
    return calls[-1] if calls else None


def _unindexed(calls: Sequence[ToolCallBuilder], index: int | None, known_as: str | None) -> ToolCallBuilder | None:
    """The newest call if it has no index: some servers give the index only with later pieces."""
    return calls[-1] if calls and calls[-1].index is None else None


def _nameless(calls: Sequence[ToolCallBuilder], index: int | None, known_as: str | None) -> ToolCallBuilder | None:
    """The newest call if neither its id nor its name has come."""
    return calls[-1] if calls and calls[-1].id is None and calls[-1].name is None else None


_Lookup = Callable[[Sequence[ToolCallBuilder], int | None, str | None], ToolCallBuilder | None]
_LOOKUPS: Final[dict[tuple[bool, bool], tuple[_Lookup, ...]]] = {
    (True, True): (_by_both, _by_index, _by_id),
    (True, False): (_by_index, _unindexed),
    (False, True): (_by_id, _nameless),
    (False, False): (_newest,),
}
"""The lookups for a piece's call, by (the piece has an index, it has an id)."""


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
        failed, ended, tool_calls = False, True, 0
        for end in ends:
            failed = failed or bool(end.error) or end.finish_reason == FAILED
            ended = ended and bool(end.finish_reason)
            told = end.message if isinstance(end, _ChoiceHead) else end.deltas or end.messages
            if told and self.calls_tools:
                tool_calls += _called(end)
        if not stream:
            why: Failure | None = "error_body" if failed else body_failure(answer)
        elif failed or is_error(answer):
            why = "stream_error"
        else:
            enough = ended and len(ends) >= ((count(asked.n) if asked.n else None) or 1)
            why = None if enough or is_done(response) else "ended_early"
        finish = ends[0].finish_reason if ends else None
        model, served, id, finish = labels(asked.model, answer.model, answer.id, finish)
        usage = self.usage(decoded_fields(answer)) if answer.usage or not stream else None
        return Facts(model, served, id, finish, usage, tool_calls, len(ends), why)

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
    told = latest_usage_fields(map(decoded_fields, counted)) if counted else Json()
    usage, tier = told.get("usage"), told.get("service_tier")
    whole = _CompletionHead(id=id, model=model, usage=usage, service_tier=tier, error=error)
    return whole, list(map(choices.__getitem__, sorted(met)))


def _called(choice: _ChoicePieces | _ChoiceHead) -> int:
    """The number of tool calls of a choice."""
    if isinstance(choice, _ChoiceHead):
        said = choice.message or _MessageHead()
        return len(call_list(said.tool_calls)) + bool(obj(said.function_call))
    calls = [it.tool_calls for it in choice.deltas if it.tool_calls] or [
        it.tool_calls for it in choice.messages if it.tool_calls
    ]
    functions = [it for it in (*choice.deltas, *choice.messages) if it.function_call.__class__ is dict]
    return len(folded_calls(calls)) + any(map(_function_call, functions))


def _complete(choices: list[Json]) -> bool:
    return bool(choices) and all(choice["finish_reason"] for choice in choices)
