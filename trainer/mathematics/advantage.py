"""Credit: how much better or worse each rollout was than expected, broadcast to the tokens that were sampled.

Let r_1 … r_n be the rewards of a group, the rollouts of one task.

    dr_grpo      A_i = r_i - mean(r)                       Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO)
    grpo         A_i = (r_i - mean(r)) / (std(r) + eps)    Shao et al. 2024, arXiv:2402.03300 (DeepSeekMath)
    rloo         A_i = r_i - mean(r_j, j != i)             Ahmadian et al. 2024, arXiv:2402.14740
    reinforce++  as grpo, over the whole batch             Hu et al. 2025, arXiv:2501.03262: there by tokens, with the
                                                           KL term in their rewards

std is the sample's (n - 1) and eps 1e-6, as in verl; DeepSeekMath has no eps and does not say which std. The unit is
the rollout, however many calls or samples it was cut into: normalising over rows instead would let long rollouts decide
the mean.

With `credit = "turn"` the unit is the call and r its return (`adapters.samples.returns`); the baseline is taken over
all calls of the group (for rloo: of the other rollouts). The process supervision of DeepSeekMath, §4.1.3, compares all
steps of a group, too, but normalises their rewards and sums afterwards.

Failed rollouts are compared too, by the reward of their failure, even if none of their tokens can be trained on:
otherwise a policy that makes its agents crash or loop would be compared with its successful rollouts only.

The reward of an answer that was cut off at the limit of tokens says little of how good it would have been. With
`overlong = "mask"` a rollout with such an answer has no loss; its reward is still compared (overlong filtering of
DAPO, arXiv:2503.14476, section 3.4). With two numbers (a, b) length has a price, DAPO's soft overlong punishment: the
reward changes by

    0  for n <= a,    (a - n) / (b - a)  for a < n <= b,    -1  for n > b, and for an answer that was cut off

where n is the tokens of the rollout's longest answer. The paper (equation 13) has one answer, (a, b) = (L_max -
L_cache, L_max), and looks at the length alone: -1 for an answer that was cut off is our addition. With `credit =
"turn"` each call is punished for its own answer.

A group whose rewards are all the same teaches nothing, and a group of one has nothing to compare with. Both are left
out and reported; otherwise they would only dilute the mean over rollouts. `reinforce++` has one group, the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.adapters.samples import Sample, Segment, returns
from penstock.trainer.config import AdvantageSettings, Credit, Estimator
from penstock.trainer.mathematics.batch import Owner, TokenExample, example

Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]
Reason = Literal["reward", "single", "equal", "truncated"]
"""Why a rollout is left out: no finite reward, alone in its group, all rewards of the group are equal, or an answer was
cut off."""

EPS = 1e-6
"""Keeps a division by a spread finite; values that differ by less count as equal."""

BATCH = ""
"""Name of the group of all rollouts of a step; no group of rollouts has it."""

Key = tuple[Owner, int, int]
"""(rollout and attempt, sequence, choice) of a call; a whole rollout has 0 and 0."""


@dataclass(slots=True)
class CreditAssignment:
    """The examples to train on, and the rollouts that are left out, with the reason."""

    examples: list[TokenExample] = field(default_factory=list[TokenExample])
    dropped: dict[Owner, Reason] = field(default_factory=dict[Owner, Reason])


NO_REWARDS: Mapping[str, Sequence[float]] = {}


def credit(
    samples: Sequence[Sample], config: AdvantageSettings, beside: Mapping[str, Sequence[float]] = NO_REWARDS
) -> CreditAssignment:
    """Return the examples of the samples, in their order. Raises `ValueError` when samples of a rollout disagree on its
    reward. `beside`: rewards by group of rollouts without samples, which are compared too where the unit is the
    rollout."""
    units = _units(samples, config)
    made = CreditAssignment(dropped={key[0]: "reward" for key, value in units.items() if not np.isfinite(value)})
    worth: dict[Key, float] = {}
    for group, keys in _by_group(samples, units, config.estimator, made.dropped).items():
        others = [] if config.credit == "turn" else _others(group, beside)
        values = np.array([*(units[key] for key in keys), *others], np.float64)
        owners = _numbered([*(key[0] for key in keys), *(("", str(number)) for number in range(len(others)))])
        reason = drop_reason(values, owners)
        if reason is None:
            worth |= zip(keys, ESTIMATORS[config.estimator](values, owners)[: len(keys)].tolist(), strict=True)
        else:
            made.dropped |= dict.fromkeys((key[0] for key in keys), reason)
    if config.overlong == "mask":
        cut = {_owner(sample) for sample in samples if any(segment.truncated for segment in sample.segments)}
        made.dropped |= dict.fromkeys(cut - made.dropped.keys(), "truncated")
    for sample in samples:
        if _owner(sample) not in made.dropped:
            made.examples.append(
                example(sample, [worth[_key(sample, each, config.credit)] for each in sample.segments])
            )
    return made


def drop_reason(values: Values, owners: Numbers) -> Reason | None:
    """Return why a group teaches nothing; None when it does. `owners`: [n] the rollout of each value, numbered from
    0."""
    if owners.max() == 0:
        return "single"
    return "equal" if np.ptp(values) < EPS else None


def _owner(sample: Sample) -> Owner:
    return sample.rollout, sample.attempt


def _key(sample: Sample, segment: Segment, per: Credit) -> Key:
    return (_owner(sample), 0, 0) if per == "rollout" else (_owner(sample), segment.sequence, segment.choice)


def _units(samples: Sequence[Sample], config: AdvantageSettings) -> dict[Key, float]:
    """Return the values to compare: the reward of every rollout, or the return of every call."""
    owned: dict[Owner, list[Sample]] = {}
    for sample in samples:
        owned.setdefault(_owner(sample), []).append(sample)
    found: dict[Key, float] = {}
    for owner, mine in owned.items():
        reward = _reward(owner, mine)
        if config.credit == "rollout" or not np.isfinite(reward):
            found[owner, 0, 0] = reward + min(overlong(part, config) for sample in mine for part in sample.segments)
            continue
        for sample, values in zip(mine, returns(mine), strict=True):
            for segment, value in zip(sample.segments, values.tolist(), strict=True):
                found[_key(sample, segment, "turn")] = value + overlong(segment, config)
    return found


def overlong(segment: Segment, config: AdvantageSettings) -> float:
    """Return the change of the reward for an answer's length: 0 to -1."""
    if isinstance(config.overlong, str):
        return 0.0
    begins, whole = config.overlong
    if segment.truncated:
        return -1.0
    return -min(1.0, max(0.0, (segment.end - segment.start - begins) / (whole - begins)))


def _reward(owner: Owner, samples: Sequence[Sample]) -> float:
    rewards = {sample.reward for sample in samples if np.isfinite(sample.reward)}
    if len(rewards) > 1:
        raise ValueError(f"rollout {owner[0]}: its samples have different rewards: {sorted(rewards)}")
    return min((sample.reward for sample in samples), key=np.isfinite)


def _by_group(
    samples: Sequence[Sample], units: Iterable[Key], estimator: Estimator, dropped: Container[Owner]
) -> dict[str, list[Key]]:
    """Return the units of each group, without rollouts that are dropped already. `BATCH` is the group of the whole
    batch."""
    groups = {_owner(sample): BATCH if estimator == "reinforce++" else sample.group for sample in samples}
    found: dict[str, list[Key]] = {}
    for key in units:
        if key[0] not in dropped:
            found.setdefault(groups[key[0]], []).append(key)
    return found


def _others(group: str, beside: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the rewards of a group's rollouts without samples, which are compared too."""
    return [reward for name, rewards in beside.items() if group in (name, BATCH) for reward in rewards]


def _numbered(owners: Sequence[Owner]) -> Numbers:
    numbers: dict[Owner, int] = {}
    return np.array([numbers.setdefault(owner, len(numbers)) for owner in owners], np.intp)


def _centred(values: Values, owners: Numbers) -> Values:
    return values - values.mean()


def _scaled(values: Values, owners: Numbers) -> Values:
    return (values - values.mean()) / (values.std(ddof=1) + EPS)


def _leave_one_out(values: Values, owners: Numbers) -> Values:
    sums, counts = np.bincount(owners, values), np.bincount(owners)
    others = (values.sum() - sums) / (len(values) - counts)
    return values - others[owners]


ESTIMATORS: dict[Estimator, Callable[[Values, Numbers], Values]] = {
    "dr_grpo": _centred,
    "grpo": _scaled,
    "rloo": _leave_one_out,
    "reinforce++": _scaled,
}
"""(values, the rollout of each) of one group -> advantages."""
