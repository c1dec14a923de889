"""Releases of tool texts in lists of servers: what an agent is told of a tool is what its rollout was given."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.experiment import policy
from fakes.mcp_wire import Client, McpServer, mcp_server
from fakes.odd import request, send
from fakes.rig import Inside, inside

from penstock.gateway.client.client import Client as Api
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.resource import NewVersion

Json = dict[str, Any]
SAYS = "Finds pages about a topic."
BETTER = "Finds pages. Ask for one topic at a time."
SEARCH: Json = {"name": "search", "description": SAYS, "inputSchema": {"type": "object", "title": SAYS}}
OTHER: Json = {"name": "write", "description": SAYS, "inputSchema": {"type": "object"}}
LIST: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


def text(said: str, tool: str = "search", sent: bool = False) -> NewVersion:
    return NewVersion(kind="tool-text", content={"tool": tool, "text": said, "sent": sent})


@pytest.fixture
async def lists() -> AsyncGenerator[McpServer]:
    async with mcp_server(sessions=False) as made:
        made.results["tools/list"] = lambda sent: {"tools": [SEARCH, OTHER], "nextCursor": "2"}
        yield made


@pytest.fixture
async def rig(tmp_path: Path, http: aiohttp.ClientSession, lists: McpServer) -> AsyncGenerator[Inside]:
    async with inside(tmp_path, http, mcp={"servers": {"web": {"url": lists.url}}}) as made:
        yield made


@pytest.fixture
async def api(rig: Inside) -> AsyncGenerator[Api]:
    async with Api(rig.base.url) as made:
        yield made


async def listed(rig: Inside, http: aiohttp.ClientSession, rollout: str) -> bytes:
    client = Client(f"{rig.base.url}/rollout/{rollout}/attempt/a1/mcp/web", http, {})
    status, body = await client.say(LIST)
    assert status == 200
    return body


async def test_nothing_is_changed_where_nothing_is_registered(rig: Inside, http: aiohttp.ClientSession) -> None:
    assert json.loads(await listed(rig, http, "r1"))["result"]["tools"] == [SEARCH, OTHER]
    assert not rig.gateway.mcp.changes("web")


async def test_the_pinned_text_stands_in_the_list_and_nothing_else_changes(
    rig: Inside, http: aiohttp.ClientSession, api: Api
) -> None:
    before = await listed(rig, http, "r0")
    _ = await api.add_version("search-text", text(SAYS, sent=True))
    assert await listed(rig, http, "r1") == before
    _ = await api.add_version("search-text", text(BETTER))
    release = await api.start_release("search-text", NewRelease(candidate="v2", policy=policy(0.5)))
    while (await api.release(release.id)).release.stage != "canary":
        pass
    arms = dict[str, str]()
    for number in range(2, 40):
        rollout = f"r{number}"
        body = await listed(rig, http, rollout)
        (pin,) = await api.pins(rollout)
        arms[pin.arm or ""] = rollout
        # Byte for byte: the same words elsewhere, and the other tool, stay.
        assert body == (before.replace(SAYS.encode(), BETTER.encode(), 1) if pin.arm == "candidate" else before)
        span = (await rig.tape.spans(rollout, 1))[0]
        assert (span.name, span.versions, span.arm) == (
            "tools/list",
            {"search-text": pin.version},
            f"{release.id}:{pin.arm}",
        )
        if len(arms) == 2:
            break
    assert arms.keys() == {"stable", "candidate"}
    # Whoever began before the release takes no part.
    assert await listed(rig, http, "r1") == before
    _ = await api.decide(release.id, "rollback", ActionRequest(who="ada"))
    assert await listed(rig, http, arms["candidate"]) == before
    (pin,) = await api.pins(arms["candidate"])
    assert (pin.version, pin.mixed) == ("v1", True)


async def test_the_text_that_was_listed_is_known_in_requests_of_models(
    rig: Inside, http: aiohttp.ClientSession, api: Api
) -> None:
    _ = await api.add_version("search-text", text(SAYS, sent=True))
    _ = await api.add_version("search-text", text(BETTER))
    # The agent has the candidate's words of an earlier rollout; this one was given the stable version.
    tools = [{"type": "function", "function": {"name": "mcp__web__search", "description": BETTER}}]
    asked = json.dumps({"model": "m", "messages": [], "tools": tools}).encode()
    done = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    async with rig.upstream([request(), send(done)]) as upstream, rig.client() as client:
        client.send(rig.call(asked))
        _ = await client.message()
        (seen,) = (await upstream.connection(0)).requests
    assert seen.endswith(asked.replace(BETTER.encode(), SAYS.encode()))
    assert (await rig.span()).versions == {"search-text": "v1"}


async def test_a_text_that_is_not_registered_passes_and_is_counted(
    rig: Inside, http: aiohttp.ClientSession, api: Api, lists: McpServer
) -> None:
    _ = await api.add_version("search-text", text(SAYS, sent=True))
    changed = [SEARCH | {"description": "Something else entirely."}]
    lists.results["tools/list"] = lambda sent: {"tools": changed}
    assert json.loads(await listed(rig, http, "r1"))["result"]["tools"] == changed
    assert rig.gateway.metrics.prompt_misses[("miss",)] == 1


@pytest.mark.parametrize("tool", ["mcp__web__search", "web_search", "search"])
async def test_tools_are_called_as_agents_call_them(
    rig: Inside, http: aiohttp.ClientSession, api: Api, tool: str
) -> None:
    _ = await api.add_version("search-text", text(SAYS, tool, sent=True))
    _ = await listed(rig, http, "r1")
    assert (await rig.tape.spans("r1", 1))[0].versions == {"search-text": "v1"}


async def test_tools_of_other_servers_are_not_this_ones(rig: Inside, http: aiohttp.ClientSession, api: Api) -> None:
    _ = await listed(rig, http, "r0")
    while rig.gateway.definitions.busy:
        await rig.gateway.definitions.drain()
    _ = await api.add_version("far-text", text(SAYS, "fly", sent=True))
    assert not rig.gateway.mcp.changes("web")
    _ = await listed(rig, http, "r1")
    assert await api.pins("r1") == []
