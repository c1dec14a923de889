"""Messages on a WebSocket, read while its frames pass (RFC 6455, RFC 7692). Sans-I/O: bytes in, messages out.

Frames pass as they came; `frame` makes the gateway's own. A `WebSocketReader` reads one direction. It tells the end of
the last frame of every message, so that a request can be held until it is whole. After the first frame that it cannot
read it sets its `problem` and reads no more. wsproto and websockets, which do the same without sockets, tell of no
message where its frames end, so a message could not be held and passed on as it came.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
_CONTINUATION, _CONTROL = 0, 8
_TAIL: Final = b"\x00\x00\xff\xff"
"""The bytes that a sender leaves out at the end of a compressed message (RFC 7692 §7.2.1)."""
_EXTENSION: Final = re.compile(rb"\s*permessage-deflate\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)
_FRAMES: Final = 1 << 16
"""Most frames from the beginning of a message to its end, including control frames: all are held with it."""
_MASKED: Final = 1 << 20
"""Bytes that are unmasked at a time: unmasking takes several times as much memory."""
GOING_AWAY: Final = 1001
UNREADABLE: Final = 1002
TOO_LARGE: Final = 1009
FAILED: Final = 1011
RESTART: Final = 1012


class WebSocketMessage(NamedTuple):
    kind: int
    """`TEXT`, `BINARY`, `CLOSE`, or the opcode of another control frame, which may come within a message."""
    body: bytes
    end: int
    """Bytes of the direction up to the message's end. For a control frame within a message: up to where that message
    begins."""


class DeflateParameters(NamedTuple):
    """The compression of one direction (permessage-deflate)."""

    no_context_takeover: bool
    """True if each message is compressed by itself."""


class WebSocketReader:
    """The messages of one direction."""

    __slots__ = ("_alone", "_begun", "_buffer", "_compressed", "_frames", "_inflater", "_kind", "_limit", "_read",
                 "_size", "problem", "whole")  # fmt: skip

    def __init__(self, limit: int, packing: DeflateParameters | None) -> None:
        """`limit`: most bytes of a message. `packing`: None for an uncompressed direction."""
        self.problem: str | None = None
        self.whole = 0
        """Bytes of the direction up to the last place at which no message was unfinished."""
        self._limit = limit
        self._inflater = None if packing is None else zlib.decompressobj(-zlib.MAX_WBITS)
        self._alone = packing is not None and packing.no_context_takeover
        self._buffer = bytearray()
        self._begun: list[bytes] = []
        self._size = self._read = self._kind = self._frames = 0
        self._compressed = False

    @property
    def between_frames(self) -> bool:
        """True if no frame is unfinished."""
        return not self._buffer

    @property
    def between_messages(self) -> bool:
        """True if neither a frame nor a message is unfinished."""
        return not self._buffer and not self._begun

    def feed(self, data: bytes) -> list[WebSocketMessage]:
        """Returns the messages that end within these bytes."""
        found = list[WebSocketMessage]()
        if self.problem is not None:
            return found
        self._buffer += data
        while (frame := self._frame()) is not None:
            message = self._take(*frame)
            if message is not None:
                found.append(message)
        return found

    def _frame(self) -> tuple[int, bytes] | None:
        """The first byte and the payload of the next whole frame."""
        buffer = self._buffer
        if self.problem is not None or len(buffer) < 2:
            return None
        length, at = buffer[1] & 127, 2
        if length > 125:
            at = 4 if length == 126 else 10
            if len(buffer) < at:
                return None
            length = int.from_bytes(buffer[2:at], "big")
        masked = buffer[1] & 128
        start = at + 4 if masked else at
        if length + self._size > self._limit:
            self.problem = f"a message is larger than {self._limit} bytes"
            return None
        if len(buffer) < start + length:
            return None
        first, payload = buffer[0], bytes(memoryview(buffer)[start : start + length])
        if masked:
            payload = _unmasked(payload, bytes(buffer[at:start]))
        del buffer[: start + length]
        self._read += start + length
        return first, payload

    def _take(self, first: int, payload: bytes) -> WebSocketMessage | None:
        kind, compressed = first & 15, bool(first & 64)
        self._frames = self._frames + 1 if self._begun else 0
        if self._frames > _FRAMES:
            self.problem = f"a message is larger than {_FRAMES} frames"
        elif first & 48 or (compressed and (self._inflater is None or kind not in (TEXT, BINARY))):
            self.problem = "a frame has bits of an extension that was not agreed on"
        elif kind >= _CONTROL:
            if not self._begun:
                self.whole = self._read
            return WebSocketMessage(kind, payload, self.whole if self._begun and kind != CLOSE else self._read)
        elif (kind == _CONTINUATION) != bool(self._begun) or kind > BINARY:
            self.problem = "a frame does not continue what came before"
        else:
            return self._add(kind, payload, compressed, bool(first & 128))
        return None

    def _add(self, kind: int, payload: bytes, compressed: bool, last: bool) -> WebSocketMessage | None:
        if not self._begun:
            self._kind, self._compressed = kind, compressed
        self._begun.append(payload)
        self._size += len(payload)
        if not last:
            return None
        body = self._begun[0] if len(self._begun) == 1 else b"".join(self._begun)
        self._begun, self._size, self.whole = [], 0, self._read
        if self._compressed:
            body = self._inflated(body)
        return None if self.problem is not None else WebSocketMessage(self._kind, body, self._read)

    def _inflated(self, body: bytes) -> bytes:
        inflater = self._inflater
        assert inflater is not None
        try:
            plain = inflater.decompress(body + _TAIL, self._limit + 1)
        except zlib.error as error:
            self.problem = f"a message cannot be inflated: {error}"
            return b""
        if len(plain) > self._limit:
            self.problem = f"a message is larger than {self._limit} bytes"
        if self._alone:
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        return plain


def _unmasked(payload: bytes, key: bytes) -> bytes:
    if len(payload) > _MASKED:
        # A multiple of the key's length, so each piece begins with its first byte.
        return b"".join(_unmasked(payload[at : at + _MASKED], key) for at in range(0, len(payload), _MASKED))
    size = len(payload)
    mask = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(mask, "little")).to_bytes(size, "little")


def supports_extensions(offers: Iterable[bytes]) -> bool:
    """True if this module can read every extension that a client offers (values of Sec-WebSocket-Extensions)."""
    return all(_EXTENSION.fullmatch(one) for offer in offers for one in offer.split(b",") if one.strip())


def negotiated_deflate(agreed: bytes) -> tuple[DeflateParameters | None, DeflateParameters | None]:
    """The compression of the client's and the server's messages, from the extensions that the server has agreed to."""
    if not agreed.strip():
        return None, None
    low = agreed.lower()
    return DeflateParameters(b"client_no_context_takeover" in low), DeflateParameters(
        b"server_no_context_takeover" in low
    )


def frame(kind: int, payload: bytes, masked: bool = False) -> bytes:
    """An uncompressed frame with a message or a control frame's payload; `masked` as clients must."""
    size, mask = len(payload), 128 if masked else 0
    if size < 126:
        length = bytes([size | mask])
    elif size < 1 << 16:
        length = bytes([126 | mask]) + size.to_bytes(2, "big")
    else:
        length = bytes([127 | mask]) + size.to_bytes(8, "big")
    # A mask of zeros hides nothing, and there is nothing to hide.
    return bytes([0x80 | kind]) + length + (bytes(4) if masked else b"") + payload


def close_frame(code: int, reason: str, masked: bool = False) -> bytes:
    """A frame that closes the WebSocket."""
    # ASCII, because a cut within a UTF-8 character would make the reason invalid.
    return frame(CLOSE, code.to_bytes(2, "big") + reason.encode("ascii", "replace")[:123], masked)
