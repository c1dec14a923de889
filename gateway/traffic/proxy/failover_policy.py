"""Decides when another upstream is asked instead of one that has begun to answer. Pure.

Until a call's client has a byte of its answer, another upstream of its route can still serve it. So an answer that says
that this upstream cannot serve the call now is not passed on while another upstream is left, and neither is the
beginning of a stream before its first content: a model that accepts a call and then says nothing is as good as one that
does not answer. A repeated request must do no harm, so only calls that generate or read are repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from penstock.gateway.wire.dialects.base import EVENT_STREAM, Dialect
from penstock.gateway.wire.dialects.sse import begins_event_stream

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

ContentKind = Literal["nothing", "an error", "something"]


def may_repeat(method: str, dialect: Dialect) -> bool:
    """True if a call may be served twice, because it creates nothing that stays."""
    return dialect.generates or dialect.uses_tokens or method in _READS


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
