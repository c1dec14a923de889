"""A run: asks the engine until it proposes nothing, screens its candidates, and lets the finalists race.

1. The tasks are split (`split`). What was learnt about a customer in one split helps on the same customer in another,
   and nowhere else: so tasks of one key stay together, and without keys equal tasks do. The share of a split is of
   tasks, as near as whole keys allow.
2. `RACE_SHARE` of the rollouts are reserved for the race; the engine has the others.
3. The engine proposes (`protocol`). Each new candidate is run on `SCREEN` tasks of the train split, beside its parent.
4. The finalists and the seed run on the validation split, in blocks of `BLOCK` tasks, until every finalist is better or
   out, or each task had its turn. Rollouts that the search has not used go into the race too: with more rollouts than
   tasks, a task is run several times in its turn, and its mean counts once.
5. The winner is the finalist that is better by the highest margin; without one the seed stays.

In the race the difference of rewards on each task counts. A finalist is *better* once the wealth that was bet against
"it is no better than the seed" (`gateway.releases.canary.evidence`) reaches K / ALPHA, where K is the number of
finalists: so a candidate that is no better passes with probability ALPHA at most, however many rollouts it takes and
however often one looks (Ville's inequality). It is *out* once the opposite bet reaches 1 / ALPHA, or when `ENOUGH`
pairs have shown no gain. Half of the stake is bet at the rate that fits the results of the search, and half at every
rate. The search's rollouts are of other tasks, so the bet uses nothing of the race: a wrong guess costs a factor of
two, a right one saves a third of the rollouts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

from penstock.gateway.model.base import Mode
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.releases.canary.evidence import Wealth
from penstock.trainer.apo.protocol import (
    AgentTask,
    BudgetExhausted,
    Candidate,
    Evidence,
    Laboratory,
    Pool,
    PromptEngine,
    SearchBudget,
    Trial,
    TrialSpec,
    ignore,
    means,
)  # fmt: skip

SHARES: Final[Mapping[str, float]] = {"train": 0.4, "validation": 0.35, "test": 0.25}
LEAST: Final = 4
SCREEN: Final = 8
RACE_SHARE: Final = 0.3
BLOCK: Final = 24
FINALISTS: Final = 2
IDLE: Final = 8
"""Proposals in a row without use of the budget after which the engine is asked no more."""
ROUNDING: Final = 1e-9
SHRINK: Final = 8
"""Rollouts of the seed's mean that are mixed into a candidate's mean, so that few lucky ones win nothing."""
RECENT: Final = 32
"""Trials from which a gain is estimated if a candidate has too few of its own."""
ALPHA: Final = 0.05
ENOUGH: Final = 64
"""Pairs without any gain after which a finalist is out."""
LEAST_RATE: Final = 0.05
MOST_RATE: Final = 0.9
"""A bet at this rate keeps a tenth of its wealth after the worst pair."""
TINY: Final = 1e-12
State = Literal["racing", "better", "out"]


@dataclass(frozen=True, slots=True)
class Splits:
    train: Sequence[AgentTask]
    validation: Sequence[AgentTask]
    test: Sequence[AgentTask]
    """Tasks of the test, opened once, when all is decided."""

    @property
    def seal(self) -> str:
        """SHA-256 of the tasks of each split, with their inputs: 16 hex digits."""
        names = [[[task.id, task.key, task.input] for task in one] for one in (self.train, self.validation, self.test)]
        return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()[:16]


def agent_tasks(inputs: Sequence[Any], key: str | None) -> list[AgentTask]:
    """Return tasks with ids by their place: `t0`, `t1` ... `key`: field of the input, or a path of fields such as
    `customer.id`, whose value is the key of a task; without it each task has its own, and equal tasks share one. Raises
    `ConfigError`."""
    first: dict[str, str] = {}

    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    def key_of(value: Any, at: int) -> str:
        if key is None:
            return first.setdefault(text(value), f"t{at}")
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise ConfigError(f"tasks.key: task {at + 1} has no field {key!r}")
            value = cast(dict[str, Any], value)[name]
        return value if isinstance(value, str) else text(value)

    return [AgentTask(f"t{at}", value, key_of(value, at)) for at, value in enumerate(inputs)]


def split(tasks: Sequence[AgentTask], seed: int) -> Splits:
    """Give keys, in a random order, to the split that lacks the largest share. Raises `ConfigError` below `LEAST`."""
    by_key: defaultdict[str, list[AgentTask]] = defaultdict(list)
    for task in tasks:
        by_key[task.key].append(task)
    order = sorted(by_key)
    random.Random(f"split-{seed}").shuffle(order)
    found: dict[str, list[AgentTask]] = {name: [] for name in SHARES}
    for key in order:
        lacking = max(SHARES, key=lambda name: SHARES[name] - len(found[name]) / len(tasks))
        found[lacking] += by_key[key]
    for name, one in found.items():
        if len(one) < LEAST:
            raise ConfigError(
                f"tasks: the {name} split has {len(one)} of {len(tasks)} tasks with {len(order)} keys, and needs "
                f"{LEAST}; give more tasks, or a key that parts them more finely (tasks.key)"
            )
    places = {task.id: at for at, task in enumerate(tasks)}
    return Splits(**{name: sorted(one, key=lambda task: places[task.id]) for name, one in found.items()})


@dataclass(slots=True)
class Racer:
    candidate: str
    finalists: int
    rate: float
    """Rate of the bet that fits the results of the search (`rate`)."""
    differences: list[float] = field(default_factory=list[float])
    """Its rewards less those of the seed on the same tasks."""
    _guessed: float = 1.0
    """Wealth of the bet at `rate`."""
    _better: Wealth = field(default_factory=Wealth)
    _worse: Wealth = field(default_factory=Wealth)

    def add(self, difference: float) -> None:
        """Add a pair; `difference` lies within -1 and 1."""
        self.differences.append(difference)
        self._guessed *= 1.0 + self.rate * difference
        self._better.bet(difference, 1.0)
        self._worse.bet(-difference, 1.0)

    @property
    def pairs(self) -> int:
        return len(self.differences)

    @property
    def e_value(self) -> float:
        return (self._guessed + self._better.value) / 2

    @property
    def needed(self) -> float:
        """The e-value at which it is better: 1 / ALPHA for each finalist."""
        return self.finalists / ALPHA

    @property
    def state(self) -> State:
        if self.e_value >= self.needed:
            return "better"
        idle = self.pairs >= ENOUGH and self.gain <= 0
        return "out" if idle or self._worse.value >= 1 / ALPHA else "racing"

    @property
    def gain(self) -> float:
        return sum(self.differences) / self.pairs if self.differences else 0.0


def rate(gain: float, variance: float) -> float:
    """Return the rate at which wealth grows fastest, if pairs differ by `gain` on average and with this variance (the
    first two terms of the growth, Kelly 1956)."""
    return min(MOST_RATE, max(LEAST_RATE, gain / max(variance + gain**2, TINY))) if gain > 0 else LEAST_RATE


def winner(racers: Sequence[Racer]) -> Racer | None:
    """Return the finalist that is better, with the highest gain; None when none is."""
    better = [racer for racer in racers if racer.state == "better"]
    return max(better, key=lambda racer: racer.gain, default=None)


@dataclass(slots=True)
class SearchResult:
    pool: Pool
    budget: SearchBudget
    racers: Sequence[Racer] = field(default_factory=list[Racer])
    winner: Candidate | None = None
    """The candidate that is better than the seed; None if the seed stays."""
    why: str = ""
    """Why the search ended, and the result of the race; for a person."""
    validation: list[Trial] = field(default_factory=list[Trial])


class PromptSearch:
    """One run. `watch` is called when something has changed."""

    race_share = RACE_SHARE

    def __init__(
        self, laboratory: Laboratory, engine: PromptEngine, seed: Candidate, train: Sequence[AgentTask],
        validation: Sequence[AgentTask], budget: SearchBudget, draw: int = 0,
    ) -> None:  # fmt: skip
        self._laboratory, self._engine, self._validation, self._draw = laboratory, engine, validation, draw
        self.result = SearchResult(Pool(seed), budget)
        self._evidence = Evidence(laboratory, self.result.pool, train, budget, draw)
        self.watch: Callable[[], Awaitable[None]] = ignore

    async def run(self) -> SearchResult:
        result, budget = self.result, self.result.budget
        budget.reserved = round(self.race_share * budget.rollouts)
        result.why = await run_engine(self._engine, result.pool, self._evidence, self.watch)
        budget.reserved = 0
        pool = result.pool
        named = getattr(self._engine, "finalists", None)
        found = cast(Sequence[Candidate], named(pool)) if named is not None else best(pool)
        able = {one.id: one for one in found if one.id != pool.seed.id and not self._evidence.problem(one)}
        finalists = [pool.add(one) for one in able.values()][:FINALISTS]
        if finalists:
            await self._race(finalists)
        elif pool.trials and pool.mean(pool.seed.id) is None:
            result.why += "; no rollout of the seed has a reward"
        else:
            result.why += "; no candidate looks better than the seed"
        return result

    async def _race(self, finalists: Sequence[Candidate]) -> None:
        result, pool, budget = self.result, self.result.pool, self.result.budget
        racers = result.racers = [Racer(one.id, len(finalists), rate(*expected_gain(pool, one))) for one in finalists]
        ahead = random.Random(f"race-{self._draw}").sample(self._validation, len(self._validation))
        while (alive := [racer for racer in racers if racer.state == "racing"]) and ahead:
            runners = [pool.seed, *(pool.candidates[racer.candidate] for racer in alive)]
            # A repeated task tells nothing about other tasks: the remaining rollouts are spread over the remaining
            # tasks.
            repeats = max(1, budget.left // (len(runners) * len(ahead)))
            tasks = [task.id for task in ahead[:BLOCK]][: budget.left // (len(runners) * repeats)]
            ahead = ahead[BLOCK:]
            if not tasks:
                break
            budget.take_rollouts(len(tasks) * len(runners) * repeats)
            orders = [pool.next_trial(one.id, task) for task in tasks for one in runners for _ in range(repeats)]
            trials = await self._laboratory.run(runners, orders, "val")
            result.validation += trials
            found = means(((one.candidate, one.task), one.reward) for one in trials)
            for task in tasks:
                for racer in alive:
                    if {(racer.candidate, task), (pool.seed.id, task)} <= found.keys():
                        racer.add(found[racer.candidate, task] - found[pool.seed.id, task])
            await self.watch()
        first = winner(racers)
        if first is not None:
            result.winner = pool.candidates[first.candidate]
            figures = f"by {first.gain:.3f} on {first.pairs} tasks (e-value {first.e_value:.3g})"
            result.why += f"; {first.candidate} is better {figures}"
        else:
            said = ", ".join(f"{one.candidate} {one.gain:+.3f} (e-value {one.e_value:.3g})" for one in racers)
            result.why += f"; no finalist is shown to be better: {said}"


async def run_engine(
    engine: PromptEngine, pool: Pool, evidence: Evidence, watch: Callable[[], Awaitable[None]] = ignore
) -> str:
    """Ask the engine until it proposes nothing or the budget is used up, and wait for its work; return why it ended."""
    budget, idle, why = evidence.budget, 0, "the engine proposes nothing new"
    try:
        while idle < IDLE:
            stand = budget.used_rollouts, budget.used_reflections
            proposed = await engine.propose(pool, evidence)
            if not proposed:
                why = "the engine knows no more"
                break
            await _screen(proposed, pool, evidence)
            await watch()
            idle = idle + 1 if stand == (budget.used_rollouts, budget.used_reflections) else 0
    except BudgetExhausted as spent:
        why = str(spent)
    await evidence.close()
    return why


async def _screen(proposed: Sequence[Candidate], pool: Pool, evidence: Evidence) -> None:
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
        others = [trial for trial in pool.trials if trial.candidate != pool.seed.id and trial.reward is not None]
        seen = others[-RECENT:]
    found = [[trial.reward or 0.0 for trial in trials] for trials in (seen, pool.of(pool.seed.id))]
    if not all(found):
        return 0.0, 1.0
    middle = [sum(one) / len(one) for one in found]
    spread = [sum((x - mean) ** 2 for x in one) / len(one) for one, mean in zip(found, middle, strict=True)]
    return middle[0] - middle[1], sum(spread)


def best(pool: Pool) -> list[Candidate]:
    """Return the candidates above the seed, best first; each mean is mixed with `SHRINK` rollouts of the seed's."""
    seed = pool.mean(pool.seed.id)
    if seed is None:
        return []
    scores = {
        one: (sum(trial.reward or 0.0 for trial in pool.of(one)) + SHRINK * seed) / (len(pool.of(one)) + SHRINK)
        for one in pool.candidates
    }
    ranked = sorted(pool.candidates.values(), key=lambda one: (-scores[one.id], one.length))
    return [one for one in ranked if one.id != pool.seed.id and scores[one.id] > seed + ROUNDING]


class PlaceboLaboratory:
    """A laboratory whose search gets feedback without information, while race and test are real.

    Every rollout of the search gets a reward that was drawn from the true rewards of all rollouts of the search so far,
    of any candidate, and no reason. (Shuffling within a batch is not enough: many engines run one candidate a batch,
    and its mean would stay. Reasons of other rollouts are no feedback on a candidate, but they still name failures, and
    an engine that writes down what they ask for gets better without any reward.) The reflecting model can still guess
    from the transcripts. A method whose gains come from feedback gains nothing here, and an honest race lets nothing
    through; what it does let through is what any rewriting brings.

    Draws follow from the seed and from the order of the batches, so that a restarted run draws the same: feedback is
    given in that order, even if a later batch ends first.
    """

    def __init__(self, laboratory: Laboratory, seed: int) -> None:
        self._laboratory = laboratory
        self.reflect, self.most, self.problem = laboratory.reflect, laboratory.most, laboratory.problem
        self._draw = random.Random(f"placebo-{seed}")
        self._rewards: list[float | None] = []
        self._turn = asyncio.Event()
        """Set when the batch before has its feedback."""
        self._turn.set()

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        if mode != "train":
            return await self._laboratory.run(candidates, orders, mode)
        before, mine = self._turn, asyncio.Event()
        self._turn = mine
        try:
            trials = await self._laboratory.run(candidates, orders, mode)
            await before.wait()
        finally:
            mine.set()
        self._rewards += [trial.reward for trial in trials]
        return [replace(trial, reward=self._draw.choice(self._rewards), reason="") for trial in trials]
