"""Frames a translated answer for the client: its head, and its transfer framing. Sans-I/O.

A stream is passed on as it comes: each read from the engine becomes the events that it completes, in the same callback.
A plain answer and an error are held until they are complete. If an answer cannot be written, the agent gets an error in
the shape of its own API: a status while nothing has gone out, an event after that.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, Final

import orjson

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.traffic.calls.answer_masking import mask_recorded_body
from penstock.gateway.traffic.proxy.translation.chat_pieces import (
    KIND,
    AnswerConverter,
    ChatAnswer,
    TranslationError,
    encode_events,
)
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import error_message, loads, obj
from penstock.gateway.wire.dialects.sse import SseParser
from penstock.gateway.wire.http.headers import LAST_CHUNK, chunk, client_head, refusal_head
from penstock.gateway.wire.http.request import UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import IDENTITY, LIMIT

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
