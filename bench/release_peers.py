"""Other common rules of canaries, on the same rollouts. Each says when it would roll back.

`TTest`: Welch's t-test, one-sided at 5 %, after every rollout or once. `Argo`: the success rate of the candidate in
windows of rollouts, against a fixed threshold or the stable's, aborted after more than three failed windows, as an
AnalysisTemplate with `failureLimit: 3`. `Kayenta`: its judge on means of windows: the confidence interval of the
shift between the arms (Mann-Whitney, Hodges-Lehmann) beyond a quarter of the estimate. Written from their
documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist


@dataclass
class TTest:
    """Welch's t-test of the means; from 20 rollouts on each arm, where t is nearly normal."""

    at: int | None = None
    """Test once, after so many rollouts; None: after every one."""
    arms: tuple[list[float], list[float]] = field(default_factory=lambda: ([0.0] * 3, [0.0] * 3))
    seen: int = 0

    def add(self, arm: int, reward: float) -> bool:
        """Add a rollout; return True when the candidate is judged worse."""
        self.seen += 1
        sums = self.arms[arm]
        sums[0] += 1
        sums[1] += reward
        sums[2] += reward * reward
        if self.at is not None and self.seen != self.at:
            return False
        (n0, s0, q0), (n1, s1, q1) = self.arms
        if n0 < 20 or n1 < 20:
            return False
        m0, m1 = s0 / n0, s1 / n1
        gap = m0 - m1
        return gap > 0 and gap * gap > 2.7055 * ((q0 / n0 - m0 * m0) / (n0 - 1) + (q1 / n1 - m1 * m1) / (n1 - 1))


@dataclass
class Argo:
    """Success rates by window of rollouts."""

    window: int
    """Rollouts of a window, both arms together."""
    threshold: float
    """Lowest rate of the candidate; with `relative` a share of the stable's in the same window."""
    relative: bool = False
    limit: int = 3
    """Failed windows that do not abort."""
    counts: list[int] = field(default_factory=lambda: [0, 0])
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    failed: int = 0

    def add(self, arm: int, reward: float) -> bool:
        """Add a rollout; return True when it aborts."""
        self.counts[arm] += 1
        self.sums[arm] += reward
        if self.counts[0] + self.counts[1] < self.window:
            return False
        self.failed += self._fails()
        self.counts, self.sums = [0, 0], [0.0, 0.0]
        return self.failed > self.limit

    def _fails(self) -> bool:
        if not self.counts[1] or (self.relative and not self.counts[0]):
            return False
        bar = self.threshold * (self.sums[0] / self.counts[0] if self.relative else 1.0)
        return self.sums[1] / self.counts[1] < bar


@dataclass
class Kayenta:
    """Means of windows, compared at the end of each from the tenth on."""

    window: int = 100
    """Rollouts of a window, both arms together."""
    confidence: float = 0.98
    tolerance: float = 0.25
    least: int = 10
    """Windows before the first comparison."""
    counts: list[int] = field(default_factory=lambda: [0, 0])
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    means: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def add(self, arm: int, reward: float) -> bool:
        """Add a rollout; return True when the candidate is judged low."""
        self.counts[arm] += 1
        self.sums[arm] += reward
        if self.counts[0] + self.counts[1] < self.window:
            return False
        for one, means in enumerate(self.means):
            if self.counts[one]:
                means.append(self.sums[one] / self.counts[one])
        self.counts, self.sums = [0, 0], [0.0, 0.0]
        return min(map(len, self.means)) >= self.least and self._low()

    def _low(self) -> bool:
        stable, candidate = self.means
        shifts = sorted(after - before for after in candidate for before in stable)
        pairs = len(shifts)
        estimate = (shifts[pairs // 2] + shifts[(pairs - 1) // 2]) / 2
        spread = (pairs * (len(stable) + len(candidate) + 1) / 12) ** 0.5
        quantile = NormalDist().inv_cdf(1 - (1 - self.confidence) / 2)
        upper = shifts[min(pairs - 1, int(pairs / 2 + quantile * spread))]
        return upper < -self.tolerance * abs(estimate)


Peer = TTest | Argo | Kayenta


def on_a_ramp(rate: float) -> dict[str, Peer]:
    """Return the rules beside a canary on the ramp. `rate`: the stable's mean reward before the release."""
    return {
        "t-test after every rollout": TTest(),
        "t-test once, at 2,000": TTest(at=2000),
        "Argo-style, windows of 100, 0.9 of the former rate": Argo(100, 0.9 * rate),
        "Argo-style, windows of 500, 0.9 of the former rate": Argo(500, 0.9 * rate),
        "Argo-style, windows of 100, 0.95 of the stable": Argo(100, 0.95, relative=True),
    }


def at_half() -> dict[str, Peer]:
    """Return the rules that need equal arms."""
    return {"Kayenta-like judge": Kayenta()}
