"""Tool runs behind a gateway, joined with the model calls that asked for them: in the API, in `show` and `tools`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.local import locally
from fakes.mcp_wire import Client, config, mcp_server
from fakes.mcp_wire import call as tools_call
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from fakes.tape import Tape

from examples.demo.model import DemoAnswer
from examples.demo.model import DemoToolCall as Asked
from penstock.gateway.model.tools import ToolList, ToolUse

ARGUMENTS = {"city": "Oslo"}
ASK = [{"role": "user", "content": "Say it again, and the time."}]


async def asked(gateway: Gateway, http: aiohttp.ClientSession, messages: list[Any]) -> Any:
    """What the model answers."""
    async with http.post(
        gateway.openai("r1") + "/chat/completions", json={"model": "m", "messages": messages}
    ) as reply:
        assert reply.status == 200
        return (await reply.json())["choices"][0]["message"]


async def conversation(
    gateway: Gateway, http: aiohttp.ClientSession, provider: Provider, tools: Client | None = None
) -> None:
    """An agent: the model asks for a tool of a server and one of the agent's own, and gets both results. `tools`: its
    client of the server, if its address does not name the rollout."""
    provider.script = [
        DemoAnswer(calls=(Asked("x1", "mcp__tools__echo", json.dumps(ARGUMENTS)), Asked("x2", "clock", "{}")))
    ]
    answered = await asked(gateway, http, ASK)
    provider.script = [DemoAnswer("It is noon.")]
    client = tools or Client(f"{gateway.address('r1')}/mcp/tools", http, {})
    _, told = await client.say(tools_call("echo", ARGUMENTS))
    results = [("x1", json.loads(told)["result"]["content"][0]["text"]), ("x2", "12:00")]
    carried = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
    _ = await asked(gateway, http, [*ASK, answered, *carried])


async def tools_of(tape: Tape, rollout: str) -> list[ToolUse]:
    found = ToolList.model_validate(await tape.get(f"/api/rollouts/{rollout}/attempts/a1/tools")).tools
    return sorted(found, key=lambda use: use.tool)


@pytest.mark.slow
async def test_a_tool_run_is_joined_with_the_call_that_asked(
    tmp_path: Path, http: aiohttp.ClientSession, provider: Provider
) -> None:
    """And a tool inside the agent is marked that a rule is about."""
    rules = '[[policy]]\nname = "{0}"\ntool = "{0}"\nverdict = "{1}"\nserver = "*"\n'
    text = upstreams(openai=provider.openai_url) + rules.format("echo", "allow") + rules.format("clock", "deny")
    async with mcp_server(sessions=False) as server, locally(tmp_path, text + config(server)) as gateway:
        await conversation(gateway, http, provider)
        tape, shell = Tape(gateway.url, http), Shell(gateway.url, tmp_path)
        spans = await tape.spans("r1", 3)
        assert [(span.kind, span.status) for span in spans] == [("llm", "ok"), ("tool", "ok"), ("llm", "ok")]
        clock, echo = await tools_of(tape, "r1")
        where = (echo.span, echo.server, echo.grade, echo.asked_by, echo.call_id, echo.carried_by, echo.rule)
        assert where == (2, "tools", "certain", 1, "x1", 3, "echo")
        where = (clock.span, clock.server, clock.grade, clock.asked_by, clock.call_id, clock.rule)
        assert where == (None, None, "certain", 1, "x2", "clock")
        assert (clock.start_ns, clock.end_ns) == (spans[0].end_ns, spans[2].start_ns)
        shown = (await shell.run("show", "r1")).text
        model, tool = (next(line for line in shown.splitlines() if mark in line) for mark in ("#1", "#2"))
        assert tool.index("#2") > model.index("#1"), "the run stands below the call that asked for it"
        listed = (await shell.run("tools", "r1", COLUMNS="120")).text
        assert "inside the agent" in listed
        assert "#1" in listed
        assert "rule" in listed.splitlines()[0]


@pytest.mark.slow
async def test_a_session_whose_address_names_no_rollout_is_joined_with_the_rollout_that_asked(
    tmp_path: Path, http: aiohttp.ClientSession, provider: Provider
) -> None:
    text = upstreams(openai=provider.openai_url)
    async with mcp_server() as server, locally(tmp_path, text + config(server)) as gateway:
        client = Client(f"{gateway.url}/mcp/tools", http, {})
        await client.open()
        await conversation(gateway, http, provider, client)
        tape, shell = Tape(gateway.url, http), Shell(gateway.url, tmp_path)
        _ = await tape.spans("r1", 2)
        (rollout,) = [one["id"] for one in (await tape.get("/api/rollouts?filter=kind:tool"))["rollouts"]]
        session = f"{rollout}/a1"
        assert [(use.tool, use.run_in, use.asked_by, use.grade) for use in await tools_of(tape, "r1")] == [
            ("clock", None, 1, "certain"),
            ("echo", session, 1, "certain"),
        ]
        [told] = await tools_of(tape, rollout)
        assert (told.asked_in, told.asked_by, told.call_id, told.grade) == ("r1/a1", 1, "x1", "certain")
        lines = (await shell.run("show", "r1")).text.splitlines()
        marks = "#1  chat", "→ answer", "tools/call echo", "#2  chat"
        assert sorted(places := [next(at for at, it in enumerate(lines) if mark in it) for mark in marks]) == places
        assert session in lines[places[2]]
        assert session in (await shell.run("tools", "r1")).text
        assert "r1/a1#1" in (await shell.run("tools", rollout)).text
        # In the session itself nothing is shown below a call of another rollout.
        assert (await shell.run("show", rollout)).code == 0
        rows = [json.loads(line) for line in (await shell.run("export", "--what", "tools")).text.splitlines()]
        assert {(row["rollout"], row["tool"], row["asked_in"]) for row in rows} == {
            ("r1", "clock", None),
            (rollout, "echo", "r1/a1"),
        }


async def test_the_session_header_of_a_coding_agent_names_the_rollout_of_its_tools(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with mcp_server() as server, locally(tmp_path, config(server)) as gateway:
        client = Client(f"{gateway.url}/mcp/tools", http, {"X-Claude-Code-Session-Id": "0198aa"})
        await client.open()
        assert (await client.say(tools_call("echo", ARGUMENTS)))[0] == 200
        spans = await Tape(gateway.url, http).spans("claude-0198aa", 2)
    assert [span.kind for span in spans] == ["mcp", "tool"]


@pytest.mark.slow
async def test_an_attempt_without_tools_says_so(
    tmp_path: Path, http: aiohttp.ClientSession, provider: Provider
) -> None:
    async with locally(tmp_path, upstreams(openai=provider.openai_url)) as gateway:
        _ = await asked(gateway, http, ASK)
        _ = await Tape(gateway.url, http).spans("r1", 1)
        assert (await Shell(gateway.url, tmp_path).run("tools", "r1")).err == "r1/a1 has used no tools.\n"
