"""Tables of outcomes: the releases, the leads between contestants, and the share of harmful releases. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Final

from bench.apo.contest import Outcome
from bench.apo.worlds import FAMILIES, HEADROOM

WIDE: Final = 1.96
HALF: Final = 0.5


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return Markdown; all columns but the first are right-aligned."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(values: Sequence[bool]) -> str:
    """Return the share of True in percent; "-" without values."""
    return f"{100 * mean(values):.0f} %" if values else "-"


def values(outcomes: Sequence[Outcome], budget: int) -> str:
    """Return the mean value of the prompt after a run, x 100, by contestant and family; with rollouts and
    reflections."""
    found = [one for one in outcomes if one.budget == budget]
    rows = [["nothing", *_means(_first(found), lambda one: one.before), "0", "0"]]
    for name in _names(found):
        mine = [one for one in found if one.contestant == name]
        used = [f"{mean(one.rollouts for one in mine):.0f}", f"{mean(one.reflections for one in mine):.0f}"]
        rows.append([name, *_means(mine, lambda one: one.after), *used])
    rows.append(["the best there is", *_means(_first(found), lambda one: one.ceiling), "", ""])
    return table([f"{budget:,} rollouts", *FAMILIES, "with headroom", "rollouts", "reflections"], rows)


def _first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of one contestant: the worlds are the same for all."""
    return [one for one in outcomes if one.contestant == outcomes[0].contestant]


def _names(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(one.contestant for one in outcomes))


def _means(outcomes: Sequence[Outcome], read: Callable[[Outcome], float]) -> list[str]:
    by_family = [[read(one) for one in outcomes if one.family == family] for family in FAMILIES]
    pooled = [read(one) for one in outcomes if one.family in HEADROOM]
    return [f"{100 * mean(found):.1f}" if found else "-" for found in (*by_family, pooled)]


def ahead(outcomes: Sequence[Outcome]) -> str:
    """Return the lead of the first contestant over each other one: paired by world, x 100, with 95 % intervals."""
    budgets = sorted({one.budget for one in outcomes})
    first, *others = _names(outcomes)
    after = {(one.contestant, one.budget, one.family, one.seed): one.after for one in outcomes}
    rows: list[list[str]] = []
    for other in others:
        row = [f"{first} - {other}"]
        for budget in budgets:
            gains = [
                100 * (value - after[other, b, family, seed])
                for (name, b, family, seed), value in after.items()
                if name == first and b == budget and family in HEADROOM and (other, b, family, seed) in after
            ]
            row.append(interval(gains))
        rows.append(row)
    return table(["ahead by", *(f"{budget:,} rollouts" for budget in budgets)], rows)


def interval(values: Sequence[float]) -> str:
    """Return the mean and half the width of its 95 % interval, by the normal distribution."""
    if len(values) < 2:
        return "-"
    return f"{mean(values):+.1f} ± {WIDE * stdev(values) / sqrt(len(values)):.1f}"


def worse(outcomes: Sequence[Outcome]) -> str:
    """Return the share of the runs that release a worse prompt than the seed's, by family; all budgets."""
    rows: list[list[str]] = []
    for name in _names(outcomes):
        mine = [one for one in outcomes if one.contestant == name]
        shares = [percent([one.worse for one in mine if one.family == family]) for family in FAMILIES]
        broken = [_recovered(one) for one in mine if one.family == "broken"]
        rows.append([name, *shares, percent(broken)])
    return table(["worse than the seed", *FAMILIES, "broken seed half mended"], rows)


def _recovered(one: Outcome) -> bool:
    return one.after - one.before >= HALF * (one.ceiling - one.before)


def released(outcomes: Sequence[Outcome]) -> str:
    """Return the share of the runs that release anything; for placebo worlds, where nothing is better."""
    rows = [
        [name, *(percent([one.released for one in outcomes if (one.contestant, one.family) == (name, family)])
                 for family in FAMILIES)]
        for name in _names(outcomes)
    ]  # fmt: skip
    return table(["releases under placebo", *FAMILIES], rows)
