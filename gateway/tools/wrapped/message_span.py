"""A message that passed a wrapper, as a span."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.gateway.model import trace
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.message_records import SENDER, with_session_attributes
from penstock.gateway.tools.wrapped.line import WrapperLine
from penstock.gateway.wire.dialects.loose_json import loads, obj
from penstock.gateway.wire.dialects.mcp import CALL, PREFIX, JsonRpcMessage, outcome, request_facts
from penstock.gateway.wire.dialects.mcp_dialect import McpDialect

if TYPE_CHECKING:
    from penstock.gateway.model.base import Origin

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
        if self.by_client and (found := trace.parse(about.traceparent or "")) is not None:
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
