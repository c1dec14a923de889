"""The rules by which a call (`proxy.call`) asks another upstream instead of one that has begun to answer. Pure.

Until a call's client has a byte of its answer, another upstream of its route can still serve it. So an answer that says
that this upstream cannot serve the call now is not passed on while another upstream is left, and neither is the
beginning of a stream before its first content: a model that accepts a call and then says nothing is as good as one that
does not answer. A repeated request must do no harm, so only calls that generate or read are repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final, Literal, NamedTuple, cast

from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.base import EVENT_STREAM, Dialect
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

RETRY_DELAY_S: Final = 0.1
"""Seconds after a fault until the same upstream is asked once more: most faults are over by then, and it has the
prompt's beginning in its cache."""
MAX_RETRY_AFTER_S: Final = 3.0
"""Seconds of `Retry-After` that a call waits at most while another upstream is left."""
_PASSING: Final = frozenset({500, 502, 503})
"""Statuses of faults that may be over in a moment."""
_NEVER: Final = frozenset({501, 505})
"""Statuses that another upstream would give, too."""
_READS: Final = frozenset({"GET", "HEAD"})
_PREAMBLES: Final = frozenset({
    "message_start", "content_block_start", "ping", "response.created", "response.queued", "response.in_progress",
    "response.output_item.added", "response.content_part.added",
})  # fmt: skip
"""Types of events that come before the first content (Anthropic's messages, OpenAI's responses)."""
_OF_UPSTREAMS: Final = (None, "server_error", "rate_limit_exceeded", "vector_store_timeout")
"""Error codes of failed responses after which another upstream may succeed; all others are the request's own fault."""
_TOO_LONG: Final = re.compile(
    rb"context_length_exceeded|context (?:length|window)|prompt is too long|input is too long|"
    rb"exceeds the maximum number of tokens",
    re.IGNORECASE,
)

LONGEST_REFUSAL: Final = 1 << 20
"""Most bytes of a refusal that are held."""
_LONGEST_ANSWER: Final = 64 << 20
"""Most bytes of an answer that are held."""
ContentKind = Literal["nothing", "an error", "something"]


def may_repeat(method: str, dialect: Dialect) -> bool:
    """True if a call may be served twice, because it creates nothing that stays."""
    return (dialect.uses_tokens and not dialect.creates) or method in _READS


def is_down(status: int) -> bool:
    """True if the status says that this upstream cannot serve the call now, while another one may."""
    return status in (408, 429) or (status >= 500 and status not in _NEVER)


def retry_delay_s(status: int, asked_s: float | None) -> float | None:
    """Seconds after which the upstream with this answer is asked once more; None if another upstream is asked at once.
    `asked_s`: seconds of its `Retry-After`."""
    if asked_s is not None:
        return max(asked_s, RETRY_DELAY_S) if asked_s <= MAX_RETRY_AFTER_S else None
    return RETRY_DELAY_S if status in _PASSING else None


def is_too_long(body: bytes) -> bool:
    """True if a refusal says that the prompt does not fit into the model's context."""
    return _TOO_LONG.search(body) is not None


class FirstContentDetector:
    """The beginning of an answer, read by read, until its first content. Every byte is looked at once."""

    __slots__ = ("_first", "_line", "_opaque")

    def __init__(self, content_type: bytes, encoded: bool = False) -> None:
        """Content that is `encoded` is not looked into. Nor is an answer that is no stream of events; its first bytes
        tell if its content type does not."""
        self._opaque = encoded
        self._first: bytes | None = None if encoded or content_type.startswith(EVENT_STREAM) else b""
        """The first bytes, until they tell."""
        self._line: list[bytes] = []
        """Pieces of a line that has not ended yet."""

    @property
    def format_known(self) -> bool:
        """True once it is known whether the answer is a stream of events."""
        return self._first is None

    def classify(self, payload: Sequence[bytes]) -> ContentKind:
        """Classify one more read. In a stream of events, comments and the events before the first content are
        "nothing"."""
        if self._first is not None:
            payload = [b"".join([self._first, *payload])]
            told = begins_event_stream(payload[0])
            self._first = payload[0] if told is None else None
            if told is None:
                return "nothing"
            self._opaque = not told
        if self._opaque:
            return "something" if any(payload) else "nothing"
        for piece in payload:
            end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
            if not end:
                self._line.append(piece)
                continue
            lines, self._line = b"".join([*self._line, piece[:end]]).splitlines(), [piece[end:]]
            for line in lines:
                if (found := _line_says(line)) != "nothing":
                    return found
        return "nothing"


class AnswerWatch:
    """Watches an answer for its first content. It holds the answer while another upstream may still give a better
    one."""

    __slots__ = ("_looked", "detector", "head", "pieces", "sent_at", "size", "spoke_at")

    def __init__(self, connection: UpstreamConnection, sent_at: float) -> None:
        """`sent_at`: when the request was written; monotonic seconds."""
        self.sent_at = sent_at
        self.detector: FirstContentDetector | None = FirstContentDetector(
            connection.content_type, bool(connection.encoding)
        )
        """The beginning of the answer until the first content; None after it."""
        self.spoke_at: float | None = None
        """When the first content came; monotonic seconds."""
        self.head = b""
        self.pieces: list[bytes] | None = None
        """The reads of an answer that is held; None if it is passed on."""
        self.size = 0
        """Bytes of the held body."""
        self._looked = 0

    def hold(self, raw: bytes) -> None:
        """Hold one more read of the answer."""
        if self.pieces is None:
            self.pieces = []
        self.pieces.append(raw)
        self.size += len(raw)

    def release(self) -> bytes:
        """Hold the answer no longer. Returns the body bytes so far."""
        held, self.pieces = self.pieces or [], None
        return b"".join(held)

    def classify(self, pieces: Sequence[bytes], passed_on: bool = False) -> ContentKind:
        """Classify the payload of the answer that was not looked at yet. `passed_on`: the next read begins a new list
        of pieces."""
        if self.detector is None:
            found: ContentKind = "something"
        else:
            found = self.detector.classify(pieces[self._looked :])
            self.detector = self.detector if found == "nothing" else None
            self.spoke_at = monotonic() if found == "something" else None
        self._looked = 0 if passed_on else len(pieces)
        return found

    def waits_for_more(self, has_spare: bool, whole: bool) -> bool:
        """True if the held answer may still be dropped. `whole`: it is held until it is complete."""
        if self.size >= _LONGEST_ANSWER:
            return False
        if has_spare:
            return self.detector is not None or whole
        return self.detector is not None and not self.detector.format_known


class UpstreamRefusal(NamedTuple):
    """A complete refusal of an upstream, passed on if no upstream gives a better answer."""

    pool: ConnectionPool
    body: bytes
    sent: bytes
    """The head that it was sent with."""
    connection: UpstreamConnection
    """A copy, with the state of that moment."""
    head: bytes
    raw: bytes


class Tries:
    """The requests of one call to upstreams that have not served it."""

    __slots__ = ("again", "refused", "repaired", "said")

    def __init__(self) -> None:
        self.said: list[dict[str, str | int]] = []
        """Upstream, time and reason of each, for the span."""
        self.refused: UpstreamRefusal | None = None
        """The last refusal that was not passed on."""
        self.again = False
        """True once an upstream that is down was asked a second time; there is no third."""
        self.repaired = False
        """True once an upstream was asked again after a repair."""


def _line_says(line: bytes) -> ContentKind:
    if not line.startswith(b"data:"):
        return "nothing"
    try:
        event = json.loads(line[5:])
    except (ValueError, RecursionError):
        return "something"  # such as `[DONE]`
    if not isinstance(event, dict):
        return "something"
    found = cast("Mapping[str, Any]", event)
    if _is_error(found):
        return "an error"
    return "nothing" if _is_preamble(found) else "something"


def _is_error(event: Mapping[str, Any]) -> bool:
    """True if the event ends the stream before its first content, for a reason that is not the request's fault."""
    error = event.get("error")
    if not error:
        return _is_failed_response(event)
    return not (isinstance(error, dict) and cast("Mapping[str, Any]", error).get("type") == "invalid_request_error")


def _is_failed_response(event: Mapping[str, Any]) -> bool:
    """The same for OpenAI's responses."""
    error: Any = event if event.get("type") == "error" else None
    if event.get("type") == "response.failed" and isinstance(event.get("response"), dict):
        error = cast("Mapping[str, Any]", event["response"]).get("error")
    return isinstance(error, dict) and cast("Mapping[str, Any]", error).get("code") in _OF_UPSTREAMS


def _is_preamble(event: Mapping[str, Any]) -> bool:
    kind = event.get("type")
    if isinstance(kind, str) and kind in _PREAMBLES:
        return True
    choices = event.get("choices")
    if event.get("object") != "chat.completion.chunk" or not isinstance(choices, list):
        return False
    return all(map(_is_empty, cast("list[Any]", choices)))


def _is_empty(choice: Any) -> bool:
    """True if a choice of a chunk has only its role."""
    if not isinstance(choice, dict):
        return False
    found = cast("Mapping[str, Any]", choice)
    delta = found.get("delta")
    if found.get("finish_reason") or not isinstance(delta, dict):
        return False
    return not any(value for name, value in cast("Mapping[str, Any]", delta).items() if name != "role")
