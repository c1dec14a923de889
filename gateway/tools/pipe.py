"""MCP servers on stdin and stdout with a wrapper in front of them (`penstock mcp wrap`, `sidecar.stdio`): frames of a
session become lines, its lines messages, its messages spans.

The wrapper sends the lines that have passed, as frames (`model.stdio_frames`), below the address of its rollout, and
repeats those that it does not know to be on the tape. A request of either side is kept until its answer passes, as in
every session of a server (`tools.sessions`). Its span is written when it has ended. Until then the wrapper keeps its
bytes, and sends them again to a restarted gateway (`restore`). Spans and the session's progress are written in one
transaction: so a frame that comes twice makes no second span, whichever process was killed meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.gateway.model import span
from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.model.stdio_frames import CLIENT, END, GAP, SERVER, TAIL, StdioFrame
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.tools.definitions import LISTS
from penstock.gateway.tools.sessions import SENDER, McpSession, with_session_attributes
from penstock.gateway.wire.dialects.loose_json import arr, loads, obj
from penstock.gateway.wire.dialects.mcp import (
    CALL,
    PREFIX,
    JsonRpcMessage,
    McpDialect,
    cancelled_request_id,
    messages,
    outcome,
    read_truncated_message,
    request_facts,
)
from penstock.gateway.work.operations import QueueOperations

if TYPE_CHECKING:
    from penstock.gateway.model.base import Origin

# Joins the frames of one direction to lines.


class WrapperLine(NamedTuple):
    """A line that has passed."""

    raw: bytes
    """The bytes that are kept, with its end if it is whole."""
    size: int
    """Bytes that passed."""
    tail: bytes
    """Its last bytes, if it is not kept whole."""
    begun_ns: int
    ended_ns: int
    sequences: tuple[int, ...]
    """Sequence numbers of its frames."""

    @property
    def cut(self) -> bool:
        """True if a part of it is missing."""
        return self.size > len(self.raw)

    def messages(self) -> list[JsonRpcMessage]:
        """Its messages; none for an empty line."""
        if self.cut:
            return [read_truncated_message(self.raw, self.tail)]
        said = self.raw.strip()
        return messages(said) if said else []


class LineAssembler:
    """Joins frames to lines, and keeps each up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._forget()

    def _forget(self) -> None:
        self._pieces: list[bytes] = []
        self._kept = self._size = self._begun_ns = 0
        self._tail = b""
        self.sequences: tuple[int, ...] = ()
        """Sequence numbers of the frames of the incomplete line."""

    def add(self, frame: StdioFrame) -> WrapperLine | None:
        """Adds a frame, and returns the line that ends with it, if any."""
        self._begun_ns = self._begun_ns or frame.time_ns
        self.sequences += (frame.sequence,)
        if frame.size == len(frame.data):
            room = self._limit - self._kept
            if len(frame.data) > room:
                self._tail = (self._tail + frame.data[room:])[-TAIL:]
            self._keep(frame.data[:room])
        else:
            # The wrapper has left out a part of the line: this data is its end.
            self._tail = frame.data[-TAIL:]
        self._size += frame.size
        return self.end(frame.time_ns) if frame.last else None

    def _keep(self, data: bytes) -> None:
        self._pieces.append(data)
        self._kept += len(data)

    def end(self, time_ns: int, broken: bool = False) -> WrapperLine | None:
        """Returns the line as far as it has come; None if no frame has. `broken`: its end will never come."""
        if not self.sequences:
            return None
        raw = b"".join(self._pieces)
        line = WrapperLine(raw, self._size + broken, self._tail, self._begun_ns, time_ns, self.sequences)
        self._forget()
        return line


# The progress of a session on the tape, from which a gateway continues after a restart.


class OpenRequest(msgspec.Struct, array_like=True):
    """A request without its answer. The wrapper keeps its bytes and sends them again."""

    sequences: list[int]
    """Sequence numbers of the frames of its line."""
    index: int
    """Its place in that line."""
    parent: str | None = None
    gap: bool = False
    """True if lines were lost since."""


class SessionProgress(msgspec.Struct, array_like=True):
    """The progress of one session."""

    done: int = 0
    """Frames up to this number are on the tape, or of open requests or lines."""
    over: bool = False
    protocol: str | None = None
    owed: list[OpenRequest] = []
    begun: list[list[int]] = []
    """Frames of incomplete lines, for each direction."""

    def open_frames(self) -> list[int]:
        """The frames that the wrapper must keep, in order."""
        found = {number for one in self.owed for number in one.sequences}
        return sorted(found.union(*self.begun))


def session_key(rollout: str, attempt: str, session: str) -> str:
    """The name of a session's note on the tape. It includes the rollout, so that no other rollout can write it."""
    return f"wrapped {rollout}/{attempt}/{session}"


_decode = msgspec.json.Decoder(SessionProgress).decode


def decode_progress(note: bytes | None) -> SessionProgress:
    """Decodes a session's note; a new session has none."""
    return SessionProgress() if note is None else _decode(note)


def encode_progress(saved: SessionProgress) -> bytes:
    """Encodes the note of a session."""
    return msgspec.json.encode(saved)


# Writes the frames of a wrapper within a write transaction.


def keep(transaction: Transaction, entries: Sequence[SpanEntry], name: str, saved: bytes, now: int) -> None:
    """Writes spans and, under a name, the progress of their session: both or nothing."""
    for entry in entries:
        entry.sequence = 0
        # The wrapper's clock may be that of another machine.
        transaction.record(entry, seen_ns=min(now, max(entry.start_ns, entry.end_ns or 0)))
    QueueOperations(transaction).note(name, saved)


# A message that passed a wrapper, as a span.


TRANSPORT = {"network.transport": "pipe"}


@dataclass(frozen=True, slots=True)
class WrapperSession:
    """The session that messages belong to."""

    rollout: str
    attempt: str
    origin: Origin
    session: str
    server: str


class MessageSpan:
    """A message, such as a request or a notification, on its way to the tape."""

    def __init__(
        self, sent: JsonRpcMessage, line: WrapperLine, index: int, by_client: bool, source: WrapperSession
    ) -> None:
        """`index`: the message's place in the line."""
        self.sent, self.line, self.index, self.by_client = sent, line, index, by_client
        self.span_id = _span_id(f"{source.session} {line.sequences[-1]} {index}")
        self.parent: str | None = None
        self.gap = False
        """True if lines were lost since."""
        self.status: str = "ok"
        self.error: str | None = None
        self.end_ns = line.ended_ns
        self.answer: JsonRpcMessage | None = None
        self.answer_line: WrapperLine | None = None
        self._source = source
        self._token: Any = None

    @property
    def progress_token(self) -> Any:
        """The token of the request's progress reports; None if it wants none."""
        if self._token is None:
            params = obj(obj(loads(self.sent.raw)).get("params"))
            self._token = (obj(params.get("_meta")).get("progressToken"),)
        return self._token[0]

    def entry(self, protocol: str | None, secrets: Secrets) -> SpanEntry:
        """The span. `protocol`: the version that the session has agreed on."""
        secrets = secrets.for_call()
        source, sent, about = self._source, self.sent, request_facts(self.sent)
        entry = SpanEntry(source.rollout, source.attempt, source.origin)
        entry.dialect, entry.method, entry.path, entry.upstream = (
            McpDialect.name,
            "",
            PREFIX + source.server,
            source.server,
        )
        tool = self.by_client and sent.kind == "request" and sent.method == CALL
        entry.kind = "tool" if tool else "mcp"
        named = sent.method or ("answer" if sent.kind == "answer" else "unreadable")
        entry.name = secrets.text(" ".join(filter(None, (named, about.target))))
        said = about.attributes if sent.method else {}
        more = TRANSPORT if self.by_client else TRANSPORT | {SENDER: "server"}
        entry.attributes = with_session_attributes(said | more, source.session, about.protocol or protocol)
        entry.start_ns, entry.end_ns = self.line.begun_ns, max(self.end_ns, self.line.begun_ns)
        entry.span_id, entry.parent_id = self.span_id, self.parent
        if self.by_client and (found := span.parse(about.traceparent or "")) is not None:
            entry.trace_id, entry.parent_id = found
        entry.status, entry.error = self.status, self.error
        entry.request_bytes, entry.truncated = self._size(sent, self.line), self.line.cut
        self._close(entry)
        response = b"" if self.answer is None else secrets.hide(self.answer.raw)
        entry.body = StoredBody("", b"", secrets.hide(sent.raw), b"", response, b"", [])
        if secrets:
            entry.attributes = {**secrets.json(entry.attributes or {}), **secrets.span_attributes}
            entry.error = None if entry.error is None else secrets.text(entry.error)
        return entry

    def _close(self, entry: SpanEntry) -> None:
        answer, line = self.answer, self.answer_line
        if answer is None or line is None:
            return
        failed, entry.finish, attributes = outcome(answer.raw)
        if failed is not None:
            entry.status, entry.error = "error", failed
        entry.attributes = {**(entry.attributes or {}), **attributes}
        entry.first_byte_ns = max(0, line.begun_ns - entry.start_ns)
        entry.response_bytes = self._size(answer, line)
        entry.truncated = entry.truncated or line.cut

    @staticmethod
    def _size(sent: JsonRpcMessage, line: WrapperLine) -> int:
        return line.size if line.cut else len(sent.raw)


def _span_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


ENDS = {"client": ("cancelled", "client_gone"), "server": ("error", "ended_early")}
"""Status and error of requests without an answer, by the side that has ended the session."""
KILLED = ("interrupted", "wrapper_died")
UNANSWERED = ("error", "unanswered")
GAP_NAME = "recording_gap"
_PROGRESS = "notifications/progress"
_NEAR = 1000
"""Most requests, the newest, that are searched for the one of a progress report: with more, a server that reports a lot
would keep the gateway busy."""


class _PipeRequest:
    """A request in its session. When its answer passes, the pipe knows in which line."""

    def __init__(self, pipe: Pipe, passing: MessageSpan) -> None:
        self._pipe, self.passing = pipe, passing

    @property
    def weight(self) -> int:
        return len(self.passing.sent.raw)

    def answered(self, answer: bytes, now: float) -> None:
        self._pipe.settle(self.passing, answer)

    def given_up(self) -> None:
        self._pipe.settle(self.passing, None)


class Pipe:
    """A session with its open requests."""

    def __init__(self, source: WrapperSession, saved: SessionProgress, limit: int) -> None:
        """`saved`: the session's progress on the tape; `limit`: bytes of a line that are kept."""
        self.source = source
        self.secrets = NO_SECRETS
        """Values that no span may hold."""
        self.done, self.over, self._protocol = saved.done, saved.over, saved.protocol
        self._session = McpSession(source.rollout)
        self._lines = {kind: LineAssembler(limit) for kind in (CLIENT, SERVER)}
        self._waiting: dict[str, MessageSpan] = {}
        """Requests without their answers, by span id."""
        self._asked: dict[str, MessageSpan] = {}
        """Those of `_waiting` that the client has sent."""
        self._owed = {(one.sequences[-1], one.index): one for one in saved.owed}
        self._needed = set(saved.open_frames())
        """Frames of open requests whose bytes are not in memory."""
        self._entries: list[SpanEntry] = []
        self.listed: list[tuple[JsonRpcMessage, bytes]] = []
        """Requests for lists with their answers. The reader empties it."""
        self._line: WrapperLine | None = None
        """The line that is being read."""
        self._why: tuple[str, str] = UNANSWERED

    # -- progress on the tape ----------------------------------------------------------------------------------------

    def progress(self) -> SessionProgress:
        """The session's progress, for the tape."""
        owed = [OpenRequest(list(one.line.sequences), one.index, one.parent, one.gap) for one in self._waiting.values()]
        begun = [list(line.sequences) for line in self._lines.values() if line.sequences]
        return SessionProgress(self.done, self.over, self._protocol, owed, begun)

    @property
    def need(self) -> list[int]:
        """Frames that must come again before the session can go on."""
        return sorted(self._needed)

    def restore(self, some: Iterable[StdioFrame], lost: Iterable[int]) -> None:
        """Takes repeated frames of open requests, in their order. `lost`: frames that the wrapper no longer has."""
        for frame in some:
            if frame.sequence in self._needed and frame.kind in self._lines:
                self._needed.discard(frame.sequence)
                line = self._lines[frame.kind].add(frame)
                if line is not None:
                    self._restore_line(line, frame.kind == CLIENT)
        self._needed.difference_update(lost)

    def _restore_line(self, line: WrapperLine, by_client: bool) -> None:
        for index, sent in enumerate(line.messages()):
            owed = self._owed.pop((line.sequences[-1], index), None)
            if owed is not None:
                passing = MessageSpan(sent, line, index, by_client, self.source)
                passing.parent, passing.gap = owed.parent, owed.gap
                self._wait(passing)

    # -- new frames --------------------------------------------------------------------------------------------------

    def take(self, some: Iterable[StdioFrame]) -> list[SpanEntry]:
        """Reads new frames, and returns the spans that end by them."""
        self._entries = []
        for frame in some:
            if frame.sequence <= self.done or self.over:
                continue
            self.done = frame.sequence
            if frame.kind == GAP:
                self._gap(frame)
            elif frame.kind == END:
                self._end(frame)
            elif (line := self._lines[frame.kind].add(frame)) is not None:
                self._read(line, frame.kind == CLIENT)
        return self._entries

    def _read(self, line: WrapperLine, by_client: bool) -> None:
        self._line = line
        for index, sent in enumerate(line.messages()):
            passing = MessageSpan(sent, line, index, by_client, self.source)
            if sent.kind == "request":
                passing.parent = None if by_client else self._asked_within()
                self._wait(passing)
            elif sent.kind == "answer":
                self._answered(passing)
            else:
                passing.parent = None if by_client else self._about(sent)
                if sent.kind == "unreadable":
                    passing.status, passing.error = "error", "unreadable"
                self._put(passing)
                self._withdraw(sent, by_client)

    def _wait(self, passing: MessageSpan) -> None:
        ask = self._session.keep_client_request if passing.by_client else self._session.keep_server_request
        # This gives up an open request of the same id.
        ask(passing.sent.id, _PipeRequest(self, passing))
        self._waiting[passing.span_id] = passing
        if passing.by_client:
            self._asked[passing.span_id] = passing

    def _answered(self, passing: MessageSpan) -> None:
        settle = self._session.settle_server_request if passing.by_client else self._session.settle_client_request
        if not settle(passing.sent.id, passing.sent.raw):
            # No request is open for it, or it was cancelled.
            self._put(passing)

    def _withdraw(self, sent: JsonRpcMessage, by_client: bool) -> None:
        unwanted = cancelled_request_id(sent)
        kept = None if unwanted is None else self._session.withdraw(unwanted, by_client)
        if isinstance(kept, _PipeRequest):
            self._why = ("cancelled", "client_cancelled" if by_client else "server_cancelled")
            kept.given_up()
            self._why = UNANSWERED

    def settle(self, passing: MessageSpan, answer: bytes | None) -> None:
        """Ends a request with its answer; None without one."""
        line = self._line
        _ = self._asked.pop(passing.span_id, None)
        if self._waiting.pop(passing.span_id, None) is None or line is None:
            return
        passing.end_ns = line.ended_ns
        if answer is None:
            passing.status, passing.error = self._why
            if passing.gap and self._why[0] == "error":
                passing.error = GAP_NAME
        else:
            passing.answer, passing.answer_line = JsonRpcMessage("answer", passing.sent.id, "", answer), line
            if passing.sent.method == "initialize":
                self._protocol = outcome(answer)[2].get("mcp.protocol.version") or self._protocol
            if passing.by_client and passing.sent.method in LISTS and not line.cut:
                self.listed.append((passing.sent, answer))
        self._put(passing)

    def _put(self, passing: MessageSpan) -> None:
        self._entries.append(passing.entry(self._protocol, self.secrets))

    # -- parents of the server's messages ----------------------------------------------------------------------------

    def _asked_within(self) -> str | None:
        """The client's request within which a server's request comes: the only open one, else None."""
        return next(iter(self._asked)) if len(self._asked) == 1 else None

    def _about(self, sent: JsonRpcMessage) -> str | None:
        """The request whose progress a server reports; for any other message, `_asked_within`."""
        if sent.method != _PROGRESS:
            return self._asked_within()
        token = obj(obj(loads(sent.raw)).get("params")).get("progressToken")
        asked = islice(reversed(self._asked.values()), _NEAR)
        return next((one.span_id for one in asked if token is not None and one.progress_token == token), None)

    # -- gaps and the end of a session -------------------------------------------------------------------------------

    def _gap(self, frame: StdioFrame) -> None:
        said = obj(loads(frame.data))
        cut = arr(said.get("cut"))
        for name, kind in (("client", CLIENT), ("server", SERVER)):
            if name in cut:
                self._break(kind, frame)
        for passing in self._waiting.values():
            passing.gap = True
        since = said.get("since_ns")
        entry = self._event(GAP_NAME, "event", frame, {"lines": said.get("lines"), "bytes": frame.size})
        entry.start_ns = since if isinstance(since, int) and 0 < since <= frame.time_ns else frame.time_ns
        self._entries.append(entry)

    def _break(self, kind: int, frame: StdioFrame) -> None:
        """Ends a line whose end will never come."""
        line = self._lines[kind].end(frame.time_ns, broken=True)
        if line is not None:
            self._read(line, kind == CLIENT)

    def _end(self, frame: StdioFrame) -> None:
        said = obj(loads(frame.data))
        by = said.get("by")
        self.over, self._why = True, ENDS.get(by if isinstance(by, str) else "", KILLED)
        for kind in self._lines:
            self._break(kind, frame)
        self._line = WrapperLine(b"", 0, b"", frame.time_ns, frame.time_ns, (frame.sequence,))
        self._session.give_up(float("inf"))
        entry = self._event("end session", "mcp", frame, {"process.exit.code": said.get("exit_code")})
        if self._why == KILLED:
            entry.status, entry.error = KILLED
        entry.attributes = {**(entry.attributes or {}), **TRANSPORT, "mcp.session.id": self.source.session}
        entry.body = StoredBody("", b"", b"", b"", b"", b"", [])
        self._entries.append(entry)

    def _event(self, name: str, kind: str, frame: StdioFrame, said: dict[str, Any]) -> SpanEntry:
        source = self.source
        entry = SpanEntry(source.rollout, source.attempt, source.origin, kind=kind, name=name, method="", status="ok")
        entry.start_ns = entry.end_ns = frame.time_ns
        entry.dialect, entry.path, entry.upstream = "mcp", f"/mcp/{source.server}", source.server
        entry.attributes = {name: value for name, value in said.items() if isinstance(value, int)}
        return entry
