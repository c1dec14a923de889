"""Advice as it is printed, for a person (`page`) or as JSON: the verdict, its figures, and what a run costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil
from typing import Final

from pydantic import Field

from penstock.gateway.model.base import Noun
from penstock.trainer.apo.advice.belief import NormalEstimate
from penstock.trainer.apo.advice.decision import ProbeFindings, Verdict
from penstock.trainer.apo.advice.explanation import why
from penstock.trainer.apo.advice.observation import Observation, Stance, with_rewards
from penstock.trainer.apo.budget import SearchBudget
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.engines import beam, pooled_edits
from penstock.trainer.apo.search import RACE_SHARE

LEAST_RUN: Final = 40
"""Rollouts that `budget.rollouts` must be at least."""
FAILURES: Final = 3
"""Most failures in the advice."""
_OURS: Final = pooled_edits.REFLECTIONS / ((pooled_edits.ARMS[1] + 2) * pooled_edits.TASKS)
_LARGEST: Final = beam.SIZES[0]
_BEAM: Final = 2 * _LARGEST.width * _LARGEST.branch * _LARGEST.rounds / _LARGEST.rollouts(beam.HELD_OUT[0])
REFLECTIONS: Final = {"ours": _OURS, "beam": _BEAM}
"""Reflections for each rollout of the search, by engine; other engines count as `ours`."""


class IntervalEstimate(Noun):
    """A figure with its 90 % interval."""

    mean: float
    """What is expected."""
    low: float
    """Where its interval begins."""
    high: float
    """Where it ends."""


class Variance(Noun):
    """The variance of the reward, in parts."""

    task: float
    """Between tasks."""
    prompt: float
    """Between prompts, on average over tasks."""
    task_prompt: float
    """Of prompts on single tasks, beyond that."""
    within: float
    """Between repeats: the agent's randomness and the grader."""
    grader: float | None = None
    """The grader's part of that; None where nothing was judged twice, and it may be all of it."""
    judgements: int = 0
    """Judgements of a behaviour that was judged before."""


class PromptResult(Noun):
    """A prompt of the probe."""

    stance: Stance
    """How it came about."""
    candidate: str
    """Its id."""
    characters: int
    """Its length."""
    rollouts: int
    """Rollouts of it that have a reward."""
    mean: float | None = None
    """Their mean reward; None without any."""
    gain: IntervalEstimate | None = None
    """How much better than the seed it is believed to be; None of the seed."""


class ToolCallSummary(Noun):
    """How tool calls went."""

    calls: int = 0
    """All of them."""
    misused: int = 0
    """Rollouts with a call that was asked for wrongly."""
    broken: int = 0
    """Rollouts with a call that failed by itself."""
    cost: IntervalEstimate
    """What misuse takes from the mean reward of the seed."""


class Cost(Noun):
    """What something needs."""

    rollouts: int
    """Rollouts of agents."""
    agent_tokens: int | None = None
    """Tokens of these agents, in and out; None where nobody counted them."""
    reflections: int
    """Calls of the reflecting model."""
    tokens: int
    """Tokens of these, in and out, hidden reasoning counted."""
    money: float
    """What these tokens cost, in the currency of the configured prices."""


class Advice(Noun):
    """What `penstock train apo advise` says."""

    run: str
    """The run that is thought of."""
    verdict: Verdict
    """What is worth doing."""
    why: list[str]
    """Why, in sentences."""
    rollouts: int
    """Rollouts that were looked at."""
    earlier: int
    """Those of them that were on the tape before."""
    unrewarded: int
    """Those of them that nobody has judged."""
    tasks: int
    """Tasks that they were of."""
    mean: IntervalEstimate | None = None
    """Mean reward of the texts as they are; None where nothing was judged."""
    best_by_task: float | None = None
    """Mean over tasks of the best reward that any rollout of the task got: a bound that luck makes too high."""
    variance: Variance
    """Of the reward."""
    prompts: list[PromptResult]
    """The seed first."""
    tools: ToolCallSummary
    """How tool calls went."""
    failures: list[str] = Field(default_factory=list[str])
    """What reflections say goes wrong; some of it."""
    pairs: int | None = None
    """Pairs of rollouts after which 4 of 5 races are decided, if there is a gain; None: more than 2,000."""
    decided: float
    """Share of the races that the configured budget decides."""
    budget: int
    """Rollouts of that budget."""
    needs: Cost | None = None
    """A run that decides 4 of 5 races; None where none does."""
    spent: Cost
    """What the probe has used."""
    problems: list[str] = Field(default_factory=list[str])
    """What went wrong with it."""


def advice(
    config: ApoConfig,
    found: ProbeFindings,
    budget: SearchBudget,
    earlier: int,
    failures: list[str],
    problems: list[str],
) -> Advice:
    """Return the advice. `budget`: the probe's, with its use; `earlier`: observations from before the probe, which cost
    it nothing."""
    observations, split, belief = found.observations, found.split, found.belief
    judged = with_rewards(observations)
    spent = _spent(observations[earlier:], budget)
    return Advice(
        run=config.run.name,
        verdict=found.verdict,
        why=why(found, config.budget.rollouts),
        rollouts=len(observations),
        earlier=earlier,
        unrewarded=len(observations) - len(judged),
        tasks=len({one.task for one in observations}),
        mean=_estimate(belief.seed) if judged else None,
        best_by_task=_best_by_task(observations),
        variance=Variance(
            task=split.task,
            prompt=split.prompt,
            task_prompt=split.interaction,
            within=split.within,
            grader=split.of_grader,
            judgements=0 if split.grader is None else split.grader.judgements,
        ),
        prompts=_prompts(found),
        tools=ToolCallSummary(
            calls=sum(one.tools for one in observations),
            misused=sum(one.misused > 0 for one in observations),
            broken=sum(one.broken > 0 for one in observations),
            cost=_estimate(belief.tools),
        ),
        failures=failures[:FAILURES],
        pairs=found.forecast.pairs,
        decided=found.forecast.power,
        budget=config.budget.rollouts,
        needs=_needs(found.forecast.pairs, config.engine, spent),
        spent=spent,
        problems=[f"{text} ({times} times)" if times > 1 else text for text, times in Counter(problems).items()],
    )


def _estimate(found: NormalEstimate) -> IntervalEstimate:
    return IntervalEstimate(mean=found.mean, low=found.low, high=found.high)


def _best_by_task(observations: Sequence[Observation]) -> float | None:
    best: defaultdict[str, float] = defaultdict(float)
    for seen in with_rewards(observations):
        best[seen.observation.task] = max(best[seen.observation.task], seen.reward)
    return sum(best.values()) / len(best) if best else None


def _prompts(found: ProbeFindings) -> list[PromptResult]:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for seen in with_rewards(found.observations):
        rewards[seen.observation.prompt].append(seen.reward)
    gains = found.belief.gains
    return [
        PromptResult(
            stance=arm.stance,
            candidate=name,
            characters=arm.candidate.length,
            rollouts=len(rewards[name]),
            mean=sum(rewards[name]) / len(rewards[name]) if rewards[name] else None,
            gain=_estimate(gains[name]) if name in gains else None,
        )
        for arm in found.arms
        for name in [arm.candidate.id]
    ]


def _spent(observations: Sequence[Observation], budget: SearchBudget) -> Cost:
    counted = [one.tokens for one in observations if one.tokens is not None]
    return Cost(
        rollouts=budget.used_rollouts,
        agent_tokens=sum(counted) if counted else None,
        reflections=budget.used_reflections,
        tokens=budget.used_tokens,
        money=budget.used_money,
    )


def _needs(pairs: int | None, engine: str, spent: Cost) -> Cost | None:
    """Return the cost of a run whose race has so many pairs. A reflection is assumed to cost as much as one of the
    probe."""
    if pairs is None:
        return None
    rollouts = max(LEAST_RUN, ceil(2 * pairs / RACE_SHARE))
    reflections = round((1 - RACE_SHARE) * rollouts * REFLECTIONS.get(engine, _OURS))
    share = reflections / spent.reflections if spent.reflections else 0.0
    tokens = None if spent.agent_tokens is None else round(spent.agent_tokens * rollouts / max(1, spent.rollouts))
    return Cost(
        rollouts=rollouts,
        agent_tokens=tokens,
        reflections=reflections,
        tokens=round(spent.tokens * share),
        money=spent.money * share,
    )
