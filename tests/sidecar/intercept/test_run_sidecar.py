"""`penstock run --sidecar`: each rollout of the queue has an agent without base URLs, behind a front of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from fakes.process import Gateway
from fakes.runs import enqueue, events, only_attempt
from fakes.shell import PENSTOCK, Done, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

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


@pytest_asyncio.fixture(loop_scope="module")
async def rig(gateway: Gateway, host: TlsHost, tmp_path: Path) -> AsyncGenerator[Rig]:
    async with Client(gateway.url) as client:
        yield Rig(host, gateway, tmp_path, client)


async def test_each_agent_has_its_own(rig: Rig, tape: Tape) -> None:
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
        raw = await tape.get(f"/api/rollouts/{rollout}/attempts/a1/spans/{calls[0].sequence}")
        assert word in json.dumps(raw)
        (egress,) = [one for one in await events(rig.client, rollout) if one.name == "egress"]
        assert (egress.attributes or {})["server.address"] == "other.invalid"
    assert len(proxies) == 2


async def test_what_kept_an_agent_from_the_gateway_is_in_its_output(rig: Rig) -> None:
    _ = await rig.client.enqueue([RolloutSpec(id="mistrusts", input={"word": "one"})])
    script = AGENT.replace("urlopen(ask)", "urlopen(ask, context=__import__('ssl').create_default_context(cadata=CA))")
    mistrusts = "CA = open(__import__('sys').argv[1]).read()\n" + script
    done = await rig.run(mistrusts, "--arg", str(rig.host.trust))
    assert done.code == 1
    outcome = (await only_attempt(rig.client, "mistrusts")).outcome
    assert outcome is not None
    assert outcome.reason is not None
    assert "does not trust the certificate of localhost" in outcome.reason
