"""Explains a verdict in sentences with the figures that decided. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock.trainer.apo.advice.belief import NormalEstimate
from penstock.trainer.apo.advice.decision import (
    ENOUGH_JUDGEMENTS,
    MOSTLY,
    SHORT,
    WORTH,
    ProbeFindings,
    Verdict,
)
from penstock.trainer.apo.advice.forecast import MOST_PAIRS


def why(found: ProbeFindings, budget: int) -> list[str]:
    """Return the reasons, the deciding one first. `budget`: rollouts of the planned run."""
    if not found.rewards:
        return ["No rollout has a reward, so nothing can be said. Let the runner judge: --reward, or --reward-command."]
    if len(set(found.rewards)) < 2:
        return [_constant(found)]
    return [*_REASONS[found.verdict](found, budget), *_beside(found)]


def _constant(found: ProbeFindings) -> str:
    value, number = found.rewards[0], len(found.rewards)
    said = f"All {number} rollouts have the reward {value:.2f}"
    if value >= 1:
        return f"{said}: nothing is missing."
    return f"{said}: whatever a prompt says, such rewards tell nothing apart. Look at the grader and at the tasks."


def _prompts(found: ProbeFindings, budget: int) -> list[str]:
    gain, best = found.belief.gain, found.belief.best
    stance = next(arm.stance for arm in found.arms if arm.candidate.id == best)
    said = f"The prompt {stance} is better than the texts as they are by {interval(gain)}"
    sure = f"by {WORTH} or more with probability {gain.above(WORTH):.2f}"
    return [f"{said}, and {sure}.", _race(found, budget)]


def _race(found: ProbeFindings, budget: int) -> str:
    pairs, decided = found.forecast
    takes = f"more than {MOST_PAIRS:,} pairs" if pairs is None else f"about {pairs} pairs"
    return f"A race takes {takes} of rollouts; a budget of {budget} decides {decided:.0%} of such races."


def _noisy(found: ProbeFindings, budget: int) -> list[str]:
    part, grader = found.split.of_grader or 0.0, found.split.grader
    number = 0 if grader is None else grader.judgements
    share = part / found.split.within if found.split.within else 0.0
    return [
        f"{share:.0%} of what repeats differ by is the grader: the same behaviour, judged {number} times again, got "
        f"rewards with a standard deviation of {part**0.5:.2f}.",
        _race(found, budget),
        "Mend the grader first: clearer criteria, fewer guesses, or the mean of several judgements.",
    ]


def _tools(found: ProbeFindings, budget: int) -> list[str]:
    number = sum(one.misused > 0 for one in found.observations)
    return [
        f"In {number} of {len(found.observations)} rollouts a tool was asked for wrongly. That takes "
        f"{interval(found.belief.tools)} from the mean reward; no prompt of the probe brings as much.",
        "Register the tools' descriptions (penstock mcp adopt) and name them in texts.tools.",
    ]


def _weights(found: ProbeFindings, budget: int) -> list[str]:
    gain = found.belief.gain
    return [
        f"{interval(found.missing)} is missing to the best reward, and no prompt is shown to mend it: the best brings "
        f"{interval(gain)}, and {WORTH} or more with probability {gain.above(WORTH):.2f} only.",
        "The agent succeeds now and then, so there is something to learn from: penstock train grpo.",
    ]


def _nothing(found: ProbeFindings, budget: int) -> list[str]:
    if not found.belief.gains:
        return [f"The texts as they are get {interval(found.belief.seed)}: no rollout failed."]
    return [
        f"The texts as they are get {interval(found.belief.seed)}; less than {SHORT} is missing to the best reward, "
        f"and the best other prompt brings {interval(found.belief.gain)}.",
    ]


_REASONS: Final[Mapping[Verdict, Callable[[ProbeFindings, int], list[str]]]] = {
    "prompts": _prompts,
    "the grader is too noisy": _noisy,
    "tool texts": _tools,
    "weights": _weights,
    "nothing": _nothing,
}


def _beside(found: ProbeFindings) -> list[str]:
    """Return further facts for a person."""
    said: list[str] = []
    grader = found.split.grader
    unknown = grader is None or grader.judgements < ENOUGH_JUDGEMENTS
    if unknown and found.split.within >= MOSTLY * found.split.total and found.verdict != "nothing":
        said.append(
            "Nobody knows how noisy the grader is: hardly anything was judged twice, and all of what repeats differ by "
            "may be the grader's. Name it in rollouts.run (--reward), and it is asked again; or judge some rollouts "
            "again with penstock reward."
        )
    broken = sum(one.broken > 0 for one in found.observations)
    if broken:
        said.append(f"In {broken} of {len(found.observations)} rollouts a tool failed by itself; no text mends that.")
    return said


def interval(found: NormalEstimate) -> str:
    """Return an estimate as 0.21 (0.08 to 0.34)."""
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"
