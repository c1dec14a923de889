"""A run that trains all weights, on two scripted servers that it starts itself: it goes on after `kill -9` as if
nothing had been, each server with what it had, and leaves no more directories than it must.

What a server answers follows from its version and the question, so what a run has learnt can be held against another's.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.settings import Sections
from fakes.staging import RUNNER, Learnt, Served, Stage, served, staged
from fakes.tiny_model import make_model

from penstock.gateway.model.resource import Need

pytestmark = pytest.mark.timeout(600)

STEPS, KEEP = 4, 2
LEARNT = ("reward", "loss", "grad_norm", "tokens", "samples", "ratio", "mismatch_max", "staleness/max", "updates")
"""Metrics that follow from what the rollouts said and from the weights, and from nothing else."""
UPSTREAMS = ("vllm", "vllm-2")


def begin(home: Path, model: Path, ahead: bool = False) -> AbstractAsyncContextManager[Stage]:
    sections: Sections = {
        "run": {"checkpoint_every": 2},
        "model": {"weights": "full"},
        "rollouts": {"ahead": ahead, "run": ["--lease=60s", *RUNNER]},
        "engine": {"batch_tokens": 64},
        "publish": {"keep": KEEP},
    }
    return staged(home, model, STEPS, sections, servers=2)


async def answers(stage: Stage) -> Served:
    """Versions of each step's calls, and the upstreams that answered them."""
    async with stage.client as client:
        return await served(client, "kind:llm status:ok")


def directories(stage: Stage) -> list[str]:
    """Versions that lie on the disk."""
    return sorted(path.name for path in (stage.home / "run" / "models").iterdir())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("model"))
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors.index.json").write_text("{}")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Learnt:
    """What a run comes to that nothing happens to."""
    async with begin(tmp_path_factory.mktemp("whole"), model) as stage:
        await stage.to_the_end()
        found = await stage.learnt(LEARNT)
        # No step mixes versions, and servers take turns.
        assert await answers(stage) == {
            ("train", step): {(f"run.{step - 1}", UPSTREAMS[(step - 1) % 2])} for step in range(1, STEPS + 1)
        }
        # What training gets is needed, the others are among the newest.
        assert directories(stage) == [f"run.{STEPS - 1}", f"run.{STEPS}"]
        # All that a server needs, and nothing of the weights that it began with.
        names = {path.name for path in (stage.home / "run" / "models" / f"run.{STEPS}").iterdir()}
        assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert len(found) == STEPS
    assert all(step["loss"] and step["updates"] and step["staleness/max"] == 0 for step in found)
    return found


async def test_a_trainer_that_is_killed_goes_on_where_it_was(tmp_path: Path, model: Path, whole: Learnt) -> None:
    async with begin(tmp_path, model) as stage:
        # In step 4 the newest checkpoint is that of step 2; the version of step 3 is what training gets.
        stage.hold(3)
        async with stage.life() as life:
            await stage.waits(3)
            await life.kill()
        stage.let_go()
        await stage.to_the_end()
        assert await stage.learnt(LEARNT) == whole
        found = await answers(stage)
        # Agents have asked again and were answered by the same weights, although the trainer was two steps back.
        assert found["train", 4] == {("run.3", "vllm-2")}
        assert directories(stage) == ["run.3", "run.4"]


async def test_with_the_next_step_ahead_two_versions_are_enough(tmp_path: Path, model: Path) -> None:
    async with begin(tmp_path, model, ahead=True) as stage:
        await stage.to_the_end()
        learnt = await stage.learnt(LEARNT)
        assert [step["updates"] for step in learnt] == [1.0] * STEPS
        assert max(step["staleness/max"] or 0 for step in learnt) <= 1
        for (_, step), found in (await answers(stage)).items():
            allowed = {max(0, step - 2), step - 1}
            assert found <= {(f"run.{version}", UPSTREAMS[version % 2]) for version in allowed}
        async with stage.client as client:
            needs = await client.needed_versions("policy")
        assert [need for need in needs if need.rollouts] == list[Need]()
