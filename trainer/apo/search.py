"""A run: asks the engine until it proposes nothing, screens its candidates, and lets the finalists race.

1. `RACE_SHARE` of the rollouts are reserved for the race; the engine has the others.
2. The engine proposes (`protocol`). Each new candidate is run on `SCREEN` tasks of the train split, beside its parent.
3. The finalists and the seed run on the validation split, in blocks of `BLOCK` tasks (`gate`), until every finalist is
   better or out, or each task had its turn. Rollouts that the search has not used go into the race too: with more
   rollouts than tasks, a task is run several times in its turn, and its mean counts once.
4. The winner is the finalist that is better by the highest margin; without one the seed stays.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from penstock.trainer.apo.budget import BudgetExhausted, SearchBudget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.gate import Racer, rate, winner
from penstock.trainer.apo.protocol import AgentTask, Evidence, Laboratory, PromptEngine
from penstock.trainer.apo.trials import Pool, Trial

SCREEN: Final = 8
RACE_SHARE: Final = 0.3
"""Share of the rollouts that is reserved for the race."""
BLOCK: Final = 24
FINALISTS: Final = 2
IDLE: Final = 8
"""Proposals in a row without use of the budget after which the engine is asked no more."""
ROUNDING: Final = 1e-9
"""Tolerance for rounded sums."""
SHRINK: Final = 8
"""Rollouts of the seed's mean that are mixed into a candidate's mean, so that few lucky ones win nothing."""
RECENT: Final = 32
"""Trials from which a gain is estimated if a candidate has too few of its own."""


@dataclass(slots=True)
class SearchResult:
    """The state of a run, and its result at the end."""

    pool: Pool
    """All candidates and their trials."""
    budget: SearchBudget
    """The budget, with its use."""
    racers: Sequence[Racer] = field(default=())
    """The finalists."""
    winner: Candidate | None = None
    """The candidate that is better than the seed; None if the seed stays."""
    why: str = ""
    """Why the search ended, and the result of the race; for a person."""
    validation: list[Trial] = field(default_factory=list[Trial])
    """Trials of the race."""


class PromptSearch:
    """One run. `watch` is called when something has changed."""

    def __init__(
        self,
        laboratory: Laboratory,
        engine: PromptEngine,
        seed: Candidate,
        train: Sequence[AgentTask],
        validation: Sequence[AgentTask],
        budget: SearchBudget,
        draw: int = 0,
    ) -> None:
        self._laboratory, self._engine = laboratory, engine
        self._validation = validation
        self._draw = draw
        self.result = SearchResult(Pool(seed), budget)
        self._evidence = Evidence(laboratory, self.result.pool, train, budget, draw)
        self.watch: Callable[[], Awaitable[None]] = _nobody

    async def run(self) -> SearchResult:
        """Run search and race; return the result."""
        result, budget = self.result, self.result.budget
        budget.reserved = self._kept()
        result.why = await run_engine(self._engine, result.pool, self._evidence, self.watch)
        budget.reserved = 0
        await self._race()
        return result

    def _kept(self) -> int:
        return round(RACE_SHARE * self.result.budget.rollouts)

    async def _race(self) -> None:
        result = self.result
        finalists = self._finalists()
        racers = result.racers = [
            Racer(one.id, len(finalists), rate(*expected_gain(result.pool, one))) for one in finalists
        ]
        if not racers:
            unjudged = result.pool.trials and result.pool.mean(result.pool.seed.id) is None
            lacks = "no rollout of the seed has a reward" if unjudged else "no candidate looks better than the seed"
            result.why += f"; {lacks}"
            return
        ahead = random.Random(f"race-{self._draw}").sample(self._validation, len(self._validation))
        while (alive := [racer for racer in racers if racer.state == "racing"]) and ahead:
            runners = [result.pool.seed, *(result.pool.candidates[racer.candidate] for racer in alive)]
            # A repeated task tells nothing about other tasks: the remaining rollouts are spread over the remaining
            # tasks.
            repeats = max(1, result.budget.left // (len(runners) * len(ahead)))
            tasks = [task.id for task in ahead[:BLOCK]][: result.budget.left // (len(runners) * repeats)]
            ahead = ahead[BLOCK:]
            if not tasks:
                break
            result.budget.take_rollouts(len(tasks) * len(runners) * repeats)
            orders = [result.pool.next_trial(one.id, task) for task in tasks for one in runners for _ in range(repeats)]
            trials = await self._laboratory.run(runners, orders, "val")
            result.validation += trials
            means = _means(trials)
            for task in tasks:
                for racer in alive:
                    if {(racer.candidate, task), (result.pool.seed.id, task)} <= means.keys():
                        racer.add(means[racer.candidate, task] - means[result.pool.seed.id, task])
            await self.watch()
        best = winner(racers)
        result.winner = None if best is None else result.pool.candidates[best.candidate]
        result.why += "; " + _told(racers, best)

    def _finalists(self) -> list[Candidate]:
        named = getattr(self._engine, "finalists", None)
        pool = self.result.pool
        found = cast(Sequence[Candidate], named(pool)) if named is not None else best(pool)
        able = {one.id: one for one in found if one.id != pool.seed.id and not self._evidence.problem(one)}
        return [pool.add(one) for one in able.values()][:FINALISTS]


async def _nobody() -> None: ...


async def run_engine(
    engine: PromptEngine, pool: Pool, evidence: Evidence, watch: Callable[[], Awaitable[None]] = _nobody
) -> str:
    """Ask the engine until it proposes nothing or the budget is used up, and wait for the work that it began; return
    why it ended."""
    try:
        why = await _propose(engine, pool, evidence, watch)
    except BudgetExhausted as spent:
        why = str(spent)
    await evidence.close()
    return why


async def _propose(engine: PromptEngine, pool: Pool, evidence: Evidence, watch: Callable[[], Awaitable[None]]) -> str:
    budget, idle = evidence.budget, 0
    while idle < IDLE:
        stand = budget.used_rollouts, budget.used_reflections
        proposed = await engine.propose(pool, evidence)
        if not proposed:
            return "the engine knows no more"
        await _screen(proposed, pool, evidence)
        await watch()
        idle = idle + 1 if stand == (budget.used_rollouts, budget.used_reflections) else 0
    return "the engine proposes nothing new"


async def _screen(proposed: Sequence[Candidate], pool: Pool, evidence: Evidence) -> None:
    """Run new candidates beside their parents."""
    pairs: list[tuple[Candidate, str]] = []
    for candidate in {one.id: one for one in proposed}.values():
        if not evidence.problem(candidate) and not pool.of(pool.add(candidate).id):
            tasks = evidence.random.sample([task.id for task in evidence.tasks], min(SCREEN, len(evidence.tasks)))
            parent = pool.candidates.get(candidate.parent or "", pool.seed)
            pairs += [(one, task) for task in tasks for one in (parent, candidate)]
    if pairs:
        await evidence.run(pairs)


def expected_gain(pool: Pool, candidate: Candidate) -> tuple[float, float]:
    """Return (gain, variance) of the difference between a candidate's reward and the seed's, by the trials of the
    search. If the candidate has too few, those of the last trials are used."""
    seen = pool.of(candidate.id)
    if len(seen) < SHRINK:
        seen = [trial for trial in pool.trials if trial.candidate != pool.seed.id and trial.reward is not None][
            -RECENT:
        ]
    found = [[trial.reward or 0.0 for trial in trials] for trials in (seen, pool.of(pool.seed.id))]
    if not all(found):
        return 0.0, 1.0
    means = [sum(one) / len(one) for one in found]
    spread = [sum((x - mean) ** 2 for x in one) / len(one) for one, mean in zip(found, means, strict=True)]
    return means[0] - means[1], sum(spread)


def best(pool: Pool) -> list[Candidate]:
    """Return the candidates whose mean is above the seed's, best first; each mean is mixed with `SHRINK` rollouts of
    the seed's."""
    seed = pool.mean(pool.seed.id)
    if seed is None:
        return []
    scores: Mapping[str, float] = {
        one: (sum(trial.reward or 0.0 for trial in pool.of(one)) + SHRINK * seed) / (len(pool.of(one)) + SHRINK)
        for one in pool.candidates
    }
    ranked = sorted(pool.candidates.values(), key=lambda one: (-scores[one.id], one.length))
    return [one for one in ranked if one.id != pool.seed.id and scores[one.id] > seed + ROUNDING]


def _means(trials: Sequence[Trial]) -> dict[tuple[str, str], float]:
    """Return the mean reward by candidate and task; those without any are left out."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for trial in trials:
        if trial.reward is not None:
            found[trial.candidate, trial.task].append(trial.reward)
    return {key: sum(rewards) / len(rewards) for key, rewards in found.items()}


def _told(racers: Sequence[Racer], best: Racer | None) -> str:
    if best is not None:
        pairs = len(best.differences)
        return f"{best.candidate} is better by {best.gain:.3f} on {pairs} tasks (e-value {best.evidence:.3g})"
    said = ", ".join(f"{one.candidate} {one.gain:+.3f} (e-value {one.evidence:.3g})" for one in racers)
    return f"no finalist is shown to be better: {said}"
