"""Calls on a Unix socket: plain HTTP of an agent, which reaches its host over TLS."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.process import Gateway, deep_folder
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost

from penstock.sidecar.intercept.certificate_store import CertificateStore

HOST = "api.anthropic.com"
KEYS = """
import os
for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
    assert os.environ[name].startswith("pst_"), name
assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
"""
CURL = """
import os, stat, subprocess, sys
path, url = os.environ["ANTHROPIC_UNIX_SOCKET"], os.environ["ANTHROPIC_BASE_URL"]
mode = stat.S_IMODE(os.stat(path).st_mode), stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)
assert mode == (0o600, 0o700), mode
words = ["curl", "-sS", "--noproxy", "*", "--unix-socket", path, url + "/v1/messages", "-H"]
words.append("x-api-key: " + os.environ["ANTHROPIC_API_KEY"])
for said in ('{"model":"m","messages":[]}', '{"model":"n","messages":[]}'):
    done = subprocess.run([*words, "-d", said], stdout=subprocess.PIPE, check=True)
    sys.stdout.write(done.stdout.decode()[:20])
"""

AGENT = ("--", "env", "ANTHROPIC_API_KEY=sk-ant-x", sys.executable, "-c", CURL)


@dataclass
class Rig:
    host: TlsHost
    gateway: Gateway
    shell: Shell


@pytest.fixture
async def rig(start_gateway: StartGateway, tmp_path: Path) -> AsyncGenerator[Rig]:
    """The host is behind a proxy, which leads there whatever its name."""
    authority, host = CertificateStore.create_in_process([HOST]), TlsHost()
    trust = tmp_path / "host.pem"
    _ = await asyncio.to_thread(trust.write_text, authority.pem)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(f"CONNECT {HOST}:443 ".encode())
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await writer.start_tls(authority.context(HOST))
        await host.serve(reader, writer)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    text = f'[[upstream]]\nname = "up"\nbase_url = "https://{HOST}"\ndialect = "anthropic"\nproxy = "{proxy}"\n'
    gateway = await start_gateway(text + f'ca_file = "{trust}"\n')
    yield Rig(host, gateway, Shell(gateway.url, tmp_path, PENSTOCK))
    server.close()


@pytest.mark.parametrize("lies", ["as usual", "deep"])
async def test_calls_on_a_socket_are_those_of_the_rollout(
    rig: Rig, http: aiohttp.ClientSession, lies: str, tmp_path: Path
) -> None:
    given = deep_folder(tmp_path) if lies == "deep" else tempfile.gettempdir()
    done = await rig.shell.run("sidecar", "--socket", "--rollout", "r1", *AGENT, TMPDIR=given)
    assert (done.code, done.err) == (0, "")
    assert done.text.count('{"id": "c-1"') == 2
    first, second = await Tape(rig.gateway.url, http).spans("r1", 2)
    assert [(span.dialect, span.model, span.upstream) for span in (first, second)] == [
        ("messages", "m", "up"),
        ("messages", "n", "up"),
    ]
    head = rig.host.asked[0].partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert head[:2] == [b"POST /v1/messages HTTP/1.1", b"Host: api.anthropic.com"]
    assert b"x-api-key: sk-ant-x" in head


async def test_without_it_there_is_none(rig: Rig) -> None:
    script = "import os; print('ANTHROPIC_UNIX_SOCKET' in os.environ, 'ANTHROPIC_BASE_URL' in os.environ)"
    done = await rig.shell.run("sidecar", "--", sys.executable, "-c", script)
    assert (done.code, done.text) == (0, "False False\n")


async def test_nothing_goes_past_a_gateway_that_is_away(rig: Rig) -> None:
    await rig.gateway.kill()
    done = await rig.shell.run("sidecar", "--socket", "--fail", "open", *AGENT)
    assert (done.code, rig.host.asked) == (0, [])
    assert done.text.startswith("the gateway could no")
    assert "the gateway could not be reached" in done.err


async def test_an_agent_may_have_its_token_for_a_key(
    rig: Rig, start_gateway: StartGateway, http: aiohttp.ClientSession
) -> None:
    config = await asyncio.to_thread(rig.gateway.config.read_text)
    gateway = await start_gateway(config + 'key_env = "REAL_KEY"\n', env={"REAL_KEY": "sk-ant-the-real-one"})
    async with http.post(gateway.url + "/api/tokens", json={"rollout": "r7"}) as made:
        token = (await made.json())["token"]
    words = ("sidecar", "--socket", "--keys", "surrogate", "--", sys.executable, "-c", KEYS + CURL)
    done = await Shell(gateway.url, rig.shell.folder, PENSTOCK).run(
        *words, PENSTOCK_TOKEN=token, ANTHROPIC_API_KEY="sk-ant-mine", ANTHROPIC_AUTH_TOKEN="sk-ant-mine"
    )
    assert (done.code, done.err) == (0, "")
    assert [span.status for span in await Tape(gateway.url, http).spans("r7", 2)] == ["ok", "ok"]
    heads = b"".join(rig.host.asked)
    assert heads.count(b"x-api-key: sk-ant-the-real-one") == 2
    assert b"pst_" not in heads
