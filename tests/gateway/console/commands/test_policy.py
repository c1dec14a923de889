"""`penstock policy` as people run it, against a gateway with recorded tool calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from fakes.local import Local, locally
from fakes.mcp_wire import Client, call, config, mcp_server
from fakes.process import PATIENCE
from fakes.shell import Shell
from fakes.tape import Tape

from penstock.gateway.client.client import Client as Control
from penstock.gateway.model.rollout import Judgement

pytestmark = pytest.mark.slow

RULES = """
[[policy]]
name = "no-etc"
argument = [{ at = "path", glob = "/etc/*" }]
verdict = "deny"

[[policy]]
name = "listed-as-it-is"
tool = "echo"
annotations = { destructiveHint = true }
verdict = "dry"
"""


@pytest.fixture
async def shell(tmp_path: Path, http: aiohttp.ClientSession) -> AsyncGenerator[Shell]:
    """Beside a gateway with three rollouts on its tape; one has read /etc, and badly."""
    (tmp_path / "rules.toml").write_text(RULES)
    async with mcp_server(sessions=False) as server, locally(tmp_path, config(server)) as gateway:
        for rollout, path, reward in (("r1", "/srv/a", 1.0), ("r2", "/etc/passwd", 0.0), ("r3", "/srv/b", 0.5)):
            client = Client(f"{gateway.address(rollout)}/mcp/tools", http, {})
            for message in (call("echo", {"path": path}), {"jsonrpc": "2.0", "id": 9, "method": "tools/list"}):
                assert (await client.say(message))[0] == 200
            _ = await Tape(gateway.url, http).spans(rollout, 2)
            async with Control(gateway.url) as control:
                _ = await control.reward(rollout, "a1", Judgement(value=reward))
        yield Shell(gateway.url, tmp_path)


async def test_rules_are_tried_on_recorded_calls(shell: Shell) -> None:
    done = await shell.run("policy", "test", "rules.toml", "since:1d")
    assert (done.code, done.err) == (0, "")
    lines = done.text.splitlines()
    assert lines[0].startswith("3 tool calls of 3 rollouts: 1 ")
    assert [line.split() for line in lines[3:5]] == [
        ["no-etc", "deny", "1", "-", "1", "0", "0.75", "too", "little", "to", "tell"],
        ["listed-as-it-is", "dry", "2", "-", "2", "0.75", "0", "too", "little", "to", "tell"],
    ]
    assert lines[-1].split() == ["r2/a1#1", "deny", "no-etc", "tools", "echo", "-"]
    told = json.loads((await shell.run("policy", "test", "rules.toml", "rollout:r1,r2", "--json")).text)
    assert (told["calls"], told["denied"], told["stopped"][0]["rollout"]) == (2, 1, "r2")
    done = await shell.run("policy", "test", "rules.toml", "rollout:nobody")
    assert (done.code, done.text) == (0, "")
    assert done.err.startswith("No recorded tool call matches: ")


async def test_a_wrong_file_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    shell = Shell("http://127.0.0.1:9", tmp_path)
    for text, said in (
        ("port = 1\n", "rules.toml has no [[policy]]: add a rule with a name and a verdict"),
        ('[[policy]]\nname = "a"\nverdict = "stop"\n', "policy 'a': verdict: 'stop' is not 'allow', 'deny'"),
        ('[[polcy]]\nname = "a"\n', "polcy: unknown key; did you mean 'policy'?"),
    ):
        (tmp_path / "rules.toml").write_text(text)
        done = await shell.run("policy", "test", "rules.toml")
        assert (done.code, said in done.err) == (1, True), done.err


async def test_a_person_answers(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    rule = '[[policy]]\nname = "ask"\nverdict = "ask"\nmessage = "Really?"\n'
    async with mcp_server(sessions=False) as server, locally(tmp_path, config(server) + rule) as gateway:
        shell = Shell(gateway.url, tmp_path)
        none = await shell.run("policy", "waiting")
        assert (none.code, none.text, none.err) == (0, "", "No tool call waits for a person.\n")
        client = Client(f"{gateway.address('r1')}/mcp/tools", http, {})
        for command, said in (
            ("approve", "It runs: echo on tools, for rollout r1."),
            ("refuse", "It was refused: echo"),
        ):
            waiting = asyncio.ensure_future(client.say(call("echo", {"n": command})))
            id = await _asked(gateway)
            shown = await shell.run("policy", "waiting")
            assert shown.text.splitlines()[0] == f"{id}  echo on tools"
            assert f'{{"n":"{command}"}}' in shown.text
            done = await shell.run("policy", command, id, "--why", "because", "--who", "ann")
            assert (done.code, done.text.startswith(said)) == (0, True), done
            assert (b"a person refused it: because" in (await waiting)[1]) == (command == "refuse")
        gone = await shell.run("policy", "approve", id)
        assert (gone.code, "no call waits under this id" in gone.err) == (1, True)
        assert len(server.asked) == 1


async def _asked(gateway: Local) -> str:
    async with Control(gateway.url) as control, asyncio.timeout(PATIENCE):
        found: list[str] = []
        while not found:
            found = [one.id for one in await control.waiting()]
        return found[0]
