"""Several held-out suites, and tasks that are chosen by what they were worth: in whole runs, one of them killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.settings import Sections
from fakes.staging import GROUPS, RUNNER, SIZE, Stage, staged, write_tasks

from penstock.gateway.client.client import Client
from penstock.gateway.model.run import Point

pytestmark = pytest.mark.timeout(300)

TASKS = 12


def sections(home: Path, steps_between: int = 1) -> Sections:
    """Two suites, the second with three rollouts of each of its tasks, and a curriculum."""
    for name, count in (("easy", 2), ("hard", 3)):
        write(home, name, count)
    hard = {"name": "hard", "tasks": home / "hard.jsonl", "samples": 3, "passed": 0.5}
    return {
        "run": {"checkpoint_every": 1},
        "model": {"rank": 4},
        "rollouts": {"run": RUNNER, "curriculum": True, "ahead": False, "tasks": home / "many.jsonl"},
        "engine": {"batch_tokens": 512},
        "evaluate": {"every": steps_between, "suite": [{"name": "easy", "tasks": home / "easy.jsonl"}, hard]},
    }


def write(home: Path, name: str, count: int) -> None:
    write_tasks(home, *(f"{name}{number}" for number in range(count)), name=name)


async def points(client: Client) -> list[Point]:
    return [point async for point in client.points("run")]


async def asked(client: Client) -> dict[str, Any]:
    """What each group of a step was asked."""
    return {one.group or "": one.input async for one in client.rollouts("mode:train")}


async def test_each_suite_is_reported_and_the_first_decides(tmp_path: Path, model: Path) -> None:
    write(tmp_path, "many", TASKS)
    async with staged(tmp_path, model, 2, sections(tmp_path)) as stage:
        await stage.to_the_end()
        async with stage.client as client:
            found = await points(client)
            said = [event.text async for event in client.run_events("run")]
            held_out = [one.group async for one in client.rollouts("mode:val")]
    for point in found:
        names = {name for name in point.values if name.startswith("evaluation/")}
        bounds = {f"evaluation/{name}/reward{end}" for name in ("easy", "hard") for end in ("", "_low", "_high")}
        others = {f"evaluation/{name}/{what}" for name in ("easy", "hard") for what in ("failed", "pass@1")}
        assert names == bounds | others | {"evaluation/hard/pass@3"}
        values = {name: value for name, value in point.values.items() if value is not None}
        assert values["evaluation/hard/pass@1"] <= values["evaluation/hard/pass@3"] <= 1
        assert values["evaluation/easy/reward_low"] <= values["evaluation/easy/reward"]
    best = max((point.values["evaluation/easy/reward"] or 0.0) for point in found)
    assert (
        any(text.endswith(f"evaluation/easy/reward {best:.4g}") for text in said)
        or best == found[0].values["evaluation/easy/reward"]
    )
    assert not any("best" in text and "hard" in text for text in said)
    assert {len([one for one in held_out if f"-val-{step}.hard-" in (one or "")]) for step in range(3)} == {9}
    for point in found[1:]:
        assert 0 <= (point.values["groups/differ"] or 0.0) <= 1
        assert (point.values["curriculum/tried"] or 0.0) == pytest.approx(point.step * GROUPS / TASKS)


async def test_a_run_that_was_killed_takes_the_same_tasks(tmp_path: Path, model: Path) -> None:
    """What the first step has taught of the tasks comes out of the checkpoint."""
    asked_of: list[dict[str, Any]] = []
    for name in ("whole", "killed"):
        home = tmp_path / name
        home.mkdir()
        write(home, "many", TASKS)
        async with staged(home, model, 3, sections(home, steps_between=9)) as stage:
            if name == "killed":
                await killed_in_step_2(stage)
            await stage.to_the_end()
            async with stage.client as client:
                asked_of.append(await asked(client))
                assert (await points(client))[-1].values["curriculum/tried"] == pytest.approx(3 * GROUPS / TASKS)
    assert asked_of[0] == asked_of[1]
    assert len(asked_of[0]) == 3 * GROUPS


async def killed_in_step_2(stage: Stage) -> None:
    stage.hold(1)
    async with stage.life() as life:
        await stage.in_step(life, 2)
        await life.kill()
    stage.let_go()


def test_a_step_asks_as_many_as_it_is_told() -> None:
    """The test above counts on it: no task is taken twice while there are others that were never tried."""
    assert 3 * GROUPS < TASKS
    assert SIZE > 1
