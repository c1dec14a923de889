"""An answer -> the answer without the values that the gateway had asked for: a document, or a stream by its events.
Pure.

The added values become `null`: `token_ids`, `prompt_token_ids` and `logprobs` in a choice, `prompt_token_ids` above the
choices. vLLM writes null for values that were not asked for, and so does OpenAI's API for log-probabilities. When asked
for ids or log-probabilities, vLLM also streams tokens without text, such as the frame of a tool call, as events with an
empty `delta`. It does not do so otherwise, so these events are left out.

A part that cannot be parsed is not changed. In a stream only the event that is not complete yet is held back.
"""

from __future__ import annotations

from typing import Final, Protocol

from penstock.gateway.wire.capture.request import LOGPROBS, CaptureRequest
from penstock.gateway.wire.dialects.json_scan import LEAF, JsonRange, KeyTree, find, splice
from penstock.gateway.wire.dialects.loose_json import UNREADABLE
from penstock.gateway.wire.dialects.token_ids import IDS

_PROMPT, _CHOICES, _TOKENS = "prompt_token_ids", "choices", "token_ids"
_DELTA, _FINISH = (_CHOICES, "delta"), (_CHOICES, "finish_reason")
_BROUGHT: Final = {IDS: {(_PROMPT,), (_CHOICES, _PROMPT), (_CHOICES, _TOKENS)}, LOGPROBS: {(_CHOICES, LOGPROBS)}}
"""Paths to the values that a field of the request adds to the answer."""
_WATCHED: Final[KeyTree] = {
    _PROMPT: LEAF,
    _CHOICES: dict.fromkeys((_PROMPT, _TOKENS, LOGPROBS, "delta", "finish_reason"), LEAF),
}
_DATA: Final = b"data:"
_DATAS: Final = (_DATA, b"\xef\xbb\xbf" + _DATA)
"""Beginnings of data lines. Clients ignore a byte order mark before the first."""
_ENDS: Final = (b"\n", b"\r")


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


class EventStreamRewriter:
    """Cleans a stream of events. It takes pieces of any size and returns events as soon as they are complete."""

    def __init__(self, cleaner: AnswerRewriter, limit: int) -> None:
        """`limit`: most bytes of an event that is looked into. From a larger one on, the stream passes unchanged."""
        self._cleaner = cleaner
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
        """Return the rest of a stream that has ended, cleaned as if its event had ended."""
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
        made = self._cleaned(lines)
        self._dropped = not made
        return made

    def _cleaned(self, lines: list[bytes]) -> bytes:
        """An event's lines, with its data cleaned; without its data, or nothing at all, if that only brought tokens."""
        datas = [line for line in lines if line.startswith(_DATAS)]
        data = b"\n".join([line.partition(b":")[2].rstrip(b"\r\n") for line in datas])
        cleaned = self._cleaner.event(data) if datas else data
        if cleaned is data:
            return b"".join(lines)
        end = datas[0][len(datas[0].rstrip(b"\r\n")) :]
        written = [_DATA + line + end for line in cleaned.split(b"\n")] if cleaned else []
        at = lines.index(datas[0])
        kept = [*lines[:at], *written, *(line for line in lines[at:] if not line.startswith(_DATAS))]
        return b"".join(kept) if any(line.strip(b"\r\n") for line in kept) else b""
