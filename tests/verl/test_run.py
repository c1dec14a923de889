"""`penstock train grpo` with `engine.kind = "verl"`: the same rollouts, and the metrics of the local engine.

Real are the trainer, its two ranks, the gateway, the runner and its agents, each a process of its own. The vLLM is
scripted: what it answers follows from the version and the question, so both runs learn from the same tokens.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-verl`, then `make test-verl`")
pytest.importorskip("tensordict", reason="there is no verl here: `make install-verl`, then `make test-verl`")

from fakes.staging import Learnt, staged, trained
from fakes.tiny_model import make_model

pytestmark = pytest.mark.timeout(900)

STEPS = 2


async def learnt_by(home: Path, model: Path, **engine: Any) -> Learnt:
    """A whole run; what every step of it came to. `engine`: more keys of that section."""
    sections = {"model": {"rank": 4}, "engine": {"batch_tokens": 64} | engine}
    async with staged(home, model, STEPS, sections) as stage:
        # One thread, as ranks have; Ray's workers do not stand back behind everybody.
        await trained(home, stage.gateway.url, OMP_NUM_THREADS="1", RAY_worker_niceness="0")
        return await stage.learnt()


async def test_a_run_is_that_of_the_local_engine(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    for name in ("local", "verl"):
        (tmp_path / name).mkdir()
    async with asyncio.TaskGroup() as both:
        local = both.create_task(learnt_by(tmp_path / "local", model))
        verl = both.create_task(learnt_by(tmp_path / "verl", model, kind="verl", ranks=2))
    expected = local.result()
    assert len(expected) == STEPS
    for one, other in zip(verl.result(), expected, strict=True):
        assert other["loss"]
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    adapters = [
        sorted(path.name for path in (tmp_path / name / "run" / "adapters").iterdir()) for name in ("local", "verl")
    ]
    assert adapters[0] == adapters[1] == [f"run.{step}" for step in range(STEPS + 1)]
