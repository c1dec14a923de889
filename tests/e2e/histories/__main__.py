"""Histories of any length: `PYTHONPATH=tests python -m e2e.histories --seed 1 --seeds 5 --seconds 60`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from e2e.histories.harness import Plan, run
from e2e.histories.nemesis import FAULTS


def main() -> int:
    """Runs them, prints a report of each, returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Record what clients see while all goes wrong; check it against the tape."
    )
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=10, help="how many, one after the other")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each")
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    parser.add_argument("--workers", type=int, default=0, help="processes of the gateway; every third seed has two")
    parser.add_argument("--record", choices=("strict", "batched"), help="each in turn unless given")
    parser.add_argument("--keep", type=Path, help="where histories and tapes stay")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="penstock-histories-") as made:
        for seed in range(given.seed, given.seed + given.seeds):
            strict = given.record == "strict" or (given.record is None and seed % 2 == 1)
            processes = given.workers or (2 if seed % 3 == 0 else 1)
            plan = Plan(seed, given.seconds, tuple(given.faults), strict=strict, processes=processes)
            report = asyncio.run(run(plan, (given.keep or Path(made)) / str(seed)))
            print(report, flush=True)
            wrong += len(report.problems)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
