"""Gzip of the control API's answers, for clients that ask for it: those who look on over a slow line.

Nobody gets it unasked: on the same machine or network it costs more time than it saves. What is large is compressed in
a thread, so that no call waits for it. In a feed every piece is flushed: a follower can read it as soon as it is there.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Final, Protocol

LEAST: Final = 1024
"""Answers of fewer bytes fit one packet anyway."""
LARGE: Final = 16 * 1024
"""More bytes are compressed in a thread: these take a few tenths of a millisecond."""
HEADERS: Final = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
_NONE: Final[Mapping[str, str]] = {}
_LEVEL: Final = 6
_GZIP: Final = 16 + zlib.MAX_WBITS


class Writes(Protocol):
    """Where a feed goes."""

    async def write(self, data: bytes, /) -> None:
        """Sends bytes."""
        ...


def accepts_gzip(headers: Mapping[str, str]) -> bool:
    """Whether the client asks for gzip by its name."""
    for one in headers.get("Accept-Encoding", "").lower().split(","):
        coding, _, parameter = one.partition(";")
        if coding.strip() == "gzip":
            return not _is_zero(parameter)
    return False


def _is_zero(parameter: str) -> bool:
    """Whether `q=...` says: on no account."""
    name, _, value = parameter.replace(" ", "").partition("=")
    return name == "q" and not value.strip("0.")


def answered(asked: Mapping[str, str], body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The body of an answer to these headers, with gzip where that is asked for and worth it; and the headers that say
    so."""
    if len(body) <= LEAST or not accepts_gzip(asked):
        return body, _NONE
    return zlib.compress(body, _LEVEL, _GZIP), HEADERS


async def answered_soon(asked: Mapping[str, str], body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The same, what is large in a thread."""
    if len(body) <= LARGE:
        return answered(asked, body)
    return await asyncio.to_thread(answered, asked, body)


class PackedFeed:
    """A feed with gzip, before where it goes."""

    def __init__(self, feed: Writes) -> None:
        self._feed = feed
        self._gzip = zlib.compressobj(_LEVEL, wbits=_GZIP)

    async def write(self, data: bytes, /) -> None:
        """Sends bytes; all of them are readable at the other end."""
        await self._feed.write(self._add(data) if len(data) <= LARGE else await asyncio.to_thread(self._add, data))

    def _add(self, data: bytes) -> bytes:
        return self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
