"""Credits the rewards of an attempt and its calls (`attempt_rewards`) to the calls.

The return is that of Sutton and Barto, 2018, §3.3, with a discount for each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.adapters.samples import Sample


def returns(samples: Sequence[Sample], gamma: float = 1.0) -> list[npt.NDArray[np.float32]]:
    """The discounted return of every segment: for each sample an array [S]. `samples` are all those of one attempt,
    merged or not. The return of a call is its own reward plus the later rewards of the attempt, discounted by `gamma`
    for each later call; the terminal reward belongs to the last call. Choices of one call have the same return. Raises
    ValueError for samples of several attempts and for gamma outside 0 to 1.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}: it must be from 0 to 1")
    names = {(sample.rollout, sample.attempt) for sample in samples}
    if len(names) > 1:
        raise ValueError(f"returns are made attempt by attempt, and these samples are of {len(names)}")
    own = {part.sequence: part.reward or 0.0 for sample in samples for part in sample.segments}
    after, total = (samples[0].reward if samples else 0.0), dict[int, float]()
    for place, sequence in enumerate(sorted(own, reverse=True)):
        after = own[sequence] + (after if place == 0 else gamma * after)
        total[sequence] = after
    return [np.array([total[part.sequence] for part in sample.segments], np.float32) for sample in samples]
