"""Cuts the bytes of one direction into lines, and long lines into pieces. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.gateway.model.stdio_frames import TAIL

PIECE: Final = 256 << 10
"""Bytes of a line that are collected before they are written to disk."""
LINE_BYTES: Final = 64 << 20
"""The most bytes of a line that are kept, until the gateway reports its own limit (`limits.recorded_bytes`)."""


class LinePiece(NamedTuple):
    """A line, or a part of one."""

    data: bytes
    size: int
    """Bytes that it stands for; more than `data` has when a part is left out."""
    last: bool


class LineSplitter:
    """Cuts the bytes of one direction."""

    def __init__(self) -> None:
        self.limit = LINE_BYTES
        """The most bytes of a line that are kept."""
        self._rest = bytearray()
        self._kept = self._skipped = 0
        self._tail = b""

    def feed(self, data: bytes) -> list[LinePiece]:
        """Add bytes; return the pieces that are complete now. Together the pieces are all bytes that were fed, line
        ends included.
        """
        made: list[LinePiece] = []
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._add(made, data[start : end + 1], True)
            start = end + 1
        if start < len(data):
            self._rest += data[start:]
            if len(self._rest) >= PIECE:
                self._add(made, b"", False)
        return made

    def close(self) -> list[LinePiece]:
        """The last line, if it had no end."""
        made: list[LinePiece] = []
        if self._rest or self._kept or self._skipped:
            self._add(made, b"", True)
        return made

    def _add(self, made: list[LinePiece], data: bytes, last: bool) -> None:
        if self._rest:
            data = bytes(self._rest + data)
            self._rest.clear()
        room = self.limit - self._kept
        if len(data) <= room and not self._skipped:
            self._kept += len(data)
            made.append(LinePiece(data, len(data), last))
        else:
            self._cut(made, data, max(0, room), last)
        if last:
            self._kept = self._skipped = 0
            self._tail = b""

    def _cut(self, made: list[LinePiece], data: bytes, room: int, last: bool) -> None:
        """Keep the beginning of a line that is too long, and its last bytes."""
        kept, dropped = (data[:room], data[room:]) if not self._skipped else (b"", data)
        if kept:
            made.append(LinePiece(kept, len(kept), False))
            self._kept += len(kept)
        self._skipped += len(dropped)
        self._tail = (self._tail + dropped)[-TAIL:]
        if last:
            # At least one byte fewer than were left out, to show that some were.
            tail = self._tail if len(self._tail) < self._skipped else self._tail[1:]
            made.append(LinePiece(tail, self._skipped, True))
