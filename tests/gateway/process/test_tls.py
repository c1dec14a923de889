"""TLS on the agents' side: real clients, every byte as without it, certificates that change while calls run; and
upstreams that ask for a client certificate. One gateway process serves them all."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from fakes.certificates import Authority, serial
from fakes.odd import abort, request, send, wait
from fakes.process import deep_folder, running
from fakes.raw import chunk, connect, events_head, reply
from fakes.responses_websocket import Host
from fakes.rig import GOOD, MESSAGES, Base, Rig, based
from fakes.tape import Tape
from fakes.waiting import until
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.server import serve

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError

STREAM = events_head()
DELTA = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"hello"},"finish_reason":null}]}\n\n'
)
FIRST, LAST = chunk(DELTA), chunk(b"data: [DONE]\n\n") + chunk(b"")
LEAVES = reply(200, b"{}", [("Connection", "close")])
LIMIT = 9 << 20


@dataclass
class Files:
    """What the module's gateway has been given."""

    authority: Authority
    current: Path
    """Its certificate and key."""
    guarded: socket.socket
    """Where the upstream listens that asks for a client certificate."""
    shown: Path
    """What that is shown."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Generator[Files]:
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder)
    current = folder / "current.pem"
    shutil.copy(authority.issue("first", "localhost"), current)
    with socket.create_server(("127.0.0.1", 0)) as guarded:
        yield Files(authority, current, guarded, authority.issue("shown"))


@pytest.fixture(scope="module")
def base(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Generator[Base]:
    address = f"https://localhost:{files.guarded.getsockname()[1]}"
    guarded = f'base_url = "{address}"\nca_file = "{files.authority.file}"'
    # Without routes, because these keep WebSockets away: it is the dialect that finds an upstream.
    config = f"""
[tls]
certificate = "{files.current}"
[limits]
request_bytes = {LIMIT}
[[upstream]]
name = "guarded"
dialect = "anthropic"
{guarded}
client_cert = "{files.shown}"
[[upstream]]
name = "unknown"
dialect = "gemini"
{guarded}
"""
    with based(tmp_path_factory.mktemp("gateway"), config) as made:
        assert made.url.startswith("https://127.0.0.1:")
        made.url = made.url.replace("127.0.0.1", "localhost")
        yield made


@pytest.fixture
def tls(files: Files) -> ssl.SSLContext:
    return files.authority.client()


@pytest.fixture
async def rig(base: Base, tls: ssl.SSLContext, request: pytest.FixtureRequest) -> AsyncGenerator[Rig]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        yield Rig(base, Tape(base.url, session), request.node.name.split("[")[0])


async def test_the_openai_sdk(rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DELTA[6:].replace(b"chat.completion.chunk", b"chat.completion").replace(b'"delta"', b'"message"')
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority.file))
    url = rig.base.url + rig.path("/v1")
    said: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}
    async with (
        rig.upstream([request(), send(STREAM + FIRST + LAST), request(), send(reply(200, whole))]),
        AsyncOpenAI(base_url=url, api_key="k") as client,
    ):
        streamed = await client.chat.completions.create(model="m", messages=[said], stream=True)
        assert [one.choices[0].delta.content async for one in streamed] == ["hello"]
        made = await client.chat.completions.create(model="m", messages=[said])
        assert made.choices[0].message.content == "hello"
    assert [span.status for span in await rig.tape.spans(rig.rollout, 2)] == ["ok", "ok"]


@pytest.mark.slow
async def test_curl_is_offered_http_1_1_only(rig: Rig, files: Files) -> None:
    async with rig.upstream([request(), send(GOOD)]):
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sSv", "--http2", "--cacert", files.authority.file, "-d", "{}", rig.base.url + rig.path()),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, told = await curl.communicate()
    assert said == b"{}", told
    assert b"< HTTP/1.1 200 OK" in told


async def test_every_byte_on_a_connection_that_is_kept(rig: Rig, tls: ssl.SSLContext) -> None:
    large = b'{"model":"m","x":"' + b"x" * (8 << 20) + b'"}'
    back = reply(200, large, [("X-Odd", "a")])
    script = [request(), send(STREAM + FIRST), wait("on"), send(LAST), request(), send(back)]
    async with rig.upstream(script) as upstream, connect(rig.base.url, tls) as client:
        client.send(rig.call())
        await client.until(STREAM + FIRST)
        upstream.go("on")
        await client.until(LAST)
        client.send(rig.call(large))
        await client.until(back)
        assert bytes(client.received) == STREAM + FIRST + LAST + back
        assert (await upstream.connection(0)).requests[1].endswith(b"\r\n\r\n" + large)


async def test_an_upstream_that_breaks_off_looks_broken(rig: Rig, tls: ssl.SSLContext) -> None:
    until_closed = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhalf"
    scripts = [request(), send(STREAM + FIRST), abort()], [request(), send(until_closed), wait("on"), abort()]
    async with rig.upstream(*scripts) as upstream:
        async with connect(rig.base.url, tls) as client:
            client.send(rig.call())
            assert await client.rest() == STREAM + FIRST
        async with connect(rig.base.url, tls) as client:
            client.send(rig.call())
            await client.until(b"half")
            upstream.go("on")
            assert await client.gone() == "reset"


async def test_a_refusal_reaches_who_still_sends(rig: Rig, tls: ssl.SSLContext) -> None:
    async with connect(rig.base.url, tls) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1))
        client.send(b"x" * (1 << 20))
        await client.until(b"HTTP/1.1 413 ")
        client.send(b"x" * (1 << 20))
        assert await client.gone() == "eof"


async def test_a_websocket(rig: Rig, tls: ssl.SSLContext) -> None:
    host = Host()
    url = f"{rig.base.url.replace('https', 'wss')}{rig.path('/v1/responses')}"
    async with (
        serve(host.talk, sock=rig.base.listener.dup(), process_request=host.open, max_size=None),
        connect_websocket(url, ssl=tls, proxy=None, additional_headers={"Authorization": "Bearer k"}) as client,
    ):
        await client.send('{"type":"response.create","model":"gpt-5","input":[{"role":"user","content":"hi"}]}')
        said = [await client.recv()]
        while "response.completed" not in str(said[-1])[:40]:
            said.append(await client.recv())
    assert said == host.sent


async def test_who_is_not_let_in_is_told(rig: Rig, files: Files, tmp_path: Path) -> None:
    own, stranger = files.authority.client(), Authority(tmp_path, "stranger").client()
    for url, context, why in (
        (rig.base.url, stranger, "unable to get local issuer certificate"),
        (rig.base.url.replace("localhost", "127.0.0.1"), own, "IP address mismatch"),
    ):
        with pytest.raises(ssl.SSLCertVerificationError, match=why):
            async with connect(url, context):
                pass
    async with connect(rig.base.url.replace("https", "http")) as client:
        client.send(b"GET /readyz HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.until(b"speaks HTTPS: write https:// in place of http://")


async def test_our_own_client(rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(ClientError, match=r"is not trusted: .*; SSL_CERT_FILE names whom to trust"):
        async with Client(rig.base.url) as client:
            _ = await client.workers()
    with pytest.raises(ClientError, match="this port of the Penstock gateway speaks HTTPS"):
        async with Client(rig.base.url.replace("https", "http")) as client:
            _ = await client.workers()
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority.file))
    async with Client(rig.base.url) as client:
        assert await client.workers() == []


@pytest.mark.slow
async def test_where_temporary_files_lie_deep(files: Files, tmp_path: Path) -> None:
    config, tls = f'[tls]\ncertificate = "{files.authority.issue("deep", "127.0.0.1")}"\n', files.authority.client()
    async with running(tmp_path, config, env={"TMPDIR": deep_folder(tmp_path)}, tls=tls) as gateway:
        assert gateway.url.startswith("https://")
        assert os.listdir(gateway.env["TMPDIR"]) == []


async def test_an_upstream_that_asks_for_a_certificate(rig: Rig, files: Files) -> None:
    tls = files.authority.client()
    async with guarded(files) as seen, connect(rig.base.url, tls) as client:
        client.send(rig.call(below=MESSAGES))
        await client.until(b"\r\n\r\n{}")
        client.send(rig.call(below="/v1beta/models/m:generateContent"))
        await client.until(b"HTTP/1.1 502 ")
    assert seen == [serial(files.shown)]
    assert [span.status for span in await rig.tape.spans(rig.rollout, 2)] == ["ok", "error"]


@asynccontextmanager
async def guarded(files: Files) -> AsyncGenerator[list[str]]:
    """The upstream that asks for a certificate; the serial numbers of those that it was shown."""
    seen: list[str] = []
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peercert")["serialNumber"])
        _ = await reader.readuntil(b"}")
        writer.write(LEAVES)
        writer.close()
        await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(serve, sock=files.guarded.dup(), ssl=guarding(files))
    try:
        yield seen
        await over.wait()
    finally:
        server.close()


def guarding(files: Files) -> ssl.SSLContext:
    """TLS of that upstream."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(files.authority.issue("upstream"))
    made.load_verify_locations(files.authority.file)
    made.verify_mode = ssl.CERT_REQUIRED
    return made


async def served(base: Base, tls: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection gets."""
    async with connect(base.url, tls) as client:
        return client.transport.get_extra_info("peercert")["serialNumber"]


async def test_the_certificate_changes_while_a_stream_runs(rig: Rig, files: Files, tls: ssl.SSLContext) -> None:
    script = [request(), send(STREAM + FIRST), wait("on"), send(LAST), request(), send(GOOD)]
    before = serial(files.current)
    async with rig.upstream(script) as upstream, connect(rig.base.url, tls) as client:
        client.send(rig.call())
        await client.until(STREAM + FIRST)
        assert await served(rig.base, tls) == before
        # Its key is of another kind: nothing of the old one may be left.
        shutil.copy(files.authority.issue("second", "localhost", of_rsa=True), files.current)
        await until_logged(rig.base, "new connections get the new certificate")
        assert await served(rig.base, tls) == serial(files.current) != before
        upstream.go("on")
        await client.until(LAST)
        client.send(rig.call())
        await client.until(GOOD)
        assert bytes(client.received) == STREAM + FIRST + LAST + GOOD
    after = serial(files.current)
    key, certificate = (path.read_text().partition("-----BEGIN CERT") for path in (files.shown, files.current))
    files.current.write_text(key[0] + certificate[1] + certificate[2])
    await until_logged(rig.base, f"the old certificate stays: tls.certificate '{files.current}': the private key does")
    assert await served(rig.base, tls) == after
    assert "PRIVATE KEY" not in rig.base.log


async def until_logged(base: Base, words: str) -> None:
    await until(lambda: words in base.log)
