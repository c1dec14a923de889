"""How nouns and bodies become bytes on the tape, and come back.

Heads, attempts and rollouts are positional msgpack: the model's field order is the format, trailing defaults are cut
off, missing ones are filled in when read (so a field may be appended). What the key says is not repeated in the value.

Agents resend the whole conversation with every call, so a body is stored as what is new: the request body without the
longest common prefix and suffix that it shares with its *base* (an earlier body, usually the attempt's previous call),
and everything else of the exchange, compressed by zstd with the neighbourhood of the cut and the base's own remainder
as dictionary; under load a whole commit is compressed at once instead. Byte-exact, nothing is parsed. `DEPTH` bounds the
chain that a read has to follow. A body without a base is a keyframe; the first call of an attempt may lean on a keyframe of
another attempt with the same system prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import zstandard
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gateway.model import Chunk, Exchange, Noun, Usage

DEPTH = 16
_NEAR = 4096
_FAR = 16384
_BLOCK = 16384
_ZSTD = b"\x28\xb5\x2f\xfd"
_LEVEL = 1

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_plain = zstandard.ZstdCompressor(level=_LEVEL)

N = TypeVar("N", bound=Noun)


def encode(values: list[Any], defaults: list[Any]) -> bytes:
    """A positional record without its trailing defaults."""
    end = len(values)
    while end and values[end - 1] == defaults[end - 1]:
        end -= 1
    return _pack(values[:end])


def decode(record: bytes | memoryview) -> list[Any]:
    """The positions of a record."""
    return _unpack(record)


def fields(model: type[BaseModel], skip: tuple[str, ...] = ()) -> list[str]:
    """The stored positions of a model: its fields in order, less those that the key holds."""
    return [name for name in model.model_fields if name not in skip]


def defaults(model: type[BaseModel], names: list[str]) -> list[Any]:
    """What each position is when it is missing, as it is stored."""
    found = [model.model_fields[name].get_default(call_default_factory=True) for name in names]
    return [None if value is PydanticUndefined else _storable(value) for value in found]


def _storable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return [_storable(getattr(value, name)) for name in type(value).model_fields]
    return value


def values(noun: BaseModel, names: list[str]) -> list[Any]:
    """A noun as positions; nested nouns become lists."""
    return [_storable(getattr(noun, name)) for name in names]


def usage_values(usage: Usage | None) -> list[int | None] | None:
    """Usage as positions; cheaper than `values` on the recorder's path."""
    if usage is None:
        return None
    u = usage
    return [u.input_tokens, u.output_tokens, u.cached_tokens, u.cache_write_tokens, u.reasoning_tokens]


@dataclass(slots=True)
class Body:
    """The bytes of one call on their way to the tape; header blocks are `name: value CRLF` lines, already masked."""

    url: str
    request_headers: bytes
    request: bytes
    response_headers: bytes
    response: bytes
    trailers: bytes
    marks: list[int]
    """Arrival of the response, read by read: microseconds since the start, then size, in turn."""


@dataclass(slots=True)
class Base:
    """A body that others may lean on."""

    number: int
    depth: int
    request: bytes
    rest: bytes

    @property
    def size(self) -> int:
        """Memory it holds; bytes."""
        return len(self.request) + len(self.rest)


def pack_body(body: Body, base: Base | None, alone: bool) -> tuple[bytes, bytes]:
    """(record, rest): what is stored, and the remainder that a later body may use as dictionary.

    `alone`: the segment is small, so the record is compressed by itself, with the base as dictionary. In a large segment
    the records are each other's dictionary and are compressed together, at a third of the cost (`pack_segment`).
    """
    request = body.request
    prefix = suffix = 0
    if base is not None:
        prefix = common_prefix(base.request, request)
        suffix = common_suffix(base.request, request, min(len(base.request), len(request)) - prefix)
    middle = request[prefix : len(request) - suffix]
    rest = _pack(
        (
            body.response,
            body.marks,
            middle,
            body.request_headers,
            body.response_headers,
            body.trailers,
            body.url,
        )
    )
    number, depth = (0, 0) if base is None else (base.number, base.depth + 1)
    if not alone:
        return _pack((number, depth, prefix, suffix, False, rest)), rest
    compressor = _plain
    if base is not None:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, dict_data=_dictionary(base, prefix))
    return _pack((number, depth, prefix, suffix, True, compressor.compress(rest))), rest


def base_of(record: bytes | memoryview) -> int:
    """Number of the body that this one leans on; 0 for a keyframe."""
    return _unpack(record)[0]


def unpack_body(record: bytes | memoryview, base: Base | None, number: int) -> tuple[Body, Base]:
    """The body, and itself as a base for the next one in the chain."""
    _, depth, prefix, suffix, compressed, rest = _unpack(record)
    if compressed:
        dictionary = None if base is None else _dictionary(base, prefix)
        rest = zstandard.ZstdDecompressor(dict_data=dictionary).decompress(rest)
    response, marks, middle, request_headers, response_headers, trailers, url = _unpack(rest)
    request = middle
    if base is not None:
        request = base.request[:prefix] + middle + base.request[len(base.request) - suffix :]
    body = Body(url, request_headers, request, response_headers, response, trailers, marks)
    return body, Base(number, depth, request, rest)


def _dictionary(base: Base, prefix: int) -> zstandard.ZstdCompressionDict:
    near = base.request[max(0, prefix - _NEAR) : prefix]
    # The compressor refuses a dictionary of less than eight bytes.
    raw = (b"\0" * 8) + near + base.rest[:_FAR]
    return zstandard.ZstdCompressionDict(raw, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def common_prefix(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix: blocks by memcmp, then bisection in the block that differs."""
    high = min(len(a), len(b))
    low = 0
    while low < high and b.startswith(a[low : min(low + _BLOCK, high)], low):
        low += _BLOCK
    if low >= high:
        return high
    high = min(low + _BLOCK, high)
    while high - low > 1:
        middle = (low + high) // 2
        if b.startswith(a[low:middle], low):
            low = middle
        else:
            high = middle
    return low + 1 if a[low] == b[low] else low


def common_suffix(a: bytes, b: bytes, most: int) -> int:
    """Length of the longest common suffix of at most `most` bytes."""
    ends = len(a), len(b)
    done = 0
    while done < most:
        size = min(_BLOCK, most - done)
        if not b.endswith(a[ends[0] - done - size : ends[0] - done], 0, ends[1] - done):
            break
        done += size
    if done >= most:
        return max(0, most)
    high = min(done + _BLOCK, most)
    while high - done > 1:
        middle = (done + high) // 2
        if b.endswith(a[ends[0] - middle : ends[0] - done], 0, ends[1] - done):
            done = middle
        else:
            high = middle
    if done < most and a[ends[0] - done - 1] == b[ends[1] - done - 1]:
        done += 1
    return done


def pack_segment(records: list[bytes], compress: bool = False) -> bytes:
    """The value of a `bodies` or `log` key: what one commit appended."""
    packed = _pack(records)
    return _plain.compress(packed) if compress else packed


def unpack_segment(segment: bytes | memoryview) -> list[bytes]:
    """The inverse of `pack_segment`. A zstd frame starts with 28 B5 2F FD; no msgpack array does."""
    if segment[:4] == _ZSTD:
        segment = zstandard.ZstdDecompressor().decompress(segment)
    return cast(list[bytes], _unpack(segment))


def pack_open(head: bytes, body: bytes | None) -> bytes:
    """The value of an `open` key."""
    return _pack((head, body))


def header_lines(block: bytes) -> list[tuple[str, str]]:
    """`name: value CRLF` lines as pairs, bytes above 0x7f as latin-1 (RFC 9110 §5.5)."""
    lines = block.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return [(name, value.strip(" \t")) for name, _, value in pairs]


def exchange(body: Body) -> Exchange:
    """A stored body as the noun."""
    marks = iter(body.marks)
    return Exchange(
        url=body.url,
        request_headers=header_lines(body.request_headers),
        request_body=body.request,
        response_headers=header_lines(body.response_headers),
        response_body=body.response,
        trailers=header_lines(body.trailers),
        chunks=[Chunk(at_ns=at * 1000, size=size) for at, size in zip(marks, marks, strict=True)],
    )
