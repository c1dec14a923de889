"""A message that passed a wrapper, as a span."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.gateway.dialects.loose_json import loads, obj
from penstock.gateway.dialects.mcp import CALL, PREFIX, Sent, asked, outcome
from penstock.gateway.dialects.mcp_dialect import Mcp
from penstock.gateway.mcp.recorded import SENDER, listed
from penstock.gateway.mcp.wrapped.line import Line
from penstock.gateway.model import trace
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.store.codec import Body
from penstock.gateway.store.records import Entry

if TYPE_CHECKING:
    from penstock.gateway.model.base import Origin

TRANSPORT = {"network.transport": "pipe"}


@dataclass(frozen=True, slots=True)
class Source:
    """The session that messages belong to."""

    rollout: str
    attempt: str
    origin: Origin
    session: str
    server: str


class Passing:
    """A message, such as a request or a notification, on its way to the tape."""

    def __init__(self, sent: Sent, line: Line, index: int, by_client: bool, source: Source) -> None:
        """`index`: the message's place in the line."""
        self.sent, self.line, self.index, self.by_client = sent, line, index, by_client
        self.span_id = _span_id(f"{source.session} {line.sequences[-1]} {index}")
        self.parent: str | None = None
        self.gap = False
        """True if lines were lost since."""
        self.status: str = "ok"
        self.error: str | None = None
        self.end_ns = line.ended_ns
        self.answer: Sent | None = None
        self.answered_in: Line | None = None
        self._source = source
        self._token: Any = None

    @property
    def progress_token(self) -> Any:
        """The token of the request's progress reports; None if it wants none."""
        if self._token is None:
            params = obj(obj(loads(self.sent.raw)).get("params"))
            self._token = (obj(params.get("_meta")).get("progressToken"),)
        return self._token[0]

    def entry(self, protocol: str | None, secrets: Secrets) -> Entry:
        """The span. `protocol`: the version that the session has agreed on."""
        secrets = secrets.noting()
        source, sent, about = self._source, self.sent, asked(self.sent)
        entry = Entry(source.rollout, source.attempt, source.origin)
        entry.dialect, entry.method, entry.path, entry.upstream = Mcp.name, "", PREFIX + source.server, source.server
        tool = self.by_client and sent.kind == "request" and sent.method == CALL
        entry.kind = "tool" if tool else "mcp"
        named = sent.method or ("answer" if sent.kind == "answer" else "unreadable")
        entry.name = secrets.text(" ".join(filter(None, (named, about.target))))
        said = about.attributes if sent.method else {}
        more = TRANSPORT if self.by_client else TRANSPORT | {SENDER: "server"}
        entry.attributes = listed(said | more, source.session, about.protocol or protocol)
        entry.start_ns, entry.end_ns = self.line.begun_ns, max(self.end_ns, self.line.begun_ns)
        entry.span_id, entry.parent_id = self.span_id, self.parent
        if self.by_client and (found := trace.parse(about.traceparent or "")) is not None:
            entry.trace_id, entry.parent_id = found
        entry.status, entry.error = self.status, self.error
        entry.request_bytes, entry.truncated = self._size(sent, self.line), self.line.cut
        self._close(entry)
        response = b"" if self.answer is None else secrets.hide(self.answer.raw)
        entry.body = Body("", b"", secrets.hide(sent.raw), b"", response, b"", [])
        if secrets:
            entry.attributes = {**secrets.json(entry.attributes or {}), **secrets.noted}
            entry.error = None if entry.error is None else secrets.text(entry.error)
        return entry

    def _close(self, entry: Entry) -> None:
        answer, line = self.answer, self.answered_in
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
    def _size(sent: Sent, line: Line) -> int:
        return line.size if line.cut else len(sent.raw)


def _span_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
