"""Content encodings, as servers and clients make them: whole, or flushed piece by piece, as of a stream."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator

import brotli
import zstandard


def bare(body: bytes) -> bytes:
    """deflate as some servers send it: without the zlib header that the standard asks for."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, mtime=0),
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}
"""By name."""


def flushed(name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """What a server sends that flushes after every piece, and then the end of the encoding."""
    take, flush, end = _streams(name)
    for piece in pieces:
        yield take(piece) + flush()
    yield end()


def _streams(name: str) -> tuple[Callable[[bytes], bytes], Callable[[], bytes], Callable[[], bytes]]:
    if name == "br":
        packer = brotli.Compressor()
        return packer.process, packer.flush, packer.finish
    if name == "zstd":
        inner = zstandard.ZstdCompressor().compressobj()
        return inner.compress, lambda: inner.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), inner.flush
    other = zlib.compressobj(wbits=16 + zlib.MAX_WBITS if name == "gzip" else zlib.MAX_WBITS)
    return other.compress, lambda: other.flush(zlib.Z_SYNC_FLUSH), other.flush
