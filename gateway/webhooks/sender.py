"""One request to a webhook, and its result, in words that hold no secret."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from http.client import responses
from time import time
from typing import Final

import aiohttp

from penstock.gateway.http.retry_after import retry_after
from penstock.gateway.webhooks.retry import GONE, PATIENCE_NS, Answer
from penstock.gateway.webhooks.signing import headers

TIMEOUT_S: Final = 10.0
LARGEST_ANSWER: Final = 16 << 10
"""Bytes of an answer that are read, so that its connection can be used again; its content is not used."""


class Sender:
    """Sends messages. `open` before use, `close` after."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make the client; on the loop."""
        # `service` bounds the requests at a time by webhook: a slow one takes no other's place.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, url: str, keys: list[bytes], id: str, body: bytes) -> Answer:
        """Send a message once and return the result."""
        assert self._session is not None, "open() comes first"
        signed = headers(keys, id, int(time()), body)
        try:
            async with self._session.post(url, data=body, headers=signed, allow_redirects=False) as answer:
                asked = retry_after(answer.headers.get("Retry-After"), PATIENCE_NS / 1e9) or 0.0
                # The status is enough, even if the rest never comes.
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    _ = await answer.content.read(LARGEST_ANSWER)
                return Answer(answer.status, _refused(answer.status), asked)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return Answer(None, _failed(error))


def _refused(status: int) -> str:
    if 200 <= status < 300:
        return ""
    named = f"{status} {responses.get(status, '')}".rstrip()
    if 300 <= status < 400:
        return f"{named}: redirects are not followed; configure the address that it leads to"
    return f"{named}: it wants no more messages" if status == GONE else named


def _failed(error: Exception) -> str:
    """Return why there was no answer. Errors of the client may repeat a URL, so their own words are not shown."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:.0f} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted on this machine"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its host has no address"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "no TLS could be agreed on"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or 'refused'}"
    return f"the connection broke off ({type(error).__name__})"


async def cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
