"""The chunks of HTTP/1.1 (RFC 9112, 7.1): a body that is sent before its length is known. Sans-I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LAST_CHUNK: Final = b"0\r\n\r\n"
"""The end of a body without trailers."""


def chunk(piece: bytes) -> bytes:
    """A piece of a body; nothing for an empty piece, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


def last_chunk(trailers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The end of a body."""
    return b"0\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % field for field in trailers])


class ChunkedBodyParser:
    """Finds the payload in a chunked body that comes in reads."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the chunk that have not come yet."""
        self._line = b""
        self.over = False
        """True once only trailers can follow."""

    def payload(self, raw: bytes) -> list[tuple[int, int]]:
        """(start, end) of the payload's parts in a read."""
        places: list[tuple[int, int]] = []
        at = 0
        while at < len(raw) and not self.over:
            if self._left:
                end = min(at + self._left, len(raw))
                places.append((at, end))
                self._left -= end - at
            else:
                end = raw.find(b"\n", at) + 1 or len(raw)
                self._size(raw[at:end])
            at = end
        return places

    def _size(self, part: bytes) -> None:
        """Read the size in a chunk's head line; an empty line ends the chunk before."""
        self._line += part
        if self._line.endswith(b"\n"):
            line, self._line = self._line.partition(b";")[0].strip(), b""
            if line:
                self._left = int(line, 16)
                self.over = not self._left
