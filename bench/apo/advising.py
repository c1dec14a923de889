"""How often the advice is right: `python -m bench.apo.advising [--worlds 40] [--first 1000] [--rollouts 60]`.

The probe, the split, the beliefs and the table are those of `penstock train apo advise`; agents, grader and reflecting
model are scripted (`bench.apo.advice_worlds`), so the right verdict of each world is known. Everything was set on the
worlds 0 to 99; `--first` names others. Prints Markdown: what was said of each kind of world, once with a grader that is
asked again about 16 rollouts, and once where it cannot be asked again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from bench.apo.advice_worlds import HARD, RIGHT, AdviceLaboratory, advice_world
from bench.apo.laboratory import NAME
from penstock.trainer.apo.advice.decision import VERDICTS, ProbeFindings, Verdict, derive_findings
from penstock.trainer.apo.advice.probe import Probe
from penstock.trainer.apo.protocol import Candidate, SearchBudget
from penstock.trainer.apo.search import split

BUDGET = 500
"""Rollouts of the planned run."""


class Case(NamedTuple):
    """A world to advise on."""

    kind: str
    seed: int
    judged_again: bool
    rollouts: int


def advised(case: Case) -> ProbeFindings:
    """Return the findings of a probe of a world."""
    made = advice_world(case.kind, case.seed, case.judged_again)
    laboratory = AdviceLaboratory(made, case.seed)
    tasks = split(made.world.tasks, case.seed).train
    seed = Candidate({NAME: made.world.seed})
    probe = Probe(laboratory, laboratory, seed, tasks, SearchBudget(case.rollouts), case.seed)
    probed = asyncio.run(probe.run())
    return derive_findings(probed.arms, probed.observations, BUDGET)


def verdict(case: Case) -> tuple[str, Verdict]:
    """Return (kind, verdict on the case)."""
    return case.kind, advised(case).verdict


def table(found: Sequence[tuple[str, Verdict]], right: Mapping[str, Verdict]) -> Iterator[str]:
    """Yield rows of Markdown: the verdicts on each kind."""
    yield "| world | right is | " + " | ".join(VERDICTS) + " | right |"
    yield "|---|---|" + "---:|" * (len(VERDICTS) + 1)
    for kind, wanted in right.items():
        said = Counter(one for name, one in found if name == kind)
        cells = (str(said[one] or "") for one in VERDICTS)
        yield f"| {kind} | {wanted} | {' | '.join(cells)} | {said[wanted] / said.total():.0%} |"
    every = [one == right[name] for name, one in found if name in right]
    yield f"| all | | {'| ' * len(VERDICTS)}| {sum(every) / len(every):.1%} of {len(every)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=40, help="worlds of each kind")
    parser.add_argument("--first", type=int, default=1000, help="the first one's seed")
    parser.add_argument("--rollouts", type=int, default=60, help="of each probe")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.worlds)
    start = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        for again in (True, False):
            kinds = {**RIGHT, **HARD}
            cases = [Case(kind, seed, again, given.rollouts) for kind in kinds for seed in seeds]
            found = list(pool.map(verdict, cases, chunksize=8))
            print(f"\nThe grader is {'asked again about 16 rollouts' if again else 'not asked again'}:\n")
            print("\n".join(table(found, RIGHT)))
            print("\nHard to tell:\n")
            print("\n".join(table(found, HARD)))
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
