"""The events of a hosted agent's session that a running stream brings.

Such a stream may be open for hours. Every second in which something came, the recorder takes the events that are
complete (`tape.hosted_sessions`). Only events that the tape does not have yet are held here, so it does not matter how
long the stream is, and how much of it the span of the call keeps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final, Protocol, TypeAlias

from penstock.gateway.reading.turns import stream_decoder
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction

_log = logging.getLogger("penstock.recorder")
_INTERVAL_S: Final = 1.0
EventOperation: TypeAlias = Callable[[Transaction], None]
_BLANK: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


class StreamOwner(Protocol):
    """The call whose answer the stream is; its methods are called on the recorder's thread."""

    def hide_events(self, events: bytes) -> bytes:
        """Return the events with secrets replaced by asterisks."""
        ...

    def event_operation(self, stream: SessionStream, events: bytes, now: float) -> EventOperation | None:
        """The operation that writes what the events of a stream tell; None if they tell nothing. `now`: monotonic
        seconds. Sets the `session` of the stream if that is told."""
        ...


class SessionStream:
    """The events of one stream that are not on the tape. The loop adds bytes, the recorder's thread reads them."""

    __slots__ = (
        "_asked", "_at", "_call", "_came", "_decode", "_encoding", "_events", "_is_written", "_lost", "_most",
        "_operation", "_rest", "_taken", "_waiting", "_writing", "session",
    )  # fmt: skip
    weight = 0

    def __init__(self, call: StreamOwner, encoding: bytes | None) -> None:
        """`encoding`: the content encoding of the stream."""
        self._call, self._encoding = call, encoding
        self._decode: Callable[[bytes], bytes] | None = None
        self._waiting = deque[bytes]()
        self.session = ""
        """The id of the session, once that is told."""
        self._most = 0
        """Most bytes to hold."""
        self._came: int = 0
        self._taken: int = 0
        """Bytes that came, and those that the recorder's thread has taken."""
        self._asked: int = 0
        """Bytes that had come when it was last asked to."""
        self._at = 0.0
        """When it was last asked; monotonic seconds."""
        self._writing = self._is_written = self._lost = False
        self._events = self._rest = b""
        """Complete events that the tape may not have, without secrets; the beginning of the next one."""
        self._operation: QueuedOperation[None] | None = None

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def add(self, pieces: list[bytes], size: int, most: int) -> None:
        """Add the bytes of one read. If more than `most` wait, because the recorder stands still, later events are left
        to the next list."""
        self._most = most
        self._came += size
        self._lost = self._lost or self._came - self._taken > most
        if self._lost:
            self._waiting.clear()
        else:
            self._waiting += pieces

    def is_due(self) -> bool:
        """True if it is to be announced to the recorder now."""
        now = monotonic()
        if self._writing or self._lost or self._came == self._asked or now - self._at < _INTERVAL_S:
            return False
        self._writing, self._asked, self._at = True, self._came, now
        return True

    def on_recorded(self, kept: bool) -> None:
        """Called when its events are on the tape, or could not be written and are tried again."""
        operation, self._writing = self._operation, False
        self._is_written = kept or (operation is not None and bool(operation.failure))
        if not self._is_written:
            self._asked = -1

    # -- on the recorder's thread --------------------------------------------------------------------------------------

    def entry(self, final: bool) -> QueuedOperation[None] | None:
        """The operation that writes the events that came; None if they tell nothing."""
        self._operation, events = None, self.untaken()
        try:
            made = self._call.event_operation(self, events, self._at) if events else None
        except Exception:
            _log.exception("events of a running stream could not be read")
            made, self._events = None, b""
        if made is not None:
            self._operation = QueuedOperation(made)
        return self._operation

    def untaken(self) -> bytes:
        """The complete events that the tape may not have, without secrets."""
        if self._is_written:
            self._events, self._is_written = b"", False
        try:
            came = self._rest + b"".join(self._decoded())
        except Exception as error:
            _log.warning("a running stream of a session cannot be decoded (%s): its end is awaited", error)
            self._lost, came = True, b""
        end = max((at + len(blank) for blank in _BLANK if (at := came.rfind(blank)) >= 0), default=0)
        self._rest = came[end:]
        self._lost = self._lost or len(self._rest) > self._most
        if len(self._events) + end > self._most:
            self._events = b""  # the tape has failed for long: they are left to the next list
        if end:
            self._events += self._call.hide_events(came[:end])
        return self._events

    def _decoded(self) -> list[bytes]:
        found = list[bytes]()
        with suppress(IndexError):
            while True:
                piece = self._waiting.popleft()
                self._taken += len(piece)
                if self._encoding is not None:
                    self._decode = self._decode or stream_decoder(self._encoding.decode("latin-1"), piece)
                    piece = self._decode(piece)
                found.append(piece)
        return found
