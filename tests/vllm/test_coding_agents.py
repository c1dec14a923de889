"""The proof: Claude Code and Codex as they are installed, by `penstock run`, on an exact route in front of a real vLLM.
Every rollout is one row of the engine's own tokens, and can be trained on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import environments
from fakes.coding_agents import AGENTS, PROVIDERS, Agent, config, missing, one_row_each, run
from fakes.ports import steady_ports
from fakes.process import running

from .conftest import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(1800)]

MODEL = os.environ.get("PENSTOCK_SHELL_MODEL")
"""A model that `make_shell_model.py` has made: making it takes minutes, so it is made once and kept."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A vLLM whose model works in a shell, and whose template takes one system message."""
    if not environments.installed("vllm"):
        pytest.skip("there is no vLLM here: `make install-vllm` installs it (3.4 GB), `make test-vllm` runs this")
    if (why := missing()) is not None:
        pytest.skip(why)
    if MODEL is None:
        pytest.skip("no model: `make_shell_model.py DIR` makes one in minutes; then set PENSTOCK_SHELL_MODEL=DIR")
    home = tmp_path_factory.mktemp("shell")
    flags = {"served-model-name": "policy", "max-model-len": 4096, "reasoning-parser": "qwen3"}
    flags |= {"override-generation-config": '{"temperature": 0}'}
    server = Vllm(home, steady_ports(1)[0], model=Path(MODEL), flags=flags, lora=False)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_every_rollout_is_one_row(shell: Vllm, tmp_path: Path, agent: Agent) -> None:
    async with running(tmp_path / "gateway", config(shell.url + "/v1"), python=PROVIDERS) as gateway:
        await one_row_each(gateway, await run(gateway, agent, tmp_path, 2))
