"""A placebo: the search gets feedback without information, while race and test are real.

Every rollout of the search gets a reward that was drawn from the true rewards of all rollouts of the search so far, of
any candidate, and no reason. (Shuffling within a batch is not enough: many engines run one candidate a batch, and its
mean would stay. Reasons of other rollouts are no feedback on a candidate, but they still name failures, and an engine
that writes down what they ask for gets better without any reward.) The reflecting model can still guess from the
transcripts. A method whose gains come from feedback gains nothing here, and an honest race lets nothing through; what
it does let through is what any rewriting brings.

Draws follow from the seed and from the order of the batches, so that a restarted run draws the same: feedback is given
in that order, even if a later batch ends first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from penstock.gateway.model.base import Mode
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import Laboratory, Reflection
from penstock.trainer.apo.trials import Trial, TrialSpec


class PlaceboLaboratory:
    """A laboratory whose search has no true feedback."""

    def __init__(self, laboratory: Laboratory, seed: int) -> None:
        self._laboratory = laboratory
        self._draw = random.Random(f"placebo-{seed}")
        self._rewards: list[float | None] = []
        """True rewards of the search."""
        self._turn = asyncio.Event()
        """Set when the batch before has its feedback."""
        self._turn.set()

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
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
        return await self._laboratory.reflect(prompt, number)

    def most(self, prompt: str) -> tuple[int, float]:
        return self._laboratory.most(prompt)

    def problem(self, candidate: Candidate) -> str:
        return self._laboratory.problem(candidate)
