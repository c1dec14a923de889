"""Google's SDK asks for interactions through a gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from clients.profiles import HERE, NOWHERE, PYTHON
from fakes import environments
from fakes.budgets import budget, spans_of, toml, uses
from fakes.interactions import SAID, interactions_host
from fakes.process import running, upstream

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(120)]


async def test_the_sdk_streams_calls_tools_and_works_in_the_background(tmp_path: Path) -> None:
    if not environments.installed("clients"):
        pytest.skip(NOWHERE)
    caps = toml(budget(name="cap", unit="tokens", limit=10**6), budget(name="n", limit=100))
    async with (
        interactions_host() as host,
        running(tmp_path, upstream("g", host.url, "gemini") + caps) as gateway,
        aiohttp.ClientSession() as http,
    ):
        host.left = 1
        script = str(HERE / "scripts" / "agent_interactions.py")
        agent = await asyncio.create_subprocess_exec(
            str(PYTHON), script, f"{gateway.url}/rollout/r", stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await agent.communicate()
        assert agent.returncode == 0
        kinds, text, states, cancelled, error = json.loads(printed)
        assert (kinds[0], kinds[-1]) == ("interaction.created", "interaction.completed")
        assert (text, states, cancelled) == (SAID, ["in_progress", "in_progress", "completed"], "cancelled")
        assert error == "NotFoundError"
        spans = await spans_of(http, gateway, "rollout:r", 8)
        told = {span["sequence"]: span for span in spans}
        assert [(told[at]["dialect"], told[at]["status"], told[at]["finish"]) for at in sorted(told)] == [
            ("interactions", "ok", "requires_action"),
            ("interactions", "ok", "completed"),
            ("interactions", "ok", "completed"),
            ("interaction_retrieval", "ok", None),
            ("interaction_retrieval", "ok", "completed"),
            ("interactions", "error", "cancelled"),
            ("interaction_retrieval", "ok", "cancelled"),
            ("interactions", "error", None),
        ]
        assert told[3]["model"] == told[3]["model_served"] == "deep-research-pro-preview"
        assert told[1]["usage"] == told[3]["usage"]
        assert (told[1]["usage"]["input_tokens"], told[1]["usage"]["output_tokens"]) == (70, 30)
        turn: dict[str, Any] = (await detail(http, gateway.url, told[1]))["turn"]
        assert [part["type"] for part in turn["choices"][0]["message"]["parts"]] == ["reasoning", "tool_call"]
        assert not turn["problems"]
        assert not any("penstock.unread" in (span["attributes"] or {}) for span in spans)
        assert [row[:3] for row in await uses(http, gateway.url)] == [("cap", "", 400), ("n", "", 4)]


async def detail(http: aiohttp.ClientSession, url: str, span: dict[str, Any]) -> dict[str, Any]:
    path = f"{url}/api/rollouts/r/attempts/{span['attempt']}/spans/{span['sequence']}"
    async with http.get(path) as answer:
        return await answer.json()
