"""An answer -> the answer without the values that the gateway had asked for: a document, or a stream by its events.
Sans-I/O.

The added values become `null`: `token_ids`, `prompt_token_ids` and `logprobs` in a choice, `prompt_token_ids` above the
choices. vLLM writes null for values that were not asked for, and so does OpenAI's API for log-probabilities. When asked
for ids or log-probabilities, vLLM also streams tokens without text, such as the frame of a tool call, as events with an
empty `delta`. It does not do so otherwise, so these events are left out.

A part that cannot be parsed is not changed. In a stream only the event that is not complete yet is held back. Errors,
encoded answers and answers that are neither JSON nor events are not looked into.
"""

from __future__ import annotations

from typing import Final

from penstock.gateway.wire.capture.request import LOGPROBS, CaptureRequest
from penstock.gateway.wire.dialects.json_scan import LEAF, JsonRange, KeyTree, find, splice
from penstock.gateway.wire.dialects.loose_json import UNREADABLE
from penstock.gateway.wire.dialects.token_ids import IDS
from penstock.gateway.wire.http.headers import Fields
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import IDENTITY, LIMIT, BufferedFraming, Framing, StreamFraming, begins_json

_PROMPT, _CHOICES, _TOKENS = "prompt_token_ids", "choices", "token_ids"
_DELTA, _FINISH = (_CHOICES, "delta"), (_CHOICES, "finish_reason")
_BROUGHT: Final = {IDS: {(_PROMPT,), (_CHOICES, _PROMPT), (_CHOICES, _TOKENS)}, LOGPROBS: {(_CHOICES, LOGPROBS)}}
"""Paths to the values that a field of the request adds to the answer."""
_WATCHED: Final[KeyTree] = {
    _PROMPT: LEAF,
    _CHOICES: dict.fromkeys((_PROMPT, _TOKENS, LOGPROBS, "delta", "finish_reason"), LEAF),
}
_LINES: Final = (b"ndjson", b"jsonl", b"json-seq", b"stream+json")
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
            found = find(body, _WATCHED)
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
    lines = any(name in connection.content_type for name in _LINES)
    if not told and (lines or begins_json(connection.pieces) is False):
        return None
    return BufferedFraming(CaptureCleaner(asked), chunked, limit, connection.events, told)


def _is_json(headers: Fields) -> bool:
    types = [value for name, value in headers if name.lower() == b"content-type"]
    return len(types) == 1 and types[0].partition(b";")[0].strip().lower() == b"application/json"
