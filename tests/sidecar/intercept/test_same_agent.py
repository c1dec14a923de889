"""The same agent: what a model host gets of an unmodified client behind `penstock sidecar` is what it gets without."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.process import Gateway
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost, tls_host

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

    async def behind(self, script: str) -> bytes:
        """What it prints behind a sidecar."""
        shell = Shell(self.gateway.url, self.folder, PENSTOCK)
        agent = ("--", sys.executable, "-c", script.replace("HOST", self.host.name))
        done = await shell.run("sidecar", "--rollout", "r1", "--intercept", self.host.name, *agent)
        assert (done.code, done.err) == (0, "")
        return done.out


@pytest.fixture
async def rig(start_gateway: StartGateway, tmp_path: Path) -> AsyncGenerator[Behind]:
    async with tls_host(tmp_path) as host:
        text = f'[[upstream]]\nname = "host"\nbase_url = "https://{host.name}/v1"\nca_file = "{host.trust}"\n'
        yield Behind(host, await start_gateway(text), tmp_path)


@pytest.mark.parametrize("script", [OPENAI, REQUESTS, URLLIB, CURL], ids=["openai", "requests", "urllib", "curl"])
async def test_the_bytes_are_the_same(rig: Behind, http: aiohttp.ClientSession, script: str) -> None:
    direct = await rig.direct(script)
    first, rig.host.asked = rig.host.asked, []
    assert await rig.behind(script) == direct != b""
    assert rig.host.asked == first
    spans = await Tape(rig.gateway.url, http).spans("r1", len(first))
    assert {(span.kind, span.dialect, span.status, span.upstream) for span in spans} == {("llm", "chat", "ok", "host")}
    assert "sk-real" not in str(await Tape(rig.gateway.url, http).get("/api/rollouts/r1/attempts/a1/spans/1"))


async def test_signals_and_the_exit_code_pass(rig: Behind) -> None:
    shell = Shell(rig.gateway.url, rig.folder, PENSTOCK)
    done = await shell.run("sidecar", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.code == 7
    script = "import signal, time\nprint('up', flush=True)\nsignal.pause()"
    process = await shell.start("sidecar", "--", sys.executable, "-c", script)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    process.terminate()
    assert await process.wait() == 143


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "no command was given: put the agent and its arguments after --"),
        (("--", "no-such-agent"), 127, "'no-such-agent' could not be started: No such file"),
        (("--intercept", "a:b:c:d", "--", "true"), 2, "--intercept 'a:b:c:d' is no HOST or HOST:PORT"),
        (("--intercept", "x:0", "--", "true"), 2, "--intercept 'x:0' is no HOST or HOST:PORT"),
    ],
)
async def test_wrong_words(rig: Behind, words: tuple[str, ...], code: int, said: str) -> None:
    done = await Shell(rig.gateway.url, rig.folder, PENSTOCK).run("sidecar", *words)
    assert done.code == code
    assert re.search(re.escape(said), done.err)
