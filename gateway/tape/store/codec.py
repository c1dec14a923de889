"""The formats of nouns and bodies on the tape: encoding and decoding.

Nouns are positional msgpack: the order of fields is the format. Trailing defaults are cut off, and missing fields are
filled in when read, so fields may be appended. The value does not repeat what the key says.

Agents resend the whole conversation with every call, so only the new part of a body is stored. The request body is
stored without the longest common prefix and suffix that it shares with its *base* (an earlier body, usually the
attempt's previous call). Everything else of the exchange is compressed by zstd, with the neighbourhood of the cut and
the base's own remainder as dictionary; under load many bodies are compressed together instead. This is byte-exact:
nothing is parsed. A body without a base is a keyframe. The text that the first calls of several rollouts have in common
(system prompts, definitions of tools) is a *shared* body of its own, which they are stored against: so a rollout never
depends on the bytes of another, and each can be forgotten (`erasure`). `DEPTH` and `CHAIN` bound the chain that a
read has to follow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import zstandard
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Side

DEPTH = 32
CHAIN = 8 << 20
"""A request is stored against a body only while its depth, and its depth times the request's bytes, are below these:
otherwise the chain would become too long to be read back quickly."""
DECODE_ERRORS = (zstandard.ZstdError, struct.error, ValueError, TypeError, LookupError, MemoryError)
"""Errors that decoding raises when the bytes are damaged."""
CORRUPTION_ERRORS: tuple[type[Exception], ...] = tuple(error for error in DECODE_ERRORS if error is not MemoryError)
"""Those of `DECODE_ERRORS` that occur at every try."""

_NEAR = 16384
_FAR, _FAR_OF_STREAM = 32768, 4096
"""Bytes of the base's remainder in the dictionary. A long answer comes back in the next request; a stream has it in
pieces, so that only the form of its events is worth keeping."""
_STEPS = (16384, 1024, 256)
_INLINE = 700
"""Bytes of a small segment: five fit into a page of 4 KB. Larger ones would leave more of it empty, and beyond half a
page take pages of their own."""
_FRAME = 3
"""Bytes that msgpack puts before a record."""
_SEGMENT = 131072
_SHARED = (b"\1", b"\2")
"""Bytes that stand for the rollout, and for the rollout and the attempt, of the record before. No id begins with
them."""
_OF_ROLLOUTS = (b"r", b"a", b"o", b"s")
_ZSTD = b"\x28\xb5\x2f\xfd"
_LEVEL = 6
_WHOLE = 1 << 53
_AT_ONCE = 4
"""Positions of a record that are compared with their defaults at once."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_alone = zstandard.ZstdCompressor(level=_LEVEL)
_some = zstandard.ZstdCompressor(level=6)
_many = zstandard.ZstdCompressor(level=1)
_MANY = 64
"""From this number of records on, CPU is scarcer than disk."""


def encode(values: list[Any], defaults: list[Any]) -> bytes:
    """Return a positional record without its trailing defaults."""
    end = len(values)
    while end > _AT_ONCE and values[end - _AT_ONCE : end] == defaults[end - _AT_ONCE : end]:
        end -= _AT_ONCE
    while end and values[end - 1] == defaults[end - 1]:
        end -= 1
    return _pack(values[:end])


def decode(record: bytes) -> list[Any]:
    """Return the positions of a record."""
    return _unpack(record)


def fields(model: type[BaseModel], skip: tuple[str, ...] = ()) -> list[str]:
    """Return the stored positions of a model: its fields in order, without those that the key holds."""
    return [name for name in model.model_fields if name not in skip]


def defaults(model: type[BaseModel], names: list[str]) -> list[Any]:
    """Return the default of each position, in its stored form."""
    found = [model.model_fields[name].get_default(call_default_factory=True) for name in names]
    return [None if value is PydanticUndefined else _storable(value) for value in found]


def _storable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return [_storable(getattr(value, name)) for name in type(value).model_fields]
    return value


def values(noun: BaseModel, names: list[str]) -> list[Any]:
    """Return a noun as positions; nested nouns become lists."""
    return [_storable(getattr(noun, name)) for name in names]


def usage_values(usage: Usage | None) -> list[Any] | None:
    """Return usage as positions; a number that no provider can mean is dropped."""
    if usage is None:
        return None
    u = usage
    counts: list[Any] = [u.input_tokens, u.output_tokens, u.cached_tokens, u.cache_write_tokens, u.reasoning_tokens]
    for at, count in enumerate(counts):
        if count is not None and not 0 <= count < _WHOLE:
            counts[at] = None
    if u.billed is not None:
        counts.append(u.billed)
    return counts


@dataclass(slots=True)
class StoredBody:
    """The bytes of one call for the tape; header blocks are `name: value CRLF` lines, already masked."""

    url: str
    request_headers: bytes
    request: bytes
    response_headers: bytes
    response: bytes
    trailers: bytes
    marks: list[int]
    """Arrival of the response, read by read: microseconds since the start, then size, in turn."""
    sides: list[Side] = field(default_factory=list[Side])
    """Exchanges with parties in another wire format."""


@dataclass(slots=True)
class DeltaBase:
    """A body that others may be stored against."""

    number: int
    depth: int
    request: bytes
    rest: bytes
    """The beginning of the rest of its record, used as a dictionary."""
    sides: tuple[bytes, ...] = ()
    """The request bodies of its sides."""
    size: int = 0
    """Bytes that it holds in memory."""


def pack_body(body: StoredBody, number: int, base: DeltaBase | None, alone: bool) -> tuple[bytes, DeltaBase]:
    """Return (record, the body as a base) of the body with this number.

    `alone`: the record is compressed by itself, with the base as dictionary. Otherwise it is left as it is: records of
    one segment are each other's dictionary and are compressed together, at a third of the cost (`pack_segments`).
    """
    request = body.request
    prefix, suffix, middle = (0, 0, request) if base is None else _cut(base.request, request)
    # The beginning is the next body's dictionary, so parts that may be long and repeat least come last.
    parts = [body.url, body.request_headers, body.response_headers, body.trailers, body.marks, body.response, middle]
    if body.sides:
        parts.append(_pack_sides(body.sides, () if base is None else base.sides))
    rest = _pack(parts)
    lower, depth = (0, 0) if base is None else (base.number, base.depth + 1)
    stored = rest
    if alone:
        compressor = _alone
        if base is not None:
            compressor = zstandard.ZstdCompressor(level=_LEVEL, dict_data=_dictionary(base, prefix))
        # The frame's magic number is the same in every record.
        stored = compressor.compress(rest)[len(_ZSTD) :]
    return _pack((lower, depth, prefix, suffix, alone, stored)), _as_base(number, depth, body, rest, base)


def pack_shared(text: bytes, number: int, alone: bool) -> tuple[bytes, DeltaBase]:
    """Return (record, the body as a base) of a shared body, which is only a request."""
    return pack_body(StoredBody("", b"", text, b"", b"", b"", []), number, None, alone)


def _as_base(number: int, depth: int, body: StoredBody, rest: bytes, base: DeltaBase | None) -> DeltaBase:
    """Return a body as a base for the next one. The beginning of its rest serves as a dictionary, but of a shared body,
    which has no URL, only its text: the text may be cut where nobody uses it any more, and bodies that were compressed
    with it must still be readable."""
    request, sides = body.request, tuple([side.request_body for side in body.sides]) if body.sides else ()
    if not body.url and base is None:
        rest = b""
    rest = rest[: _FAR_OF_STREAM if b"text/event-stream" in body.response_headers else _FAR]
    return DeltaBase(number, depth, request, rest, sides, len(request) + len(rest) + sum(map(len, sides)))


def common_affixes(one: bytes, other: bytes) -> tuple[int, int]:
    """Return the lengths of (the prefix, the suffix) that two requests share."""
    prefix, suffix, _ = _cut(one, other)
    return prefix, suffix


def base_use(record: bytes) -> tuple[int, int, int]:
    """Return (number of the base, length of the prefix, length of the suffix that a record takes of its base's
    request)."""
    base, _, prefix, suffix, *_ = _unpack(record)
    return base, prefix, suffix


def _cut(base: bytes | None, request: bytes) -> tuple[int, int, bytes]:
    """Return (length of the prefix, length of the suffix that a request shares with its base, the middle)."""
    if base is None:
        return 0, 0, request
    prefix = common_prefix(base, request)
    suffix = common_suffix(base, request, min(len(base), len(request)) - prefix)
    return prefix, suffix, request[prefix : len(request) - suffix]


def _joined(base: bytes, prefix: int, suffix: int, middle: bytes) -> bytes:
    """Put a request together again: the inverse of `_cut`."""
    return b"".join((base[:prefix], middle, base[len(base) - suffix :]))


def _pack_sides(sides: list[Side], bases: tuple[bytes, ...]) -> list[Any]:
    """Pack sides. Their requests grow like those of calls: each is stored against the one at its place in the base."""
    under = [*bases[: len(sides)], *[None] * (len(sides) - len(bases))]
    return [
        (side.who, side.dialect, side.path, *_cut(base, side.request_body), side.response_body)
        for side, base in zip(sides, under, strict=True)
    ]


def _unpack_sides(packed: list[Any], bases: tuple[bytes, ...]) -> list[Side]:
    under = [*bases[: len(packed)], *[b""] * (len(packed) - len(bases))]
    return [
        Side(
            who=who,
            dialect=dialect,
            path=path,
            request_body=_joined(base, prefix, suffix, middle),
            response_body=response,
        )
        for (who, dialect, path, prefix, suffix, middle, response), base in zip(packed, under, strict=True)
    ]


def base_of(record: bytes) -> int:
    """Return the number of the body that this one is stored against; 0 for a keyframe."""
    return _unpack(record)[0]


def unpack_body(record: bytes, base: DeltaBase | None, number: int) -> tuple[StoredBody, DeltaBase]:
    """Return the body, and the body as a base for the next one in the chain."""
    _, depth, prefix, suffix, compressed, rest = _unpack(record)
    if compressed:
        rest = _decompress(rest, base, prefix)
    url, request_headers, response_headers, trailers, marks, response, middle, *more = _unpack(rest)
    request = middle if base is None else _joined(base.request, prefix, suffix, middle)
    sides = _unpack_sides(more[0] if more else [], () if base is None else base.sides)
    body = StoredBody(url, request_headers, request, response_headers, response, trailers, marks, sides)
    return body, _as_base(number, depth, body, rest, base)


def _decompress(frame: bytes, base: DeltaBase | None, prefix: int) -> bytes:
    dictionary = None if base is None else _dictionary(base, prefix)
    return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(_ZSTD + frame)


def _dictionary(base: DeltaBase, prefix: int) -> zstandard.ZstdCompressionDict:
    near = base.request[max(0, prefix - _NEAR) : prefix]
    # The compressor refuses a dictionary of less than eight bytes.
    raw = b"".join((bytes(8), near, base.rest))
    return zstandard.ZstdCompressionDict(raw, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the length of the longest common prefix: memcmp in ever smaller steps, then the first byte that
    differs."""
    done, most = 0, min(len(a), len(b))
    for step in _STEPS:
        while done + step <= most and b.startswith(a[done : done + step], done):
            done += step
    end = min(done + _STEPS[-1], most)
    differing = int.from_bytes(a[done:end], "big") ^ int.from_bytes(b[done:end], "big")
    return end - (differing.bit_length() + 7) // 8


def common_suffix(a: bytes, b: bytes, most: int) -> int:
    """Return the length of the longest common suffix of at most `most` bytes, found in the same way."""
    done, end_a, end_b = 0, len(a), len(b)
    for step in _STEPS:
        while done + step <= most and b.endswith(a[end_a - done - step : end_a - done], 0, end_b - done):
            done += step
    size = min(done + _STEPS[-1], most) - done
    last_a, last_b = a[end_a - done - size : end_a - done], b[end_b - done - size : end_b - done]
    differing = int.from_bytes(last_a, "little") ^ int.from_bytes(last_b, "little")
    return done + size - (differing.bit_length() + 7) // 8


Segments = list[tuple[int, int, bytes]]
"""Segments, each with the place of its first record and its number of records."""


def pack_small(records: list[bytes]) -> Segments:
    """Return segments that fit into the pages of the tree.

    A larger value takes pages of its own and leaves the rest of the last one empty: of a few KB that is much.
    """
    return [(first, len(run), _pack(run)) for first, run in _runs(records, _INLINE)]


def pack_segments(records: list[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yield segments that are each compressed as a whole. A read decompresses the whole segment, so its size is
    bounded."""
    compressor = _some if len(records) < _MANY else _many
    return ((first, len(run), compressor.compress(_pack(run))) for first, run in _runs(records, _SEGMENT))


def pack_log(records: list[bytes]) -> Segments:
    """Return segments of records of the log; many are one segment, which costs least. A rollout, its attempt and its
    calls often follow each other, and names are most of a short rollout. So a byte (`_SHARED`) replaces names that the
    record before has too."""
    shared = _share(records) if len(records) > 1 else records
    if len(records) >= _MANY:
        return [(0, len(records), _pack(shared))]
    # The first record of a segment has none before it.
    return [(first, len(run), _pack([records[first], *run[1:]])) for first, run in _runs(shared, _INLINE)]


def repack_log(records: list[bytes]) -> bytes:
    """Return a segment of records, few or many."""
    return _pack([records[0], *_share(records)[1:]])


def repack_segment(records: list[bytes], segment: bytes) -> bytes:
    """Return a segment of these bodies, compressed if `segment` is."""
    packed = _pack(records)
    return _some.compress(packed) if segment[:4] == _ZSTD else packed


def unpack_log(segment: bytes) -> list[bytes]:
    """The inverse of `pack_log` and `repack_log`."""
    found: list[bytes] = []
    names: tuple[bytes, ...] = ()
    for record in cast(list[bytes], _unpack(segment)):
        if record[1:2] in _SHARED:
            record = record[:1] + b"".join(names[: record[1]]) + record[2:]
        names = _names(record)
        found.append(record)
    return found


def _share(records: list[bytes]) -> list[bytes]:
    shared: list[bytes] = []
    before: tuple[bytes, ...] = ()
    for record in records:
        names = _names(record)
        same = 0
        while same < len(names) and same < len(before) and names[same] == before[same]:
            same += 1
        shared.append(record[:1] + _SHARED[same - 1] + record[1 + sum(map(len, names[:same])) :] if same else record)
        before = names
    return shared


def _names(record: bytes) -> tuple[bytes, ...]:
    """Return the names of the rollout and of the attempt that a record of the log is about, each with its NUL; none for
    other records."""
    if record[:1] not in _OF_ROLLOUTS:
        return ()
    end = record.find(0, 1) + 1
    if record[:1] == b"r":
        return (record[1:end],)
    return record[1:end], record[end : record.find(0, end) + 1]


def _runs(records: list[bytes], most: int) -> list[tuple[int, list[bytes]]]:
    """Return runs of records that have at most `most` bytes together, or of one record that is larger."""
    runs: list[tuple[int, list[bytes]]] = []
    first = size = 0
    for at, record in enumerate(records):
        if at > first and size + len(record) > most:
            runs.append((first, records[first:at]))
            first, size = at, 0
        size += len(record) + _FRAME
    if records:
        runs.append((first, records[first:]))
    return runs


def unpack_segment(segment: bytes) -> list[bytes]:
    """The inverse of `pack_small` and `pack_segments`. A zstd frame starts with 28 B5 2F FD; no msgpack array does."""
    if segment[:4] == _ZSTD:
        segment = zstandard.ZstdDecompressor().decompress(segment)
    return cast(list[bytes], _unpack(segment))


def pack_open(summary: bytes, body: bytes | None, process: str) -> bytes:
    """Return the value of an `open` key. `process`: the name of the process that serves the call
    (`store.directory`)."""
    return _pack((summary, body, process))


def unpack_open(value: bytes) -> tuple[bytes, bytes | None]:
    """Return the summary and the body of an `open` value."""
    summary, body, _ = _unpack(value)
    return summary, body


def process_of(value: bytes) -> str:
    """Return the name of the process that serves an open call, from its `open` value."""
    return cast(str, _unpack(value)[2])
