"""The bytes of many calls in one answer. Pure.

Training reads every call of every rollout; asking for the two bodies of each costs more than the bodies. Here they come
one after the other: a length (4 bytes, big endian) and a MessagePack array of attempt, sequence, request and response.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

LENGTH = 4
LARGEST = (1 << 32) - 1
"""Bytes of one call's record at most: two bodies and their names."""


class Recorded(msgspec.Struct, array_like=True, frozen=True):
    """The bytes of one call."""

    attempt: str
    """Its attempt."""
    sequence: int
    """Its span's number in the attempt."""
    request: bytes
    """Request body as it went upstream, content encodings removed."""
    response: bytes
    """Response body as it was received, content encodings removed."""


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Recorded)


def pack(call: Recorded) -> bytes:
    """One record."""
    record = _encoder.encode(call)
    return len(record).to_bytes(LENGTH) + record


class Unpacker:
    """Finds the records in what arrives."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Recorded]:
        """The records that are complete with this."""
        self._rest += data
        start = 0
        while (body := start + LENGTH) <= len(self._rest):
            end = body + int.from_bytes(self._rest[start:body])
            if end > len(self._rest):
                break
            yield _decoder.decode(memoryview(self._rest)[body:end])
            start = end
        del self._rest[:start]
