"""A small chaos run, every time: kill -9 of agents, runners and the gateway, and nothing is lost or done twice.

`make chaos` does the same with 10,000 rollouts and 64 workers; docs/reliability.md has its figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.chaos.harness import run
from e2e.chaos.plan import Plan

pytestmark = pytest.mark.slow


@pytest.mark.timeout(700)
async def test_nothing_is_lost_or_done_twice_when_everything_is_killed(tmp_path: Path) -> None:
    plan = Plan()
    report = await run(plan, tmp_path)
    print(report)
    assert report.problems == []
    # The run was worth its name: everything was killed that should have been, and everything came to an end.
    assert sum(report.verdict.rollouts.values()) == plan.rollouts
    assert report.kills["gateway"] == plan.gateway_kills
    assert report.kills["runner"] == plan.runner_kills
    assert report.kills["agent"] >= plan.agent_kills // 2
