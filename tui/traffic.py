"""The recent digests of the feed: calls, errors and tokens a second, for sparklines. It keeps the last `SECONDS`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.gateway.model.answers import Digest

SECONDS: Final = 120
"""The time for which digests are kept; s."""
BUCKETS: Final = 24


class RateSeries(NamedTuple):
    """The course of one rate, such as calls a second."""

    rates: list[float | None]
    """Rates a second in `BUCKETS` intervals, oldest first; None for intervals before the feed was followed."""

    @property
    def now(self) -> float:
        """Mean rate of the last two intervals."""
        last = [rate for rate in self.rates[-2:] if rate is not None]
        return sum(last) / len(last) if last else 0.0

    @property
    def peak(self) -> float:
        """The highest rate of an interval; 0 when none is known."""
        return max((rate for rate in self.rates if rate is not None), default=0.0)


class DigestHistory:
    """A bounded history of digests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds, from any origin."""
        self._clock, self._since = clock, clock()
        self._told: deque[tuple[float, Digest]] = deque()

    def add(self, digest: Digest) -> None:
        """Add a digest that has just come."""
        now = self._clock()
        self._told.append((now, digest))
        while self._told and self._told[0][0] < now - SECONDS:
            self._told.popleft()

    def rate_series(self, of: Callable[[Digest], int]) -> RateSeries:
        """A figure of the digests over time."""
        now, size = self._clock(), SECONDS / BUCKETS
        sums: list[float | None] = [
            0.0 if now - (BUCKETS - at - 1) * size >= self._since else None for at in range(BUCKETS)
        ]
        for at, digest in self._told:
            place = BUCKETS - 1 - int((now - at) / size)
            if 0 <= place < BUCKETS:
                sums[place] = (sums[place] or 0.0) + of(digest) / size
        return RateSeries(sums)
