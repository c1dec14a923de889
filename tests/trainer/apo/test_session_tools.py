"""Descriptions of tools as candidates: an agent takes the wrong tool of an MCP server because of what it is told.

The server has two tools. The model takes the one whose description speaks of orders, else the first, which fails; then
it gives up on every third order, and tries the other tool for the rest.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_wire import Client as McpClient
from fakes.mcp_wire import McpServer, call, config, mcp_server
from fakes.optimising import Done, Optimising
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.waiting import until

from examples.demo.model import DemoAnswer, DemoToolCall, Json, tool_result
from penstock.gateway.model.queue import Claim
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import load
from penstock.trainer.apo.session import check_publish

RIGHT, WRONG = "echo", "fails"
SAYS = "Says what there is."
BETTER = "Use this for orders: it says where one is."
SCHEMA: Json = {"type": "object", "properties": {"order": {"type": "string"}}}
TOOLS = [
    {"name": WRONG, "description": "Looks things up.", "inputSchema": SCHEMA},
    {"name": RIGHT, "description": SAYS, "inputSchema": SCHEMA},
]
TASKS = [{"order": str(number)} for number in range(120)]
LIST: Json = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
SETTINGS: dict[str, Any] = {
    "texts": {"prompts": [], "tools": ["orders-tool"]},
    "tasks": {"key": "order"},
    "budget": {"rollouts": 240},
}


def model(asked: Json) -> DemoAnswer:
    """What the models say: which tool is taken, and what would be a better description."""
    if asked["model"] == "thinker":
        about = {"resource": "orders-tool", "kind": "replace", "line": 1, "text": BETTER}
        return DemoAnswer(json.dumps({"hypotheses": [{"failure": "the wrong tool was used", **about}]}))
    functions = [one["function"] for one in asked["tools"]]
    order = next(text["content"] for text in asked["messages"] if text["role"] == "user")
    results = [found for text in asked["messages"] if (found := tool_result(text)) is not None]
    if results and (order in results[-1] or int(order) % 3 == 0):
        return DemoAnswer(results[-1])
    meant = next((one for one in functions if "orders" in one["description"]), functions[0])
    tool = next(one for one in functions if one is not meant) if results else meant
    return DemoAnswer(calls=(DemoToolCall(f"call_{len(results)}", tool["name"], json.dumps({"order": order})),))


@pytest.fixture
async def server() -> AsyncGenerator[McpServer]:
    async with mcp_server(sessions=False) as made:
        made.results["tools/list"] = lambda sent: {"tools": TOOLS}
        yield made


@pytest.fixture
async def shop(
    tmp_path: Path, start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession, server: McpServer
) -> AsyncGenerator[Optimising]:
    gateway = await start_gateway(upstreams(openai=provider.openai_url) + config(server))
    async with Optimising(tmp_path, gateway, provider, http) as made:
        provider.script = model
        yield made


class Agent:
    """Asks the server what there is, offers that to the model, and does what it wants, four times at most."""

    def __init__(self, here: Optimising) -> None:
        self._here = here
        self.told: set[str] = set()
        """Everything but descriptions that it was told of tools."""

    async def __call__(self, claim: Claim) -> Done:
        here, order = self._here, claim.rollout.input["order"]
        tools = await listed(here, claim.address)
        self.told.add(json.dumps([{key: tool[key] for key in ("name", "inputSchema")} for tool in tools]))
        offered = [
            {"type": "function", "function": {key: tool[key] for key in ("name", "description")}} for tool in tools
        ]
        messages: list[Json] = [{"role": "user", "content": order}]
        for _ in range(4):
            body = {"model": "m", "messages": messages, "tools": offered}
            async with here.http.post(f"{here.gateway.url}{claim.address}/v1/chat/completions", json=body) as answer:
                said: Json = (await answer.json())["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                break
            (wanted,) = said["tool_calls"]
            client = McpClient(f"{here.gateway.url}{claim.address}/mcp/tools", here.http, {})
            asked = call(wanted["function"]["name"], json.loads(wanted["function"]["arguments"]))
            result = json.loads((await client.say(asked))[1])["result"]
            text = "failed" if result.get("isError") else result["content"][0]["text"]
            messages.append({"role": "tool", "tool_call_id": wanted["id"], "content": text})
        good = order in str(messages[-1].get("content"))
        return Done(float(good), "found" if good else "the order was not found")


async def listed(here: Optimising, address: str) -> list[Json]:
    client = McpClient(f"{here.gateway.url}{address}/mcp/tools", here.http, {})
    status, body = await client.say(LIST)
    assert status == 200
    return json.loads(body)["result"]["tools"]


async def adopt(here: Optimising) -> None:
    """An agent has seen the tools; what the server says of one is registered."""
    assert await listed(here, "/rollout/first/attempt/a1") == TOOLS

    async def are_kept() -> bool:
        return bool((await here.client.server_definitions("tools")).of("tools"))

    await until(are_kept)
    adopted = await here.ended(await here.start("mcp", "adopt", "tools", RIGHT, "--name", "orders-tool"))
    assert adopted.code == 0, adopted.output


async def test_a_description_gets_better_and_is_released_by_canary(shop: Optimising) -> None:
    await adopt(shop)
    agent = Agent(shop)
    async with shop.agents(agent):
        path = shop.config(of=TASKS, publish={"release": "auto"}, **SETTINGS)
        ended = await shop.apo(path)
    assert ended.code == 0, ended.output
    assert "better by" in ended.output
    assert len(agent.told) == 1, "names and schemas are always the same"
    (release,) = await shop.client.releases("orders-tool")
    view = await shop.client.release(release.id)
    winner = next(
        one for one in (await shop.client.resource("orders-tool")).versions if one.version == release.candidate
    )
    assert winner.content == {"tool": RIGHT, "text": BETTER, "sent": False}
    assert view.release.stage not in ("promoted", "held", "aborted")
    assert (await shop.client.resource("orders-tool")).stable.version == "v1"


async def test_with_the_same_rewards_fewer_steps_win(shop: Optimising) -> None:
    """No order is given up on, so that only steps differ: three calls against two."""
    await adopt(shop)
    tasks = [one for one in ({"order": str(number)} for number in range(90)) if int(one["order"]) % 3]
    async with shop.agents(Agent(shop)):
        free = await shop.apo(shop.config("free", tasks, **SETTINGS))
        costly = await shop.apo(shop.config("costly", tasks, reward={"step_cost": 0.3}, **SETTINGS))
    assert (free.code, costly.code) == (0, 0), costly.output
    assert "better by" not in free.output
    assert "better by 0.3" in costly.output


def test_tool_texts_are_never_promoted_unseen(shop_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"publish\.policy: the stage 50% waits for 0 rollouts"):
        check_publish(load(shop_config))


@pytest.fixture
def shop_config(tmp_path: Path) -> Path:
    policy = tmp_path / "policy.toml"
    policy.write_text("[[stages]]\nsplit = 0.5\nrollouts = 0\n")
    path = tmp_path / "apo.toml"
    path.write_text(
        f'[texts]\ntools = ["t"]\n[reflection]\nmodel = "m"\n[publish]\nrelease = "auto"\npolicy = "{policy}"\n'
    )
    return path
