"""A module that cannot be imported where there is no attempt."""

from __future__ import annotations

import os

if os.environ.get("PENSTOCK_ROLLOUT_ID", "preflight") == "preflight":
    raise RuntimeError("not here")


def reward(task: object) -> dict[str, float]:
    """An agent in an attempt."""
    return {"reward": 1.0}
