"""What tests with verl share: a Ray cluster on this machine, with places enough for several engines at once; one
thread for the local engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.threads import one_thread

__all__ = ["cluster", "one_thread"]

PLACES = 8


@pytest.fixture(scope="session")
def cluster() -> Iterator[int]:
    """How many ranks may be at the same time."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray as _ray

    ray: Any = _ray
    # Its workers would stand back behind everybody, and they are what the tests wait for.
    own = {"object_store_memory": 80 << 20, "_system_config": {"worker_niceness": 0}}
    ray.init("local", num_cpus=PLACES, include_dashboard=False, log_to_driver=False, **own)
    yield PLACES
    ray.shutdown()
