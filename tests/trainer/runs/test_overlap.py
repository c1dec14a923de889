"""The held-out tasks of a step run beside the next step, with the weights of their own; also when the trainer is killed
while they do."""

from __future__ import annotations

import json
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.settings import Sections
from fakes.staging import GROUPS, RUNNER, SIZE, Learnt, Served, Stage, served, staged

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import RolloutStatus

pytestmark = pytest.mark.timeout(300)

STEPS, HELD_OUT = 3, 2
REWARD = "evaluation/held-out/reward"
METRICS = ("reward", "loss", "updates", REWARD)


def sections(home: Path, ahead: bool) -> Sections:
    tasks = [json.dumps({"question": f"unseen{number}"}) for number in range(HELD_OUT)]
    (home / "held-out.jsonl").write_text("\n".join(tasks))
    return {
        "run": {"checkpoint_every": 1},
        "model": {"rank": 4},
        "rollouts": {"run": ["--lease=60s", *RUNNER], "ahead": ahead},
        "engine": {"batch_tokens": 512},
        "evaluate": {"every": 1, "suite": [{"tasks": home / "held-out.jsonl"}]},
    }


async def results(stage: Stage) -> tuple[Learnt, Served]:
    async with stage.client as client:
        points = [point async for point in client.points("run")]
        assert [point.step for point in points] == list(range(STEPS + 1))
        # The first point is from before any step.
        learnt = [{name: point.values.get(name) for name in METRICS} for point in points]
        return learnt, await served(client, "kind:llm status:ok")


async def step_has_ended(client: Client, step: int) -> None:
    """Comes back when all rollouts that a step learns from have succeeded."""
    done: set[str] = set()
    async with aclosing(client.changes(0, ["rollout"], [f"run-train-{step}-*"], [RolloutStatus.SUCCEEDED])) as changes:
        async for change in changes:
            assert change.rollout is not None
            done.add(change.rollout.id)
            if len(done) == GROUPS * SIZE:
                return


@pytest.mark.parametrize("ahead", [False, True])
async def test_held_out_tasks_run_beside_the_next_step(tmp_path: Path, model: Path, ahead: bool) -> None:
    found: list[Learnt] = []
    for name in ("whole", "killed"):
        home = tmp_path / name
        home.mkdir()
        async with staged(home, model, STEPS, sections(home, ahead)) as stage:
            if name == "killed":
                await killed_beside_step_2(stage)
            await stage.to_the_end()
            learnt, answered = await results(stage)
        found.append(learnt)
        # Those of a step have the weights of that step, although the next one has made others meanwhile.
        assert {step: versions for (mode, step), versions in answered.items() if mode == "val"} == {
            step: {(f"run.{step}", "vllm")} for step in range(STEPS + 1)
        }
    assert all(step[REWARD] is not None for step in found[0])
    # Whether a rollout of the step that is ahead begins before or after the weights are published is chance.
    same = (REWARD,) if ahead else METRICS
    whole, killed = ([[step[name] for name in same] for step in learnt] for learnt in found)
    assert whole == killed


async def killed_beside_step_2(stage: Stage) -> None:
    """Ends while the held-out tasks of step 1 have not ended, and the rollouts of step 2 have."""
    stage.hold(1, "unseen")
    async with stage.life() as life:
        await life.said(rf"^step 1/{STEPS} ")
        await stage.waits(1, HELD_OUT)
        async with stage.client as client:
            await step_has_ended(client, 2)
            # Nothing is published before the held-out tasks have ended.
            assert {one.version for one in (await client.resource("policy")).versions} == {"base", "run.0", "run.1"}
        life.signal(signal.SIGKILL)
        assert await life.ended() == -signal.SIGKILL
    stage.let_go()
