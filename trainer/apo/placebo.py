"""A placebo: the search is shown feedback that says nothing, while race and test are real.

Every rollout of the search gets a reward that was drawn from the true rewards of all rollouts of the search so far,
whoever they were of, and no reason. (Shuffling within a batch is not enough: many engines run one candidate a batch,
and its mean would stay. Reasons of other rollouts say nothing of a candidate, but they still name what fails, and an
engine that writes down what they ask for gets better without any reward.) What is left is what the reflecting model can
guess from the transcripts. A method whose gains come from feedback gains nothing here, and an honest race lets nothing
through; what it does let through is what any rewriting brings.

Draws follow from the seed and from the order of the questions, so that a run that is started again draws the same:
answers are given in that order, even where a later batch ends first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from penstock.gateway.model.base import Mode
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import Laboratory, Reflection
from penstock.trainer.apo.trials import Order, Trial


class Placebo:
    """A laboratory whose search has no true feedback."""

    def __init__(self, laboratory: Laboratory, seed: int) -> None:
        self._laboratory = laboratory
        self._draw = random.Random(f"placebo-{seed}")
        self._rewards: list[float | None] = []
        """True rewards of the search."""
        self._turn = asyncio.Event()
        """Set when the batch before has its feedback."""
        self._turn.set()

    async def run(self, candidates: Sequence[Candidate], orders: Sequence[Order], mode: Mode = "train") -> list[Trial]:
        """See `Laboratory`."""
        if mode != "train":
            return await self._laboratory.run(candidates, orders, mode)
        before, self._turn = self._turn, asyncio.Event()
        mine = self._turn
        try:
            trials = await self._laboratory.run(candidates, orders, mode)
            await before.wait()
        finally:
            mine.set()
        self._rewards += [trial.reward for trial in trials]
        return [replace(trial, reward=self._draw.choice(self._rewards), reason="") for trial in trials]

    async def reflect(self, prompt: str, number: int) -> Reflection:
        """See `Laboratory`."""
        return await self._laboratory.reflect(prompt, number)

    def most(self, prompt: str) -> tuple[int, float]:
        """See `Laboratory`."""
        return self._laboratory.most(prompt)

    def problem(self, candidate: Candidate) -> str:
        """See `Laboratory`."""
        return self._laboratory.problem(candidate)
