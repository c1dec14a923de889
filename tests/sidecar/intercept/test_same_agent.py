"""The same agent: what a model host gets of an unmodified client behind `penstock sidecar` is what it gets without."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
from fakes.process import PATIENCE, Gateway, running
from fakes.pty_program import pty_program
from fakes.responses_websocket import Host, websocket_host
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost
from fakes.websocket_agent import WEBSOCKET_AGENT

from penstock.gateway.client.client import Client
from penstock.sidecar.intercept import session
from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.certificate_store import CertificateStore

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OPENAI = """
import openai
client = openai.OpenAI(api_key="sk-real", base_url="https://HOST/v1")
ask = dict(model="m", messages=[{"role": "user", "content": "hi"}])
print(client.chat.completions.create(**ask).choices[0].message.content)
print("".join(chunk.choices[0].delta.content for chunk in client.chat.completions.create(**ask, stream=True)))
"""
REQUESTS = """
import os, requests
session = requests.Session()
for _ in range(2):
    made = session.post("https://HOST/v1/chat/completions", json={"model": "m", "messages": []}, headers={"X-Odd": "1"})
    print(made.json()["choices"][0]["message"]["content"])
"""
URLLIB = """
import json, urllib.request
ask = urllib.request.Request("https://HOST/v1/chat/completions", json.dumps({"model": "m", "messages": []}).encode())
print(json.load(urllib.request.urlopen(ask))["choices"][0]["message"]["content"])
"""
CURL = """
import subprocess, sys
line = ["curl", "-sS", "https://HOST/v1/chat/completions", "-d", '{"model":"m","messages":[]}', "-H", "api-key: k"]
sys.stdout.write(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
"""


SCRIPTS = {"openai": OPENAI, "requests": REQUESTS, "urllib": URLLIB, "curl": CURL}


@dataclass
class Behind:
    host: TlsHost
    gateway: Gateway
    folder: Path

    async def direct(self, script: str) -> bytes:
        """What an agent prints that knows the host's authority."""
        trust = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), str(self.host.trust))
        shell = Shell(self.gateway.url, self.folder, (sys.executable,))
        done = await shell.run("-c", script.replace("HOST", self.host.name), **trust)
        assert done.code == 0, done.err
        return done.out

    async def behind(self, script: str, rollout: str) -> bytes:
        """What it prints behind a sidecar."""
        shell = Shell(self.gateway.url, self.folder, PENSTOCK)
        agent = ("--", sys.executable, "-c", script.replace("HOST", self.host.name))
        done = await shell.run("sidecar", "--rollout", rollout, "--intercept", self.host.name, *agent)
        assert (done.code, done.err) == (0, "")
        return done.out


@pytest.fixture
def rig(gateway: Gateway, host: TlsHost, tmp_path: Path) -> Behind:
    return Behind(host, gateway, tmp_path)


@pytest.mark.parametrize("client", SCRIPTS)
async def test_the_bytes_are_the_same(rig: Behind, tape: Tape, client: str) -> None:
    script = SCRIPTS[client]
    direct = await rig.direct(script)
    first, rig.host.asked = rig.host.asked, []
    assert await rig.behind(script, client) == direct != b""
    assert rig.host.asked == first
    spans = await tape.spans(client, len(first))
    assert {(span.kind, span.dialect, span.status, span.upstream) for span in spans} == {("llm", "chat", "ok", "host")}
    assert "sk-real" not in str(await tape.detail(spans[0]))


@pytest.mark.smoke
async def test_signals_and_the_exit_code_pass(rig: Behind) -> None:
    shell = Shell(rig.gateway.url, rig.folder, PENSTOCK)
    done = await shell.run("sidecar", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.code == 7
    done = await shell.run("sidecar", "--", "no-such-agent")
    assert (done.code, "'no-such-agent' could not be started" in done.err) == (127, True), done.err
    script = "import signal, time\nprint('up', flush=True)\nsignal.pause()"
    process = await shell.start("sidecar", "--", sys.executable, "-c", script)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    process.terminate()
    _ = await process.communicate()  # closes the pipes
    assert process.returncode == 143


@pytest.mark.smoke
async def test_a_signal_that_comes_at_the_end_of_the_start_is_passed_on() -> None:
    """asyncio calls a handler one turn after it has seen the signal; by then the agent may be started."""

    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec("sleep", "300")
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):
            await asyncio.sleep(0)
        return process

    async with asyncio.timeout(PATIENCE):
        assert await session._run_to_end(start()) == 128 + signal.SIGTERM


TWO_TALKS = """
import json, urllib.request
for text in ("one", "two"):
    said = {"model": "m", "messages": [{"role": "user", "content": text}]}
    urllib.request.urlopen(urllib.request.Request("https://HOST/v1/chat/completions", json.dumps(said).encode())).read()
"""


async def test_a_run_without_a_name_is_one_rollout(rig: Behind) -> None:
    shell = Shell(rig.gateway.url, rig.folder, PENSTOCK)
    agent = ("--intercept", rig.host.name, "--", sys.executable, "-c", TWO_TALKS.replace("HOST", rig.host.name))
    done = await shell.run("sidecar", *agent)
    named = re.fullmatch(r"penstock: this run is rollout (sidecar-[0-9a-f]{8}): `penstock show \1`\n", done.err)
    assert named is not None, done.err
    async with Client(rig.gateway.url) as client:
        assert (await client.rollout(named[1])).totals.calls == 2
        before = {one.id async for one in client.rollouts("")}
        done = await shell.run("sidecar", "--conversations", *agent)
        assert (done.code, done.err) == (0, "")
        assert [one.totals.calls async for one in client.rollouts("") if one.id not in before] == [1, 1]
    done = await shell.run("sidecar", "--conversations", "--rollout", "r1", *agent)
    assert (done.code, "and a rollout was given for all" in done.err) == (2, True), done.err


async def test_an_agent_that_called_no_model_has_an_address_and_is_told_of(rig: Behind) -> None:
    shell = Shell(rig.gateway.url, rig.folder, PENSTOCK)
    done = await shell.run("sidecar", "run", "--rollout", "r1", "--", "sh", "-c", "echo $PENSTOCK_URL")
    assert done.text == f"{rig.gateway.url}/rollout/r1/attempt/a1\n", "`penstock mcp wrap` finds its rollout by this"
    assert done.err.startswith("penstock: nothing was recorded: the agent opened no connection to a host of models")


async def test_hosts_are_named_where_nothing_was_recorded() -> None:
    ledger, record = session.EgressLedger(), ConnectionRecord("a.example", 443, "tunnel", 0.0)
    ledger.add(record)
    (line,) = ledger.nothing_recorded()
    assert "(others: a.example:443). Name its host with --intercept HOST" in line
    ledger.add(replace(record, action="intercept"))
    assert ledger.nothing_recorded() == []


IN_A_TERMINAL = """
import signal, sys
def told(number, _):
    print(signal.Signals(number).name, flush=True)
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, told)
print("ready", flush=True)
sys.stdin.readline()
print("done", flush=True)
"""


@pytest.mark.parametrize("sent", ["\x03", signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
async def test_an_agent_in_a_terminal_hears_of_it_once(sent: str | signal.Signals) -> None:
    """Keys, which the terminal tells both, and a signal to the sidecar alone."""
    name = "SIGINT" if isinstance(sent, str) else sent.name
    sidecar = (*PENSTOCK, "sidecar", "run", "--gateway", "http://127.0.0.1:9", "--")
    command = (*sidecar, sys.executable, "-c", IN_A_TERMINAL)
    async with pty_program(command, {**os.environ, "TERM": "xterm"}) as program:
        _ = await program.until(lambda text: "ready" in text)
        if isinstance(sent, str):
            program.write(sent)
        else:
            program.signal(sent)
        _ = await program.until(lambda text: name in text)
        program.write("go on\n")
        text = await program.until(lambda text: "done" in text)
        assert text.count(name) == 1
        assert await program.ended() == 0


def opened(host: Host) -> list[tuple[str, list[tuple[str, str]]]]:
    """Its openings, without their keys, which are random."""
    return [(path, [it for it in headers.raw_items() if it[0] != "Sec-WebSocket-Key"]) for path, headers in host.opened]


async def test_a_websocket_passes(tmp_path: Path) -> None:
    """And each answer is a call."""
    authority, trust = CertificateStore.create_in_process(["localhost"]), tmp_path / "host.pem"
    trust.write_text(authority.pem)
    async with websocket_host(authority.context("localhost")) as host:
        name = host.url.partition("://")[2]
        text = f'[[upstream]]\nname = "host"\nbase_url = "{host.url}/v1"\nca_file = "{trust}"\n'
        agent = ("-c", WEBSOCKET_AGENT.replace("HOST", name))
        async with running(tmp_path / "gateway", text) as gateway, aiohttp.ClientSession() as http:
            direct = await Shell(gateway.url, tmp_path, (sys.executable,)).run(*agent, SSL_CERT_FILE=str(trust))
            assert (direct.code, direct.text) == (0, "said 1\nsaid 2\n"), direct.err
            first = opened(host), host.asked
            host.opened, host.asked = [], []
            words = ("sidecar", "--rollout", "r1", "--intercept", name, "--", sys.executable, *agent)
            done = await Shell(gateway.url, tmp_path, PENSTOCK).run(*words)
            assert (done.code, done.out, done.err) == (0, direct.out, "")
            assert (opened(host), host.asked) == first
            spans = await Tape(gateway.url, http).spans("r1", 2)
    assert [(span.dialect, span.http_status, span.status) for span in spans] == [("responses", 101, "ok")] * 2
