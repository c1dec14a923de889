"""Tool runs behind a gateway, joined with the model calls that asked for them: in the API, in `show` and `tools`."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
from conftest import StartGateway
from fakes.mcp_wire import Client, config, mcp_server
from fakes.mcp_wire import call as tools_call
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from fakes.tape import Tape

from penstock.gateway.demo.model import Answer
from penstock.gateway.demo.model import Call as Asked
from penstock.gateway.model.tools import ToolList

ARGUMENTS = {"city": "Oslo"}
ASK = [{"role": "user", "content": "Say it again, and the time."}]


async def conversation(
    gateway: Gateway, http: aiohttp.ClientSession, provider: Provider, tools: Client | None = None
) -> None:
    """An agent: the model asks for a tool of a server and one of the agent's own, and gets both results. `tools`: its
    client of the server, if its address does not name the rollout."""
    provider.script = [
        Answer(calls=(Asked("x1", "mcp__tools__echo", json.dumps(ARGUMENTS)), Asked("x2", "clock", "{}")))
    ]
    url = gateway.openai("r1") + "/chat/completions"
    async with http.post(url, json={"model": "m", "messages": ASK}) as reply:
        answered = (await reply.json())["choices"][0]["message"]
    provider.script = [Answer("It is noon.")]
    client = tools or Client(f"{gateway.address('r1')}/mcp/tools", http, {})
    _, told = await client.say(tools_call("echo", ARGUMENTS))
    results = [("x1", json.loads(told)["result"]["content"][0]["text"]), ("x2", "12:00")]
    carried = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
    messages = [*ASK, answered, *carried]
    async with http.post(
        gateway.openai("r1") + "/chat/completions", json={"model": "m", "messages": messages}
    ) as reply:
        assert reply.status == 200


async def test_a_tool_run_is_joined_with_the_call_that_asked(
    start_gateway: StartGateway, http: aiohttp.ClientSession, provider: Provider, tmp_path: Path
) -> None:
    async with mcp_server(sessions=False) as server:
        gateway = await start_gateway(upstreams(openai=provider.openai_url) + config(server))
        await conversation(gateway, http, provider)
    spans = await Tape(gateway.url, http).spans("r1", 3)
    assert [span.kind for span in spans] == ["llm", "tool", "llm"]
    found = ToolList.model_validate(await Tape(gateway.url, http).get("/api/rollouts/r1/attempts/a1/tools"))
    clock, echo = sorted(found.tools, key=lambda use: use.tool)
    assert (echo.span, echo.server, echo.grade, echo.asked_by, echo.call_id, echo.carried_by) == (
        2, "tools", "certain", 1, "x1", 3,
    )  # fmt: skip
    assert (clock.span, clock.server, clock.grade, clock.asked_by, clock.call_id) == (None, None, "certain", 1, "x2")
    assert (clock.start_ns, clock.end_ns) == (spans[0].end_ns, spans[2].start_ns)
    shown = (await Shell(gateway.url, tmp_path).run("show", "r1")).text
    model, tool = (next(line for line in shown.splitlines() if mark in line) for mark in ("#1", "#2"))
    assert tool.index("#2") > model.index("#1"), "the run stands below the call that asked for it"
    listed = (await Shell(gateway.url, tmp_path).run("tools", "r1")).text
    assert "inside the agent" in listed
    assert "#1" in listed


async def test_a_session_whose_address_names_no_rollout_is_joined_with_the_rollout_that_asked(
    start_gateway: StartGateway, http: aiohttp.ClientSession, provider: Provider, tmp_path: Path
) -> None:
    async with mcp_server() as server:
        gateway = await start_gateway(upstreams(openai=provider.openai_url) + config(server))
        client = Client(f"{gateway.url}/mcp/tools", http, {})
        await client.open()
        await conversation(gateway, http, provider, client)
    tape = Tape(gateway.url, http)
    _ = await tape.spans("r1", 2)
    rollouts = [one["id"] for one in (await tape.get("/api/rollouts?filter=kind:tool"))["rollouts"]]
    assert len(rollouts) == 1
    session = f"{rollouts[0]}/a1"
    found = ToolList.model_validate(await tape.get("/api/rollouts/r1/attempts/a1/tools"))
    assert {(use.tool, use.run_in, use.asked_by, use.grade) for use in found.tools} == {
        ("echo", session, 1, "certain"),
        ("clock", None, 1, "certain"),
    }
    [told] = ToolList.model_validate(await tape.get(f"/api/rollouts/{rollouts[0]}/attempts/a1/tools")).tools
    assert (told.asked_in, told.asked_by, told.call_id, told.grade) == ("r1/a1", 1, "x1", "certain")
    shell = Shell(gateway.url, tmp_path)
    lines = (await shell.run("show", "r1")).text.splitlines()
    asked, ran = (next(at for at, line in enumerate(lines) if mark in line) for mark in ("#1", "tools/call echo"))
    assert ran == asked + 1
    assert session in lines[ran]
    assert session in (await shell.run("tools", "r1")).text
    assert "r1/a1#1" in (await shell.run("tools", rollouts[0])).text
    # In the session itself nothing is shown below a call of another rollout.
    assert (await shell.run("show", rollouts[0])).code == 0
    rows = [json.loads(line) for line in (await shell.run("export", "--what", "tools")).text.splitlines()]
    assert [(row["rollout"], row["tool"], row["asked_in"]) for row in sorted(rows, key=lambda row: row["tool"])] == [
        ("r1", "clock", None),
        (rollouts[0], "echo", "r1/a1"),
    ]


async def test_the_session_header_of_a_coding_agent_names_the_rollout_of_its_tools(
    start_gateway: StartGateway, http: aiohttp.ClientSession, provider: Provider
) -> None:
    named = {"X-Claude-Code-Session-Id": "0198aa"}
    async with mcp_server() as server:
        gateway = await start_gateway(upstreams(openai=provider.openai_url) + config(server))
        client = Client(f"{gateway.url}/mcp/tools", http, dict(named))
        await client.open()
        assert (await client.say(tools_call("echo", ARGUMENTS)))[0] == 200
    spans = await Tape(gateway.url, http).spans("claude-0198aa", 2)
    assert [span.kind for span in spans] == ["mcp", "tool"]


async def test_a_tool_inside_the_agent_that_a_rule_is_about_is_marked(
    start_gateway: StartGateway, http: aiohttp.ClientSession, provider: Provider, tmp_path: Path
) -> None:
    rules = '[[policy]]\nname = "{0}"\ntool = "{0}"\nverdict = "{1}"\nserver = "{2}"\n'
    async with mcp_server(sessions=False) as server:
        text = rules.format("echo", "allow", "*") + rules.format("clock", "deny", "*")
        gateway = await start_gateway(upstreams(openai=provider.openai_url) + config(server) + text)
        await conversation(gateway, http, provider)
    tape = Tape(gateway.url, http)
    assert all(span.status == "ok" for span in await tape.spans("r1", 3))
    found = ToolList.model_validate(await tape.get("/api/rollouts/r1/attempts/a1/tools"))
    assert {use.tool: (use.rule, use.server) for use in found.tools} == {
        "echo": ("echo", "tools"),
        "clock": ("clock", None),
    }
    listed = (await Shell(gateway.url, tmp_path).run("tools", "r1", COLUMNS="120")).text
    assert "rule" in listed.splitlines()[0]


async def test_an_attempt_without_tools_says_so(gateway: Gateway, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    body = {"model": "m", "messages": ASK}
    async with http.post(gateway.openai("r1") + "/chat/completions", json=body) as reply:
        assert reply.status == 200
    _ = await Tape(gateway.url, http).spans("r1", 1)
    assert (await Shell(gateway.url, tmp_path).run("tools", "r1")).err == "r1/a1 has used no tools.\n"
