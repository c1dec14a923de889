"""The answer to one of the gateway's own requests, read by read, and its span. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.model.known_secrets import BodyContext
from penstock.gateway.model.turn import Turn
from penstock.gateway.reading.turns import decode_body
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.calls.answer_masking import (
    mask_recorded_body,
    masked_facts,
    rescaled,
    unencoded,
    without_tokens,
)
from penstock.gateway.traffic.trials.replay.outbound_requests import OutboundRequest
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.redaction import url as redact_url

LARGEST: Final = 64 << 20
"""Largest answer in bytes; a larger one is given up."""
_TOLD: Final = 300
"""Characters of an error that are kept: some servers repeat the whole request in theirs, and the audit keeps them."""


class ReplyTooLarge(Exception):
    """The answer is larger than `LARGEST` and is given up."""


@dataclass(slots=True)
class Reply:
    """An answer, as far as it came."""

    sent: list[tuple[bytes, bytes]]
    """The header lines of the request."""
    status: int | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    pieces: list[bytes] = field(default_factory=list[bytes])
    marks: list[int] = field(default_factory=list[int])
    size: int = 0
    error: str | None = None
    problem: str | None = None
    streaming_content_type: bytes = EVENT_STREAM
    """The media type of a stream in its dialect."""

    def receive(self, piece: bytes, seconds: float) -> None:
        """Add one read; raises `ReplyTooLarge`."""
        self.size += len(piece)
        if self.size > LARGEST:
            raise ReplyTooLarge
        self.pieces.append(piece)
        self.marks += (int(seconds * 1e6), len(piece))

    @property
    def body(self) -> bytes:
        """All bytes of the body so far."""
        return b"".join(self.pieces)

    @property
    def stream(self) -> bool:
        """True if it is a stream of events."""
        return self.header(b"content-type").lower().startswith(self.streaming_content_type.decode())

    def header(self, name: bytes) -> str:
        """Return the values of a header, separated by commas."""
        return ",".join(value.decode("latin-1") for key, value in self.headers if key.lower() == name)


def complete(
    question: OutboundRequest, reply: Reply, entry: SpanEntry, redactor: Redactor
) -> tuple[Turn | None, str | None]:
    """Complete the entry. Return (the exchange that was read, why it failed), of which one is None."""
    secrets = redactor.secrets(question.request.headers, question.path).for_call()
    encoding = reply.header(b"content-encoding")
    came = BodyContext(reply.header(b"content-type"), answer=True, cut=reply.error == "too_large")
    dialect, asked = question.dialect, secrets.hide(question.body)
    kept = mask_recorded_body(secrets, reply.body, encoding, about=came)
    stream = dialect.is_stream(reply.stream, question.body, question.path, kept.plain)
    if secrets.masked:
        asked, kept = secrets.without_tokens(asked, BodyContext()), without_tokens(secrets, kept, came)
        plain = decode_body(reply.body, encoding)[0] if encoding else reply.body
        facts = masked_facts(dialect, asked, kept.plain, stream, dialect.facts(question.body, plain, stream))
    else:
        facts = dialect.facts(asked, kept.plain, stream)
    turn = dialect.read(asked, kept.plain, stream)
    failed, problem = _failure(reply, turn, kept.plain, facts.failed)
    entry.status, entry.error = ("error", failed) if failed else ("ok", None)
    entry.http_status, entry.stream = reply.status, stream
    entry.model_served, entry.response_id, entry.finish = facts.model_served, facts.response_id, facts.finish
    entry.usage, entry.tool_calls, entry.choices = facts.usage, facts.tool_calls, facts.choices
    entry.first_byte_ns = reply.marks[0] * 1000 if reply.marks else None
    entry.response_bytes, entry.truncated = reply.size, reply.error == "too_large"
    headers = unencoded(reply.headers) if kept.decoded else reply.headers
    entry.body = StoredBody(
        secrets.text(redact_url(question.pool.url(question.path))),
        secrets.block(redactor.block(reply.sent)),
        asked,
        secrets.block(redactor.block(headers)),
        kept.body,
        b"",
        rescaled(reply.marks, len(kept.body)) if kept.decoded else reply.marks,
    )
    if secrets.span_attributes:
        entry.attributes = {**(entry.attributes or {}), **secrets.span_attributes}
    return (None, problem or kept.problem) if failed else (turn, None)


def _failure(reply: Reply, turn: Turn, response: bytes, why: str | None) -> tuple[str | None, str | None]:
    """Return (short reason, a sentence) when there is no answer to compare."""
    if reply.error is not None:
        return reply.error, reply.problem
    if reply.status is None or reply.status >= 400:
        said = turn.error or response[:_TOLD].decode("utf-8", "replace")
        return f"http_{reply.status}", f"HTTP {reply.status}: {' '.join(said[:_TOLD].split())}"
    if why is not None:
        return why, (turn.error or "; ".join(turn.problems))[:_TOLD]
    if not turn.choices:
        return "no_answer", "; ".join(turn.problems) or "it holds no answer"
    return None, None
