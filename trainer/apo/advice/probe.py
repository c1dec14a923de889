"""The probe: runs the seed and a handful of very different prompts on a few tasks, some of them again.

The seed goes first, on every task twice: without failures there is nothing to fix, and the probe ends. Otherwise the
reflecting model sees the failures and writes the other prompts (`stances`), which run on the same tasks. The best of
them is mended once more, as a search would go on, and most of the remaining rollouts go to the mended prompt and the
seed. The ids of rollouts follow from prompt, task and number, so a restarted probe finds its earlier rollouts and
answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.trainer.apo.advice.belief import fit_belief
from penstock.trainer.apo.advice.observation import WRITTEN, Arm, Observation, Stance
from penstock.trainer.apo.advice.probe_prompts import REWORDED, ask_reworded, checklist
from penstock.trainer.apo.advice.variance import variance_components
from penstock.trainer.apo.budget import BudgetExhausted, SearchBudget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.engines.pooled_edits import SLOT
from penstock.trainer.apo.protocol import AgentTask, Laboratory
from penstock.trainer.apo.reflection import ask_hypotheses, ask_scratch, read_hypotheses, read_texts
from penstock.trainer.apo.trials import Trial, TrialSpec

LEAST_TASKS: Final = 4
ROLLOUTS_A_TASK: Final = 7.5
"""Rollouts of the whole probe for each of its tasks."""
REPEATS: Final = 2
REFLECTIONS: Final = 12
"""Questions for the checklist."""
MINIBATCH: Final = 6
"""Rollouts that a question shows."""
HYPOTHESES: Final = 3
JUDGED_AGAIN: Final = 16
"""Rollouts that the grader judges again."""
DONE: Final = 0.97
"""Reward above which a rollout has not failed."""


class ObservationReader(Protocol):
    """Adds facts from the tape to trials."""

    async def read(self, trials: Sequence[Trial]) -> list[Observation]:
        """Return the observation of each trial."""
        ...

    async def regrade(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the observations, each with a second judgement of the grader; unchanged where that is impossible."""
        ...


@dataclass(slots=True)
class ProbeReport:
    """The results of a probe."""

    arms: list[Arm]
    """The prompts that were run; the seed first."""
    observations: list[Observation] = field(default_factory=list[Observation])
    """All rollouts."""
    failures: list[str] = field(default_factory=list[str])
    """Failures that reflections name, without repetitions."""
    problems: list[str] = field(default_factory=list[str])
    """Prompts that could not be run, and why."""


class Probe:
    """One probe. `budget`: its rollouts, and the limits of its reflections."""

    def __init__(
        self,
        laboratory: Laboratory,
        reader: ObservationReader,
        seed: Candidate,
        tasks: Sequence[AgentTask],
        budget: SearchBudget,
        draw: int,
    ) -> None:
        self._laboratory, self._reader, self._budget = laboratory, reader, budget
        self._random = random.Random(f"advise-{draw}")
        number = max(LEAST_TASKS, int(budget.rollouts / ROLLOUTS_A_TASK))
        self._tasks = _of_different_keys(tasks, number, self._random)
        self._asked: dict[str, int] = {}
        self.report = ProbeReport([Arm(seed, "seed")])
        self.watch: Callable[[str], Awaitable[None]] = _nobody

    async def run(self) -> ProbeReport:
        """Run the whole probe; return its results."""
        seed = self.report.arms[0]
        await self.watch(f"{REPEATS * len(self._tasks)} rollouts of the texts as they are")
        failed = _failed(await self._run([(seed, task, at) for at in range(REPEATS) for task in self._tasks]))
        if not failed:
            return self.report
        await self.watch("other prompts are written")
        await self._write(failed)
        others = self.report.arms[1:]
        await self.watch(f"rollouts of {len(others)} other prompts")
        trials = await self._run(_once(others, self._tasks))
        best = self._best()
        await self.watch(f"the prompt {best.stance} is mended")
        await self._mend(best, _failed([one for one in trials if one.candidate == best.candidate.id]) or failed)
        await self._run(_again(best, self.report.arms, self._tasks))
        await self._ask_the_grader_again()
        return self.report

    async def _ask_the_grader_again(self) -> None:
        found = self.report.observations
        some = self._random.sample(range(len(found)), min(JUDGED_AGAIN, len(found)))
        for at, one in zip(some, await self._reader.regrade([found[at] for at in some]), strict=True):
            found[at] = one

    def _best(self) -> Arm:
        """Return the prompt to go on from."""
        probed = self.report
        belief = fit_belief(probed.arms, probed.observations, variance_components(probed.observations))
        names = {arm.candidate.id: arm for arm in probed.arms}
        return names[belief.best] if belief.best is not None and belief.gain.mean > 0 else probed.arms[0]

    async def _run(self, plan: Sequence[tuple[Arm, AgentTask, int]]) -> list[Trial]:
        plan = plan[: self._budget.take_rollouts(min(len(plan), self._budget.left))]
        orders = [TrialSpec(arm.candidate.id, task.id, number) for arm, task, number in plan]
        candidates = {arm.candidate.id: arm.candidate for arm, _, _ in plan}
        trials = await self._laboratory.run(list(candidates.values()), orders)
        self.report.observations += await self._reader.read(trials)
        return trials

    # Prompts ----------------------------------------------------------------------------------------------------------

    async def _write(self, failed: Sequence[Trial]) -> None:
        """Add the prompts of all stances but `mended`."""
        seed = self.report.arms[0].candidate
        reworded = {stance: ask_reworded(seed.texts, stance) for stance in REWORDED}
        slots = [slot for text in seed.texts.values() for slot in SLOT.findall(text)]
        scratch = ask_scratch(seed.texts, slots, self._batch(failed))
        answers = await asyncio.gather(*map(self._reflect, [*reworded.values(), scratch]))
        stances: list[Stance] = list(REWORDED)
        stances.append("scratch")
        for stance, answer in zip(stances, answers, strict=True):
            self._add(read_texts(answer or "", seed.texts), stance)
        await self._mend(self.report.arms[0], failed, "checklist")

    async def _mend(self, arm: Arm, failed: Sequence[Trial], stance: Stance = "mended") -> None:
        """Add the prompt with the edits that reflections on its failed rollouts propose."""
        texts = arm.candidate.texts
        asked = [ask_hypotheses(texts, self._batch(failed), HYPOTHESES) for _ in range(REFLECTIONS)]
        answers = await asyncio.gather(*map(self._reflect, asked))
        named = [one for answer in answers for one in read_hypotheses(answer or "", texts)]
        failures = (one.failure for one in named if one.failure)
        self.report.failures = list(dict.fromkeys([*self.report.failures, *failures]))
        self._add(checklist(texts, named) if named else None, stance)

    def _batch(self, failed: Sequence[Trial]) -> list[Trial]:
        return self._random.sample(failed, min(MINIBATCH, len(failed)))

    def _add(self, texts: dict[str, str] | None, stance: Stance) -> None:
        """Add a prompt if it can be run and is new; note why if it cannot."""
        if texts is None:
            self.report.problems.append(f"{stance}: the reflecting model has given no texts")
            return
        made = Candidate(texts, self.report.arms[0].candidate.id, f"advise: {stance}")
        if why := self._laboratory.problem(made):
            self.report.problems.append(f"{stance}: {why}")
        elif all(arm.candidate.id != made.id for arm in self.report.arms):
            self.report.arms.append(Arm(made, stance))

    async def _reflect(self, question: str) -> str | None:
        """Return the answer; None when the budget is used up."""
        tokens, money = self._laboratory.most(question)
        try:
            self._budget.take_reflection(tokens, money)
        except BudgetExhausted as spent:
            self.report.problems.append(str(spent))
            return None
        number = self._asked.get(question, 0)
        self._asked[question] = number + 1
        found = await self._laboratory.reflect(question, number)
        self._budget.give_back(tokens - found.tokens, money - found.money)
        return found.text


async def _nobody(said: str) -> None: ...


def _of_different_keys(tasks: Sequence[AgentTask], number: int, draw: random.Random) -> list[AgentTask]:
    """Return `number` tasks, of as many keys as possible."""
    shuffled = draw.sample(list(tasks), len(tasks))
    times: dict[str, int] = {}
    turns: list[int] = []
    for task in shuffled:
        turns.append(times.get(task.key, 0))
        times[task.key] = turns[-1] + 1
    ranked = sorted(range(len(shuffled)), key=lambda at: turns[at])
    return [shuffled[at] for at in ranked[:number]]


def _failed(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.reward is not None and trial.reward < DONE]


def _once(arms: Sequence[Arm], tasks: Sequence[AgentTask]) -> list[tuple[Arm, AgentTask, int]]:
    """Return the plan: prompts that should fix failures on every task, the others on a third of them."""
    half = tasks[: (len(tasks) + 2) // 3]
    return [(arm, task, 0) for arm in arms for task in (tasks if arm.stance in WRITTEN else half)]


def _again(best: Arm, arms: Sequence[Arm], tasks: Sequence[AgentTask]) -> list[tuple[Arm, AgentTask, int]]:
    """Return the plan: the mended prompt twice on every task, or without one the best once more, and then the seed."""
    mended = [arm for arm in arms if arm.stance == "mended"]
    rounds = [(mended[0], at) for at in range(REPEATS)] if mended else [(best, 1)] if best.stance != "seed" else []
    return [(arm, task, at) for arm, at in [*rounds, (arms[0], REPEATS)] for task in tasks]
