"""Claude Code and Codex as they are installed, on an exact route: every rollout is one row that can be trained on.

The engine is a script whose chat template drifts, as real ones do, and takes one system message; `tests/vllm` has the
same with a real vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.coding_agents import AGENTS, PROVIDERS, SAID, Agent, config, missing, one_row_each, run
from fakes.process import running
from fakes.scale_out import GENERATE, scale_out
from fakes.toy_template import CALL, CALLED, START, Template

pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("clients"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_every_rollout_is_one_row(tmp_path: Path, agent: Agent) -> None:
    if (why := missing()) is not None:
        pytest.skip(why)

    def speaks(prompt: str) -> str:
        done = prompt.count(START + "tool\n")
        call = {"name": agent.shell, "arguments": {agent.field: f"echo {done + 1}"}}
        return f"<think>\nHm.\n</think>\n\n{CALL}{json.dumps(call)}{CALLED}" if done < 3 else SAID

    async with scale_out() as vllm:
        vllm.template, vllm.longest = Template(strips=True, rewrites=True, thinks=True, one_system=True), 200_000
        vllm.speaks = speaks
        async with running(tmp_path / "gateway", config(vllm.openai_url), python=PROVIDERS) as gateway:
            await one_row_each(gateway, await run(gateway, agent, tmp_path, 2))
        assert len(vllm.of(GENERATE)) == 6
