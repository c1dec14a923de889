"""Policies of others, which a rule asks: what they may be, and what becomes of a call when they fail.

What is shown of the toolkit in "policies.md" is run where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from fakes.mcp_wire import Client, McpServer, call
from fakes.process import ROOT
from fakes.rig import Inside, inside

from penstock.gateway.model.toml import ConfigError
from penstock.gateway.tools.policy_enforcement import KernelCall, ask_kernel, load_kernel

CALL = KernelCall("files", "write", {"path": "/a", "tool_name": "forged"}, "r1", "a1", None, "online")


class Intercepts:
    """As an `MCPGateway` is."""

    def intercept_tool_call(self, agent_id: str, tool_name: str, params: dict[str, Any]) -> tuple[bool, str]:
        return tool_name == "write", f"{agent_id} {tool_name} {params['path']}"


@dataclass
class Verdict:
    allowed: object
    reason: str = "so it is"


class Evaluates:
    """As a `PolicyEvaluator` is."""

    def evaluate(self, context: dict[str, Any]) -> Verdict:
        return Verdict(context["tool_name"] == "write" and context["path"] == "/a")


async def later(call: KernelCall) -> bool:
    return call.tool == "write"


def fails(call: KernelCall) -> bool:
    raise RuntimeError("secret words")


def unsure(call: KernelCall) -> Any:
    return object()


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("strangers")
    kernels = {"intercepts": Intercepts(), "evaluates": Evaluates(), "later": later, "fails": fails, "unsure": unsure}
    made.__dict__.update(kernels, says=lambda call: (False, "no writing"), number=7)  # pyright: ignore
    monkeypatch.setitem(sys.modules, "strangers", made)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("intercepts", (True, "r1/a1 write /a")),
        ("evaluates", (True, "so it is")),
        ("later", (True, "")),
        ("says", (False, "no writing")),
        ("unsure", (False, "")),
        ("fails", (False, "it failed; the log of the gateway says why")),
    ],
)
async def test_what_kernels_say(name: str, said: tuple[bool, str]) -> None:
    assert await ask_kernel(load_kernel("r", f"strangers:{name}"), CALL, 30) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "nowhere:kernel",
            "kernel 'nowhere:kernel' cannot be loaded (No module named 'nowhere'); it must be importable",
        ),
        ("strangers:kernel", "has no attribute 'kernel'"),
        ("strangers:number", "is of type int, not a function, an MCPGateway or a PolicyEvaluator"),
    ],
)
def test_what_is_no_kernel_is_said_at_the_start(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = load_kernel("mine", name)
    assert said in str(caught.value)
    assert "policy rule 'mine'" in str(caught.value)


RULE = {"name": "kernel", "verdict": "kernel", "kernel": "company_policy:gateway", "wait": 20.0}
Started = Callable[[str], AbstractAsyncContextManager[Inside]]


@pytest.fixture
def started(server: McpServer, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> Started:
    """A gateway whose kernel is of this code."""

    def start(code: str) -> AbstractAsyncContextManager[Inside]:
        (tmp_path / "company_policy.py").write_text(code)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        monkeypatch.delitem(sys.modules, "company_policy", raising=False)
        return inside(tmp_path, http, mcp={"servers": {"tools": {"url": server.url}}}, policy=[RULE])

    return start


def agent(made: Inside, rollout: str) -> Client:
    return Client(f"{made.base.url}/rollout/{rollout}/attempt/a1/mcp/tools", made.tape.http, {})


async def test_calls_wait_for_a_kernel(started: Started, server: McpServer) -> None:
    code = "def gateway(call):\n    return call.arguments.get('path') != '/etc', 'only below /srv'\n"
    async with started(code) as made:
        client = agent(made, "r1")
        await client.open()
        _, body = await client.say(call("echo", {"path": "/srv"}))
        assert b'"result"' in body
        _, body = await client.say(call("echo", {"path": "/etc"}))
    error = json.loads(body)["error"]
    assert error["data"] == {"reason": "policy", "rule": "kernel"}
    assert error["message"].endswith("does not allow it: only below /srv")
    assert sum(b"tools/call" in body for _, _, _, body in server.asked) == 1


@pytest.mark.skipif(importlib.util.find_spec("agent_os") is None, reason="needs: pip install agent-os-kernel==3.7.0")
async def test_the_documented_gateway_of_the_toolkit_decides(started: Started) -> None:
    code = (ROOT / "docs" / "policies.md").read_text().split("```python\n")[1].split("```")[0]
    code = code.replace("delete_database", "fails").replace("100", "2")
    said: list[str] = []
    async with started(code) as made:
        client, other = agent(made, "r1"), agent(made, "r2")
        await client.open()
        for tool, arguments in (("fails", {}), ("echo", {"x": "; rm -rf /"}), ("echo", {}), ("echo", {}), ("echo", {})):
            _, body = await client.say(call(tool, arguments))
            said.append(json.loads(body).get("error", {}).get("message", "").rpartition("not allow it: ")[2])
        await other.open()
        assert b'"result"' in (await other.say(call("echo")))[1]
    assert said[0] == "Tool 'fails' is on the deny list"
    assert said[1].startswith("Parameters matched dangerous pattern")
    assert said[2:4] == ["", ""]
    assert said[4] == "Agent 'r1/a1' exceeded call budget (2)"
