"""`penstock run --on ray` on a real Ray cluster of several nodes (processes on this machine)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.runs import AGENTS, PATIENCE, PYTHON, StartRun, enqueue, gone, only_attempt, written

from gateway.client import Client
from gateway.model import RolloutStatus


@dataclass(slots=True)
class Nodes:
    """A cluster of two nodes with one CPU each: two workers are never on one of them."""

    cluster: Any
    first: Any
    second: Any

    @property
    def address(self) -> str:
        return self.cluster.address


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A running cluster."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray import cluster_utils

    ray_cluster: Any = cluster_utils
    cluster = ray_cluster.Cluster()
    try:
        options = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
        made = [cluster.add_node(**options) for _ in range(2)]
        cluster.wait_for_nodes()
        yield Nodes(cluster, *made)
    finally:
        cluster.shutdown()


async def requeued(client: Client) -> str:
    """The rollout that waits for another attempt, as soon as there is one."""
    async with asyncio.timeout(PATIENCE):
        while True:
            async for rollout in client.rollouts("status:requeuing"):
                return rollout.id


async def test_a_cluster_works_the_queue_and_loses_nothing_with_a_node(
    nodes: Nodes, client: Client, start_run: StartRun, tmp_path: Path
) -> None:
    # Each agent meets the other one: they can only end when they run at the same time, on two nodes.
    meet = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, os.environ['PENSTOCK_ROLLOUT_ID']).touch()\n"
    meet += f"while len(list(pathlib.Path({str(tmp_path)!r}).glob('r?'))) < 2: time.sleep(0.01)\n"
    meet += "print('{\"reward\": 1}')"
    ray = ("--on", "ray", "--ray-address", nodes.address, "--workers", "2", "--lease", "1s", "--grace", "100ms")
    _ = await enqueue(client, None, None)
    run = await start_run(*ray, agent=(PYTHON, "-c", meet))
    assert await run.ended() == 0, run.stderr
    assert run.stdout == "2 succeeded, 0 failed, mean reward 1.000 of 2\n"
    workers = {(await only_attempt(client, rollout)).worker for rollout in ("r1", "r2")}
    assert len(workers) == 2

    # The same again, and a node goes while both agents are at work.
    stay = f"{PYTHON} {AGENTS / 'family.py'} {tmp_path}/$PENSTOCK_ROLLOUT_ID.pids 600"
    again = f"test $PENSTOCK_ATTEMPT_ID = a2 && exec {stay}; exit 0"
    for rollout in ("r1", "r2"):
        _ = await client.requeue(rollout)
    run = await start_run(*ray, agent=("/bin/sh", "-c", again))
    pids = [*await written(tmp_path / "r1.pids"), *await written(tmp_path / "r2.pids")]
    await asyncio.to_thread(nodes.cluster.remove_node, nodes.second, allow_graceful=False)
    lost = await requeued(client)
    kept = "r2" if lost == "r1" else "r1"
    _ = await client.cancel(kept)
    assert await run.ended() == 0, run.stderr
    for pid in pids:
        await gone(pid)
    assert [attempt.status for attempt in await client.attempts(lost)] == ["succeeded", "unresponsive", "succeeded"]
    assert (await client.rollout(kept)).status == RolloutStatus.CANCELLED
