"""A chaos run of any size: `PYTHONPATH=tests python -m e2e.chaos --rollouts 10000 --workers 64`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from e2e.chaos.harness import run
from e2e.chaos.plan import Plan


def main() -> int:
    """Runs it, prints the report, returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill agents, runners and gateways, and see whether anything is lost.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64, help="agents at a time, of all runners together")
    parser.add_argument("--runners", type=int, default=16, help="processes")
    parser.add_argument("--lease", type=int, default=5, help="seconds")
    parser.add_argument(
        "--kills", type=float, default=3.0, help="agents killed, per 100 rollouts; a fifth as many runners"
    )
    parser.add_argument("--gateway-kills", type=int, default=10)
    parser.add_argument("--patience", type=float, default=7200.0, help="seconds")
    given = parser.parse_args()
    agents = round(given.rollouts * given.kills / 100)
    plan = Plan(
        seed=given.seed,
        rollouts=given.rollouts,
        runners=given.runners,
        workers=max(1, given.workers // given.runners),
        agent_kills=agents,
        runner_kills=agents // 5,
        gateway_kills=given.gateway_kills,
        calm_after_gateway=False,
        lease_s=given.lease,
        timeout_s=3.0 * given.lease,
        patience_s=given.patience,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as home:
        report = asyncio.run(run(plan, Path(home)))
    print(f"{plan}\n{report}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
