"""One session of a wrapper: its frames become lines, its lines messages, its messages spans.

A request of either side is kept until its answer passes, as in every session of a server (`tools.sessions`). Its span
is written when it has ended. Until then the wrapper keeps its bytes, and sends them again to a restarted gateway
(`restore`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from penstock.gateway.model.known_secrets import NO_SECRETS
from penstock.gateway.model.stdio_frames import CLIENT, END, GAP, SERVER, StdioFrame
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.definitions.list_answer import LISTS
from penstock.gateway.tools.sessions import McpSession
from penstock.gateway.tools.wrapped.line import LineAssembler, WrapperLine
from penstock.gateway.tools.wrapped.message_span import TRANSPORT, MessageSpan, WrapperSession
from penstock.gateway.tools.wrapped.session_progress import OpenRequest, SessionProgress
from penstock.gateway.wire.dialects.loose_json import arr, loads, obj
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, cancelled_request_id, outcome

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
