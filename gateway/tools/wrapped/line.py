"""Joins the frames of one direction to lines."""

from __future__ import annotations

from typing import NamedTuple

from penstock.gateway.model.stdio_frames import TAIL, StdioFrame
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, messages
from penstock.gateway.wire.dialects.mcp_truncation import read_truncated_message


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
