"""Engines of prompt optimisation beside each other, in scripted worlds: `python -m bench.apo`.

    python -m bench.apo [--worlds 20] [--budgets 200,500,1500] [--first 1000] [--processes 2] [--only ours,gepa]

Every engine plays the same worlds, with the same budget of rollouts and reflections, and is judged on customers that
nobody has seen. At the end come worlds in which every prompt is rewarded as the seed is, and the time that runs take
with 1 and with 16 workers. `bench/out/apo.md` has the tables, `bench/out/apo.json` every outcome. 20 worlds take about
half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Final, NamedTuple

from bench.apo.contest import CONTESTANTS, Contestant, Outcome, play
from bench.apo.summary import ahead, released, table, values, worse
from bench.apo.worlds import FAMILIES, Family

OUT: Final = Path("bench/out")
WORKERS: Final = (1, 16)
TIMED: Final = 4
"""Worlds of a family in which time is measured."""


class Game(NamedTuple):
    """A run to play: engine, world and budget."""

    contestant: Contestant
    family: Family
    seed: int
    budget: int
    placebo: bool = False
    workers: int = 0


def main() -> None:
    # One thread each: the matrices are small, and processes use the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--budgets", default="200,500,1500")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first world")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", help="names of contestants, with commas between; those that begin so")
    given = parser.parse_args()
    budgets = [int(one) for one in given.budgets.split(",")]
    seeds = range(given.first, given.first + given.worlds)
    wanted = ("",) if given.only is None else tuple(given.only.split(","))
    playing = [one for one in CONTESTANTS if one.name.startswith(wanted)]
    worlds: list[tuple[Family, int]] = [(family, seed) for family in FAMILIES for seed in seeds]
    games = [Game(one, *place, budget) for budget in budgets for one in playing for place in worlds]
    middle = sorted(budgets)[len(budgets) // 2]
    blind = [Game(one, *place, middle, True) for one in playing for place in worlds]
    slow = [
        Game(one, "headroom", seed, budget, workers=workers)
        for one in playing
        if one.gated
        for budget in budgets
        for seed in seeds[:TIMED]
        for workers in WORKERS
    ]
    found = played([*games, *blind, *slow], given.processes)
    real, placebo, timed = found[: len(games)], found[len(games) : len(games) + len(blind)], found[-len(slow) :]
    parts = [*(values(real, budget) for budget in budgets), ahead(real), worse(real), released(placebo)]
    text = "\n\n".join([*parts, speed(slow, timed)]) + "\n"
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "apo.md").write_text(text)
    (OUT / "apo.json").write_text(json.dumps([one._asdict() for one in found]))
    print(text)


def played(games: Sequence[Game], processes: int) -> list[Outcome]:
    """Play the games; return their outcomes in order."""
    found: list[Outcome] = []
    with ProcessPoolExecutor(processes) as pool:
        for at, outcome in enumerate(pool.map(_play, games, chunksize=4), 1):
            found.append(outcome)
            if not at % 50:
                print(f"{at} of {len(games)} runs", file=sys.stderr, flush=True)
    return found


def _play(game: Game) -> Outcome:
    return play(*game)


def speed(games: Sequence[Game], outcomes: Sequence[Outcome]) -> str:
    """Return a table: hours of a run with one worker and with many, and whether both came to the same prompt."""
    rows: list[list[str]] = []
    for name, budget in dict.fromkeys((game.contestant.name, game.budget) for game in games):
        mine = [(game, one) for game, one in zip(games, outcomes, strict=True)
                if (game.contestant.name, game.budget) == (name, budget)]  # fmt: skip
        slow, fast = ([one for game, one in mine if game.workers == workers] for workers in WORKERS)
        ratios = [one.seconds / other.seconds for one, other in zip(slow, fast, strict=True)]
        same = sum(one.after == other.after for one, other in zip(slow, fast, strict=True))
        hours = [f"{mean(one.seconds for one in found) / 3600:.2f}" for found in (slow, fast)]
        rows.append([name, f"{budget:,}", *hours, f"{mean(ratios):.1f}", f"{same} of {len(slow)}"])
    return table(["time", "rollouts", "hours, 1 worker", "hours, 16 workers", "faster", "same prompt"], rows)


if __name__ == "__main__":
    main()
