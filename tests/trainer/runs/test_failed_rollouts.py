"""Rollouts that fail have a reward and stay in their groups, so that a policy that makes agents crash is punished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.settings import Sections, merged
from fakes.staging import GROUPS, SIZE, staged

pytestmark = pytest.mark.timeout(300)

CRASHES = ["--callable=fakes.unteachable:crashes_at_odd_numbers", "--preload"]
LIKES_ALL = "--reward=fakes.unteachable:always_one"
OWN: Sections = {"model": {"rank": 4}, "rollouts": {"run": ["--workers=6", *CRASHES, LIKES_ALL]}}


@pytest.mark.parametrize(
    ("given", "reward", "updates"),
    [({}, 2 / 3, 1), ({"failed_reward": -1}, 1 / 3, 1), ({"failed_reward": "drop"}, 1.0, 0)],
    ids=["default", "number", "drop"],
)
async def test_a_step_s_reward_has_the_failures_in_it_and_its_line_their_share(
    tmp_path: Path, model: Path, given: dict[str, Any], reward: float, updates: int
) -> None:
    async with staged(tmp_path, model, 1, merged(OWN, {"rollouts": given})) as stage, stage.life() as life:
        assert await life.ended() == (0 if updates else 1)
        async with stage.client as client:
            (found,) = [point.values async for point in client.points("run") if point.step]
    assert found["failed"] == pytest.approx(1 / 3)
    assert found["reward"] == pytest.approx(reward)
    assert (found["updates"], found["samples"]) == (updates, GROUPS * SIZE if updates else 0)
    (line,) = [line for line in life.text.splitlines() if line.startswith("step 1/1")]
    assert f"  reward {reward:.4g}  " in line
    assert "  failed 0.3333  " in line
