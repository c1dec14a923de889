"""The held-out tasks of a step run beside the next step, with the weights of their own; also when the trainer is killed
while they do."""

from __future__ import annotations

from contextlib import aclosing
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.asking import reward
from fakes.settings import Sections
from fakes.staging import GROUPS, RUNNER, SIZE, Learnt, Served, Stage, served, staged, write_tasks
from fakes.vllm_process import answered

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import RolloutStatus

pytestmark = pytest.mark.timeout(300)

STEPS, HELD_OUT = 3, 2
REWARD = "evaluation/held-out/reward"
METRICS = ("reward", "loss", "updates", REWARD)


def sections(home: Path, ahead: bool = False) -> Sections:
    write_tasks(home, *(f"unseen{number}" for number in range(HELD_OUT)), name="held-out")
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


async def trained(stage: Stage) -> Learnt:
    """Goes to the end. Held-out tasks of a step have its weights, although the next one has made others meanwhile."""
    await stage.to_the_end()
    learnt, answered = await results(stage)
    assert {step: versions for (mode, step), versions in answered.items() if mode == "val"} == {
        step: {(f"run.{step}", "vllm")} for step in range(STEPS + 1)
    }
    return learnt


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Learnt:
    """What a run comes to that nothing happens to."""
    home = tmp_path_factory.mktemp("whole")
    async with staged(home, model, STEPS, sections(home)) as stage:
        learnt = await trained(stage)
    assert all(step[REWARD] is not None for step in learnt)
    return learnt


@pytest.mark.parametrize("ahead", [False, True])
async def test_held_out_tasks_run_beside_the_next_step(tmp_path: Path, model: Path, whole: Learnt, ahead: bool) -> None:
    async with staged(tmp_path, model, STEPS, sections(tmp_path, ahead)) as stage:
        await killed_beside_step_2(stage)
        killed = await trained(stage)
    # Whether a rollout of the step that is ahead begins before or after the weights are published is chance.
    same = (REWARD,) if ahead else METRICS
    assert [[step[name] for name in same] for step in killed] == [[step[name] for name in same] for step in whole]


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
        await life.kill()
    stage.let_go()


# -- what the checkpoint does not know yet ---------------------------------------------------------------------------


def liked_best(best: int, *others: int) -> str:
    """A question whose answer by the weights of one step has a higher reward than by those of others."""

    def judged(question: str, step: int) -> float:
        asked = [{"role": "user", "content": f"{question} run-val-{step}.held-out-0-0"}]
        said = answered(f"policy@run.{step}", asked)["choices"][0]["message"]["content"]
        return reward({}, {"said": said}, None)

    questions = (f"unseen{number}" for number in count())
    return next(one for one in questions if judged(one, best) > max(judged(one, step) for step in others))


async def test_weights_that_turn_out_to_be_the_best_after_a_crash_are_there(tmp_path: Path, model: Path) -> None:
    """The checkpoint of step 2 does not have its evaluation; the newest version is that of step 3 when it is read."""
    own = sections(tmp_path)
    write_tasks(tmp_path, liked_best(2, 0, 4), name="held-out")
    own["run"]["checkpoint_every"] = own["evaluate"]["every"] = 2
    own["publish"] = {"keep": 1}
    async with staged(tmp_path, model, 4, own) as stage:
        stage.hold(3)
        async with stage.life() as life:
            await stage.waits(3)
            await life.kill()
        stage.let_go()
        async with stage.life() as life:
            await life.said("goes on at step 3")
            await life.said("run.2 are the best on the held-out tasks")
            assert await life.ended() == 0
        assert (tmp_path / "run" / "best").resolve().name == "run.2"
        assert list((tmp_path / "run" / "best").iterdir())


async def test_a_run_that_shall_end_at_its_checkpoint_has_its_evaluation(tmp_path: Path, model: Path) -> None:
    async with staged(tmp_path, model, STEPS, sections(tmp_path)) as stage:
        await killed_beside_step_2(stage)
        settings = tmp_path / "train.toml"
        settings.write_text(settings.read_text().replace(f"steps = {STEPS}", "steps = 1"))
        await stage.to_the_end()
        async with stage.client as client:
            points = [point async for point in client.points("run")]
    assert [point.step for point in points] == [0, 1]
    assert points[1].values[REWARD] is not None


async def test_a_run_whose_suites_are_taken_away_goes_on(tmp_path: Path, model: Path) -> None:
    """Its checkpoint owes an evaluation that nobody asks for any more."""
    async with staged(tmp_path, model, STEPS, sections(tmp_path)) as stage:
        await killed_beside_step_2(stage)
        settings = tmp_path / "train.toml"
        whole = settings.read_text()
        settings.write_text(whole[: whole.index("[[evaluate.suite]]")])
        await stage.to_the_end()
        async with stage.client as client:
            points = [point async for point in client.points("run")]
    assert [REWARD in point.values for point in points] == [True, False, False, False]
