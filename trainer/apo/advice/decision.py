"""Decides what is worth doing, says why, and what a run costs: `Advice`, for a person or as JSON. Pure.

A table decides: the first row that holds.

    nothing                      all rollouts have the same reward, or nothing is missing to the best one
    tool texts                   wrongly used tools cost more than WORTH, and more than the best prompt brings
    the grader is too noisy      most of the variance of repeats is the grader's, and a race would not be decided
    prompts                      a prompt of the probe is better by more than WORTH
    weights                      SHORT or more is missing to the best reward, whatever the prompt
    nothing                      else

Costs and missing reward must be more likely than not, by `estimates`. Gains must be more certain (CONFIDENT), because
one prompt of several looks good in any case. WORTH is the least gain that justifies a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Literal, get_args

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.trainer.apo.advice.estimates import (
    MOST_PAIRS,
    Arm,
    Belief,
    NormalEstimate,
    Observation,
    RaceForecast,
    Stance,
    VarianceComponents,
    fit_belief,
    forecast_race,
    variance_components,
    with_rewards,
)
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.engines import beam, pooled_edits
from penstock.trainer.apo.protocol import SearchBudget, means
from penstock.trainer.apo.search import RACE_SHARE

Verdict = Literal["prompts", "weights", "tool texts", "the grader is too noisy", "nothing"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
WORTH: Final = 0.05
"""The least gain in mean reward that is worth a run."""
SHORT: Final = 0.2
"""Reward that must be missing to the best one for training weights to be worth it."""
LIKELY: Final = 0.5
CONFIDENT: Final = 0.75
DECIDED: Final = 0.6
CERTAIN: Final = 0.95
MOSTLY: Final = 0.5
"""Share of the variance within cells above which it is mostly the grader's."""
ENOUGH_JUDGEMENTS: Final = 6
"""Fewest repeated judgements that allow a statement on the grader."""
LEAST_RUN: Final = 40
FAILURES: Final = 3
_OURS: Final = pooled_edits.REFLECTIONS / ((pooled_edits.ARMS[1] + 2) * pooled_edits.TASKS)
_LARGEST: Final = beam.SIZES[0]
_BEAM: Final = 2 * _LARGEST.width * _LARGEST.branch * _LARGEST.rounds / _LARGEST.rollouts(beam.HELD_OUT[0])
REFLECTIONS: Final = {"ours": _OURS, "beam": _BEAM}
"""Reflections for each rollout of the search, by engine; other engines count as `ours`."""


@dataclass(frozen=True, slots=True)
class ProbeFindings:
    arms: Sequence[Arm]
    observations: Sequence[Observation]
    split: VarianceComponents
    belief: Belief
    forecast: RaceForecast

    @property
    def rewards(self) -> list[float]:
        return [reward for _, reward in with_rewards(self.observations)]

    @property
    def grader_known(self) -> bool:
        return self.split.judgements >= ENOUGH_JUDGEMENTS

    @property
    def grader_dominates(self) -> bool:
        """True if most of the variance of repeats is known to be the grader's."""
        return self.grader_known and (self.split.grader or 0.0) >= MOSTLY * self.split.within

    @property
    def missing(self) -> NormalEstimate:
        """The seed's distance to the best reward."""
        return NormalEstimate(1 - self.belief.seed.mean, self.belief.seed.sd)

    @property
    def verdict(self) -> Verdict:
        return next(verdict for verdict, holds in TABLE if holds(self))


def derive_findings(arms: Sequence[Arm], observations: Sequence[Observation], rollouts: int) -> ProbeFindings:
    """Return the findings from observations. `rollouts`: budget of the planned run."""
    parts = variance_components(observations)
    belief = fit_belief(arms, observations, parts)
    variance = 2 * (parts.noise + parts.task_prompt)
    race = forecast_race(belief.gain, WORTH, variance, round(rollouts * RACE_SHARE) // 2)
    return ProbeFindings(arms, observations, parts, belief, race)


TABLE: Final[Sequence[tuple[Verdict, Callable[[ProbeFindings], bool]]]] = (
    ("nothing", lambda found: len(set(found.rewards)) < 2),
    ("tool texts", lambda found: found.belief.tools.above(WORTH) >= LIKELY
     and found.belief.tools.mean >= found.belief.gain.mean),
    ("the grader is too noisy", lambda found: found.grader_dominates and found.forecast.power < DECIDED
     and found.belief.gain.above(WORTH) < CERTAIN),
    ("prompts", lambda found: found.belief.gain.above(WORTH) >= CONFIDENT),
    ("weights", lambda found: found.missing.above(SHORT) >= LIKELY),
    ("nothing", lambda _: True),
)  # fmt: skip


def why(found: ProbeFindings, budget: int) -> list[str]:
    """Return the reasons, the deciding one first. `budget`: rollouts of the planned run."""
    rewards, split = found.rewards, found.split
    if not rewards:
        return ["No rollout has a reward, so nothing can be said. Let the runner judge: --reward."]
    if len(set(rewards)) < 2:
        said = f"All {len(rewards)} rollouts have the reward {rewards[0]:.2f}"
        hint = "whatever a prompt says, such rewards tell nothing apart. Look at the grader and at the tasks."
        return [f"{said}: {'nothing is missing.' if rewards[0] >= 1 else hint}"]
    reasons = _reasons(found, budget)
    if not found.grader_known and split.within >= MOSTLY * split.total and found.verdict != "nothing":
        reasons.append(
            "Nobody knows how noisy the grader is: hardly anything was judged twice, and all of what repeats differ by "
            "may be the grader's. Name it in rollouts.run (--reward), and it is asked again; or judge some rollouts "
            "again with penstock reward."
        )
    broken, count = sum(one.broken > 0 for one in found.observations), len(found.observations)
    if broken:
        reasons.append(f"In {broken} of {count} rollouts a tool failed by itself; no text mends that.")
    return reasons


def _reasons(found: ProbeFindings, budget: int) -> list[str]:
    belief, split, (pairs, decided) = found.belief, found.split, found.forecast
    gain, seed = belief.gain, words_of(belief.seed)
    takes = f"more than {MOST_PAIRS:,} pairs" if pairs is None else f"about {pairs} pairs"
    race = f"A race takes {takes} of rollouts; a budget of {budget} decides {decided:.0%} of such races."
    sure = f"{WORTH} or more with probability {gain.above(WORTH):.2f}"
    match found.verdict:
        case "prompts":
            stance = next(arm.stance for arm in found.arms if arm.candidate.id == belief.best)
            said = f"The prompt {stance} is better than the texts as they are by {words_of(gain)}"
            return [f"{said}, and by {sure}.", race]
        case "the grader is too noisy":
            part = split.grader or 0.0
            share = part / split.within if split.within else 0.0
            return [
                f"{share:.0%} of what repeats differ by is the grader: the same behaviour, judged {split.judgements} "
                f"times again, got rewards with a standard deviation of {part**0.5:.2f}.",
                race,
                "Mend the grader first: clearer criteria, fewer guesses, or the mean of several judgements.",
            ]
        case "tool texts":
            number = sum(one.misused > 0 for one in found.observations)
            return [
                f"In {number} of {len(found.observations)} rollouts a tool was asked for wrongly. That takes "
                f"{words_of(belief.tools)} from the mean reward; no prompt of the probe brings as much.",
                "Register the tools' descriptions (penstock mcp adopt) and name them in texts.tools.",
            ]
        case "weights":
            return [
                f"{words_of(found.missing)} is missing to the best reward, and no prompt is shown to mend it: the best "
                f"brings {words_of(gain)}, and {sure} only.",
                "The agent succeeds now and then, so there is something to learn from: penstock train grpo.",
            ]
        case "nothing" if not belief.gains:
            return [f"The texts as they are get {seed}: no rollout failed."]
        case "nothing":
            short = f"less than {SHORT} is missing to the best reward"
            return [f"The texts as they are get {seed}; {short}, and the best other prompt brings {words_of(gain)}."]


def words_of(found: NormalEstimate | IntervalEstimate) -> str:
    """Return an estimate as 0.21 (0.08 to 0.34)."""
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


class IntervalEstimate(Noun):
    """A figure with its 90 % interval."""

    mean: float
    low: float
    high: float


class PromptResult(Noun):
    stance: Stance
    candidate: str
    characters: int
    rollouts: int
    """Rollouts of it that have a reward."""
    mean: float | None = None
    gain: IntervalEstimate | None = None


class ToolCallSummary(Noun):
    calls: int = 0
    misused: int = 0
    """Rollouts with a call that was asked for wrongly."""
    broken: int = 0
    """Rollouts with a call that failed by itself."""
    cost: IntervalEstimate
    """What misuse takes from the mean reward of the seed."""


class Cost(Noun):
    rollouts: int
    agent_tokens: int | None = None
    """Tokens of these agents, in and out; None where nobody counted them."""
    reflections: int
    tokens: int
    money: float


class Advice(Noun):
    """The result of `penstock train apo advise`: its verdict, and the estimates that led to it."""

    run: str
    verdict: Verdict
    why: list[str]
    rollouts: int
    earlier: int
    """Those of them that were on the tape before."""
    unrewarded: int
    tasks: int
    mean: IntervalEstimate | None = None
    best_by_task: float | None = None
    """Mean over tasks of the best reward that any rollout of the task got: a bound that luck makes too high."""
    variance: VarianceComponents
    prompts: list[PromptResult]
    tools: ToolCallSummary
    failures: list[str] = Field(default_factory=list[str])
    pairs: int | None = None
    """Pairs of rollouts after which 4 of 5 races are decided, if there is a gain; None: more than 2,000."""
    decided: float
    """Share of the races that the configured budget decides."""
    budget: int
    needs: Cost | None = None
    """A run that decides 4 of 5 races; None where none does."""
    spent: Cost
    problems: list[str] = Field(default_factory=list[str])


def advice(
    config: ApoConfig, found: ProbeFindings, budget: SearchBudget, earlier: int, failures: list[str],
    problems: list[str],
) -> Advice:  # fmt: skip
    """Return the advice. `budget`: the probe's, with its use; `earlier`: observations from before the probe."""
    seen, belief, judged = found.observations, found.belief, with_rewards(found.observations)
    tokens = [one.tokens for one in seen[earlier:] if one.tokens is not None]
    spent = Cost(
        rollouts=budget.used_rollouts, agent_tokens=sum(tokens) if tokens else None,
        reflections=budget.used_reflections, tokens=budget.used_tokens, money=budget.used_money,
    )  # fmt: skip
    best: defaultdict[str, float] = defaultdict(float)
    for one, reward in judged:
        best[one.task] = max(best[one.task], reward)
    mean = means((one.prompt, reward) for one, reward in judged)
    counts = Counter(one.prompt for one, _ in judged)
    prompts = [
        PromptResult(
            stance=stance, candidate=one.id, characters=one.length, rollouts=counts[one.id], mean=mean.get(one.id),
            gain=_interval(belief.gains[one.id]) if one.id in belief.gains else None,
        )
        for one, stance in found.arms
    ]  # fmt: skip
    return Advice(
        run=config.run.name, verdict=found.verdict, why=why(found, config.budget.rollouts), rollouts=len(seen),
        earlier=earlier, unrewarded=len(seen) - len(judged), tasks=len({one.task for one in seen}),
        mean=_interval(belief.seed) if judged else None,
        best_by_task=sum(best.values()) / len(best) if best else None,
        variance=found.split.model_copy(update={"repeats": 0}), prompts=prompts,
        tools=ToolCallSummary(
            calls=sum(one.tools for one in seen), misused=sum(one.misused > 0 for one in seen),
            broken=sum(one.broken > 0 for one in seen), cost=_interval(belief.tools),
        ),
        failures=failures[:FAILURES], pairs=found.forecast.pairs, decided=found.forecast.power,
        budget=config.budget.rollouts, needs=_needs(found.forecast.pairs, config.engine, spent), spent=spent,
        problems=[f"{text} ({times} times)" if times > 1 else text for text, times in Counter(problems).items()],
    )  # fmt: skip


def _interval(found: NormalEstimate) -> IntervalEstimate:
    return IntervalEstimate.model_validate(found, from_attributes=True)


def _needs(pairs: int | None, engine: str, spent: Cost) -> Cost | None:
    """Return the cost of a run whose race has so many pairs, if its reflections cost as much as the probe's."""
    if pairs is None:
        return None
    rollouts = max(LEAST_RUN, ceil(2 * pairs / RACE_SHARE))
    reflections = round((1 - RACE_SHARE) * rollouts * REFLECTIONS.get(engine, _OURS))
    share = reflections / spent.reflections if spent.reflections else 0.0
    tokens = None if spent.agent_tokens is None else round(spent.agent_tokens * rollouts / max(1, spent.rollouts))
    return Cost(
        rollouts=rollouts, agent_tokens=tokens, reflections=reflections, tokens=round(spent.tokens * share),
        money=spent.money * share,
    )  # fmt: skip
