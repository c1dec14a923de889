"""The laboratory of a world: rollouts and reflections that take time, on a number of workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from bench.apo.reflector import Reflector
from bench.apo.worlds import World
from penstock.gateway.model.base import Mode
from penstock.trainer.apo.protocol import Candidate, Reflection, Trial, TrialSpec

NAME = "desk"
"""Name of the resource."""


class Simulated:
    """A world for trials of candidates. `workers` = 0: nothing takes time."""

    def __init__(self, world: World, draw: int, workers: int = 0) -> None:
        self._world, self._draw, self._workers = world, draw, workers
        self._reflector = Reflector(world)
        self._tasks = {task.id: task for task in world.tasks}
        self._free = asyncio.Semaphore(max(1, workers))
        self.rollouts = self.reflections = 0

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        self.rollouts += len(orders)
        texts = {candidate.id: candidate.texts[NAME] for candidate in candidates}
        if not self._workers:
            return [self._trial(texts[order.candidate], order) for order in orders]
        return await asyncio.gather(*(self._slow_trial(texts[order.candidate], order) for order in orders))

    async def _slow_trial(self, text: str, order: TrialSpec) -> Trial:
        async with self._free:
            await asyncio.sleep(random.Random(f"time-{order}").lognormvariate(2.0, 0.4))
        return self._trial(text, order)

    def _trial(self, text: str, order: TrialSpec) -> Trial:
        task = self._tasks[order.task]
        draw = random.Random(f"{self._draw}-{order.candidate}-{order.task}-{order.number}")
        reward, reason = self._world.draw(text, task, draw)
        said = f"customer {task.key} asks {task.input}"
        return Trial(order.candidate, order.task, order.number, reward, reason, said)

    async def reflect(self, prompt: str, number: int) -> Reflection:
        self.reflections += 1
        draw = random.Random(f"{self._draw}-{number}-{prompt}")
        if self._workers:
            async with self._free:
                await asyncio.sleep(draw.lognormvariate(2.3, 0.3))
        return Reflection(self._reflector.answer(prompt, draw), len(prompt) // 4 + 200)

    def most(self, prompt: str) -> tuple[int, float]:
        return len(prompt) // 4 + 200, 0.0

    def problem(self, candidate: Candidate) -> str:
        """Return nothing: every text can be run."""
        return ""
