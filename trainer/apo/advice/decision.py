"""Decides what is worth doing, by a table: the first row that holds decides. Pure.

    nothing                      all rollouts have the same reward, or nothing is missing to the best one
    tool texts                   wrongly used tools cost more than WORTH, and more than the best prompt brings
    the grader is too noisy      most of the variance of repeats is the grader's, and a race would not be decided
    prompts                      a prompt of the probe is better by more than WORTH
    weights                      SHORT or more is missing to the best reward, whatever the prompt
    nothing                      else

Costs and missing reward must be more likely than not, by `belief`. Gains must be more certain (CONFIDENT), because one
prompt of several looks good in any case. WORTH is the least gain that justifies a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from penstock.trainer.apo.advice.belief import Belief, NormalEstimate, fit_belief, noise
from penstock.trainer.apo.advice.forecast import RaceForecast, forecast_race
from penstock.trainer.apo.advice.observation import Arm, Observation, with_rewards
from penstock.trainer.apo.advice.variance import VarianceComponents, variance_components
from penstock.trainer.apo.search import RACE_SHARE

Verdict = Literal["prompts", "weights", "tool texts", "the grader is too noisy", "nothing"]
VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
WORTH: Final = 0.05
"""The least gain in mean reward that is worth a run."""
SHORT: Final = 0.2
"""Reward that must be missing to the best one for training weights to be worth it."""
LIKELY: Final = 0.5
CONFIDENT: Final = 0.75
"""Probability with which the best prompt of several must be better by `WORTH`."""
DECIDED: Final = 0.6
"""Share of the races that a budget must decide."""
CERTAIN: Final = 0.95
MOSTLY: Final = 0.5
"""Share of the variance within cells above which it is mostly the grader's."""
ENOUGH_JUDGEMENTS: Final = 6
"""Fewest repeated judgements that allow a statement on the grader."""


@dataclass(frozen=True, slots=True)
class ProbeFindings:
    """The results of a probe's observations."""

    arms: Sequence[Arm]
    """The prompts; the seed first."""
    observations: Sequence[Observation]
    """The rollouts."""
    split: VarianceComponents
    """The split of the reward's variance."""
    belief: Belief
    """The estimates of gains."""
    forecast: RaceForecast
    """The forecast of the race."""

    @property
    def rewards(self) -> list[float]:
        """The rewards of all observations that have one."""
        return [seen.reward for seen in with_rewards(self.observations)]

    @property
    def missing(self) -> NormalEstimate:
        """The seed's distance to the best reward."""
        return NormalEstimate(1 - self.belief.seed.mean, self.belief.seed.sd)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the first row that holds."""
        return next(verdict for verdict, holds in TABLE if holds(self))


def derive_findings(arms: Sequence[Arm], observations: Sequence[Observation], rollouts: int) -> ProbeFindings:
    """Return the findings from observations. `rollouts`: budget of the planned run."""
    parts = variance_components(observations)
    belief = fit_belief(arms, observations, parts)
    variance = 2 * (noise(parts) + parts.interaction)
    race = forecast_race(belief.gain, WORTH, variance, round(rollouts * RACE_SHARE) // 2)
    return ProbeFindings(arms, observations, parts, belief, race)


def _constant(found: ProbeFindings) -> bool:
    return len(set(found.rewards)) < 2


def _tools(found: ProbeFindings) -> bool:
    belief = found.belief
    return belief.tools.above(WORTH) >= LIKELY and belief.tools.mean >= belief.gain.mean


def _noisy(found: ProbeFindings) -> bool:
    grader, part = found.split.grader, found.split.of_grader
    if grader is None or part is None or grader.judgements < ENOUGH_JUDGEMENTS:
        return False
    undecided = found.forecast.power < DECIDED and found.belief.gain.above(WORTH) < CERTAIN
    return part >= MOSTLY * found.split.within and undecided


def _prompts(found: ProbeFindings) -> bool:
    return found.belief.gain.above(WORTH) >= CONFIDENT


def _weights(found: ProbeFindings) -> bool:
    return found.missing.above(SHORT) >= LIKELY


TABLE: Final[Sequence[tuple[Verdict, Callable[[ProbeFindings], bool]]]] = (
    ("nothing", _constant),
    ("tool texts", _tools),
    ("the grader is too noisy", _noisy),
    ("prompts", _prompts),
    ("weights", _weights),
    ("nothing", lambda _: True),
)
