"""What an agent might try with its front: to hold it up, to fill its memory, or to get where it should not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from uuid import uuid4

import pytest
import pytest_asyncio
from fakes.process import PATIENCE, Gateway
from fakes.tape import Tape
from fakes.tls_host import TlsHost

from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.agent_proxy import AgentProxy
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import ProxyTimeouts, RolloutBinding
from penstock.sidecar.intercept.rules import InterceptPolicy

pytestmark = pytest.mark.asyncio(loop_scope="module")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Rig:
    """A front and its host."""

    def __init__(self, front: AgentProxy, port: int, host: TlsHost, gateway: Gateway) -> None:
        self.front, self.port, self.host, self.gateway = front, port, host, gateway
        self.rollout = f"r-{uuid4().hex[:8]}"
        self.passed: list[ConnectionRecord] = []

    async def open(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def inside(self) -> Streams:
        """A connection whose TLS ends at the front."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {self.host.name} HTTP/1.1\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await writer.start_tls(ssl.create_default_context(cadata=self.front.authority.pem), server_hostname="localhost")
        return reader, writer

    async def call(self) -> None:
        """It still serves."""
        reader, writer = await self.inside()
        body = b'{"model":"m","messages":[]}'
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.fixture
def limits() -> ProxyTimeouts:
    """What nobody exceeds here who means it, on a busy machine either. Tests that wait for the end have others."""
    return ProxyTimeouts()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(gateway: Gateway, host: TlsHost, limits: ProxyTimeouts) -> AsyncGenerator[Rig]:
    policy = InterceptPolicy(frozenset({("localhost", host.port)}))
    passed: list[ConnectionRecord] = []
    front = AgentProxy(gateway.url, policy, CertificateStore.create_in_process(["localhost"]), passed.append, limits)
    rig = Rig(front, await front.start(), host, gateway)
    rig.passed = passed
    front.bind(RolloutBinding((("x-rollout-id", rig.rollout),)))
    yield rig
    await front.stop()


@pytest.mark.parametrize("limits", [ProxyTimeouts(head=0.3)])
@pytest.mark.parametrize("start", [b"", b"CONNECT ", b"CONNECT localhost:443 HTTP/1.1\r\nX: y\r\n"])
async def test_one_that_says_too_little_is_closed(rig: Rig, start: bytes) -> None:
    reader, writer = await rig.open()
    writer.write(start)
    assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()


@pytest.mark.parametrize("limits", [ProxyTimeouts(handshake=0.3)])
async def test_one_that_never_begins_its_tls_is_closed(rig: Rig) -> None:
    reader, writer = await rig.open()
    writer.write(f"CONNECT {rig.host.name} HTTP/1.1\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    assert rig.passed[-1].problem is not None
    writer.close()


@pytest.mark.parametrize("head", [b"CONNECT x:1 HTTP/1.1\r\n", b"GET http://localhost/ HTTP/1.1\r\n"])
async def test_a_head_without_end_is_refused(rig: Rig, head: bytes) -> None:
    reader, writer = await rig.open()
    writer.write(head + b"X: " + b"x" * (70 << 10))
    assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith(b"HTTP/1.1 400 ")
    writer.close()


@pytest.mark.parametrize("line", ["CONNECT {}:443", "CONNECT [{}]:443", "GET http://{}/", "GET http://x@{}:8/"])
async def test_a_name_that_is_too_long_for_a_host_is_refused(rig: Rig, line: str) -> None:
    for name in ("a" * 254, "f" * (60 << 10)):
        reader, writer = await rig.open()
        writer.write(f"{line.format(name)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert len(answer) < 500
        writer.close()
    assert rig.passed == [], "it would be in events, and fill memory until then"


@pytest.mark.parametrize("url", ["http://[{}]/", "http://x:{}/"])
async def test_nor_is_what_was_wrong_with_an_address_kept_whole(rig: Rig, url: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        _ = await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await rig.open()
        writer.write(f"GET http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ HTTP/1.1\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)).startswith(b"HTTP/1.1 200 ")
        writer.write(f"GET {url.format('g' * (60 << 10))} HTTP/1.1\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith(b"HTTP/1.1 400 ")
        writer.close()
    (one,) = rig.passed
    assert one.problem is not None
    assert len(one.problem) < 500


ENDLESS = ("Content-Length: 0\r\n\r\nGET http://x/ HTTP/1.1\r\nX: ", "Transfer-Encoding: chunked\r\n\r\n0\r\nX: ")


@pytest.mark.parametrize("rest", ENDLESS)
async def test_nor_does_a_later_head_or_a_trailer_fill_its_memory(rig: Rig, rest: str) -> None:
    came = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _ = await reader.readuntil(b"\r\n\r\n")
        came.set()
        _ = await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await rig.open()
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        writer.write(f"POST {url} HTTP/1.1\r\nHost: x\r\n{rest}".encode())
        async with asyncio.timeout(PATIENCE):
            await came.wait()
            writer.write(b"x" * (64 << 10) + b"x")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_nor_does_what_is_asked_of_the_sidecar_itself(rig: Rig) -> None:
    front = AgentProxy(
        rig.gateway.url,
        InterceptPolicy(frozenset()),
        CertificateStore.create_in_process(["192.0.2.1"]),
        rig.passed.append,
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", await front.start())
    writer.write(b"CONNECT 192.0.2.1:443 HTTP/1.1\r\n\r\n")
    _ = await reader.readuntil(b"\r\n\r\n")
    await writer.start_tls(ssl.create_default_context(cadata=front.authority.pem), server_hostname="192.0.2.1")
    writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * (64 << 10))
    assert (await asyncio.wait_for(reader.read(), PATIENCE)).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await front.stop()


@pytest.mark.parametrize("limits", [ProxyTimeouts(head=5.0)])
async def test_five_hundred_that_say_nothing_keep_nobody_out(rig: Rig) -> None:
    idle = [await rig.open() for _ in range(500)]
    await rig.call()
    for reader, writer in idle:
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()
    await rig.call()


async def test_inside_a_connection_nothing_leads_to_another_host_or_rollout(rig: Rig, tape: Tape) -> None:
    reader, writer = await rig.inside()
    body = b'{"model":"m","messages":[]}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 169.254.169.254\r\nx-rollout-id: r2\r\n"
        b"X-Forwarded-Host: internal\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert b"Host: 169.254.169.254\r\n" in rig.host.asked[-1], "its bytes are its own; where they go is not"
    (span,) = await tape.spans(rig.rollout, 1)
    assert span.rollout == rig.rollout
    assert "r2" not in [one["id"] for one in (await tape.get("/api/rollouts"))["rollouts"]]


async def test_the_address_of_checks_says_nothing_secret_and_leads_nowhere(rig: Rig) -> None:
    front = AgentProxy(
        rig.gateway.url,
        InterceptPolicy(frozenset()),
        CertificateStore.create_in_process(["192.0.2.1"]),
        rig.passed.append,
    )
    port = await front.start()
    front.bind(RolloutBinding((("x-rollout-id", "r1"), ("Proxy-Authorization", "Bearer pst_secret"))))
    for target, said in ((b"/", b'"rollout": "r1"'), (b"/hosts", b'"hosts": {}'), (b"/../../api", b'"penstock"')):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT 192.0.2.1:443 HTTP/1.1\r\n\r\n")
        _ = await reader.readuntil(b"\r\n\r\n")
        context = ssl.create_default_context(cadata=front.authority.pem)
        await writer.start_tls(context, server_hostname="192.0.2.1")
        writer.write(b"GET " + target + b" HTTP/1.1\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        assert said in answer
        assert b"secret" not in answer
        writer.close()
    await front.stop()
