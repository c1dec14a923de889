"""Decides whether the coverage of a resource has fallen: after each rollout that had its text, or one nearly its own.
Pure.

The last `WINDOW` rollouts are compared with those before them. The coverage has fallen when so few matches are less
likely than `UNLIKELY` if each rollout still matched as often as before. The earlier rate counts as at most `MOST`, and
as `MOST` while little is known, so a few strange calls are no alarm: it takes four misses among no others, or ten among
forty. While the coverage is down, the earlier rate stays as it was; it is up again when the last rollouts are likely
once more.
"""

from __future__ import annotations

from math import comb
from typing import Final, Literal, TypeAlias

from penstock.gateway.model.coverage import Coverage

CoverageChange: TypeAlias = Literal["fell", "back"]
WINDOW: Final = 40
"""Number of the last rollouts that are compared."""
UNLIKELY: Final = 1e-4
"""Probability below which the coverage has fallen."""
LIKELY: Final = 0.05
"""Probability from which the coverage is up again."""
MOST: Final = 0.95
KNOWN: Final = 20
"""Number of rollouts that the initial assumption (`MOST`) weighs as much as."""
FADES: Final = 1 - 1 / 500
"""Factor on the weight of the earlier rollouts with each rollout that joins them."""


def baseline_rate(coverage: Coverage) -> float:
    """The share of rollouts that matched before the window; at most `MOST`."""
    return min(MOST, (coverage.before_matched + MOST * KNOWN) / (coverage.before + KNOWN))


def likelihood(matched: int, rollouts: int, before: float) -> float:
    """The probability that `matched` or fewer of `rollouts` match, if each does with the probability `before`."""
    return sum([comb(rollouts, k) * before**k * (1 - before) ** (rollouts - k) for k in range(matched + 1)])


def observe(coverage: Coverage, matched: bool) -> None:
    """Adds a rollout to the window; the rollout that leaves it joins the earlier ones unless the coverage is down."""
    coverage.recent += "+" if matched else "-"
    leaves, coverage.recent = coverage.recent[:-WINDOW], coverage.recent[-WINDOW:]
    if leaves and coverage.fell_ns is None:
        coverage.before = coverage.before * FADES + 1
        coverage.before_matched = coverage.before_matched * FADES + (leaves == "+")


def detect_change(coverage: Coverage, now_ns: int) -> CoverageChange | None:
    """Records in `coverage` that it has fallen, or is up again, and returns which; None where nothing changes."""
    matched, rollouts, before = coverage.recent.count("+"), len(coverage.recent), baseline_rate(coverage)
    likely = likelihood(matched, rollouts, before)
    if coverage.fell_ns is None and likely < UNLIKELY:
        coverage.fell_ns = now_ns
        coverage.fell = f"{matched} of the last {rollouts} rollouts matched, {before:.0%} or more did before"
        return "fell"
    if coverage.fell_ns is not None and likely >= LIKELY:
        coverage.fell_ns, coverage.fell = None, ""
        return "back"
    return None
