"""What happens around a run goes wrong in the middle of a step: it goes on, or stops with a sentence and comes to the
same metrics when the same command is given again.

Real are the trainer, the gateway, the runner and its agents, each a process of its own; the vLLM that the trainer
starts is scripted, and what it answers follows from the version and the question. So a run that was interrupted can be
held against one that was not, number by number. A step is caught in its middle by a version that does not answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.lives import Life
from fakes.process import PATHS
from fakes.settings import Sections
from fakes.staging import GROUPS, RUNNER, SIZE, Learnt, Stage, staged
from fakes.waiting import until

from bench.procfs import tree
from examples.lookup_model import write_model, write_tokenizer
from penstock.trainer.serving.vllm import MOST_DEATHS

pytestmark = pytest.mark.timeout(600)

STEPS = 3


async def upstream(stage: Stage) -> dict[str, Any]:
    """How calls meet vLLM at the gateway."""
    async with aiohttp.ClientSession() as http, http.get(f"{stage.gateway.url}/api/upstreams") as answer:
        return next(one for one in (await answer.json())["upstreams"] if one["name"] == "vllm")


async def told(stage: Stage) -> str:
    """How the run stands and what it said, newest first."""
    async with stage.client as client:
        run = await client.run("run")
        events = [event.text async for event in client.run_events("run")]
    return "\n".join([run.status, run.message or "", *events])


def begin(home: Path, model: Path, run: list[str], **sections: dict[str, Any]) -> AbstractAsyncContextManager[Stage]:
    """`run`: what the trainer starts its runner with; nothing: it starts none."""
    own: Sections = {
        "run": {"checkpoint_every": 1},
        "model": {"rank": 4},
        "rollouts": {"run": run},
        "engine": {"batch_tokens": 512},
    }
    return staged(home, model, STEPS, own | sections)


@pytest.fixture
async def stage(tmp_path: Path, model: Path) -> AsyncGenerator[Stage]:
    async with begin(tmp_path, model, ["--lease=60s", *RUNNER]) as made:
        yield made


@pytest.fixture
async def alone(tmp_path: Path, model: Path) -> AsyncGenerator[Stage]:
    """Nobody runs agents unless the test does."""
    async with begin(tmp_path, model, []) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unharmed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncGenerator[Stage]:
    """After a run that nothing happened to."""
    async with begin(tmp_path_factory.mktemp("whole"), model, RUNNER) as stage:
        await stage.to_the_end()
        yield stage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(unharmed: Stage) -> Learnt:
    """What it comes to."""
    found = await unharmed.learnt()
    assert len(found) == STEPS
    assert all(step["loss"] and step["tokens"] == GROUPS * SIZE * 6 for step in found)
    return found


async def test_a_trainer_that_is_killed_goes_on_where_it_was(stage: Stage, whole: Learnt) -> None:
    stage.hold(1)
    async with stage.life() as life:
        await stage.in_step(life, 2)
        await life.kill()
    stage.let_go()
    await stage.to_the_end()
    assert await stage.learnt() == whole


async def test_a_trainer_that_is_stopped_says_so_and_goes_on(stage: Stage, whole: Learnt) -> None:
    stage.hold(1)
    async with stage.life() as life:
        await stage.in_step(life, 2)
        life.signal(signal.SIGTERM)
        # Its runner lets the agents finish.
        stage.let_go()
        assert await life.ended() == 1
    assert (await told(stage)).startswith("stopped\nstopped after step 1; ")
    await stage.to_the_end()
    assert await stage.learnt() == whole


@asynccontextmanager
async def runner(stage: Stage, lease: int) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Somebody else's."""
    words = ["--watch", "--gateway", stage.gateway.url, f"--lease={lease}s", *RUNNER]
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "run", *words), env=os.environ | {"PYTHONPATH": PATHS}
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def test_a_vllm_that_is_killed_is_started_again_and_agents_wait(stage: Stage, whole: Learnt) -> None:
    stage.hold(1)
    async with stage.life() as life:
        await stage.in_step(life, 2)
        os.kill(life.child(b"fakes.vllm_process"), signal.SIGKILL)
        stage.let_go()
        assert await life.ended() == 0
    assert await stage.learnt() == whole
    assert "vLLM ended with -9" in await told(stage)
    found = await upstream(stage)
    assert found["waited"] > 0
    assert (found["refused"], found["paused"]) == (0, False)


async def test_weights_wait_for_a_vllm_that_has_died_meanwhile(tmp_path: Path, model: Path, whole: Learnt) -> None:
    flags = [f"--hold={tmp_path}/hold", "--slow=3"]
    async with begin(tmp_path, model, RUNNER, inference={"flags": flags}) as stage, stage.life() as life:
        stage.hold(0)
        await stage.waits(0)
        # It dies when the step's agents have ended and the weights are not published yet.
        life.signal(signal.SIGSTOP)
        stage.let_go()
        async with stage.client as client:

            async def ended() -> bool:
                found = [one async for one in client.rollouts("mode:train status:over")]
                return len(found) == GROUPS * SIZE

            await until(ended)
        os.kill(life.child(b"fakes.vllm_process"), signal.SIGKILL)
        life.signal(signal.SIGCONT)
        assert await life.ended() == 0, life.text
        assert await stage.learnt() == whole


async def test_a_vllm_that_dies_all_the_time_ends_the_run(alone: Stage) -> None:
    alone.hold(0)
    async with runner(alone, lease=60), alone.life() as life:
        for _ in range(MOST_DEATHS + 1):
            await alone.waits()
            os.kill(life.child(b"fakes.vllm_process"), signal.SIGKILL)
        assert await life.ended() == 1
        assert "vLLM has died 4 times in one step" in life.text
    assert not (await upstream(alone))["paused"]


async def test_an_upstream_that_the_gateway_does_not_have_is_named(alone: Stage) -> None:
    config = alone.home / "train.toml"
    config.write_text(config.read_text().replace("[inference]\n", '[inference]\nupstream = "other"\n'))
    async with alone.life() as life:
        assert await life.ended() == 1
        assert "inference.upstream: there is no upstream 'other'" in life.text


async def test_a_gateway_that_is_killed_is_waited_for(stage: Stage, whole: Learnt) -> None:
    stage.hold(1)
    async with stage.life() as life:
        await stage.in_step(life, 2)
        _ = await stage.gateway.kill()
        stage.let_go()
        await stage.gateway.start(stage.gateway.port)
        assert await life.ended() == 0
    assert await stage.learnt() == whole


async def test_a_trainer_that_is_stopped_does_not_wait_for_a_gateway_that_is_away(alone: Stage) -> None:
    async with alone.life() as life:
        async with alone.client as client, aclosing(client.changes()) as changes:
            async for change in changes:
                if change.rollout is not None:
                    break
        _ = await alone.gateway.kill()
        life.signal(signal.SIGTERM)
        assert await life.ended() == 1
        assert "stopped after step 0; " in life.text


async def test_a_runner_of_ours_that_dies_stops_the_run(tmp_path: Path, model: Path, whole: Learnt) -> None:
    async with begin(tmp_path, model, ["--lease=10s", *RUNNER]) as stage:
        stage.hold(1)
        async with stage.life(own_runner=True) as life:
            await stage.in_step(life, 2)
            os.kill(life.child(b"penstock\0run"), signal.SIGKILL)
            assert await life.ended() == 1
            assert "the runner (rollouts.run) ended with -9" in life.text
        assert (await told(stage)).startswith("failed\nthe runner (rollouts.run) ended with -9")
        stage.let_go()
        await stage.to_the_end()
        assert await stage.learnt() == whole


async def test_a_runner_elsewhere_that_dies_is_replaced_by_another(alone: Stage, whole: Learnt) -> None:
    alone.hold(1)
    async with alone.life() as life:
        async with runner(alone, lease=10) as first:
            await alone.in_step(life, 2)
            first.kill()
        alone.let_go()
        async with runner(alone, lease=60):
            assert await life.ended() == 0
    assert await alone.learnt() == whole


async def test_a_disk_that_is_full_stops_the_run(stage: Stage, whole: Learnt) -> None:
    """First while an adapter is written, then, with more room, while a checkpoint is."""
    stage.hold(1)
    async with stage.life() as life:
        await stage.in_step(life, 2)
        life.file_limit(4_000)
        stage.let_go()
        await stops(stage, life, r"adapters/run\.2 could not be written: .*File too large")
    async with stage.life() as life:
        life.file_limit(40_000)
        said = r"step-00000002 could not be written: .*File too large.*; the last good checkpoint is .*step-00000001$"
        await stops(stage, life, said)
    await stage.to_the_end()
    assert await stage.learnt() == whole


async def stops(stage: Stage, life: Life, said: str) -> None:
    """It fails with this, and what was good is there."""
    assert await life.ended() == 1
    assert re.search(said, life.text, re.MULTILINE), life.text
    found = sorted(path.name for path in (stage.home / "run").rglob("step-*") if path.is_dir())
    assert found == ["step-00000001"]
    assert (await told(stage)).startswith("failed\n")


def left(processes: list[int]) -> list[int]:
    """Those that still run."""
    return [pid for pid in processes if Path(f"/proc/{pid}/cmdline").exists()]


@pytest.mark.timeout(1800)
async def test_a_real_vllm_that_is_killed_is_started_again(tmp_path: Path, vllm_python: Path) -> None:
    """And what it says of its tokens is what the trainer computes: the adapters that it was given again are the right
    ones, and nothing of former ones is left in its caches."""
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    write_model(model, seed=0)
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=32"]
    async with begin(tmp_path, model, RUNNER, inference={"python": vllm_python, "flags": flags}) as stage:
        async with stage.life() as life:
            await life.said(rf"^step 1/{STEPS} ")
            vllm = life.child(b"vllm.entrypoints")
            processes = tree(vllm)
            os.kill(vllm, signal.SIGKILL)
            assert await life.ended() == 0
        async with stage.client as client:
            found = [point.values async for point in client.points("run") if point.step]
        assert "vLLM ended with -9" in await told(stage)
    assert [values["samples"] for values in found] == [GROUPS * SIZE] * STEPS
    assert [values["unscored"] for values in found] == [0] * STEPS
    assert all((values["mismatch_max"] or 0) < 1e-3 for values in found), found
    assert len(processes) > 1
    assert not left(processes)


async def test_a_run_whose_directory_is_gone_is_not_begun_anew_under_its_name(unharmed: Stage) -> None:
    """It would find the rollouts of its earlier life, and agents would never see its weights."""
    shutil.rmtree(unharmed.home / "run")
    async with unharmed.life() as life:
        assert await life.ended() == 1
    assert f"run.name: 'run' has published policy@run.{STEPS} already, and {unharmed.home}/run/adapters" in life.text
