"""Candidates are evaluated by runners on a Ray cluster as by those on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from fakes.optimising import Optimising
from fakes.process import ROOT
from fakes.ray_cluster import Nodes, two_nodes

from examples import shop

# A cluster starts a dozen processes.
pytestmark = pytest.mark.timeout(600)
AGENT = f"{sys.executable} {ROOT / 'examples' / 'shop.py'}"
RUN = ["--on", "ray", "--workers=2", "--reward=examples.shop:reward"]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A running cluster."""
    _ = pytest.importorskip("ray")
    with two_nodes() as made:
        yield made


async def test_rollouts_of_candidates_run_on_a_cluster(here: Optimising, nodes: Nodes) -> None:
    config = here.config(
        of=shop.tasks()[::3], engine="fakes.engines:knows", budget={"rollouts": 40}, rollouts={"run": RUN}
    )
    process = await here.start("train", "apo", config, "--agent", AGENT, env={"RAY_ADDRESS": nodes.address})
    ended = await here.ended(process)
    assert ended.code == 0, ended.output
    workers, versions = set[str](), set[str]()
    async for rollout in here.client.rollouts("mode:train,val"):
        workers |= {attempt.worker for attempt in rollout.attempts if attempt.worker}
        versions |= set(rollout.config.versions.values())
        (call,) = [span async for span in here.client.spans(rollout.id, filter="kind:llm")]
        assert call.versions == rollout.config.versions
    assert len(workers) == 2, "each node has done a part"
    assert len(versions) > 1, ended.output
