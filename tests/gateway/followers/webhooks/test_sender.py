"""What comes of one request, in words without secrets; receivers here misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from fakes.hook import Failing, hooked
from fakes.process import PATIENCE

from penstock.gateway.followers import webhooks
from penstock.gateway.followers.webhooks import DeliveryResult, WebhookSender, cancel_all

KEYS = [b"k" * 32]


@asynccontextmanager
async def raw(answer: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncGenerator[str]:
    """The URL of a server that reads a request's head, writes this, and goes on as told."""
    serving: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            # What speaks TLS never ends a head.
            _ = await reader.read(1)
            writer.write(answer)
            await then(writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}/t0ken?k=t0ken"
    finally:
        server.close()
        await cancel_all([task for task in serving if task is not None])


async def forever(writer: asyncio.StreamWriter) -> None:
    """Says nothing more."""
    await asyncio.Event().wait()


async def nothing(writer: asyncio.StreamWriter) -> None:
    """Closes at once."""


async def sent(url: str) -> DeliveryResult:
    made = WebhookSender()
    made.open()
    try:
        async with asyncio.timeout(PATIENCE):
            return await made.send(url, KEYS, "msg_1", b"{}")
    finally:
        await made.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is late because the machine is busy."""
    monkeypatch.setattr(webhooks, "TIMEOUT_S", PATIENCE / 2)


async def test_a_receiver_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 0.5)
    async with raw(b"", forever) as place:
        assert (await sent(f"http://{place}"))[:2] == (None, "no answer within 0 s")


async def test_a_connection_that_breaks_off_is_no_answer() -> None:
    async with raw(b"HTTP/1.1 20", nothing) as place:
        found = await sent(f"http://{place}")
        assert (found.status, "t0ken" in found.error) == (None, False)
        assert found.error.startswith("the connection broke off")


async def test_a_receiver_without_tls_is_said_to_have_none() -> None:
    async with raw(b"HTTP/1.1 400 Bad\r\n\r\n", nothing) as place:
        found = await sent(f"https://{place}")
        assert (found.status, found.error) == (None, "no TLS could be agreed on")


async def test_a_host_without_an_address_is_said_to_have_none() -> None:
    found = await sent("https://nowhere.invalid/t0ken")
    assert (found.status, found.error) == (None, "its host has no address")


async def test_the_status_counts_even_if_the_rest_of_the_answer_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The status must be there in time, also where the machine stands still for seconds.
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 6.0)
    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", forever) as place:
        assert await sent(f"http://{place}") == DeliveryResult(200, "")


async def test_a_receiver_without_end_is_read_to_a_bound() -> None:
    async def pour(writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            pass

    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", pour) as place:
        assert await sent(f"http://{place}") == DeliveryResult(200, "")


@pytest.mark.parametrize(
    ("failing", "error", "after"),
    [
        (Failing(500), "500 Internal Server Error", 0.0),
        (Failing(410), "410 Gone: it wants no more messages", 0.0),
        (Failing(301, {"Location": "/x"}), "301 Moved Permanently: redirects are not followed; configure the", 0.0),
        (Failing(503, {"Retry-After": "20"}), "503 Service Unavailable", 20.0),
        (Failing(429, {"Retry-After": "9999999"}), "429 Too Many Requests", 86400.0),
        (Failing(599), "599", 0.0),
    ],
)
async def test_an_answer_that_takes_nothing_is_said(failing: Failing, error: str, after: float) -> None:
    async with hooked() as hook:
        hook.script = [failing]
        found = await sent(hook.url)
        assert found.error.startswith(error)
        assert (found.status, found.after_s, len(hook.log)) == (failing.status, after, 1)
