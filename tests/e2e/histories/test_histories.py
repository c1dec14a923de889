"""A short history, every time: kill -9, a process that stands still, and a handover, while clients write down what they
see. `make histories` does the same with every fault, for longer; docs/reliability.md says what was found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.histories.harness import Plan, run

pytestmark = pytest.mark.slow

FAULTS = ("kill", "reload", "stop")
DONE = {"call ok", "tool ok", "claim ok", "finish ok", "reward ok", "enqueue ok", "decide ok", "change ok", "cancel ok"}


@pytest.mark.timeout(600)
async def test_what_clients_have_seen_is_on_the_tape(tmp_path: Path) -> None:
    plan = Plan(seed=3, seconds=0.0, faults=FAULTS, pause_s=(0.5, 1.0), callers=2, workers=2, lease_s=1.0)
    report = await run(plan, tmp_path)
    print(report)
    assert report.problems == []
    assert report.faults == dict.fromkeys(FAULTS, 1)
    assert set(report.operations) >= DONE, "the run was worth its name"
