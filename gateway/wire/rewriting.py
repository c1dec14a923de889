"""Answers that are changed on their way to the client: by an `AnswerRewriter`, a document as a whole, a stream event by
event. Sans-I/O.

`StreamFraming` passes the events of a stream as they become complete, in chunks of its own. `HeldFraming` holds an
answer until it is complete, because engines write it in one go, and gives it its new length. An answer that needs no
change passes unchanged, framing included. The bytes of an answer decide what it is, and not its content type: servers
send JSON with the type of streams, that of plain texts, or without one.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final, Protocol

from penstock.gateway.wire.capture import CaptureRequest
from penstock.gateway.wire.dialects.json_scan import LEAF, JsonRange, KeyTree, find, splice
from penstock.gateway.wire.dialects.loose_json import UNREADABLE
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.dialects.tokens import IDS, LOGPROBS
from penstock.gateway.wire.http.headers import chunk, last_chunk
from penstock.gateway.wire.http.request import UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

LIMIT: Final = 64 << 20
"""Most bytes of a plain answer, or of one event, that are held."""
IDENTITY: Final = (None, b"identity")
"""Values of `Content-Encoding` that mean none."""
_LENGTH: Final = re.compile(rb"(?<=\r\n)(content-length:[ \t]*)[0-9]+", re.IGNORECASE)
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_DATA: Final = b"data:"
_DATAS: Final = (_DATA, b"\xef\xbb\xbf" + _DATA)
"""Beginnings of data lines. Clients ignore a byte order mark before the first."""
_ENDS: Final = (b"\n", b"\r")


class Framing(Protocol):
    """Carries one answer to the client, changed or unchanged."""

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        ...

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the bytes for the client of the head and the body bytes of the same read."""
        ...

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the bytes for the client of one read."""
        ...

    def broken(self) -> bytes:
        """Return the last bytes for the client of an answer that breaks off."""
        ...


class AnswerRewriter(Protocol):
    """Changes the JSON of one answer."""

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        ...

    def document(self, body: bytes) -> bytes:
        """Return a plain answer, changed; the same object if nothing changes."""
        ...

    def event(self, data: bytes) -> bytes:
        """Return the data of an event, changed; the same object if nothing changes; empty to leave the event out."""
        ...


class EventStreamRewriter:
    """Rewrites a stream of events. It takes pieces of any size and returns events as soon as they are complete."""

    def __init__(self, rewriter: AnswerRewriter, limit: int) -> None:
        """`limit`: most bytes of an event that is looked into. From a larger one on, the stream passes unchanged."""
        self._rewriter = rewriter
        self._limit = limit
        self._lines: list[bytes] = []
        self._part: list[bytes] = []
        self._held = 0
        self._after_cr = self._dropped = False

    @property
    def held(self) -> int:
        """Bytes of the incomplete event."""
        return self._held

    def feed(self, data: bytes) -> bytes:
        """Take a piece and return the events that end within it."""
        if self._held > self._limit:
            return data
        out: list[bytes] = []
        # A CR ends its line at once, so that its event is not held back; an LF that follows belongs to it.
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            if self._lines:
                self._lines[-1] += b"\n"
            elif not self._dropped:
                out.append(b"\n")
        self._after_cr = data.endswith(b"\r")
        for line in data.splitlines(keepends=True):
            self._held += len(line)
            self._part.append(line)
            if line.endswith(_ENDS):
                out += self._line()
        return b"".join(out if self._held <= self._limit else [*out, *self._lines, *self._part])

    def flush(self) -> bytes:
        """Return the rest of a stream that has ended, rewritten as if its event had ended."""
        if self._held > self._limit:
            return b""
        self._lines.append(b"".join(self._part))
        return self._event()

    def _line(self) -> list[bytes]:
        """Take a complete line; return its event if it ends there."""
        line = b"".join(self._part)
        self._part.clear()
        self._lines.append(line)
        return [self._event()] if line.strip(b"\r\n") == b"" else []

    def _event(self) -> bytes:
        lines, self._lines, self._held = self._lines, list[bytes](), 0
        made = self._rewritten(lines)
        self._dropped = not made
        return made

    def _rewritten(self, lines: list[bytes]) -> bytes:
        """An event's lines, with its data rewritten; without its data, or nothing at all, if that is left out."""
        datas = [line for line in lines if line.startswith(_DATAS)]
        data = b"\n".join([line.partition(b":")[2].rstrip(b"\r\n") for line in datas])
        made = self._rewriter.event(data) if datas else data
        if made is data:
            return b"".join(lines)
        end = datas[0][len(datas[0].rstrip(b"\r\n")) :]
        written = [_DATA + line + end for line in made.split(b"\n")] if made else []
        at = lines.index(datas[0])
        kept = [*lines[:at], *written, *(line for line in lines[at:] if not line.startswith(_DATAS))]
        return b"".join(kept) if any(line.strip(b"\r\n") for line in kept) else b""


class StreamFraming:
    """A streamed answer, whose events pass as they become complete."""

    def __init__(self, rewriter: AnswerRewriter, chunked: bool, limit: int, refuses: bool = False) -> None:
        """`chunked`: the client gets it in chunks; `limit`: most bytes of an event, or of a plain answer, that are
        held. `refuses`: a larger one is an `UpstreamFault`; else it passes unchanged."""
        self._rewriter = rewriter
        self._events = EventStreamRewriter(rewriter, sys.maxsize if refuses else limit)
        self._refuses = refuses
        self._chunked = chunked
        self._limit = limit
        self._document: list[bytes] | None = None
        """Pieces of a plain answer with the type of streams; None for a stream."""
        self._begun = False

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        return self._rewriter.ids

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the head at once."""
        return head + self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the events that are complete now."""
        data = b"".join(connection.pieces)
        if not self._begun and (first := data.lstrip(_BLANK)):
            self._begun, self._document = True, [] if first.startswith(b"{") else None
        if self._document is None:
            out = self._events.feed(data) + (self._events.flush() if connection.done else b"")
        else:
            self._document.append(data)
            out = self._whole(self._document, connection.done)
        if self._refuses and self._events.held + sum(map(len, self._document or ())) > self._limit:
            raise too_large(self._limit)
        return encode_chunk(connection, out) if self._chunked else out

    def _whole(self, pieces: list[bytes], done: bool) -> bytes:
        """A plain answer, once it is complete or too large."""
        passes = not self._refuses and sum(map(len, pieces)) > self._limit
        whole = b"".join(pieces) if done or passes else b""
        if whole:
            pieces.clear()
        return self._rewriter.document(whole) if done and whole else whole

    def broken(self) -> bytes:
        """Return nothing: half an event is useless."""
        return b""


class HeldFraming(ABC):
    """An answer that is held until it is complete."""

    def __init__(self, chunked: bool, limit: int, refuses: bool = False) -> None:
        """`chunked`: the client gets it in chunks; `limit`: most bytes that are held. `refuses`: a larger one is an
        `UpstreamFault`; else it passes unchanged."""
        self._chunked, self._limit, self._refuses = chunked, limit, refuses
        self._head = b""
        self._raw: list[bytes] = []
        self._pieces: list[bytes] = []
        self._size: int | None = 0
        """Bytes that are held; None once nothing is held any more."""

    @property
    def ids(self) -> bool:
        """True once there were token ids of an answer."""
        return False

    @abstractmethod
    def finish(self, connection: UpstreamConnection, body: bytes) -> tuple[bytes, bytes] | None:
        """Return the head, but for its length, and the body for the client; None if both pass as they came."""

    def passes(self, pieces: list[bytes]) -> bool:
        """True if these first pieces of the body tell that it is not to be held."""
        return False

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Hold the head, because the length may change."""
        self._head = head
        return self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return everything once it is complete or too large."""
        passed = client_bytes(connection, raw, self._chunked)
        if self._size is None:
            return passed
        self._raw.append(passed)
        self._pieces += connection.pieces
        self._size += len(raw)
        if self._size > self._limit and self._refuses:
            raise too_large(self._limit)
        if connection.done:
            return self._end(connection)
        return self._release() if self._size > self._limit or self.passes(self._pieces) else b""

    def broken(self) -> bytes:
        """Return the head; the client sees that the rest is missing."""
        held, self._size = self._size is not None, None
        return self._head if held else b""

    def _release(self) -> bytes:
        return self.broken() + b"".join(self._raw)

    def _end(self, connection: UpstreamConnection) -> bytes:
        made = self.finish(connection, b"".join(self._pieces))
        if made is None:
            return self._release()
        self._size, (head, body) = None, made
        return _LENGTH.sub(rb"\g<1>%d" % len(body), head) + (encode_chunk(connection, body) if self._chunked else body)


class BufferedFraming(HeldFraming):
    """A plain answer, or a stream whose length was known when it began."""

    def __init__(
        self, rewriter: AnswerRewriter, chunked: bool, limit: int, events: bool = False, told: bool = True,
        refuses: bool = False,
    ) -> None:  # fmt: skip
        """`events`: its content type says that it is a stream; `told`: it says that it is JSON or events, else its
        first bytes tell, which may come after the head."""
        super().__init__(chunked, limit, refuses)
        self._rewriter, self._labelled = rewriter, events
        self._told: bool | None = told or None

    @property
    def ids(self) -> bool:
        return self._rewriter.ids

    def passes(self, pieces: list[bytes]) -> bool:
        if self._told is None:
            self._told = begins_json(pieces)
        return self._told is False

    def finish(self, connection: UpstreamConnection, body: bytes) -> tuple[bytes, bytes] | None:
        if begins_event_stream(body) or (self._labelled and not body.lstrip(_BLANK).startswith(b"{")):
            events = EventStreamRewriter(self._rewriter, sys.maxsize if self._refuses else self._limit)
            made = events.feed(body) + events.flush()
        else:
            made = self._rewriter.document(body)
        return None if made == body else (self._head, made)


def begins_json(pieces: Iterable[bytes]) -> bool | None:
    """True if a body that begins so is a JSON object; None while that is open."""
    first = b"".join(pieces).lstrip(_BLANK)
    return first.startswith(b"{") if first else None


def encode_chunk(connection: UpstreamConnection, body: bytes) -> bytes:
    """A piece of an answer as a chunk; with the last piece, also the end and the answer's trailers."""
    made = chunk(body)
    return made + last_chunk(connection.trailers) if connection.done else made


def client_bytes(connection: UpstreamConnection, raw: bytes, chunked: bool) -> bytes:
    """The bytes for the client of a read, without the upstream's chunks if the client takes none."""
    return raw if chunked or not connection.chunked else b"".join(connection.pieces)


def too_large(limit: int) -> UpstreamFault:
    message = f"an answer of more than {limit} bytes cannot be read here, and so is not passed on"
    return UpstreamFault(502, "unreadable", message)


# -- answers of engines that were asked for token ids and log-probabilities (`capture`) --------------------------------

# The added values become `null`: `token_ids`, `prompt_token_ids` and `logprobs` in a choice, `prompt_token_ids` above
# the choices. vLLM writes null for values that were not asked for, and so does OpenAI's API for log-probabilities. When
# asked for ids or log-probabilities, vLLM also streams tokens without text, such as the frame of a tool call, as events
# with an empty `delta`. It does not do so otherwise, so these events are left out.
#
# A part that cannot be parsed is not changed. In a stream only the event that is not complete yet is held back. Errors,
# encoded answers and answers that are neither JSON nor events are not looked into.

_PROMPT, _CHOICES, _TOKENS = "prompt_token_ids", "choices", "token_ids"
_DELTA, _FINISH = (_CHOICES, "delta"), (_CHOICES, "finish_reason")
_BROUGHT: Final = {IDS: {(_PROMPT,), (_CHOICES, _PROMPT), (_CHOICES, _TOKENS)}, LOGPROBS: {(_CHOICES, LOGPROBS)}}
"""Paths to the values that a field of the request adds to the answer."""
_CLEANED: Final[KeyTree] = {
    _PROMPT: LEAF,
    _CHOICES: dict.fromkeys((_PROMPT, _TOKENS, LOGPROBS, "delta", "finish_reason"), LEAF),
}
_LINE_TYPES: Final = (b"ndjson", b"jsonl", b"json-seq", b"stream+json")
"""Parts of the content types of streams in other formats, which are not held back."""


class CaptureCleaner:
    """Removes the added values from the JSON of one answer."""

    def __init__(self, asked: CaptureRequest) -> None:
        self.ids = False
        """True once there were token ids of an answer."""
        self._ours = {path for name in asked.added for path in _BROUGHT[name]}
        self._fillers = asked.fillers

    def document(self, body: bytes) -> bytes:
        """Return a plain answer, cleaned; the same object if nothing changes."""
        return self._clean(body) or body

    def event(self, data: bytes) -> bytes:
        """Return the data of an event, cleaned; the same object if nothing changes; empty if it only brought tokens."""
        cleaned = self._clean(data, self._fillers)
        return data if cleaned is None else cleaned

    def _clean(self, body: bytes, fillers: bool = False) -> bytes | None:
        """The cleaned JSON; None if nothing has to be removed."""
        try:
            found = find(body, _CLEANED)
        except UNREADABLE:
            return None
        self.ids = self.ids or any(one.path == (_CHOICES, _TOKENS) and one.value for one in found)
        ours = [one for one in found if one.path in self._ours and one.value is not None]
        if not ours:
            return None
        return b"" if fillers and _fills(found, ours) else splice(body, ours, b"null")


def _fills(found: list[JsonRange], ours: list[JsonRange]) -> bool:
    """True if an event only brings tokens: it has choices, and none has content or ends."""
    deltas = [one.value for one in found if one.path == _DELTA]
    ends = [one.value for one in found if one.path == _FINISH]
    bare = all(delta == {} for delta in deltas) and all(end is None for end in ends)
    return bool(deltas) and bare and all(one.path != (_PROMPT,) for one in ours)


def capture_framing(
    asked: CaptureRequest, connection: UpstreamConnection, chunked: bool, limit: int = LIMIT
) -> Framing | None:
    """The framing that cleans an answer; None if it passes unchanged. `chunked`: the client gets it in chunks; `limit`:
    the most bytes that are held back."""
    if connection.status >= 300 or connection.encoding not in IDENTITY:
        return None
    if connection.events and not connection.length_known:
        return StreamFraming(CaptureCleaner(asked), chunked, limit)
    told = connection.events or _is_json(connection.headers)
    lines = any(name in connection.content_type for name in _LINE_TYPES)
    if not told and (lines or begins_json(connection.pieces) is False):
        return None
    return BufferedFraming(CaptureCleaner(asked), chunked, limit, connection.events, told)


def _is_json(headers: list[tuple[bytes, bytes]]) -> bool:
    types = [value for name, value in headers if name.lower() == b"content-type"]
    return len(types) == 1 and types[0].partition(b";")[0].strip().lower() == b"application/json"
