"""The training runs of the showcase, and the versions of weights that they made."""

from __future__ import annotations

import math
import random
from typing import Final

from examples.demo.order_desk import WEIGHTS
from examples.demo.showcase_parts import Showcase
from penstock.gateway.client.client import Client
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.run import NewRun, Point, RunChange, RunEnd, RunEvent, VersionReference

STEPS: Final = 60
SECOND_STEPS: Final = 34
"""Number of steps that the second run has done when the showcase opens."""


def point(step: int, draw: random.Random, dropped: int) -> Point:
    """The metrics of a GRPO step, with the names that `penstock train` reports."""
    share = step / STEPS
    reward = 0.2 + 0.6 * (1 - math.exp(-3 * share)) + draw.gauss(0, 0.05)
    values: dict[str, float | None] = {
        "reward": round(reward, 4),
        "loss": round(0.4 * math.exp(-2 * share) + draw.gauss(0, 0.02), 4),
        "kl": round(0.02 * share + abs(draw.gauss(0, 0.002)), 5),
        "entropy": round(1.6 - 0.7 * share + draw.gauss(0, 0.03), 4),
        "tokens_per_rollout": round(180 + 40 * share + draw.gauss(0, 8), 1),
        "rollouts": 32.0,
        "groups/informative": float(round(4 - 2 * share)),
        "samples": 90.0 - dropped,
        "updates": 2.0,
        "dropped/rollouts_equal": float(round(8 * share)),
        "dropped/samples_long": float(dropped),
        "staleness/mean": round(abs(draw.gauss(0.6, 0.2)), 2),
    }
    if step % 10 == 0:
        values["evaluation/held-out/reward"] = round(reward - 0.05, 4)
    return Point(step=step, values=values)


async def _weights(client: Client, version: str, parent: str | None) -> VersionReference:
    content = {"upstream": "vllm", "base": WEIGHTS, "adapter": f"/adapters/clerk/{version}"}
    new = NewVersion(kind="model", content=content, version=version, parent=parent, author="grpo-1")
    made = await client.add_version("clerk", new)
    return VersionReference(name=made.name, version=made.version)


async def runs(made: Showcase) -> None:
    """Makes a run that has ended, and its successor in progress."""
    client = made.client
    config = {"kind": "grpo", "model": {"path": "models/desk-7b"}, "optimizer": {"lr": 1e-5}, "group_size": 8}
    first = await client.start_run(NewRun(id="grpo-1", kind="grpo", name="first try", config=config, steps=STEPS))
    await _report(client, first.id, STEPS, 1)
    await client.add_run_events(first.id, [RunEvent(step=20, text="published clerk@v1"),
                                           RunEvent(step=41, level="warning", text="kl above 0.02"),
                                           RunEvent(step=59, text="published clerk@v2")])  # fmt: skip
    weights = [await _weights(client, "v1", None), await _weights(client, "v2", "v1")]
    await client.change_run(first.id, RunChange(made=weights))
    await client.finish_run(first.id, RunEnd(status="succeeded", message="all steps done"))
    again = config | {"optimizer": {"lr": 5e-6}, "group_size": 16}
    second = await client.start_run(NewRun(id="grpo-2", kind="grpo", name="half the step", config=again, steps=STEPS))
    await _report(client, second.id, SECOND_STEPS, 2)
    await client.add_run_events(second.id, [RunEvent(step=12, text="evaluated: 0.48"),
                                            RunEvent(step=30, level="error", text="a worker left")])  # fmt: skip
    await client.change_run(second.id, RunChange(message=f"collecting step {SECOND_STEPS}"))
    made.running = second.id


async def _report(client: Client, run: str, steps: int, seed: int) -> None:
    draw = random.Random(seed)
    await client.add_points(run, [point(step, draw, step % 3) for step in range(steps)])


async def train_on(made: Showcase, step: int, draw: random.Random) -> None:
    """Reports another step of the run in progress; ends the run after the last one."""
    if step < STEPS:
        await made.client.add_points(made.running, [point(step, draw, step % 3)])
    elif step == STEPS:
        await made.client.finish_run(made.running, RunEnd(status="succeeded", message="all steps done"))
