"""The choice among several upstreams that share a model's calls, by rollout. Pure.

A conversation is cheapest where its beginning is in the cache. So all calls of a rollout go to the same upstream, by
weighted rendezvous hashing of its name (Thaler and Ravishankar 1998; the weights as in Schindelhauer and Schomaker
2005): whichever upstream comes or goes, only the rollouts that it serves move. An upstream that already has more than
1.25 times its share of the running calls is passed over for the next in the rollout's own order (consistent hashing
with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018), so that no upstream is overrun.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

LOAD_BOUND: Final = 1.25
"""Multiple of its share that an upstream is given at most."""


_REMEMBERED: Final = 4096
"""Scores that are cached: a rollout has many calls."""


class WeightedUpstream(Protocol):
    """An upstream that shares calls with others."""

    name: str

    @property
    def running(self) -> int:
        """Number of calls under way at this upstream."""
        ...


T = TypeVar("T", bound=WeightedUpstream)


def rank_upstreams(upstreams: Sequence[T], weights: Mapping[str, float], rollout: str) -> list[T]:
    """Return upstreams in the order in which they are tried for a call of a rollout. Those without a weight are spares
    and come last, in their own order."""
    sharing = [one for one in upstreams if one.name in weights]
    sharing.sort(key=lambda one: _score(rollout, one.name, weights[one.name]), reverse=True)
    after = 1 + sum(one.running for one in sharing)
    all_weights = sum(weights[one.name] for one in sharing)
    free, crowded = list[T](), list[T]()
    for one in sharing:
        full = one.running >= math.ceil(LOAD_BOUND * after * weights[one.name] / all_weights)
        (crowded if full else free).append(one)
    spares = [one for one in upstreams if one.name not in weights] if len(sharing) < len(upstreams) else []
    return free + crowded + spares


@lru_cache(_REMEMBERED)
def _score(rollout: str, upstream: str, weight: float) -> float:
    drawn = int.from_bytes(blake2b(f"{rollout}\0{upstream}".encode(), digest_size=8).digest())
    return -weight / math.log((drawn + 1) / (2**64 + 1))
