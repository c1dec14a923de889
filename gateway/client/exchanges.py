"""The bytes of many calls in one answer. Pure.

Training reads every call of every rollout; asking for the two bodies of each costs more than the bodies. Here they come
one after the other: a length (4 bytes, big endian) and a MessagePack array of attempt, sequence, request and response.
Where whole rollouts are read, each record is a `Part`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import msgspec

from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.span import Span

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


class RolloutPart(msgspec.Struct, array_like=True, frozen=True, tag="rollout"):
    """A rollout begins; all until the next of these is of it."""

    rollout: bytes
    """JSON of `RolloutSummary`."""


class SpanPart(msgspec.Struct, array_like=True, frozen=True, tag="span"):
    """One of its spans."""

    span: bytes
    """JSON of `Span`."""


class CallPart(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    """The bytes of one of its calls."""

    call: Recorded


Part: TypeAlias = RolloutPart | SpanPart | CallPart
R = TypeVar("R")

_encoder = msgspec.msgpack.Encoder()
RECORDS: msgspec.msgpack.Decoder[Recorded] = msgspec.msgpack.Decoder(Recorded)
PARTS: msgspec.msgpack.Decoder[Part] = msgspec.msgpack.Decoder(Part)


@dataclass(frozen=True, slots=True)
class WholeRollout:
    """A rollout with what happened in it."""

    rollout: RolloutSummary
    """The task and the attempts."""
    spans: list[Span] = field(default_factory=list[Span])
    """Heads, by attempt and sequence."""
    calls: list[Recorded] = field(default_factory=list[Recorded])
    """The bytes of its model calls that are kept."""

    def add(self, part: SpanPart | CallPart) -> None:
        """Takes one of its parts."""
        if isinstance(part, CallPart):
            self.calls.append(part.call)
        else:
            self.spans.append(Span.model_validate_json(part.span))


def pack(record: Recorded | Part) -> bytes:
    """One record."""
    made = _encoder.encode(record)
    return len(made).to_bytes(LENGTH) + made


class Unpacker(Generic[R]):
    """Finds the records in what arrives."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[R]) -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[R]:
        """The records that are complete with this."""
        self._rest += data
        start = 0
        while (body := start + LENGTH) <= len(self._rest):
            end = body + int.from_bytes(self._rest[start:body])
            if end > len(self._rest):
                break
            yield self._decoder.decode(memoryview(self._rest)[body:end])
            start = end
        del self._rest[:start]
