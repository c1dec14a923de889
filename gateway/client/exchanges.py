"""The bytes of many calls in one answer. Pure.

Training reads every call of every rollout; a request for each of the two bodies of each call costs more than the
bodies. Here they come one after the other: a length (4 bytes, big endian) and a MessagePack array of attempt, sequence,
request and response. Where whole rollouts are read, each record is a `Part`.
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
"""Maximum number of bytes of one call's record: two bodies and their names."""


class CallBytes(msgspec.Struct, array_like=True, frozen=True):
    """The bytes of one call."""

    attempt: str
    """Id of the call's attempt."""
    sequence: int
    """Number of the call's span in the attempt."""
    request: bytes
    """Request body as it went upstream, content encodings removed."""
    response: bytes
    """Response body as it was received, content encodings removed."""


class RolloutPart(msgspec.Struct, array_like=True, frozen=True, tag="rollout"):
    """The head of a rollout; all parts until the next head belong to it."""

    rollout: bytes
    """JSON of `RolloutSummary`."""


class SpanPart(msgspec.Struct, array_like=True, frozen=True, tag="span"):
    """A span of the current rollout."""

    span: bytes
    """JSON of `Span`."""


class CallPart(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    """The bytes of a call of the current rollout."""

    call: CallBytes


Part: TypeAlias = RolloutPart | SpanPart | CallPart
R = TypeVar("R")

_encoder = msgspec.msgpack.Encoder()
RECORDS: msgspec.msgpack.Decoder[CallBytes] = msgspec.msgpack.Decoder(CallBytes)
PARTS: msgspec.msgpack.Decoder[Part] = msgspec.msgpack.Decoder(Part)


@dataclass(frozen=True, slots=True)
class WholeRollout:
    """A rollout with its spans and the bytes of its model calls."""

    rollout: RolloutSummary
    """The task and the attempts."""
    spans: list[Span] = field(default_factory=list[Span])
    """Heads of its spans, by attempt and sequence."""
    calls: list[CallBytes] = field(default_factory=list[CallBytes])
    """The recorded bytes of its model calls."""

    def add(self, part: SpanPart | CallPart) -> None:
        """Adds a span or the bytes of a call."""
        if isinstance(part, CallPart):
            self.calls.append(part.call)
        else:
            self.spans.append(Span.model_validate_json(part.span))


def pack(record: CallBytes | Part) -> bytes:
    """A record as bytes, with its length in front."""
    made = _encoder.encode(record)
    return len(made).to_bytes(LENGTH) + made


class Unpacker(Generic[R]):
    """Splits a stream of bytes into records."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[R]) -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[R]:
        """The records that are complete with this piece of the stream."""
        self._rest += data
        start = 0
        while (body := start + LENGTH) <= len(self._rest):
            end = body + int.from_bytes(self._rest[start:body])
            if end > len(self._rest):
                break
            yield self._decoder.decode(memoryview(self._rest)[body:end])
            start = end
        del self._rest[:start]
