"""A real Ray cluster of two nodes, which are processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fakes.process import PATIENCE


@dataclass(slots=True)
class Nodes:
    """A cluster of two nodes with one CPU each: two workers are never on one of them."""

    cluster: Any
    first: Any
    second: Any

    @property
    def address(self) -> str:
        return self.cluster.address


@contextmanager
def two_nodes() -> Generator[Nodes]:
    """A running cluster."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray import cluster_utils

    ray_cluster: Any = cluster_utils
    cluster = ray_cluster.Cluster()
    # By itself it waits for half a minute for each.
    cluster._wait_for_node = partial(cluster._wait_for_node, timeout=PATIENCE)
    try:
        options = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
        made = [cluster.add_node(**options) for _ in range(2)]
        cluster.wait_for_nodes(PATIENCE)
        yield Nodes(cluster, *made)
    finally:
        cluster.shutdown()
