"""Has the coverage of a resource fallen? Decided after each rollout that had its text, or one nearly its own. Pure.

The last `WINDOW` rollouts are compared with those before them. It has fallen when so few matches are less likely than
`UNLIKELY` if each rollout still matched as often as before. What was before counts as at most `MOST`, and as `MOST`
while little is known, so a few strange calls are no alarm: it takes four misses among no others, or ten among forty.
While it is down, what was before stays as it was; it is up again when the last rollouts are likely once more.
"""

from __future__ import annotations

from math import comb
from typing import Final, Literal, TypeAlias

from penstock.gateway.model.coverage import Coverage

Turn: TypeAlias = Literal["fell", "back"]
WINDOW: Final = 40
"""Rollouts that are looked at."""
UNLIKELY: Final = 1e-4
"""Probability below which it has fallen."""
LIKELY: Final = 0.05
"""Probability from which it is up again."""
MOST: Final = 0.95
KNOWN: Final = 20
"""Rollouts that the first assumption counts as."""
FADES: Final = 1 - 1 / 500
"""Weight of what was before, with each rollout that joins it."""


def usual(coverage: Coverage) -> float:
    """Which share of rollouts matched before."""
    return min(MOST, (coverage.before_matched + MOST * KNOWN) / (coverage.before + KNOWN))


def likelihood(matched: int, rollouts: int, before: float) -> float:
    """The probability that so few or fewer of some rollouts match, if each does with the probability `before`."""
    return sum(comb(rollouts, k) * before**k * (1 - before) ** (rollouts - k) for k in range(matched + 1))


def saw(coverage: Coverage, matched: bool) -> None:
    """Adds a rollout."""
    coverage.recent += "+" if matched else "-"
    leaves, coverage.recent = coverage.recent[:-WINDOW], coverage.recent[-WINDOW:]
    if leaves and coverage.fell_ns is None:
        coverage.before = coverage.before * FADES + 1
        coverage.before_matched = coverage.before_matched * FADES + (leaves == "+")


def judged(coverage: Coverage, now_ns: int) -> Turn | None:
    """Notes whether it has fallen, or is up again; None where nothing changes."""
    matched, rollouts, before = coverage.recent.count("+"), len(coverage.recent), usual(coverage)
    likely = likelihood(matched, rollouts, before)
    if coverage.fell_ns is None and likely < UNLIKELY:
        coverage.fell_ns = now_ns
        coverage.fell = f"{matched} of the last {rollouts} rollouts matched, {before:.0%} or more did before"
        return "fell"
    if coverage.fell_ns is not None and likely >= LIKELY:
        coverage.fell_ns, coverage.fell = None, ""
        return "back"
    return None
