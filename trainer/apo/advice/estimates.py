"""The estimates of advice, from rollouts with their rewards. Pure.

**Variance of the reward.**

    reward = mean + task + prompt + (task x prompt) + agent + grader

Every component is estimated by products or squares of differences whose expectation is that component whatever the
distributions are (moments of a two-way random model; Searle, Casella & McCulloch, Variance Components, 1992, ch. 5).
Cells may be empty, and have different numbers of rollouts. With M the mean reward of a cell, n its rollouts, s2 the
variance within cells:

    within      pooled variance of rollouts of one cell
    prompt      mean over tasks t != u of (M[p,t] - M[q,t]) (M[p,u] - M[q,u]) / 2
    task        covariance over tasks of M[p,.] and M[q,.]
    task_prompt (variance over tasks of M[p,.] - M[q,.], less s2 (1/n[p,.] + 1/n[q,.])) / 2

each over all pairs of prompts p, q. A component that comes out below 0 is 0. `within` is the agent and the grader
together. They can be separated if the same behaviour was judged more than once: several rewards of a rollout by the
same source, or rollouts of a task with the same output. Otherwise the grader's part lies anywhere between 0 and
`within`.

**Gains of the prompts.** A Bayesian linear model, whose variances come from the split:

    reward = level of the seed + effect of the prompt + task + (task x prompt) + noise

Effects of prompts have normal priors around 0; prompts with instructions from the graders' reasons share a part of
their effect, so each is evidence about the others. So the highest mean of several is not taken at face value: a prompt
that was picked because it was lucky is drawn back towards 0 as much as its few rollouts and the noise require
(empirical Bayes; Efron & Morris 1975), and the interval of the best prompt's gain needs no further correction for the
picking.

The cost of wrongly used tools is the coefficient of "a tool call of this rollout was misused" in the same model, times
the share of the seed's rollouts with misuse. Rollouts are compared within their tasks, because tasks that need a tool
may be the harder ones anyway.

**The race.** The race bets on the differences of pairs (`trainer.apo.search`). Races are simulated here with
differences that are normal around a gain and clipped at -1 and 1; each race draws its gain from the probe's estimate,
given that it is worth having. So the forecast assumes that there is something to find, and says how long finding it
takes with this noise. The wealth is that of the race, for all races at once: half of it bets at the rate that fits the
estimated gain, half of it at those of `gateway.releases.canary.evidence`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import erf, sqrt
from typing import Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.gateway.releases.canary.evidence import RATES
from penstock.trainer.apo.engines.pooled_edits import Array, regress
from penstock.trainer.apo.protocol import Candidate
from penstock.trainer.apo.search import ALPHA, rate

Stance = Literal["seed", "terse", "steps", "checklist", "scratch", "mended"]
"""Origin of a probe's prompt: the seed; the same in few words; as steps; with the instructions that the graders'
reasons ask for; written without seeing the seed; the best of these, with such instructions once more."""
LEVEL: Final = (0.5, 0.5)
"""Prior mean and standard deviation of the seed's level."""
MENDING_SD: Final = 0.15
OWN_SD: Final[dict[Stance, float]] = {"terse": 0.07, "steps": 0.07, "checklist": 0.1, "mended": 0.1, "scratch": 0.25}
MENDING: Final[tuple[Stance, ...]] = ("checklist", "mended")
MISUSE: Final = (-0.2, 0.3)
"""Prior mean and standard deviation of the effect of misuse on a rollout's reward."""
USUAL_NOISE: Final = 0.06
"""Usual variance within cells; it counts as `DOUBT` repeats, because few repeats may be alike by chance."""
DOUBT: Final = 4
LEAST_TASK: Final = 0.01
LEAST_INTERACTION: Final = 0.002
Z90: Final = 1.645
RACES: Final = 200
MOST_PAIRS: Final = 2_000
SURE: Final = 0.8
LARGEST_STAKE: Final = 0.9
"""The limit of `Wealth.bet`: the worst difference is 1."""
BLOCK: Final = 100


class Arm(NamedTuple):
    candidate: Candidate
    stance: Stance


@dataclass(frozen=True, slots=True)
class Observation:
    """A rollout, with its reward and the facts from the tape."""

    prompt: str
    task: str
    reward: float | None
    """Between 0 and 1; None without one."""
    reason: str = ""
    output: str = ""
    """The agent's answer or a digest of it; empty if unknown."""
    judged: tuple[float, ...] = ()
    """All rewards of this rollout by the same source, if there are several."""
    tools: int = 0
    misused: int = 0
    """Tool calls that failed because the agent's request was wrong."""
    broken: int = 0
    """Tool calls that failed by themselves, such as by a timeout."""
    tokens: int | None = None
    rollout: str = ""


def with_rewards(observations: Iterable[Observation]) -> list[tuple[Observation, float]]:
    """Return the observations that have a reward, with it."""
    return [(one, one.reward) for one in observations if one.reward is not None]


class VarianceComponents(Noun):
    """Variances of the reward, each 0 or above."""

    task: float = 0.0
    """Between tasks."""
    prompt: float = 0.0
    """Between prompts, on average over tasks."""
    task_prompt: float = 0.0
    """Between prompts on single tasks, beyond that."""
    within: float = 0.0
    """Of repeats: the agent's own randomness and the grader's."""
    grader: float | None = None
    """Of rewards of the same behaviour, a part of `within`; None if nothing was judged twice: it may be all of it."""
    judgements: int = 0
    """Judgements of a behaviour beyond its first one."""
    repeats: int = Field(default=0, exclude=True)
    """Degrees of freedom of `within`: rollouts beyond the first of each cell."""

    @property
    def total(self) -> float:
        return self.task + self.prompt + self.task_prompt + self.within

    @property
    def noise(self) -> float:
        """The variance within cells, mixed with `USUAL_NOISE`."""
        return (self.within * self.repeats + USUAL_NOISE * DOUBT) / (self.repeats + DOUBT)


def variance_components(observations: Sequence[Observation]) -> VarianceComponents:
    """Return the components; 0 where the observations do not suffice."""
    found = with_rewards(observations)
    within, repeats = _pooled(_grouped(((one.prompt, one.task), reward) for one, reward in found))
    again = [list(one.judged) for one in observations if len(one.judged) > 1]
    same = _grouped(((one.task, one.output), reward) for one, reward in found if one.output)
    grader, judgements = _pooled([*again, *same])
    task, prompt, both = _between(found, within)
    return VarianceComponents(
        task=task, prompt=prompt, task_prompt=both, within=within, grader=min(grader, within) if judgements else None,
        judgements=judgements, repeats=repeats,
    )  # fmt: skip


def _grouped(rows: Iterable[tuple[tuple[str, str], float]]) -> list[list[float]]:
    groups: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for key, value in rows:
        groups[key].append(value)
    return list(groups.values())


def _pooled(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return (variance within groups, its degrees of freedom)."""
    squares, freedom = 0.0, 0
    for group in groups:
        squares += float(np.var(group)) * len(group)
        freedom += len(group) - 1
    return (squares / freedom if freedom else 0.0), freedom


def _between(rewarded: Sequence[tuple[Observation, float]], within: float) -> tuple[float, float, float]:
    """Return the variances (task, prompt, task x prompt)."""
    prompts = {name: at for at, name in enumerate(dict.fromkeys(one.prompt for one, _ in rewarded))}
    tasks = {name: at for at, name in enumerate(dict.fromkeys(one.task for one, _ in rewarded))}
    sums, counts = np.zeros((len(prompts), len(tasks))), np.zeros((len(prompts), len(tasks)))
    for one, reward in rewarded:
        sums[prompts[one.prompt], tasks[one.task]] += reward
        counts[prompts[one.prompt], tasks[one.task]] += 1
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    found: list[tuple[float, float, float]] = []
    weights: list[int] = []
    for p, q in combinations(range(len(means)), 2):
        both = (counts[p] > 0) & (counts[q] > 0)
        number = int(both.sum())
        if number < 2:
            continue
        difference = means[p, both] - means[q, both]
        products = (difference.sum() ** 2 - (difference**2).sum()) / (number * (number - 1))
        noise = within * float((1 / counts[p, both] + 1 / counts[q, both]).mean())
        shared = float(np.cov(means[p, both], means[q, both])[0, 1])
        found.append((shared, products / 2, (float(difference.var(ddof=1)) - noise) / 2))
        weights.append(number)
    if not found:
        return 0.0, 0.0, 0.0
    mean = np.maximum(np.average(np.array(found), axis=0, weights=weights), 0.0)
    return float(mean[0]), float(mean[1]), float(mean[2])


@dataclass(frozen=True, slots=True)
class NormalEstimate:
    """An estimate with a normal distribution, and its 90 % interval."""

    mean: float
    sd: float

    @property
    def low(self) -> float:
        return self.mean - Z90 * self.sd

    @property
    def high(self) -> float:
        return self.mean + Z90 * self.sd

    def above(self, value: float) -> float:
        if self.sd == 0:
            return float(self.mean > value)
        return 0.5 * (1 + erf((self.mean - value) / (self.sd * sqrt(2))))


NOTHING: Final = NormalEstimate(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Belief:
    seed: NormalEstimate
    """Mean reward of the seed, on tasks like these."""
    gains: dict[str, NormalEstimate]
    best: str | None
    tools: NormalEstimate
    """Loss of the seed's mean reward by wrongly used tools."""

    @property
    def gain(self) -> NormalEstimate:
        """Gain of the best prompt; 0 without one."""
        return NOTHING if self.best is None else self.gains[self.best]


def fit_belief(arms: Sequence[Arm], observations: Sequence[Observation], split: VarianceComponents) -> Belief:
    """Return the estimates from observations; `arms`: the seed first."""
    model = _GainRegression(arms, observations, split)
    gains = {arm.candidate.id: model.quantity(*model.terms(arm.candidate.id)) for arm in arms[1:]}
    mine = [one for one, _ in with_rewards(observations) if one.prompt == arms[0].candidate.id]
    share, loss = sum(one.misused > 0 for one in mine) / max(1, len(mine)), NOTHING
    if share:
        effect = _GainRegression(arms, observations, split, tools=MISUSE).quantity("tools")
        loss = NormalEstimate(-effect.mean * share, effect.sd * share)
    return Belief(model.quantity("level"), gains, max(gains, key=lambda name: gains[name].mean, default=None), loss)


class _GainRegression:
    """The regression. `tools`: prior mean and standard deviation of the effect of misuse; by default there is none."""

    def __init__(
        self, arms: Sequence[Arm], observations: Sequence[Observation], split: VarianceComponents,
        tools: tuple[float, float] = (0.0, 1e-6),
    ) -> None:  # fmt: skip
        self._stances = {arm.candidate.id: arm.stance for arm in arms}
        self._prior = {"level": LEVEL, "mending": (0.0, MENDING_SD), "tools": tools}
        self._prior |= {f"prompt {arm.candidate.id}": (0.0, OWN_SD[arm.stance]) for arm in arms[1:]}
        found, rows = with_rewards(observations), list[list[str]]()
        for one, _ in found:
            task, cell = f"task {one.task}", f"cell {one.prompt} {one.task}"
            self._prior.setdefault(task, (0.0, sqrt(max(split.task, LEAST_TASK))))
            self._prior.setdefault(cell, (0.0, sqrt(max(split.task_prompt, LEAST_INTERACTION))))
            rows.append(["level", task, cell, *self.terms(one.prompt), *(["tools"] if one.misused else [])])
        self._places = {name: at for at, name in enumerate(self._prior)}
        design, prior = np.zeros((len(rows), len(self._prior))), np.array(list(self._prior.values()))
        for at, row in enumerate(rows):
            design[at, [self._places[name] for name in row]] = 1.0
        rewards = np.array([reward for _, reward in found])
        self._mean, self._covariance = regress(design, rewards, prior[:, 0], prior[:, 1], split.noise)

    def terms(self, prompt: str) -> list[str]:
        """Return the terms of a prompt; the seed has none."""
        own = [name for name in (f"prompt {prompt}",) if name in self._prior]
        return own + (["mending"] if self._stances[prompt] in MENDING else [])

    def quantity(self, *terms: str) -> NormalEstimate:
        at = [self._places[name] for name in terms]
        return NormalEstimate(float(self._mean[at].sum()), float(np.sqrt(self._covariance[np.ix_(at, at)].sum())))


class RaceForecast(NamedTuple):
    pairs: int | None
    """Pairs after which 80 % of the races are decided; None when even 2,000 do not suffice."""
    power: float


def forecast_race(gain: NormalEstimate, worth: float, variance: float, pairs: int) -> RaceForecast:
    """`worth`: the least gain that counts; `variance`: of a pair's difference; `pairs`: those of the budget."""
    source = np.random.default_rng(0)
    ends = race_lengths(_gains_above(gain, worth, source), variance, rate(max(gain.mean, worth), variance), source)
    needed = int(np.sort(ends)[int(SURE * RACES) - 1])
    return RaceForecast(needed if needed <= MOST_PAIRS else None, float(np.mean(ends <= pairs)))


def _gains_above(gain: NormalEstimate, worth: float, source: np.random.Generator) -> Array:
    """Return draws of a gain, given that it is above `worth`: by inversion of its distribution on a grid."""
    grid = np.linspace(worth, max(worth + 0.01, min(1.0, gain.mean + 5 * gain.sd)), 400)
    spread = max(gain.sd, 1e-6)
    with np.errstate(over="ignore"):
        density = np.exp(-0.5 * ((grid - gain.mean) / spread) ** 2 + 0.5 * ((grid[0] - gain.mean) / spread) ** 2)
    if not np.isfinite(density).all():
        return np.full(RACES, max(worth, gain.mean))
    return source.choice(grid, size=RACES, p=density / density.sum())


def race_lengths(gains: Array, variance: float, guessed: float, source: np.random.Generator) -> Array:
    """Return the number of pairs after which each race is decided; more than `MOST_PAIRS` for one that is not."""
    rates = np.minimum(np.array([*RATES, guessed]), LARGEST_STAKE)
    shares = np.array([*([1 / (2 * len(RATES))] * len(RATES)), 0.5])
    wealth = np.zeros((len(gains), len(rates)))
    ends = np.full(len(gains), MOST_PAIRS + 1)
    for start in range(0, MOST_PAIRS, BLOCK):
        drawn = source.normal(gains[:, None], np.sqrt(variance), (len(gains), BLOCK))
        steps = np.log1p(rates * np.clip(drawn, -1.0, 1.0)[:, :, None]).cumsum(axis=1) + wealth[:, None, :]
        better = (np.exp(steps) * shares).sum(axis=2) >= 1 / ALPHA
        first = np.where(better.any(axis=1), start + better.argmax(axis=1) + 1, MOST_PAIRS + 1)
        ends = np.minimum(ends, first)
        wealth = steps[:, -1]
        if (ends <= start + BLOCK).all():
            break
    return ends
