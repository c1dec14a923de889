"""Plays one engine in one world: what it releases, how good that is on unseen customers, and what it cost.

An engine runs in two ways. *Alone* it has the whole budget and releases its first finalist, as its authors publish it.
*Gated* it runs in our search: a part of the budget is reserved for the race against the seed, and without a proof the
seed stays. `ours` is gated; the others are shown both ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from bench.apo.clock import timed
from bench.apo.laboratory import NAME, Simulated
from bench.apo.worlds import Family, World, world
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.engines.gepa import GepaEngine
from penstock.trainer.apo.protocol import Candidate, SearchBudget
from penstock.trainer.apo.search import PromptSearch, SearchResult, split

REFLECTIONS: Final = 5
"""Rollouts of the budget for each reflection that it allows."""
EPSILON: Final = 1e-9


class Contestant(NamedTuple):
    """An engine, and how it runs."""

    name: str
    """Name in tables."""
    engine: str
    """Name in apo.toml."""
    gated: bool


class OneByOne(GepaEngine):
    """The library without parallel proposals, as it is."""

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
    """The result of one run. Values are expected rewards on unseen customers, without noise of the grader."""

    family: Family
    seed: int
    """Seed of the world and of the run."""
    budget: int
    """Rollouts of the budget."""
    contestant: str
    before: float
    """Value of the seed's prompt."""
    after: float
    """Value of the released prompt; the seed's if nothing is released."""
    ceiling: float
    """Value of the best prompt."""
    released: bool
    """True if a prompt other than the seed's is released."""
    rollouts: int
    """Rollouts used."""
    reflections: int
    """Calls of the reflecting model."""
    seconds: float
    """Duration, in the time of the world."""

    @property
    def worse(self) -> bool:
        """True if the release is worse than the seed's prompt."""
        return self.after < self.before - EPSILON


class Alone(PromptSearch):
    """A search without a race: the engine has all rollouts, and its first finalist is released."""

    race_share = 0.0

    async def _race(self, finalists: Sequence[Candidate]) -> None:
        self.result.winner = finalists[0]


def play(
    contestant: Contestant, family: Family, seed: int, budget: int, placebo: bool = False, workers: int = 0
) -> Outcome:
    """Play a game. `workers` = 0: nothing takes time."""
    found = world(family, seed, placebo)
    laboratory = Simulated(found, seed, workers)
    result, seconds = timed(_run(contestant, found, laboratory, seed, budget))
    released = result.winner or result.pool.seed
    return Outcome(
        family, seed, budget, contestant.name, found.value(found.seed), found.value(released.texts[NAME]),
        found.ceiling, released is not result.pool.seed, laboratory.rollouts, laboratory.reflections, seconds,
    )  # fmt: skip


async def _run(contestant: Contestant, found: World, laboratory: Simulated, seed: int, rollouts: int) -> SearchResult:
    splits = split(found.tasks, seed)
    kind = PromptSearch if contestant.gated else Alone
    budget = SearchBudget(rollouts, rollouts // REFLECTIONS)
    start = Candidate({NAME: found.seed})
    search = kind(laboratory, make_engine(contestant.engine), start, splits.train, splits.validation, budget, seed)
    # A task, because engines may think in threads of their own: they are waited for too.
    return await asyncio.ensure_future(search.run())
