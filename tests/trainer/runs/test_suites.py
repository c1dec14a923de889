"""Several held-out suites, and tasks that are chosen by what they were worth: in whole runs, one of them killed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.settings import Sections
from fakes.staging import GROUPS, RUNNER, SIZE, Stage, staged, write_tasks

from penstock.gateway.client.client import Client
from penstock.gateway.model.run import Point

pytestmark = pytest.mark.timeout(300)

STEPS, TASKS = 3, 12


def sections(home: Path) -> Sections:
    """Two suites, the second with three rollouts of each of its tasks, and a curriculum."""
    for name, count in (("many", TASKS), ("easy", 2), ("hard", 3)):
        write_tasks(home, *(f"{name}{number}" for number in range(count)), name=name)
    hard = {"tasks": home / "hard.jsonl", "samples": 3, "passed": 0.5}
    return {
        "run": {"checkpoint_every": 1},
        "model": {"rank": 4},
        "rollouts": {"run": RUNNER, "curriculum": True, "ahead": False, "tasks": home / "many.jsonl"},
        "engine": {"batch_tokens": 512},
        "evaluate": {"every": 1, "suite": [{"tasks": home / "easy.jsonl"}, hard]},
    }


async def points(client: Client) -> list[Point]:
    return [point async for point in client.points("run")]


async def asked(client: Client) -> dict[str, Any]:
    """What each group of a step was asked."""
    return {one.group or "": one.input async for one in client.rollouts("mode:train")}


@dataclass(frozen=True, slots=True)
class Whole:
    """What a run comes to that nothing happens to."""

    points: list[Point]
    said: list[str]
    held_out: list[str | None]
    """Groups of the rollouts of both suites."""
    asked: dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Whole:
    home = tmp_path_factory.mktemp("whole")
    async with staged(home, model, STEPS, sections(home)) as stage:
        await stage.to_the_end()
        async with stage.client as client:
            said = [event.text async for event in client.run_events("run")]
            held_out = [one.group async for one in client.rollouts("mode:val")]
            return Whole(await points(client), said, held_out, await asked(client))


async def test_each_suite_is_reported_and_the_first_decides(whole: Whole) -> None:
    found = whole.points
    for point in found:
        names = {name for name in point.values if name.startswith("evaluation/")}
        bounds = {f"evaluation/{name}/reward{end}" for name in ("easy", "hard") for end in ("", "_low", "_high")}
        others = {f"evaluation/{name}/{what}" for name in ("easy", "hard") for what in ("failed", "pass@1", "tasks")}
        assert names == bounds | others | {"evaluation/hard/pass@3"}
        values = {name: value for name, value in point.values.items() if value is not None}
        assert values["evaluation/hard/pass@1"] <= values["evaluation/hard/pass@3"] <= 1
        assert values["evaluation/easy/reward_low"] <= values["evaluation/easy/reward"]
    best = max((point.values["evaluation/easy/reward"] or 0.0) for point in found)
    assert (
        any(text.endswith(f"evaluation/easy/reward {best:.4g}") for text in whole.said)
        or best == found[0].values["evaluation/easy/reward"]
    )
    assert not any("best" in text and "hard" in text for text in whole.said)
    assert {
        len([one for one in whole.held_out if f"-val-{step}.hard-" in (one or "")]) for step in range(STEPS + 1)
    } == {9}
    for point in found[1:]:
        assert 0 <= (point.values["groups/differ"] or 0.0) <= 1
        assert (point.values["curriculum/tried"] or 0.0) == pytest.approx(point.step * GROUPS / TASKS)


async def test_a_run_that_was_killed_takes_the_same_tasks(tmp_path: Path, model: Path, whole: Whole) -> None:
    """What the first step has taught of the tasks comes out of the checkpoint."""
    async with staged(tmp_path, model, STEPS, sections(tmp_path)) as stage:
        await killed_in_step_2(stage)
        await stage.to_the_end()
        async with stage.client as client:
            assert await asked(client) == whole.asked
            last = (await points(client))[-1]
    assert last.values["curriculum/tried"] == pytest.approx(STEPS * GROUPS / TASKS)
    assert len(whole.asked) == STEPS * GROUPS


async def killed_in_step_2(stage: Stage) -> None:
    stage.hold(1, "many")
    async with stage.life() as life:
        await stage.in_step(life, 2)
        await life.kill()
    stage.let_go()


def test_a_step_asks_as_many_as_it_is_told() -> None:
    """The test above counts on it: no task is taken twice while there are others that were never tried."""
    assert STEPS * GROUPS < TASKS
    assert SIZE > 1
