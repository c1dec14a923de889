"""python -m bench.soak --calls 1000000: does Penstock grow, does it slow down, does it forget a call?

Calls of mixed kinds (bench/soak/kinds.py) through one gateway: plain and streamed ones of several APIs, growing
conversations, tools, errors, slow upstreams, clients that leave. In the first third of them the gateway is killed with
-9 and reloaded. Then its tape is held against what clients saw. Samples go to bench/out/soak.jsonl, the plot to
bench/out/soak.svg. The exit status is 1 when a call is not accounted for, whatever became of memory and speed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import uvloop

from bench.peers import HERE
from bench.programs import Cores
from bench.soak.figures import report
from bench.soak.harness import Plan, run
from bench.soak.plot import plot


def arguments() -> argparse.Namespace:
    plan, parser = (
        Plan(),
        argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").partition("\n")[0]),
    )
    parser.add_argument("--calls", type=int, default=plan.calls, help="how many in all (default: %(default)s)")
    parser.add_argument("--agents", type=int, default=plan.agents, help="that call at once (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=plan.kills, help="of the gateway (default: %(default)s)")
    parser.add_argument("--reloads", type=int, default=plan.reloads, help="of the gateway (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=plan.seed, help="of what agents do (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=plan.workers, help="of the gateway (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder for samples and plot")
    return parser.parse_args()


def main() -> int:
    """Soak, write and print; return the exit status."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    samples = options.out / "soak.jsonl"
    samples.unlink(missing_ok=True)
    counts = options.calls, options.agents, options.kills, options.reloads
    plan = Plan(*counts, seed=options.seed, workers=options.workers)
    cores = Cores.choose()
    os.sched_setaffinity(0, {cores.load})
    outcome = uvloop.run(run(plan, cores, samples))
    (options.out / "soak.svg").write_text(plot(outcome))
    print(report(outcome))
    print(f"samples in {samples}, plot in {options.out / 'soak.svg'}")
    return 1 if outcome.account.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
