"""One engine in one world: what it releases, how good that is on customers that nobody has seen, and what it cost.

An engine runs in two ways. *Alone* it has the whole budget and releases what it thinks best, as its authors publish
it. *Gated* it runs in our search: a part of the budget is kept for the race against the seed, and without a proof the
seed stays. `ours` is gated; the others are shown both ways.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from bench.apo.clock import timed
from bench.apo.laboratory import NAME, Simulated
from bench.apo.worlds import Family, World, world
from penstock.trainer.apo.budget import Budget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.choose import make_engine
from penstock.trainer.apo.engines.gepa import Gepa
from penstock.trainer.apo.search import Result, Search
from penstock.trainer.apo.splits import split

REFLECTIONS: Final = 5
"""Rollouts for each reflection that a budget allows."""
EPSILON: Final = 1e-9


class Contestant(NamedTuple):
    """An engine, and how it runs."""

    name: str
    """As tables have it."""
    engine: str
    """As apo.toml has it."""
    gated: bool


class OneByOne(Gepa):
    """The library as it is without parallel proposals."""

    def __init__(self) -> None:
        super().__init__(1, 1)


CONTESTANTS: Final = (
    Contestant("ours", "ours", True),
    Contestant("gepa", "bench.apo.contest:OneByOne", False),
    Contestant("gepa P×N", "gepa", False),
    Contestant("beam", "beam", False),
    Contestant("edits", "edits", False),
    Contestant("gepa, gated", "bench.apo.contest:OneByOne", True),
    Contestant("gepa P×N, gated", "gepa", True),
    Contestant("beam, gated", "beam", True),
    Contestant("edits, gated", "edits", True),
)


class Outcome(NamedTuple):
    """What came of it. Values are expected rewards on unseen customers, without noise of the grader."""

    family: Family
    seed: int
    """Of the world and of the run."""
    budget: int
    """Rollouts."""
    contestant: str
    before: float
    """Of the prompt that was there."""
    after: float
    """Of the prompt that is released; the same where nothing is."""
    ceiling: float
    """Of the best prompt."""
    released: bool
    """Whether the prompt is another than the one that was there."""
    rollouts: int
    """That were used."""
    reflections: int
    """Calls of the reflecting model."""
    seconds: float
    """That it took, in the time of the world."""

    @property
    def worse(self) -> bool:
        """Whether the release is worse than what was there."""
        return self.after < self.before - EPSILON


class Alone(Search):
    """A search without a race: the engine has all rollouts, and its first finalist is released."""

    def _kept(self) -> int:
        return 0

    async def _race(self) -> None:
        self.result.winner = next(iter(self._finalists()), None)


def play(
    contestant: Contestant, family: Family, seed: int, budget: int, placebo: bool = False, workers: int = 0
) -> Outcome:
    """Runs it. `workers` = 0: nothing takes time."""
    found = world(family, seed, placebo)
    laboratory = Simulated(found, seed, workers)
    result, seconds = timed(_run(contestant, found, laboratory, seed, budget))
    released = result.winner or result.pool.seed
    return Outcome(
        family, seed, budget, contestant.name, found.value(found.seed), found.value(released.texts[NAME]),
        found.ceiling, released is not result.pool.seed, laboratory.rollouts, laboratory.reflections, seconds,
    )  # fmt: skip


async def _run(contestant: Contestant, found: World, laboratory: Simulated, seed: int, rollouts: int) -> Result:
    splits = split(found.tasks, seed)
    kind = Search if contestant.gated else Alone
    budget = Budget(rollouts, rollouts // REFLECTIONS)
    start = Candidate({NAME: found.seed})
    search = kind(laboratory, make_engine(contestant.engine), start, splits.train, splits.validation, budget, seed)
    # Engines that think in threads of their own are waited for too.
    return await asyncio.ensure_future(search.run())
