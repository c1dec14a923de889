"""Frames a translated answer for the client: its head, and its transfer framing. Sans-I/O.

A stream is passed on as it comes: each read from the engine becomes the events that it completes, in the same callback.
A plain answer and an error are held until they are complete. If an answer cannot be written, the agent gets an error in
the shape of its own API: a status while nothing has gone out, an event after that.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, Protocol

import orjson

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.span import KIND
from penstock.gateway.traffic.calls.answer_masking import mask_recorded_body
from penstock.gateway.wire.dialects.choices import ToolCallBuilder, call_list, find_or_begin_call
from penstock.gateway.wire.dialects.family import Family
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
from penstock.gateway.wire.dialects.sse import SseParser
from penstock.gateway.wire.http.headers import LAST_CHUNK, chunk, client_head, refusal_head
from penstock.gateway.wire.http.request import ClientFault, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import IDENTITY, LIMIT

# Reads the engine's answer: each chunk of a chat stream becomes pieces that say one thing each. Pure.
#
# A chunk may bring nothing at all (the tokens of a tool call's frame), text with a finish reason, or two tool calls
# at once. The pieces come in the order in which an answer is written: a tool call first has its head (id and name),
# then its arguments; an older call is not continued. `wire.dialects.choices` tells which call a piece belongs to.
#
# A plain answer becomes the same pieces, so it is written like a streamed one.
#
# `TranslationError` is raised for an answer that cannot be written: an engine that was stopped in the middle
# (`abort`) has not answered, and an answer that was cut must not pass as a complete one.

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


_FRAMING: Final = frozenset({b"content-type", b"content-length", b"transfer-encoding", b"trailer"})
_SHOWN: Final = 500
"""Most characters that are quoted of an error that is no JSON."""
BROKEN: Final = "the engine broke off its answer"


class TranslationFraming(ABC):
    """The common base of `StreamTranslationFraming` and `BufferedTranslationFraming`, with the interface of
    `gateway.wire.rewriting.Framing`."""

    def __init__(self, converter: AnswerConverter) -> None:
        self.sent: list[bytes] = []
        """The answer's body as the client has got it."""
        self.problem: str | None = None
        """Why the answer could not be written; None if it could."""
        self._converter = converter
        self._answer = ChatAnswer()
        self._last: bytes | None = None

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        return self._answer.ids

    @abstractmethod
    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the bytes for the client of the head and the body bytes of the same read."""

    @abstractmethod
    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the bytes for the client of one read."""

    def broken(self) -> bytes:
        """Return the last bytes for the client of an answer that breaks off; idempotent."""
        if self._last is None:
            self._last = b""
            self._last = self._broken_off()
        return self._last

    @abstractmethod
    def _broken_off(self) -> bytes:
        """Return the last bytes for the client; called once."""


def can_stream(connection: UpstreamConnection, http10: bool) -> bool:
    """True if an answer can be passed on as it comes. `http10`: the client takes no chunks, so it must get its length
    if the engine's head has one."""
    told = connection.status < 400 and connection.events and connection.encoding in IDENTITY
    return told and not (http10 and connection.length_known)


class StreamTranslationFraming(TranslationFraming):
    """Frames a streamed answer: each event goes to the client when the engine's bytes complete it."""

    def __init__(self, converter: AnswerConverter, http10: bool) -> None:
        """`http10`: the client takes no chunks."""
        super().__init__(converter)
        self._chunked = not http10
        self._parser = SseParser()
        self._headed = self._begun = self._over = False

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the head at once, chunked if possible."""
        if connection.length_known:
            lines = client_head(head, frozenset({b"content-length"}), close=False)
            head = lines[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
        else:
            self._chunked = self._chunked and connection.chunked
        out, self._headed = self.go_on(connection, raw), True
        return head + out

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the events that the read completes."""
        out = b"".join([self._event(event.data) for event in self._parser.feed(b"".join(connection.pieces))])
        out += self._end() if connection.done else b""
        return self._framed(out, connection.done)

    def _broken_off(self) -> bytes:
        """An error event without an end of the stream; nothing if not even its head was sent."""
        return self._framed(self._fail(BROKEN), False) if self._headed else b""

    def _event(self, data: str) -> bytes:
        if self._over:
            return b""
        try:
            return self._end() if data.strip() == "[DONE]" else self._told(data)
        except TranslationError as untold:
            return self._fail(str(untold))

    def _told(self, data: str) -> bytes:
        pieces = self._answer.chunk(data)
        events = [] if self._begun else self._converter.begin(self._answer)
        self._begun = True
        for piece in pieces:
            events += self._converter.feed(piece)
        return encode_events(events)

    def _end(self) -> bytes:
        if self._over:
            return b""
        try:
            self._answer.check()
        except TranslationError as untold:
            return self._fail(str(untold))
        self._over = True
        return encode_events(self._converter.end(self._answer))

    def _fail(self, message: str) -> bytes:
        if self._over:
            return b""
        self._over, self.problem = True, message
        return encode_events(self._converter.broken(message))

    def _framed(self, out: bytes, done: bool) -> bytes:
        if out:
            self.sent.append(out)
        if not self._chunked:
            return out
        return chunk(out) + (LAST_CHUNK if done else b"")


class BufferedTranslationFraming(TranslationFraming):
    """A plain answer, or an error."""

    def __init__(self, converter: AnswerConverter, family: Family, asked_stream: bool, own: Secrets) -> None:
        """`family`: shape of errors; `asked_stream`: the agent expects events; `own`: the gateway's keys, taken out of
        errors."""
        super().__init__(converter)
        self._family = family
        self._asked_stream = asked_stream
        self._own = own
        self._head = b""
        self._pieces: list[bytes] = []
        self._size = 0

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Hold the head until the answer is complete."""
        self._head = head
        return self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return head and body once the answer is complete; until then nothing."""
        self._size += sum(map(len, connection.pieces))
        if self._size <= LIMIT:
            self._pieces += connection.pieces
        return self._finished(connection) if connection.done and not self.sent else b""

    def _broken_off(self) -> bytes:
        """An error answer, unless an answer was sent already."""
        return b"" if self.sent else self._refused(BROKEN)

    def _finished(self, connection: UpstreamConnection) -> bytes:
        body = b"".join(self._pieces)
        if connection.status >= 400:
            self._head = self._own.hide(self._head)
            message = _message(mask_recorded_body(self._own, body, (connection.encoding or b"").decode("latin-1")).body)
            return self._mended(self._family.error_body(connection.status, message, f"http_{connection.status}"))
        try:
            return self._mended(self._told(connection, body))
        except TranslationError as untold:
            return self._refused(str(untold))

    def _told(self, connection: UpstreamConnection, body: bytes) -> bytes:
        if self._size > LIMIT:
            raise TranslationError(f"the engine's answer has more than {LIMIT} bytes")
        if connection.encoding not in IDENTITY:
            raise TranslationError("the engine compressed its answer, unasked")
        if connection.events or self._asked_stream:
            raise TranslationError(
                f"the engine {'streamed' if connection.events else 'did not stream'} its answer, unasked"
            )
        return orjson.dumps(self._converter.whole(self._answer, self._answer.plain(body)))

    def _mended(self, body: bytes) -> bytes:
        """The engine's head with another body."""
        self.sent.append(body)
        head = client_head(self._head, _FRAMING, close=False)
        return b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (head[:-2], len(body), body)

    def _refused(self, message: str) -> bytes:
        """An error of the gateway's own: nothing of the engine's answer has gone out."""
        self.problem = message
        body = self._family.error_body(502, message, KIND)
        self.sent.append(body)
        close = b"\r\nconnection: close\r\n" in self._head.lower()
        return refusal_head(UpstreamFault(502, KIND, message), len(body), not close) + body


def _message(body: bytes) -> str:
    """The message of an engine's error."""
    return error_message(obj(loads(body))) or body.decode("utf-8", "replace")[:_SHOWN] or "the engine gave no reason"


# Drives an asynchronous iterator by hand: it advances when a chunk has arrived, in the callback that brought it.
#
# litellm's stream wrappers pull chunks out of an iterator and wait for it. Here that iterator is a `PushIterator`,
# which only waits by giving control back to the code that drives the wrapper (`IteratorDriver`). So no task and no
# thread runs per stream. A wrapper that waited for anything else would be noticed, because it would give control back
# with something other than `None`.


class PushIterator:
    """An asynchronous iterator over items that are put into it."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()
        self._over = False

    def put(self, item: Any) -> None:
        self._waiting.append(item)

    def close(self) -> None:
        """End the iterator after the items so far."""
        self._over = True

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._waiting:
            if self._over:
                raise StopAsyncIteration
            await _suspended()
        return self._waiting.popleft()


class IteratorDriver:
    """Drives an iterator that is fed by a `PushIterator`."""

    def __init__(self, make: Callable[[PushIterator], AsyncIterator[Any]]) -> None:
        """`make`: makes the iterator over a feed."""
        self._feed = PushIterator()
        self._iterator = make(self._feed)
        self._step: Coroutine[Any, Any, Any] | None = None

    def put(self, item: Any) -> list[Any]:
        """Feed an item and return the items that the iterator yields for it."""
        self._feed.put(item)
        return self._run()

    def close(self) -> list[Any]:
        """End the feed and return the last items of the iterator."""
        self._feed.close()
        return self._run()

    def _run(self) -> list[Any]:
        made: list[Any] = []
        while True:
            step = self._step or _once(self._iterator)
            try:
                waits_for = step.send(None)
            except StopIteration as done:
                self._step = None
                made.append(done.value)
            except StopAsyncIteration:
                self._step = None
                return made
            else:
                if waits_for is not None:
                    raise RuntimeError(f"a stream wrapper waits for {waits_for!r}, which never comes")
                self._step = step
                return made


async def _once(iterator: AsyncIterator[Any]) -> Any:
    return await iterator.__anext__()


@types.coroutine
def _suspended() -> Generator[None, None, None]:
    yield
