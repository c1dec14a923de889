"""Laboratories for engines of prompt optimisation: worlds that end in any order, lose slots, or do not judge."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from bench.apo.laboratory import NAME, Simulated
from bench.apo.worlds import Family, world
from penstock.gateway.model.base import Mode
from penstock.trainer.apo.protocol import Candidate, PromptEngine, Reflection, SearchBudget, Trial, TrialSpec
from penstock.trainer.apo.search import PromptSearch, SearchResult, split

SLOT = "{order}"
Change = Callable[[Trial], float | None]


class Odd(Simulated):
    """A world with a few habits.

    `hurry`: a seed of the order in which things end. `change`: what rewards become. `slot`: whether texts must keep the
    slot, which the reflecting model loses every other time. `more`: texts that do nothing.
    """

    def __init__(
        self,
        family: Family,
        seed: int = 0,
        hurry: int = 0,
        change: Change | None = None,
        slot: bool = False,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.world = world(family, seed)
        super().__init__(self.world, seed)
        self._order, self._change, self._slot = random.Random(hurry), change, slot
        self._more = more

    @property
    def seed(self) -> Candidate:
        """The texts that are there."""
        return Candidate({NAME: self.world.seed + (f"\n{SLOT}" if self._slot else ""), **self._more})

    def value(self, candidate: Candidate) -> float:
        """The expected reward of a candidate."""
        return self.world.value(candidate.texts[NAME])

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        """See `Laboratory`."""
        assert not any(map(self.problem, candidates))
        await self._wait()
        trials = await super().run(candidates, orders, mode)
        if self._change is None:
            return trials
        return [replace(trial, reward=self._change(trial)) for trial in trials]

    async def reflect(self, prompt: str, number: int) -> Reflection:
        """See `Laboratory`."""
        await self._wait()
        found = await super().reflect(prompt, number)
        loses = self._slot and random.Random(prompt).random() < 0.5
        return found._replace(text=found.text.replace(SLOT, "")) if loses else found

    async def _wait(self) -> None:
        for _ in range(self._order.randrange(5)):
            await asyncio.sleep(0)

    def problem(self, candidate: Candidate) -> str:
        """See `Laboratory`."""
        return f"{NAME}: {SLOT} is missing" if self._slot and SLOT not in candidate.texts[NAME] else ""


async def searched(laboratory: Odd, engine: PromptEngine, budget: SearchBudget, seed: int = 0) -> SearchResult:
    """A whole run."""
    splits = split(laboratory.world.tasks, seed)
    search = PromptSearch(laboratory, engine, laboratory.seed, splits.train, splits.validation, budget, seed)
    return await search.run()
