"""A run that trains weights and prompts: what its rollouts were given, what comes of it, and that `kill -9` changes
nothing. The vLLM is scripted, the engine proposes what a test wants; everything else is the real thing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.prompted import PROMPT, RULES
from fakes.settings import Sections, toml
from fakes.staging import Stage, staged

from penstock.gateway.model.resource import NewVersion
from penstock.trainer.runs.prompt_rounds import FRONT

pytestmark = pytest.mark.timeout(600)

STEPS, EVERY, SIZE = 4, 2, 6
RUNNER = ["--workers=6", "--callable=fakes.prompted:agent", "--preload", "--reward=fakes.prompted:reward"]
LEARNT = ("reward", "loss", "grad_norm", "tokens", "samples", "front/seed", "front/1", "front/size")
POLICY = 'replayed = "skip"\nshadowed = "skip"\nmargin_absolute = 0.1\nguards.margin = 0.1\n'
CELLS = ("cells/old_old", "cells/new_old", "cells/old_new", "cells/new_new")


@asynccontextmanager
async def begun(home: Path, model: Path) -> AsyncGenerator[Stage]:
    own: Sections = {
        "run": {"checkpoint_every": 2},
        "model": {"rank": 4},
        "rollouts": {"run": ["--lease=60s", *RUNNER], "group_size": SIZE},
        "engine": {"batch_tokens": 512},
        "evaluate": {"suite": [{"tasks": home / "tasks.jsonl", "samples": 2}], "every": 2},
        "prompts": {"every": EVERY, "rollouts": 24},
        "publish": {"keep": 2, "release": "canary", "policy": home / "policy.toml"},
    }
    (home / "policy.toml").write_text(POLICY)
    async with staged(home, model, STEPS, own) as stage:
        settings = toml({"texts": {"prompts": ["shop"]}, "reflection": {"model": "none"}})
        (home / "apo.toml").write_text(f'engine = "fakes.prompted:propose"\n{settings}')
        stage.flags = ("--prompts", str(home / "apo.toml"))
        async with stage.client as client:
            await client.add_version("shop", NewVersion(kind="prompt", content={"text": PROMPT, "sent": True}))
        yield stage


async def versions(stage: Stage, what: str) -> dict[str, dict[str, set[str]]]:
    """What the rollouts of a filter were served by, by their group: versions of the prompt, and of the weights."""
    found: defaultdict[str, dict[str, set[str]]] = defaultdict(lambda: {"shop": set(), "policy": set()})
    async with stage.client as client:
        async for span in client.recent_spans(what):
            rollout = await client.rollout(span.rollout)
            for name, version in (span.versions or {}).items():
                found[rollout.group or ""][name].add(version)
    return found


async def made(stage: Stage, text: str) -> str:
    """The version of the prompt with this text."""
    async with stage.client as client:
        return next(one.version for one in (await client.resource("shop")).versions if one.content["text"] == text)


async def test_a_run_of_both_goes_on_after_kill_9_and_ends_with_a_pair(tmp_path: Path, model: Path) -> None:
    for home in ("whole", "killed"):
        (tmp_path / home).mkdir()
    async with begun(tmp_path / "whole", model) as stage:
        await stage.to_the_end()
        whole = await stage.learnt(LEARNT)
        cells = await points(stage)
        best = await made(stage, "\n".join([PROMPT, *RULES]))
        await look(stage, best)
        await is_no_run_of_weights(stage)
    async with begun(tmp_path / "killed", model) as stage:
        async with stage.life() as life:
            # Its last checkpoint is of step 2, so the second round is held again.
            await life.said(rf"^step 3/{STEPS} ")
            await life.kill()
        await stage.to_the_end()
        assert await stage.learnt(LEARNT) == whole
        assert await points(stage) == cells
    # Both rules and not "Say nothing.": 0.8 and chance; none of them: 0.2 and chance.
    assert cells["cells/new_new"] > 0.75 > 0.5 > cells["cells/old_new"] > 0.15


async def points(stage: Stage) -> dict[str, float]:
    async with stage.client as client:
        found = [one.values async for one in client.points("run")]
    (cells,) = [values for values in found if CELLS[0] in values]
    return {name: value for name in CELLS if (value := cells[name]) is not None}


async def look(stage: Stage, best: str) -> None:
    """What each rollout was given is what it should be."""
    for group, found in (await versions(stage, "mode:train kind:llm status:ok")).items():
        if group.startswith("run-train-"):
            step = int(group.split("-")[2])
            assert 2 <= len(found["shop"]) <= FRONT, group
            assert (best in found["shop"]) == (step > EVERY)
            assert "v1" in found["shop"]
        elif group.startswith(("run.round-", "run.choice-")):
            weights = {"1": "run.0", "2": f"run.{EVERY}", "last": f"run.{STEPS}"}[group.split("-")[1].split(".")[0]]
            assert found["policy"] == {weights}
    for group, found in (await versions(stage, "mode:val kind:llm status:ok")).items():
        if group.startswith("run.cells-"):
            assert found == {"shop": {"v1", best}, "policy": {f"run.{group.split('-')[1].split('.')[0]}"}}
    async with stage.client as client:
        (release,) = [one for one in await client.releases("policy", live=True) if one.only.modes == ["online"]]
        assert (release.candidate, release.companions) == (f"run.{STEPS}", {"shop": best})
        assert (await client.resource("shop")).stable.version == "v1"
        run = await client.run("run")
        assert {(one.name, one.version) for one in run.made} >= {("shop", best), ("policy", f"run.{STEPS}")}
        told = [event.text async for event in client.run_events("run")]
    assert any(text.startswith("held-out tasks, new prompt, new weights: ") for text in told)
    assert f"release {release.id} shows run.{STEPS} with shop@{best} to production" in told


async def is_no_run_of_weights(stage: Stage) -> None:
    """A checkpoint of another kind of run is refused."""
    stage.flags = ()
    async with stage.life() as life:
        assert (await life.ended(), "of a run with --prompts" in life.text) == (1, True), life.text
