"""`penstock sidecar --engine mitmproxy`: mitmproxy before our front, so that agents can speak HTTP/2."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes import environments
from fakes.mistakes import tells
from fakes.process import Gateway, child, gone
from fakes.responses_websocket import websocket_host
from fakes.shell import PENSTOCK, Done, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost, tls_host
from fakes.websocket_agent import WEBSOCKET_AGENT

from penstock.sidecar.intercept.certificate_store import CertificateStore

MITMDUMP = environments.folder("mitmproxy") / "bin" / "mitmdump"
pytestmark = pytest.mark.skipif(
    not environments.installed("mitmproxy"), reason="mitmproxy is not here: `make install-mitmproxy` installs it"
)
CALLS = """
import http.client, os, ssl
proxy = os.environ["HTTPS_PROXY"].rpartition(":")[2]
BODIES = (b'{"model":"m","messages":[]}', b'{"model": "m", "messages": [], "stream": true}', b'')
connection = http.client.HTTPSConnection("127.0.0.1", int(proxy), context=ssl.create_default_context())
host, _, port = "HOST".partition(":")
connection.set_tunnel(host, int(port))
for body in BODIES:
    connection.putrequest("POST", "/v1/chat/completions?a=%20b&&c", skip_accept_encoding=True)
    connection.putheader("x-ODD", "  two  words")
    connection.putheader("X-Twice", "1")
    connection.putheader("authorization", "Bearer sk-real")
    connection.putheader("X-Twice", "2")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    print(answer.status, answer.getheaders(), answer.read())
"""
CURL = """
import subprocess, sys
line = ["curl", "-sS", "--http2", "-w", "HTTP/%{http_version}", "https://HOST/v1/chat/completions"]
line += ["-d", '{"model":"m","messages":[]}', "-H", "X-Odd: 1"]
sys.stdout.write(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
"""
HTTP_2 = """
import os, socket, ssl
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded
proxy = socket.create_connection(("127.0.0.1", int(os.environ["HTTPS_PROXY"].rpartition(":")[2])))
proxy.sendall(b"CONNECT HOST HTTP/1.1\\r\\n\\r\\n")
agreed = b""
while not agreed.endswith(b"\\r\\n\\r\\n"):
    agreed += proxy.recv(1)
context = ssl.create_default_context()
context.set_alpn_protocols(["h2"])
with context.wrap_socket(proxy, server_hostname="localhost") as tls:
    assert tls.selected_alpn_protocol() == "h2", "no h2"
    http, answer, over = H2Connection(), b"", False
    http.initiate_connection()
    to = {":method": "POST", ":scheme": "https", ":authority": "HOST", ":path": "/v1/chat/completions", "x-odd": "1"}
    http.send_headers(1, list(to.items()))
    http.send_data(1, b'{"model":"m","messages":[]}', end_stream=True)
    while not over:
        tls.sendall(http.data_to_send())
        for event in http.receive_data(tls.recv(65536)):
            over = over or isinstance(event, StreamEnded)
            answer += event.data if isinstance(event, DataReceived) else b""
print(answer.decode())
"""
KEY = """
import os, pathlib, stat
folder = pathlib.Path(os.environ["SSL_CERT_FILE"]).parent.parent
assert folder.name.startswith("penstock-sidecar-")
names = [path for path in folder.rglob("*") if path.is_file()]
print(sorted(path.name for path in names if "PRIVATE KEY" in path.read_text("latin-1")), len(names) > 3)
"""
DEAD = """
import os, signal, socket, urllib.request
print("up", flush=True)
os.kill(int(input()), signal.SIGKILL)
while True:
    try:
        socket.create_connection(("127.0.0.1", int(os.environ["HTTPS_PROXY"].rpartition(":")[2]))).close()
    except ConnectionRefusedError:
        break
try:
    urllib.request.urlopen("https://HOST/v1/chat/completions", b"{}")
except OSError as error:
    print(error)
"""


@dataclass
class Rig:
    host: TlsHost
    gateway: Gateway
    folder: Path

    def words(self, script: str, engine: str = "mitmproxy", python: Path = Path(sys.executable)) -> tuple[str, ...]:
        agent = ("--", str(python), "-c", script.replace("HOST", self.host.name))
        return ("sidecar", "--engine", engine, "--rollout", "r1", "--intercept", self.host.name, *agent)

    @property
    def shell(self) -> Shell:
        return Shell(self.gateway.url, self.folder, PENSTOCK)

    async def run(
        self, script: str, *words: str, engine: str = "mitmproxy", python: Path = Path(sys.executable)
    ) -> Done:
        return await self.shell.run(*self.words(script, engine, python), *words, PENSTOCK_MITMDUMP=str(MITMDUMP))


@pytest.fixture
async def rig(start_gateway: StartGateway, tmp_path: Path) -> AsyncGenerator[Rig]:
    async with tls_host(tmp_path) as host:
        text = f'[[upstream]]\nname = "host"\nbase_url = "https://{host.name}/v1"\nca_file = "{host.trust}"\n'
        yield Rig(host, await start_gateway(text), tmp_path)


async def test_the_host_gets_what_it_gets_by_our_own_front(rig: Rig, http: aiohttp.ClientSession) -> None:
    ours = await rig.run(CALLS, engine="own")
    assert (ours.code, ours.err) == (0, "")
    first, rig.host.asked = rig.host.asked, []
    theirs = await rig.run(CALLS)
    assert (theirs.code, theirs.out, theirs.err) == (0, ours.out, "")
    assert rig.host.asked == first
    spans = await Tape(rig.gateway.url, http).spans("r1", 6)
    assert {(span.dialect, span.upstream) for span in spans} == {("chat", "host")}


@pytest.mark.skipif("HTTP2" not in subprocess.getoutput("curl --version"), reason="this curl has no HTTP/2")
async def test_an_agent_may_speak_http_2(rig: Rig, http: aiohttp.ClientSession) -> None:
    done = await rig.run(CURL)
    assert (done.code, done.err) == (0, "")
    assert done.text.endswith("HTTP/2")
    assert "hello" in done.text
    await only_call(rig, http)


async def test_and_nothing_else(rig: Rig, http: aiohttp.ClientSession) -> None:
    ours = await rig.run(HTTP_2, engine="own", python=MITMDUMP.with_name("python"))
    assert (ours.code, rig.host.asked) == (1, [])
    assert "AssertionError: no h2" in ours.err
    done = await rig.run(HTTP_2, python=MITMDUMP.with_name("python"))
    assert (done.code, done.err) == (0, "")
    assert "hello" in done.text
    await only_call(rig, http)


async def only_call(rig: Rig, http: aiohttp.ClientSession) -> None:
    (asked,) = rig.host.asked
    assert asked.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nx-odd: 1\r\n" in asked
    (span,) = await Tape(rig.gateway.url, http).spans("r1", 1)
    assert (span.dialect, span.status, span.upstream) == ("chat", "ok", "host")


async def test_the_key_of_its_authority_is_gone_when_there_is_an_agent(rig: Rig) -> None:
    done = await rig.run(KEY)
    assert (done.code, done.text) == (0, "[] True\n")


FIRST = """
import json, os, ssl, http.client
host, _, port = "HOST".partition(":")
proxy = os.environ["HTTPS_PROXY"].rpartition(":")[2]
connection = http.client.HTTPSConnection("127.0.0.1", int(proxy), context=ssl.create_default_context())
connection.set_tunnel(host, int(port))
connection.request("POST", "/v1/chat/completions", b'{"model":"m","messages":[],"stream":true}')
answer = connection.getresponse()
print(answer.readline(), flush=True)
assert input() == "go on"
print(answer.read())
"""
OTHER = """
import http.client, os, ssl, sys
proxy = os.environ["HTTPS_PROXY"].rpartition(":")[2]
for host in ("HOST", "OTHER"):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", int(proxy), context=context)
    name, _, port = host.partition(":")
    connection.set_tunnel(name, int(port))
    connection.request("POST", "/v1/chat/completions", b'{"model":"m","messages":[]}')
    print(ssl.DER_cert_to_PEM_cert(connection.sock.getpeercert(True)) == open(sys.argv[1]).read())
    assert connection.getresponse().status == 200
"""


async def test_the_first_event_of_a_stream_does_not_wait_for_the_next(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    authority, trust, go = CertificateStore.create_in_process(["localhost"]), tmp_path / "host.pem", asyncio.Event()
    trust.write_text(authority.pem)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await go.wait()
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=authority.context("localhost")) as server:
        host = TlsHost(server.sockets[0].getsockname()[1], trust)
        text = f'[[upstream]]\nname = "host"\nbase_url = "https://{host.name}/v1"\nca_file = "{trust}"\n'
        rig = Rig(host, await start_gateway(text), tmp_path)
        pipe = asyncio.subprocess.PIPE
        process = await rig.shell.start(*rig.words(FIRST), stdin=pipe, PENSTOCK_MITMDUMP=str(MITMDUMP))
        assert process.stdout is not None
        assert process.stdin is not None
        assert await process.stdout.readline() == b"b'data: 1\\n'\n"
        go.set()
        out, err = await process.communicate(b"go on\n")
        assert (process.returncode, out, err) == (0, b"b'\\ndata: 2\\n\\n'\n", b"")


async def test_a_websocket_passes(start_gateway: StartGateway, tmp_path: Path, http: aiohttp.ClientSession) -> None:
    authority, trust = CertificateStore.create_in_process(["localhost"]), tmp_path / "host.pem"
    trust.write_text(authority.pem)
    async with websocket_host(authority.context("localhost")) as host:
        text = f'[[upstream]]\nname = "host"\nbase_url = "{host.url}/v1"\nca_file = "{trust}"\n'
        place = TlsHost(int(host.url.rpartition(":")[2]), trust)
        rig = Rig(place, await start_gateway(text), tmp_path)
        done = await rig.run(WEBSOCKET_AGENT)
        assert (done.code, done.text, done.err) == (0, "said 1\nsaid 2\n", "")
        spans = await Tape(rig.gateway.url, http).spans("r1", 2)
        assert [(span.dialect, span.http_status, span.status) for span in spans] == [("responses", 101, "ok")] * 2


async def test_what_may_not_be_reached_is_closed(rig: Rig, http: aiohttp.ClientSession) -> None:
    script = "import urllib.request as r\ntry:\n    r.urlopen('https://other.invalid/')\nexcept OSError as error:\n"
    words = rig.words(script + "    print(error)")
    done = await rig.shell.run(*words[:1], "--on-unknown", "deny", *words[1:], PENSTOCK_MITMDUMP=str(MITMDUMP))
    assert (done.code, "EOF" in done.text) == (0, True)
    assert "other.invalid:443 may not be reached" in done.err
    (event,) = await Tape(rig.gateway.url, http).spans("r1", 1)
    assert (event.name, (event.attributes or {})["fate"]) == ("egress", "deny")


async def test_other_hosts_keep_their_certificates(rig: Rig, tmp_path: Path) -> None:
    authority = CertificateStore.create_in_process(["localhost"])
    context, other, certificate = authority.context("localhost"), TlsHost(), tmp_path / "other.pem"
    async with await asyncio.start_server(other.serve, "127.0.0.1", 0, ssl=context) as server:
        other.port = server.sockets[0].getsockname()[1]
        served = await asyncio.to_thread(ssl.get_server_certificate, ("localhost", other.port))
        certificate.write_text(served)
        done = await rig.run(OTHER.replace("OTHER", other.name), str(certificate))
    assert (done.code, done.text, done.err) == (0, "False\nTrue\n", "")
    assert [len(host.asked) for host in (rig.host, other)] == [1, 1]


async def test_without_mitmproxy_nothing_is_reached(rig: Rig) -> None:
    process = await rig.shell.start(*rig.words(DEAD), stdin=asyncio.subprocess.PIPE, PENSTOCK_MITMDUMP=str(MITMDUMP))
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    out, err = await process.communicate(f"{child(process.pid, b'mitmdump')}\n".encode())
    assert b"Connection refused" in out
    assert b"mitmproxy ended with code -9; connections were refused from then on" in err
    assert rig.host.asked == []


async def test_it_ends_with_the_sidecar(rig: Rig) -> None:
    script = "import time\nprint('up', flush=True)\ntime.sleep(60)"
    process = await rig.shell.start(*rig.words(script), PENSTOCK_MITMDUMP=str(MITMDUMP))
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    mitmdump, agent = child(process.pid, b"mitmdump"), child(process.pid, b"time.sleep")
    try:
        process.kill()
        await gone(mitmdump)
    finally:
        os.kill(agent, signal.SIGKILL)
    await process.communicate()


async def test_a_client_that_does_not_trust_it_is_told_of(rig: Rig) -> None:
    script = "import ssl, urllib.request as r\nc = ssl.create_default_context(cafile=__import__('sys').argv[1])\n"
    script += "try:\n    r.urlopen('https://HOST/v1/models', context=c)\nexcept OSError as error:\n    print(error)"
    done = await rig.run(script, str(rig.host.trust))
    assert (done.code, "certificate verify failed" in done.text) == (0, True)
    assert tells(done.err, rig.host.name, "does not trust the proxy's certificate", "localhost")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/nowhere/mitmdump", "--engine mitmproxy: it needs mitmdump, and '/nowhere/mitmdump' is not there: install"),
        ("/bin/false", "mitmdump could not be started: it ended"),
    ],
)
async def test_it_must_be_there(rig: Rig, place: str, said: str) -> None:
    done = await rig.shell.run(*rig.words("print('agent')"), PENSTOCK_MITMDUMP=place)
    assert (done.code, done.out) == (1, b"")
    assert said in done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--mode", "transparent"), 2, "stands before agents that use a proxy: leave --mode transparent out"),
        (("--intercept", "127.0.0.1:8443"), 1, "--intercept 127.0.0.1: mitmproxy's certificates hold for names only"),
    ],
)
async def test_what_it_cannot_do(rig: Rig, words: tuple[str, ...], code: int, said: str) -> None:
    done = await rig.shell.run(
        "sidecar", "--engine", "mitmproxy", *words, "--", "true", PENSTOCK_MITMDUMP=str(MITMDUMP)
    )
    assert (done.code, done.out) == (code, b"")
    assert f"--engine mitmproxy{': ' if code == 1 else ' '}{said}" in done.err


async def test_the_sidecar_says_that_connections_get_to_it(rig: Rig) -> None:
    done = await rig.run("import urllib.request as r\nprint(r.urlopen('https://192.0.2.1/').read().decode())")
    assert done.code == 0, done.err
    assert "r1" in done.text
