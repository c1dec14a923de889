"""The probe: runs the seed and a handful of very different prompts on a few tasks, some of them again.

The seed goes first, on every task twice: without failures there is nothing to fix, and the probe ends. Otherwise the
reflecting model sees the failures and writes the other prompts, which run on the same tasks. Two say the same as the
seed in other words (`REWORDED`). One is the seed with a checklist of what the graders' reasons ask for. It is made of
edits that several reflections name, each of them after other failed rollouts: of the edits for one failure the one that
is named most often is made. One is written from scratch, without seeing the seed (`trainer.apo.reflection`), because a
text's error may be one that nobody thinks of changing.

The best of them is mended once more, as a search would go on, and most of the remaining rollouts go to the mended
prompt and the seed. The ids of rollouts follow from prompt, task and number, so a restarted probe finds its earlier
rollouts and answers.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.trainer.apo.advice.estimates import Arm, Observation, Stance, fit_belief, variance_components
from penstock.trainer.apo.engines.pooled_edits import DONE, HYPOTHESES, MINIBATCH, SAME, common, slots
from penstock.trainer.apo.protocol import (
    AgentTask,
    BudgetExhausted,
    Candidate,
    Evidence,
    Laboratory,
    Pool,
    SearchBudget,
    Trial,
    TrialSpec,
    ignore,
)
from penstock.trainer.apo.reflection import (
    Edit,
    Hypothesis,
    applied,
    ask_hypotheses,
    ask_scratch,
    exclude,
    read_hypotheses,
    read_texts,
    words,
)

LEAST_TASKS: Final = 4
ROLLOUTS_A_TASK: Final = 7.5
REPEATS: Final = 2
REFLECTIONS: Final = 12
"""Questions for the checklist."""
JUDGED_AGAIN: Final = 16
REWORDED: Final[dict[Stance, str]] = {
    "terse": "as few words as you can, without leaving out anything that the agent must do",
    "steps": "steps that the agent takes one after the other, with a last step that checks the answer",
}
ASK: Final = """\
Write these texts of an AI agent anew, in %s. They must ask for the same. Keep every {slot} as it is.

%s
Answer with JSON alone: {"texts": {"NAME": "..."}} with these names: %s
"""


class ObservationReader(Protocol):
    """Adds facts from the tape to trials."""

    async def read(self, trials: Sequence[Trial]) -> list[Observation]: ...

    async def regrade(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the observations, each with a second judgement of the grader; unchanged where that is impossible."""
        ...


@dataclass(slots=True)
class ProbeReport:
    arms: list[Arm]
    observations: list[Observation] = field(default_factory=list[Observation])
    failures: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    """Prompts that could not be run, and why."""


class Probe:
    """One probe. `budget`: its rollouts, and the limits of its reflections."""

    def __init__(
        self, laboratory: Laboratory, reader: ObservationReader, seed: Candidate, tasks: Sequence[AgentTask],
        budget: SearchBudget, draw: int,
    ) -> None:  # fmt: skip
        self._laboratory, self._reader, self._budget, self._seed = laboratory, reader, budget, Arm(seed, "seed")
        self._evidence = Evidence(laboratory, Pool(seed), tasks, budget, draw)
        self._random = random.Random(f"advise-{draw}")
        self._tasks = self._of_different_keys(tasks, max(LEAST_TASKS, int(budget.rollouts / ROLLOUTS_A_TASK)))
        self.report = ProbeReport([self._seed])
        self.watch: Callable[[str], Awaitable[None]] = ignore

    async def run(self) -> ProbeReport:
        probed, seed, tasks = self.report, self._seed, self._tasks
        await self.watch(f"{REPEATS * len(tasks)} rollouts of the texts as they are")
        failed = _failed(await self._run([(seed, task, at) for at in range(REPEATS) for task in tasks]))
        if not failed:
            return probed
        await self.watch("other prompts are written")
        await self._write(failed)
        others = probed.arms[1:]
        await self.watch(f"rollouts of {len(others)} other prompts")
        # Prompts that say the same as the seed run on a third of the tasks.
        few = tasks[: (len(tasks) + 2) // 3]
        trials = await self._run(
            [(arm, one, 0) for arm in others for one in (few if arm.stance in REWORDED else tasks)]
        )
        belief = fit_belief(probed.arms, probed.observations, variance_components(probed.observations))
        names = {arm.candidate.id: arm for arm in probed.arms}
        best = names[belief.best] if belief.best is not None and belief.gain.mean > 0 else seed
        await self.watch(f"the prompt {best.stance} is mended")
        await self._mend(best, _failed([one for one in trials if one.candidate == best.candidate.id]) or failed)
        # The mended prompt twice on every task, or without one the best once more, and then the seed.
        mended = [(arm, at) for arm in probed.arms if arm.stance == "mended" for at in range(REPEATS)]
        rounds = mended or ([(best, 1)] if best is not seed else [])
        await self._run([(arm, task, at) for arm, at in [*rounds, (seed, REPEATS)] for task in tasks])
        found = probed.observations
        some = self._random.sample(range(len(found)), min(JUDGED_AGAIN, len(found)))
        for at, one in zip(some, await self._reader.regrade([found[at] for at in some]), strict=True):
            found[at] = one
        return probed

    async def _run(self, plan: Sequence[tuple[Arm, AgentTask, int]]) -> list[Trial]:
        plan = plan[: self._budget.take_rollouts(min(len(plan), self._budget.left))]
        orders = [TrialSpec(arm.candidate.id, task.id, number) for arm, task, number in plan]
        candidates = {arm.candidate.id: arm.candidate for arm, _, _ in plan}
        trials = await self._laboratory.run(list(candidates.values()), orders)
        self.report.observations += await self._reader.read(trials)
        return trials

    async def _write(self, failed: Sequence[Trial]) -> None:
        texts = self._seed.candidate.texts
        asked: dict[Stance, str] = {stance: ask_reworded(texts, stance) for stance in REWORDED}
        asked["scratch"] = ask_scratch(texts, slots(texts), self._batch(failed))
        answers = await asyncio.gather(*map(self._reflect, asked.values()))
        for stance, answer in zip(asked, answers, strict=True):
            self._add(read_texts(answer, texts), stance)
        await self._mend(self._seed, failed, "checklist")

    async def _mend(self, arm: Arm, failed: Sequence[Trial], stance: Stance = "mended") -> None:
        texts = arm.candidate.texts
        asked = [ask_hypotheses(texts, self._batch(failed), HYPOTHESES) for _ in range(REFLECTIONS)]
        answers = await asyncio.gather(*map(self._reflect, asked))
        named = [one for answer in answers for one in read_hypotheses(answer, texts)]
        failures = (one.failure for one in named if one.failure)
        self.report.failures = list(dict.fromkeys([*self.report.failures, *failures]))
        self._add(checklist(texts, named) if named else None, stance)

    def _batch(self, failed: Sequence[Trial]) -> list[Trial]:
        return self._random.sample(failed, min(MINIBATCH, len(failed)))

    def _add(self, texts: dict[str, str] | None, stance: Stance) -> None:
        if texts is None:
            self.report.problems.append(f"{stance}: the reflecting model has given no texts")
            return
        made = Candidate(texts, self._seed.candidate.id, f"advise: {stance}")
        if why := self._laboratory.problem(made):
            self.report.problems.append(f"{stance}: {why}")
        elif all(arm.candidate.id != made.id for arm in self.report.arms):
            self.report.arms.append(Arm(made, stance))

    async def _reflect(self, question: str) -> str:
        """Return the answer; empty when the budget is used up."""
        try:
            return await self._evidence.reflect(question)
        except BudgetExhausted as spent:
            self.report.problems.append(str(spent))
            return ""

    def _of_different_keys(self, tasks: Sequence[AgentTask], number: int) -> list[AgentTask]:
        """Return `number` tasks, of as many keys as possible."""
        turns: defaultdict[str, int] = defaultdict(int)
        ranked: list[tuple[int, AgentTask]] = []
        for task in self._random.sample(list(tasks), len(tasks)):
            ranked.append((turns[task.key], task))
            turns[task.key] += 1
        return [task for _, task in sorted(ranked, key=lambda one: one[0])[:number]]


def _failed(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.reward is not None and trial.reward < DONE]


def ask_reworded(texts: Mapping[str, str], stance: Stance) -> str:
    shown = "\n".join(f"## Text {name}\n{text}\n" for name, text in sorted(texts.items()))
    return ASK % (REWORDED[stance], shown, ", ".join(sorted(texts)))


def checklist(texts: Mapping[str, str], hypotheses: Sequence[Hypothesis]) -> dict[str, str]:
    """Return the texts with one edit for each failure: the one that is named most often, preferably one that also
    removes a line. The most frequent failures come first; of edits that exclude each other the first is made."""
    background = [words(one.edit.text) for one in hypotheses]
    said = [words(one.failure) for one in hypotheses]
    chosen: list[Edit] = []
    for places in sorted(_groups(said, said), key=len, reverse=True):
        edits = [hypotheses[at].edit for at in places]
        group = max(_groups([words(edit.text) for edit in edits], background), key=len)
        edit = max((edits[at] for at in group), key=lambda edit: edit.kind != "add")
        if not any(exclude(edit, one) for one in chosen):
            chosen.append(edit)
    return applied(texts, chosen)


def _groups(texts: Sequence[frozenset[str]], background: Sequence[frozenset[str]]) -> list[list[int]]:
    """Return groups of places of texts with the same meaning; a word in many texts of the background weighs little."""
    groups: list[list[int]] = []
    for at, mine in enumerate(texts):
        for group in groups:
            other = texts[group[0]]
            if common(mine, other, background, float(mine == other)) >= SAME:
                group.append(at)
                break
        else:
            groups.append([at])
    return groups
