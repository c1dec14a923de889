"""Sessions, read from what agents have done through a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from fakes.local import locally
from fakes.mcp_client import answered, beside, refused
from fakes.mcp_wire import Client as ToolClient
from fakes.mcp_wire import call, config, mcp_server
from fakes.process import upstreams
from fakes.shell import Shell
from fakes.web_site import everywhere, site

from penstock.console.views.sessions import SESSIONS, Session, SessionSelection, sessions
from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.span import Span, SpanStatus


async def provider(request: web.Request) -> web.Response:
    """Answers a chat, refuses what is said to the hosted session `bad`, and takes anything else."""
    if request.path.endswith("/chat/completions"):
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]})
    return web.json_response({"ok": True}, status=500 if "bad" in request.path else 200)


async def work(url: str, http: aiohttp.ClientSession) -> None:
    """Two MCP sessions, one of which ends; two hosted ones; and one of Claude Code beside a plain call."""
    for rollout, tools in (("r1", "echo"), ("r2", "fails")):
        agent = ToolClient(f"{url}/rollout/{rollout}/attempt/a1/mcp/tools", http, {})
        await agent.open()
        _ = await agent.say(call(tools, {"text": "hello"}, 7))
        if rollout == "r1":
            async with http.delete(agent.url, headers=agent.headers) as ended:
                assert ended.status < 300
    for session in ("s_1", "bad", "s_1"):
        async with http.post(f"{url}/rollout/r3/attempt/a1/v1/sessions/{session}/events?beta=true", json={}) as done:
            _ = await done.read()
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for headers in ({"x-claude-code-session-id": "0193-ab"}, {"x-rollout-id": "claude-of-ours"}):
        async with http.post(f"{url}/v1/chat/completions", json=chat, headers=headers) as done:
            assert done.status == 200
    await rewarded(url, "r1", "r2", "r3", "claude-0193-ab", "claude-of-ours")


async def rewarded(url: str, *rollouts: str) -> None:
    """When a reward is answered, every earlier call of its attempt is durable."""
    async with Client(url) as client:
        for rollout in rollouts:
            _ = await client.reward(rollout, "a1", Judgement(value=1))


def told(rows: Sequence[Session]) -> set[tuple[object, ...]]:
    return {(one.kind, one.of, *one.rollouts, one.calls, one.errors, one.ended) for one in rows}


@pytest.mark.slow
async def test_sessions_of_servers_of_hosted_agents_and_of_coding_agents_are_listed(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with (
        mcp_server() as server,
        site(everywhere(provider)) as up,
        locally(tmp_path, config(server) + upstreams(openai=f"{up}/v1")) as gateway,
        beside(gateway.url) as model,
        Client(gateway.url) as client,
    ):
        await work(gateway.url, http)
        found = (await SESSIONS.fetch(client, SessionSelection())).rows
        assert told(found) == {
            ("mcp", "tools", "r1", 3, 0, True),
            ("mcp", "tools", "r2", 2, 1, False),
            ("hosted", "fake-openai", "r3", 2, 0, False),
            ("hosted", "fake-openai", "r3", 1, 1, False),
            ("agent", "Claude Code", "claude-0193-ab", 1, 0, False),
        }
        assert found[0].id == "claude-0193-ab", "the newest is first"
        assert {one.id for one in found if one.kind == "hosted"} == {"s_1", "bad"}
        some = await SESSIONS.fetch(client, SessionSelection(filter="server:tools", limit=1, calls=2))
        assert (told(some.rows), some.more) == ({("mcp", "tools", "r2", 2, 1, False)}, False)
        assert "newest 2 calls" in some.part
        shell = Shell(gateway.url, tmp_path)
        shown = await shell.run("sessions", "rollout:r1")
        assert shown.text.splitlines()[1].split()[1:4] == ["mcp", "tools", "r1"]
        rows, text = await answered(model, "list_sessions", filter="rollout:r1")
        assert (rows["rows"][0]["calls"], text) == (3, shown.text.rstrip("\n"))
        assert "no [[budget]]" in await refused(model, "list_budgets", name="day")
        for number in range(100):
            path = f"{gateway.address('many')}/sessions/{number:0200}/events"
            async with http.post(path, json={}) as done:
                assert done.status == 200
        await rewarded(gateway.url, "many")
        rows, text = await answered(model, "list_sessions", filter="rollout:many")
        assert (len(rows["rows"]) + rows["left_out"], rows["more"]) == (100, False)
        assert text.endswith(f"\n{rows['left_out']} more are left out: ask for fewer.")
        assert (await shell.run("sessions", "--calls", "0")).err.startswith("penstock: --calls: ")
        assert (await shell.run("sessions", "rollout:none")).err == "No call that matches has a session.\n"


def test_a_session_in_several_rollouts_names_each() -> None:
    spans = [
        Span(rollout=rollout, attempt="a1", sequence=1, kind="tool", path="/mcp/files", upstream=upstream, start_ns=at,
             status=SpanStatus.OK if upstream else SpanStatus.INTERRUPTED, attributes={"mcp.session.id": "f1"})
        for rollout, at, upstream in (("r1", 5, "files"), ("r2", 9, None), ("r1", 7, "files"))
    ]  # fmt: skip
    (one,) = sessions([*spans, Span(rollout="r1", attempt="a1", sequence=2, kind="mcp", upstream="new")])
    assert one == Session(
        id="f1", kind="mcp", of="files", rollouts=["r2", "r1"], first_seen_ns=5, last_seen_ns=9, calls=3, errors=1
    )
