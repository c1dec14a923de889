"""Makes a Turn of an exchange on the tape: decodes the bodies and lets their dialect read them. It never raises.

Decoding is bounded, because a few bytes can decode to gigabytes. It returns the bytes that it could decode together
with the problem, because a body may have been cut off with its connection.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from io import BytesIO
from typing import Protocol

import brotli
import zstandard

from penstock.gateway.model.facts import BATCH
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Exchange, Turn
from penstock.gateway.wire.capture import original
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.batches import with_batch_tier
from penstock.gateway.wire.dialects.unread_content import GAP_DESCRIPTIONS, recheck_unread

LIMIT = 32 << 20
"""Most bytes that a body is decoded to."""
ALWAYS, TIMES = 1 << 20, 64
"""Beyond `ALWAYS` bytes a body is decoded to at most `TIMES` its encoded size. Text and images come nowhere near it. A
hundred bytes can decode to all of `LIMIT`, which a call would hold as long as it runs and every reader of a tape would
decode anew."""
SLICE = 512
"""Encoded bytes decoded at a time, so that one step cannot go far over the limit."""
ZSTD_WINDOW = 8 << 20
"""Largest window that RFC 9659 allows for HTTP; bytes."""
BLOCK = 1 << 16
"""About the bytes that brotli returns at a time: it has no bound of its own, and 512 bytes can decode to gigabytes."""
MOST_ENCODINGS = 4
"""Most encodings of a body that are undone, one after the other. Nobody sends more than two, and each may take as
long."""
MOST_MEMBERS = 1 << 14
"""Most members of an encoded body that are read: each takes a decoder of its own."""
LARGER = "bytes once decoded"
"""End of the problem of a body that is too large to be decoded as a whole."""
MEMBERS = "members"
"""End of the problem of a body with too many members."""
CUT = "ends early"
"""Problem of a body that is valid but incomplete."""
EXCERPT = 300


class _Inflater(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _BrotliDecompressor:
    """A decoder of brotli with the interface of the others. It stops once it has made more than `limit` bytes."""

    unused_data = b""
    """Brotli is one stream: bytes after it are an error, and reported as one."""

    def __init__(self, limit: int) -> None:
        self._decoder = brotli.Decompressor()
        self._left = limit

    @property
    def eof(self) -> bool:
        return self._decoder.is_finished()

    def decompress(self, data: bytes, /) -> bytes:
        made = [self._decoder.process(data, output_buffer_limit=BLOCK)]
        self._left -= len(made[0])
        while made[-1] and self._left >= 0 and not self._decoder.is_finished():
            made.append(self._decoder.process(b"", output_buffer_limit=BLOCK))
            self._left -= len(made[-1])
        return b"".join(made)


def read_exchange(dialect_name: str, exchange: Exchange, span: Span) -> Turn:
    """Read an exchange as a Turn."""
    request, request_problem = decode_body(exchange.request_body, encoding(exchange.request_headers))
    response, response_problem = decode_body(exchange.response_body, encoding(exchange.response_headers))
    dialect = by_name(dialect_name)
    request = original(dialect, request, span.attributes)
    turn = dialect.read(request, response, span.stream)
    turn.model = turn.model or span.model  # Some APIs name it in the path.
    if span.attributes and BATCH in span.attributes:
        turn.usage = with_batch_tier(turn.usage)
    turn.problems[:0] = [
        *(["the exchange was too large to be kept whole"] if span.truncated else []),
        *([f"request: {request_problem}"] if request_problem else []),
        *([f"response: {response_problem}"] if response_problem else []),
    ]
    gaps = recheck_unread(span, request, response)
    turn.problems += [f"response: {key} {GAP_DESCRIPTIONS[kind]}" for key, kind in gaps.items()]
    if turn.error is None and (span.http_status or 0) >= 400:
        turn.error = response[:EXCERPT].decode("utf-8", "replace").strip() or f"HTTP {span.http_status}"
    return turn


def decode_body(body: bytes, content_encoding: str | None, limit: int = LIMIT) -> tuple[bytes, str | None]:
    """A body without its content encodings, and the problem, or None. Every reader of a sent or recorded body calls
    this, so all of them read it equally far."""
    limit = min(limit, max(ALWAYS, TIMES * len(body)))
    told = [name.strip().lower() for name in (content_encoding or "").split(",")]
    names = [name for name in told if name not in ("", "identity")]
    if len(names) > MOST_ENCODINGS:
        return body, f"{len(names)} content encodings are more than the {MOST_ENCODINGS} that are undone"
    for name in reversed(names):
        make = _inflater(name, body, limit)
        if make is None:
            return body, f"content encoding {name[:40]!r} is not supported"
        body, problem = _inflate(make, body, limit)
        if problem:
            return body, f"{name}: {problem}"
    return body, None


class IncompleteDecodeError(Exception):
    """A body that was not read to its end."""


def decoded_pieces(body: bytes, content_encoding: str, most: int) -> Iterator[bytes]:
    """Yield a body without its content encoding, in small pieces and so never as a whole. The caller takes about `most`
    bytes of it. Raises `IncompleteDecodeError` if a part cannot be read this way: the body has several encodings, or
    too many members."""
    make = _inflater(content_encoding.strip().lower(), body, most)
    if make is None:
        raise IncompleteDecodeError
    problem = yield from _pieces(make, body)
    if problem is not None and problem.endswith(MEMBERS):
        raise IncompleteDecodeError


def stream_decoder(content_encoding: str, begin: bytes) -> Callable[[bytes], bytes]:
    """A function that decodes the pieces of one body in turn, each as far as it can be decoded. `begin`: its first
    bytes. Raises `ValueError` for an encoding that is not known, or for several."""
    make = _inflater(content_encoding.strip().lower(), begin, LIMIT)
    if make is None:
        raise ValueError(f"content encoding {content_encoding[:40]!r} is not supported")
    return make().decompress


def plain_bodies(exchange: Exchange) -> tuple[bytes, bytes]:
    """Request and response without their content encodings, as far as these can be undone."""
    request = decode_body(exchange.request_body, encoding(exchange.request_headers))[0]
    return request, decode_body(exchange.response_body, encoding(exchange.response_headers))[0]


def decode_exchange(exchange: Exchange) -> Exchange:
    """The exchange as if its request had been sent without a content encoding; unchanged if that cannot be undone."""
    packed = encoding(exchange.request_headers)
    body, problem = decode_body(exchange.request_body, packed)
    if not packed or problem is not None:
        return exchange
    kept = [(name, value) for name, value in exchange.request_headers if name.lower() != "content-encoding"]
    return exchange.model_copy(update={"request_body": body, "request_headers": kept})


def encoding(headers: Iterable[tuple[str, str]]) -> str:
    """The content encodings that headers name, joined by commas."""
    return ",".join(value for name, value in headers if name.lower() == "content-encoding")


def _inflater(name: str, body: bytes, limit: int) -> Callable[[], _Inflater] | None:
    if name in ("gzip", "x-gzip"):
        return lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)
    if name == "deflate":
        # Some servers send the bare format, without the zlib header that the standard asks for.
        wrapped = len(body) >= 2 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0
        return lambda: zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    if name == "br":
        return lambda: _BrotliDecompressor(limit)
    if name == "zstd":
        return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj
    return None


def _inflate(make: Callable[[], _Inflater], body: bytes, limit: int) -> tuple[bytes, str | None]:
    # `BytesIO.getvalue` returns the bytes without a copy.
    decoded, size, pieces = BytesIO(), 0, _pieces(make, body)
    while size <= limit:
        try:
            size += decoded.write(next(pieces))
        except StopIteration as ended:
            return decoded.getvalue(), ended.value
    decoded.truncate(limit)
    return decoded.getvalue(), f"larger than {limit} {LARGER}"


def _pieces(make: Callable[[], _Inflater], body: bytes) -> Generator[bytes, None, str | None]:
    """Yield the decoded members of a body one after the other; gzip and zstd allow for several. Returns the problem."""
    inflater, ended, members = make(), not body, 0
    for start in range(0, len(body), SLICE):
        piece = body[start : start + SLICE]
        while piece:
            try:
                yield inflater.decompress(piece)
            except (zlib.error, brotli.error, zstandard.ZstdError) as error:
                return f"cannot be decoded ({error})"
            ended, piece = inflater.eof, inflater.unused_data
            if ended:
                inflater, members = make(), members + 1
            if members > MOST_MEMBERS:
                return f"it has more than {MOST_MEMBERS} {MEMBERS}"
    return None if ended else CUT
