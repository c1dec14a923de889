"""What becomes of connections that an agent opens: tunnelled, refused, sent to the gateway, or nothing, and why."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from fakes.mistakes import tells
from fakes.process import Gateway
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape
from fakes.tls_host import ANSWER, TlsHost, tls_host
from fakes.waiting import News

from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.agent_proxy import AgentProxy
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import RolloutBinding
from penstock.sidecar.intercept.rules import InterceptPolicy

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = b'POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 28\r\n\r\n{"model":"m","messages":[]} '


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Rig:
    """A front in this process, and the connections of a client."""

    def __init__(self, front: AgentProxy, port: int, host: TlsHost) -> None:
        self.front, self.port, self.host = front, port, host
        self.passed: list[ConnectionRecord] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.changed = News()

    def note(self, one: ConnectionRecord) -> None:
        self.passed.append(one)
        self.changed.tell()

    async def open(self) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def connect(self, line: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        reader, writer = await self.open()
        writer.write(f"{line}\r\nHost: x\r\n\r\n".encode("latin-1"))
        return reader, writer, await reader.readuntil(b"\r\n\r\n")

    async def secure(self, name: str = "localhost", alpn: tuple[str, ...] = ("http/1.1",)) -> Streams:
        reader, writer, _ = await self.connect(f"CONNECT {self.host.name} HTTP/1.1")
        context = ssl.create_default_context(cadata=self.front.authority.pem)
        context.set_alpn_protocols(alpn)
        context.check_hostname = name == "localhost"
        await writer.start_tls(context, server_hostname=name)
        return reader, writer

    async def over(self, count: int = 1) -> ConnectionRecord:
        """The last of so many connections that have ended."""
        await self.changed.until(lambda: len(self.passed) >= count)
        return self.passed[-1]

    async def stop(self) -> None:
        for writer in self.writers:
            writer.close()
        await self.front.stop()
        for writer in self.writers:
            with suppress(OSError):
                await writer.wait_closed()


async def made(gateway: str, host: TlsHost, policy: InterceptPolicy) -> Rig:
    front = AgentProxy(gateway, policy, CertificateStore.create_in_process(["localhost"]), lambda one: rig.note(one))
    rig = Rig(front, await front.start(), host)
    front.bind(RolloutBinding((("x-rollout-id", "r1"),)))
    return rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(gateway: Gateway, host: TlsHost) -> AsyncGenerator[Rig]:
    rig = await made(gateway.url, host, InterceptPolicy(frozenset({("localhost", host.port)})))
    yield rig
    await rig.stop()


async def test_another_host_is_tunnelled_as_it_is(rig: Rig, host: TlsHost) -> None:
    context = ssl.create_default_context(cafile=str(host.trust))
    context.check_hostname = False
    url = f"https://127.0.0.1:{host.port}/v1/chat/completions"
    proxy = f"http://127.0.0.1:{rig.port}"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={}, proxy=proxy, ssl=context, headers={"Connection": "close"}) as answer,
    ):
        assert await answer.json() == ANSWER
    one = await rig.over()
    assert (one.host, one.port, one.action, one.problem) == ("127.0.0.1", host.port, "tunnel", None)
    assert one.sent > 200
    assert one.received > 400


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("CONNECT example.org:443 HTTP/1.1", 403, b"example.org:443 may not be reached from here"),
        ("GET http://example.org/ HTTP/1.1", 403, b"example.org:80 may not be reached from here"),
        ("GET / HTTP/1.1", 400, b"it takes CONNECT HOST:PORT and http:// URLs"),
        ("CONNECT x HTTP/1.1", 400, b""),
        ("\x16\x03\x01 HTTP/1.1", 400, b"not valid HTTP/1.1"),
    ],
)
async def test_what_is_refused(gateway: Gateway, host: TlsHost, line: str, status: int, words: bytes) -> None:
    rig = await made(gateway.url, host, InterceptPolicy(frozenset(), "deny"))
    reader, _, head = await rig.connect(line)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert words in await reader.read()
    await rig.stop()


async def test_plain_requests_reach_each_its_host(rig: Rig, host: TlsHost) -> None:
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                got.append(head + (await reader.readexactly(2) if b"POST" in head else b""))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()

    servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    reader, writer = await rig.open()
    for port in (ports[0], ports[0], ports[1]):
        writer.write(
            f"POST http://127.0.0.1:{port}/a?b=c HTTP/1.1\r\nhOst: x\r\nProxy-Connection: keep-alive\r\n"
            "Content-Length: 2\r\n\r\n{}".encode()
        )
        _ = await reader.readuntil(b"\r\n\r\n")
    assert got == [b"POST /a?b=c HTTP/1.1\r\nhOst: x\r\nContent-Length: 2\r\n\r\n{}"] * 3
    writer.close()
    _ = await rig.over(2)
    assert [one.port for one in rig.passed] == ports
    for server in servers:
        server.close()


async def test_the_target_of_a_plain_request_stays_as_it_is(rig: Rig) -> None:
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                got.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    reader, writer = await rig.open()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        for target in ("/a?", "//b//?c=/d?e", "/f;g/%20/../h", "?i", ""):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{target}"
            writer.write(f"GET {url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            _ = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        _ = await rig.over()
    assert got == [b"/a?", b"//b//?c=/d?e", b"/f;g/%20/../h", b"/?i", b"/"]


async def test_a_client_that_does_not_trust_us_is_named(rig: Rig, host: TlsHost) -> None:
    _, writer, _ = await rig.connect(f"CONNECT {host.name} HTTP/1.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        await writer.start_tls(ssl.create_default_context(), server_hostname="localhost")
    assert tells((await rig.over()).problem, "left in the handshake", "localhost")
    assert not host.asked


async def test_another_name_than_was_connected_to_is_refused(rig: Rig, host: TlsHost) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await rig.secure("api.openai.com")
    assert (await rig.over()).problem is not None
    assert not host.asked


async def test_a_name_counts_however_it_is_written(rig: Rig, host: TlsHost) -> None:
    reader, writer = await rig.secure("LocalHost")
    writer.write(ASK)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    assert host.asked == [ASK]


async def test_a_client_that_offers_two_protocols_gets_http_1(rig: Rig, host: TlsHost) -> None:
    reader, writer = await rig.secure(alpn=("h2", "http/1.1"))
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    writer.write(ASK)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    assert host.asked == [ASK]


async def test_a_call_whose_client_has_left_goes_to_no_rollout(rig: Rig, host: TlsHost) -> None:
    await rig.front.release()
    _, writer = await rig.secure()
    writer.write(ASK)
    writer.close()
    one = await rig.over()
    assert (one.action, one.problem) == ("intercept", "the agent left")
    rig.front.bind(RolloutBinding((("x-rollout-id", "r2"),)))
    reader, writer = await rig.secure()
    writer.write(ASK)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    assert host.asked == [ASK]


async def test_without_a_gateway_the_agent_is_told(host: TlsHost) -> None:
    rig = await made("http://127.0.0.1:1", host, InterceptPolicy(frozenset({("localhost", host.port)})))
    reader, writer = await rig.secure()
    writer.write(ASK)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway")
    assert b"127.0.0.1:1 could not be reached" in answer
    assert not host.asked
    await rig.stop()


async def test_without_a_gateway_calls_may_go_past_it_and_that_is_said(host: TlsHost) -> None:
    policy = InterceptPolicy(frozenset({("localhost", host.port)}), fail="open")
    rig = await made("http://127.0.0.1:1", host, policy)
    reader, writer, _ = await rig.connect(f"CONNECT {host.name} HTTP/1.1")
    await writer.start_tls(ssl.create_default_context(cafile=str(host.trust)), server_hostname="localhost")
    writer.write(ASK)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    assert host.asked == [ASK]
    writer.close()
    one = await rig.over()
    assert one.action == "unrecorded"
    assert tells(one.problem, "127.0.0.1:1 could not be reached", "not recorded")
    await rig.stop()


async def test_what_a_gateway_refuses_goes_nowhere_else(gateway: Gateway, tmp_path: Path) -> None:
    async with tls_host(tmp_path) as other:
        rig = await made(gateway.url, other, InterceptPolicy(frozenset({("localhost", other.port)}), fail="open"))
        reader, writer = await rig.secure()
        writer.write(ASK)
        assert b"the gateway refused this connection" in await reader.read()
        assert not other.asked
        await rig.stop()


async def test_while_the_gateway_is_there_nothing_goes_past_it(gateway: Gateway, host: TlsHost) -> None:
    rig = await made(gateway.url, host, InterceptPolicy(frozenset({("localhost", host.port)}), fail="open"))
    reader, writer = await rig.secure()
    writer.write(ASK)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    one = await rig.over()
    assert (one.action, one.problem) == ("intercept", None)
    await rig.stop()


async def test_other_hosts_are_reached_by_the_proxy_that_the_machine_needs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if b"away.test" in asked[-1]:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 5\r\n\r\nwho??")
        else:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"first ")
            writer.write(await reader.readexactly(4))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:p%40ss@127.0.0.1:{server.sockets[0].getsockname()[1]}")
    monkeypatch.delenv("https_proxy", raising=False)
    reader, writer, _ = await rig.connect("CONNECT far.test:443 HTTP/1.1")
    writer.write(b"ping")
    assert await reader.read() == b"first ping"
    (head,) = asked
    assert head.startswith(b"CONNECT far.test:443 HTTP/1.1\r\nHost: far.test:443\r\n")
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==\r\n" in head
    reader, _, head = await rig.connect("CONNECT away.test:443 HTTP/1.1")
    assert head.startswith(b"HTTP/1.1 502 ")
    assert b"does not lead to away.test:443: who??" in await reader.read()
    server.close()


async def test_a_host_that_the_gateway_does_not_know(gateway: Gateway, tmp_path: Path) -> None:
    async with tls_host(tmp_path) as other:
        rig = await made(gateway.url, other, InterceptPolicy(frozenset({("localhost", other.port)})))
        reader, writer = await rig.secure()
        writer.write(ASK)
        assert b"add an [[upstream]] with that host" in await reader.read()
        await rig.stop()


@pytest.mark.slow
async def test_where_an_agent_has_been_is_on_the_tape(
    gateway: Gateway, host: TlsHost, tmp_path: Path, tape: Tape
) -> None:
    script = f"""if True:
        import os, socket
        proxy = socket.create_connection(("127.0.0.1", int(os.environ["HTTPS_PROXY"].split(":")[-1])))
        proxy.sendall(b"CONNECT 127.0.0.1:{host.port} HTTP/1.1\\r\\n\\r\\n")
        print(proxy.recv(99))
    """
    shell = Shell(gateway.url, tmp_path, PENSTOCK)
    done = await shell.run("sidecar", "--rollout", "agent", "--", sys.executable, "-c", script)
    assert (done.code, done.out) == (0, b"b'HTTP/1.1 200 Connection established\\r\\n\\r\\n'\n")
    assert (
        f"nothing was recorded: the agent opened no connection to a host of models (others: 127.0.0.1:{host.port})"
        in done.err
    )
    (event,) = await tape.spans("agent", 1)
    found = dict(event.attributes or {})
    assert found.pop("seconds") >= 0
    assert (event.kind, event.name) == ("event", "egress")
    assert found == {
        "server.address": "127.0.0.1", "server.port": host.port, "fate": "tunnel",
        "connections": 1, "bytes_sent": 0, "bytes_received": 0,
    }  # fmt: skip
