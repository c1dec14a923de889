"""Rounds that look for prompts between the steps that train weights (Fast-Slow Training, arXiv:2605.12484).

A round has `prompts.rollouts` rollouts, all with the newest weights, and two parts:

1. An engine (`trainer.apo.protocol`) begins from the leader of the front and proposes candidates, on one half of the
   tasks. It is a new one in each round: its results hold for the weights of its round only.
2. The front and the best candidates run on the other half, each on the same tasks; the best of them are the new front
   (`prompt_front`). `CHOICE` of the rollouts are reserved for this.

Everything follows from the front, the number of the round and the rollouts on the tape, so an interrupted round is
repeated and comes to the same front without running anything twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, cast

from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.protocol import (
    AgentTask,
    Candidate,
    Evidence,
    Laboratory,
    Pool,
    PromptEngine,
    SearchBudget,
    Trial,
    TrialSpec,
)
from penstock.trainer.apo.search import FINALISTS, best, run_engine
from penstock.trainer.config import PromptSettings
from penstock.trainer.runs.pinned_laboratory import PinnedLaboratory
from penstock.trainer.runs.prompt_front import FrontMember, PromptFront, choose_front

FRONT: Final = 3
"""Most prompts that the rollouts of a group are spread over, the one that the run began with included."""
CHOICE: Final = 0.4
LaboratoryFactory = Callable[[str], PinnedLaboratory]
"""Returns the laboratory with the newest weights, for rollouts of a label."""


class PromptRounds:
    """The rounds of one run. `front` is their result."""

    def __init__(
        self, prompts: PromptSettings, settings: ApoConfig, tasks: Sequence[AgentTask], front: PromptFront
    ) -> None:
        self.front = front
        self._prompts, self._settings, self._tasks = prompts, settings, tasks

    async def run_round(self, at: LaboratoryFactory) -> None:
        """Hold the next round, with the laboratory of `at`; replace the front."""
        number = self.front.rounds + 1
        draw = random.Random(f"round-{self._settings.run.seed}-{number}")
        shuffled = draw.sample(self._tasks, len(self._tasks))
        half = len(shuffled) // 2
        seen, unseen = (shuffled[:half], shuffled[half:]) if half else (shuffled, shuffled)
        kept = round(CHOICE * self._prompts.rollouts)
        pool, spent = await self._search(number, seen, self._prompts.rollouts - kept, at(f"round-{number}"))
        finalists = [FrontMember(one, {}) for one in self._finalists(*pool)]
        members = await self._compared(finalists, unseen, kept, at(f"choice-{number}"))
        self.front = PromptFront(self.front.seed, members, number, spent)

    async def compare_front(self, at: LaboratoryFactory) -> None:
        """Compare the front once more, with the last weights, without new candidates."""
        kept = round(CHOICE * self._prompts.rollouts)
        draw = random.Random(f"settle-{self._settings.run.seed}")
        tasks = draw.sample(self._tasks, len(self._tasks))
        members = await self._compared([], tasks, kept, at("choice-last"))
        self.front = PromptFront(self.front.seed, members, self.front.rounds, self.front.spent)

    # -- the search ----------------------------------------------------------------------------------------------------

    async def _search(
        self, number: int, tasks: Sequence[AgentTask], rollouts: int, laboratory: Laboratory
    ) -> tuple[tuple[PromptEngine, Pool, Laboratory], dict[str, float]]:
        """Return (an engine after it has used the rollouts, with its pool; the use of reflections)."""
        wanted, used = self._settings.budget, self.front.spent
        budget = SearchBudget(rollouts, wanted.reflections, wanted.tokens, wanted.money)
        budget.used_reflections = int(used.get("reflections", 0))
        budget.used_tokens, budget.used_money = int(used.get("tokens", 0)), used.get("money", 0.0)
        engine, pool = make_engine(self._settings.engine), Pool(self.front.leader.candidate)
        evidence = Evidence(laboratory, pool, tasks, budget, self._settings.run.seed * 10_000 + number)
        _ = await run_engine(engine, pool, evidence)
        spent = {"reflections": float(budget.used_reflections), "tokens": float(budget.used_tokens)}
        return (engine, pool, laboratory), {**spent, "money": budget.used_money}

    def _finalists(self, engine: PromptEngine, pool: Pool, laboratory: Laboratory) -> list[Candidate]:
        """Return the best candidates of a search that are not in the front yet."""
        named = cast(Callable[[Pool], Sequence[Candidate]] | None, getattr(engine, "finalists", None))
        found = best(pool) if named is None else named(pool)
        known = {one.candidate.id for one in self.front.members}
        return [one for one in found if one.id not in known and not laboratory.problem(one)][:FINALISTS]

    # -- the comparison ------------------------------------------------------------------------------------------------

    async def _compared(
        self, finalists: Sequence[FrontMember], tasks: Sequence[AgentTask], rollouts: int, laboratory: PinnedLaboratory
    ) -> list[FrontMember]:
        """Return the new front: the best of the old front and these finalists."""
        contestants = [*self.front.members, *finalists]
        candidates = [one.candidate for one in contestants]
        each = max(1, rollouts // len(contestants))
        orders = [
            TrialSpec(one.id, tasks[at % len(tasks)].id, at // len(tasks)) for at in range(each) for one in candidates
        ]
        trials = await laboratory.run(candidates, orders)
        found = [
            FrontMember(one, await laboratory.versions(one), _mean([it for it in trials if it.candidate == one.id]))
            for one in candidates
        ]
        return choose_front(self.front.seed, found, FRONT)


def _mean(trials: Sequence[Trial]) -> float | None:
    """Return the mean reward; None without one."""
    rewards = [trial.reward for trial in trials if trial.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
