"""`penstock run --sidecar`: each rollout of the queue has an agent without base URLs, behind a front of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.process import Gateway
from fakes.runs import enqueue, events, only_attempt
from fakes.shell import PENSTOCK, Done, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost, tls_host

from penstock.gateway.client.client import Client

AGENT = """
import json, os, socket, sys, urllib.request
word = json.load(sys.stdin)["word"]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": word}]}).encode()
ask = urllib.request.Request("https://HOST/v1/chat/completions", body, {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(ask))["choices"][0]["message"]["content"]
try:
    urllib.request.urlopen("https://other.invalid/")
except OSError as error:
    refused = str(error)
names = [name for name in os.environ if name.endswith(("BASE_URL", "API_BASE"))]
print(json.dumps({"answer": answer, "names": names, "refused": refused, "proxy": os.environ["HTTPS_PROXY"]}))
"""


@dataclass
class Rig:
    host: TlsHost
    gateway: Gateway
    folder: Path
    client: Client

    async def run(self, script: str, *words: str) -> Done:
        shell = Shell(self.gateway.url, self.folder, PENSTOCK)
        agent = ("--", sys.executable, "-c", script.replace("HOST", self.host.name))
        return await shell.run("run", "--sidecar", "--intercept", self.host.name, *words, *agent)


@pytest.fixture
async def rig(start_gateway: StartGateway, tmp_path: Path) -> AsyncGenerator[Rig]:
    async with tls_host(tmp_path) as host:
        text = f'[[upstream]]\nname = "host"\nbase_url = "https://{host.name}/v1"\nca_file = "{host.trust}"\n'
        gateway = await start_gateway(text)
        async with Client(gateway.url) as client:
            yield Rig(host, gateway, tmp_path, client)


async def test_each_agent_has_its_own(rig: Rig, http: aiohttp.ClientSession) -> None:
    _ = await enqueue(rig.client, {"word": "one"}, {"word": "two"})
    done = await rig.run(AGENT, "--workers", "2", "--on-unknown", "deny")
    assert (done.code, done.out) == (0, b"2 succeeded, 0 failed\n"), done.err
    proxies = set[str]()
    for rollout, word in (("r1", "one"), ("r2", "two")):
        outcome = (await only_attempt(rig.client, rollout)).outcome
        assert outcome is not None
        assert (outcome.output["answer"], outcome.output["names"]) == ("hello", [])
        assert "403" in outcome.output["refused"]
        proxies.add(outcome.output["proxy"])
        calls = [one async for one in rig.client.spans(rollout, "a1") if one.kind == "llm"]
        assert [(one.attempt, one.dialect, one.upstream) for one in calls] == [("a1", "chat", "host")]
        raw = await Tape(rig.gateway.url, http).get(f"/api/rollouts/{rollout}/attempts/a1/spans/{calls[0].sequence}")
        assert word in json.dumps(raw)
        (egress,) = [one for one in await events(rig.client, rollout) if one.name == "egress"]
        assert (egress.attributes or {})["server.address"] == "other.invalid"
    assert len(proxies) == 2


async def test_what_kept_an_agent_from_the_gateway_is_in_its_output(rig: Rig) -> None:
    _ = await enqueue(rig.client, {"word": "one"})
    script = AGENT.replace("urlopen(ask)", "urlopen(ask, context=__import__('ssl').create_default_context(cadata=CA))")
    mistrusts = "CA = open(__import__('sys').argv[1]).read()\n" + script
    done = await rig.run(mistrusts, "--arg", str(rig.host.trust))
    assert done.code == 1
    outcome = (await only_attempt(rig.client)).outcome
    assert outcome is not None
    assert outcome.reason is not None
    assert "does not trust the certificate of localhost" in outcome.reason


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--sidecar", "--image", "x"),
            "--sidecar stands before commands and functions that start here, not with --im",
        ),
        (("--intercept", "x"), "--intercept and --on-unknown are for --sidecar: add it, or leave them out"),
        (("--sidecar", "--intercept", "a:b:c"), "--intercept 'a:b:c' is no HOST or HOST:PORT"),
    ],
)
async def test_wrong_words(rig: Rig, words: tuple[str, ...], said: str) -> None:
    done = await Shell(rig.gateway.url, rig.folder, PENSTOCK).run("run", *words, "--", "true")
    assert done.code == 2
    assert said in done.err
