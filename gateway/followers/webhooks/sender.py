"""One request to a webhook, and its result, in words that hold no secret."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ssl
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from http.client import responses
from time import time
from typing import Final

import aiohttp

from penstock.gateway.followers.webhooks.retry import GONE, PATIENCE_NS, DeliveryResult
from penstock.gateway.model.release import AuditTrailEntry, Release
from penstock.gateway.model.webhook import (
    RELEASE_EVENTS,
    ReleaseChangeData,
    ReleaseEvent,
    WebhookMessage,
    WebhookTestData,
)
from penstock.gateway.wire.http.request import retry_after


def headers(keys: Iterable[bytes], id: str, seconds: int, body: bytes) -> dict[str, str]:
    """Return the headers of a request as Standard Webhooks 1.0 has them (https://www.standardwebhooks.com), signed with
    each key in order. `seconds`: time of sending, since the epoch."""
    signed = f"{id}.{seconds}.".encode() + body
    signatures = (base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys)
    return {
        "Content-Type": "application/json",
        "webhook-id": id,
        "webhook-timestamp": str(seconds),
        "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
    }


TIMEOUT_S: Final = 10.0
LARGEST_ANSWER: Final = 16 << 10
"""Bytes of an answer that are read, so that its connection can be used again; its content is not used."""


class WebhookSender:
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

    async def send(self, url: str, keys: list[bytes], id: str, body: bytes) -> DeliveryResult:
        """Send a message once and return the result."""
        assert self._session is not None, "open() comes first"
        signed = headers(keys, id, int(time()), body)
        try:
            async with self._session.post(url, data=body, headers=signed, allow_redirects=False) as answer:
                asked = retry_after(answer.headers.get("Retry-After"), PATIENCE_NS / 1e9) or 0.0
                # The status is enough, even if the rest never comes.
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    _ = await answer.content.read(LARGEST_ANSWER)
                return DeliveryResult(answer.status, _refused(answer.status), asked)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return DeliveryResult(None, _failed(error))


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


async def cancel_all(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# The content of a message: a link of a release's audit chain, in JSON. Pure.

LONGEST: Final = 200
"""Characters of a text among the figures: receivers want small bodies."""
_RENAMED: Final = {"rollback": "roll_back"}
"""Actions of people that have another name among the rules."""


def event_of(entry: AuditTrailEntry) -> ReleaseEvent | None:
    """Return the event of an entry; None where no webhook can subscribe to it."""
    action = _RENAMED.get(entry.action, entry.action)
    return next((event for event in RELEASE_EVENTS if event == action), None)


def id_of(entry: AuditTrailEntry) -> str:
    """Return the message's id, which is the same each time that a link is sent."""
    return f"msg_{entry.hash[:32]}"


def body(release: Release, entry: AuditTrailEntry) -> bytes:
    """Return the body of the message about a link of the chain."""
    data = ReleaseChangeData(
        release=release.id,
        resource=release.resource,
        kind=release.kind,
        stable=release.stable,
        candidate=release.candidate,
        companions=release.companions,
        before=entry.before,
        after=entry.after,
        canary=release.policy.ramp[entry.step].name if entry.after == "canary" else None,
        split=entry.split,
        who=entry.who,
        key=entry.key,
        why=entry.why,
        figures=_figures(entry),
        number=entry.number,
        hash=entry.hash,
    )
    return _written(f"release.{event_of(entry)}", entry.at_ns, data)


def test_message(webhook: str, now_ns: int) -> bytes:
    """Return the body of a test message."""
    return _written("webhook.test", now_ns, WebhookTestData(webhook=webhook))


def _figures(entry: AuditTrailEntry) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, value in entry.evidence.items():
        if isinstance(value, bool | int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = value[:LONGEST]
    return found


def _written(kind: str, at_ns: int, data: ReleaseChangeData | WebhookTestData) -> bytes:
    at = datetime.fromtimestamp(at_ns // 1000 / 1e6, UTC).isoformat(timespec="microseconds")
    return WebhookMessage(type=kind, timestamp=at.replace("+00:00", "Z"), data=data).model_dump_json().encode()
