"""Gzip of the control API's answers, for clients that ask for it: user interfaces over a slow line.

No client gets it unasked: on the same machine or network it costs more time than it saves. Large answers are compressed
in a thread, so that no call waits for them. In a feed every piece is flushed, so that a follower can read it at once.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Final, Protocol

LEAST: Final = 1024
"""Most bytes of an answer without gzip: it fits one packet anyway."""
LARGE: Final = 16 * 1024
"""Most bytes that are compressed on the loop, in a few tenths of a millisecond; more in a thread."""
HEADERS: Final = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
_NONE: Final[Mapping[str, str]] = {}
_LEVEL: Final = 6
_GZIP: Final = 16 + zlib.MAX_WBITS


class FeedWriter(Protocol):
    """The destination of a feed."""

    async def write(self, data: bytes, /) -> None: ...


def accepts_gzip(headers: Mapping[str, str]) -> bool:
    """True if the client asks for gzip by name."""
    for one in headers.get("Accept-Encoding", "").lower().split(","):
        coding, _, parameter = one.partition(";")
        if coding.strip() == "gzip":
            return not _is_zero(parameter)
    return False


def _is_zero(parameter: str) -> bool:
    """True if a parameter is `q=0`, which refuses the coding."""
    name, _, value = parameter.replace(" ", "").partition("=")
    return name == "q" and not value.strip("0.")


def compress_body(asked: Mapping[str, str], body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The body of an answer to these request headers, with gzip if requested and worth it, and the headers to add."""
    if len(body) <= LEAST or not accepts_gzip(asked):
        return body, _NONE
    return zlib.compress(body, _LEVEL, _GZIP), HEADERS


async def compress_body_async(asked: Mapping[str, str], body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The same; a large body is compressed in a thread."""
    if len(body) <= LARGE:
        return compress_body(asked, body)
    return await asyncio.to_thread(compress_body, asked, body)


class GzipFeed:
    """A feed with gzip, in front of its destination."""

    def __init__(self, feed: FeedWriter) -> None:
        self._feed = feed
        self._gzip = zlib.compressobj(_LEVEL, wbits=_GZIP)

    async def write(self, data: bytes, /) -> None:
        """Send bytes, flushed so that the client can read all of them."""
        await self._feed.write(self._add(data) if len(data) <= LARGE else await asyncio.to_thread(self._add, data))

    def _add(self, data: bytes) -> bytes:
        return self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
