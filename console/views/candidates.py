"""The candidates of a run that searches: as a tree for a terminal, and as a chart. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.svg import Chart, LineSeries
from penstock.console.views.table import Column, Listing, clean, figure, plain
from penstock.gateway.model.run import CandidateTree, RunCandidate

TREE = (
    Column("candidate"), figure("mean"), figure("rollouts", 3), Column("state"), figure("gain", 4, ),
    figure("e-value", 5), figure("length", 1), Column("claim", 6, "cut", 16),
)  # fmt: skip
COLOURS = {"winner": "bold green", "better": "green", "out": "red", "racing": "yellow"}
T = TypeVar("T", bound=RunCandidate)


def ordered(found: Sequence[T]) -> list[tuple[int, T]]:
    """(depth, candidate), in the order of the tree: below each candidate those that were made from it, finalists and
    the highest mean first. The root comes first; candidates whose parents do not lead to a root come last."""
    if not found:
        return []
    root, names = found[0], {one.id for one in found}
    children: defaultdict[str, list[T]] = defaultdict(list)
    for one in found[1:]:
        children[one.parent if one.parent and one.parent in names else root.id].append(one)

    lines, waiting = list[tuple[int, T]](), [(0, root)]
    while waiting:
        depth, one = waiting.pop()
        lines.append((depth, one))
        # `pop`: of several candidates with one name only the first gets the children, and a cycle ends.
        waiting += [(depth + 1, child) for child in sorted(children.pop(one.id, []), key=_rank)[::-1]]
    return [*lines, *((1, one) for left in children.values() for one in left)]


def _rank(one: RunCandidate) -> tuple[bool, float, int]:
    return one.state == "tried", -(one.mean or 0.0), -one.rollouts


def listing(found: Sequence[tuple[int, RunCandidate]]) -> Listing:
    """A line for each candidate, indented by its depth."""
    made = Listing(*TREE)
    for depth, one in found:
        name = Text(f"{'  ' * (depth - 1)}└ {clean(one.id)}" if depth else clean(one.id))
        value = "" if one.e_value is None else f"{one.e_value:.3g} of {one.needed or 0:g}"
        state = "" if one.state == "tried" else one.state
        made.add_row(
            name, _mean(one), f"{one.rollouts:,}" if one.rollouts else "", plain(state, COLOURS.get(state, "")),
            "" if one.gain is None else f"{one.gain:+.3f}", value, f"{one.length:,}" if one.length else "",
            plain(one.claim),
        )  # fmt: skip
    return made


def _mean(one: RunCandidate) -> str:
    return "" if one.mean is None else f"{one.mean:.3f}"


def tree(told: CandidateTree, most: int | None = None) -> RenderableType:
    """The tree, or its first `most` lines, and how many candidates are missing."""
    lines = ordered(told.candidates)
    shown = lines if most is None else lines[:most]
    missing = told.left_out + len(lines) - len(shown)
    if not missing:
        return listing(shown)
    return Group(listing(shown), Text(f"{missing:,} more candidates are not shown", "dim"))


def chart(told: CandidateTree) -> Chart | None:
    """The mean of each candidate at the step at which it came, and the best so far; None without means."""
    points = sorted((float(one.step), one.mean) for one in told.candidates if one.mean is not None)
    if not points:
        return None
    best: list[tuple[float, float]] = []
    for step, mean in points:
        best.append((step, max(mean, best[-1][1] if best else mean)))
    said = (
        f"{len(points):,} candidates by the step at which they came. The highest mean is lucky too: only the race says "
        "whether a candidate is better."
    )
    lines = [LineSeries("candidates", points, dots=True), LineSeries("highest so far", best, 1, stepped=True)]
    return Chart("Candidates: mean reward in the search", said, lines, "step", "mean reward", tick_y="{:.4g}".format)


def needed_e_value(told: CandidateTree | None) -> float | None:
    """The e-value at which a finalist is better; None while nothing races."""
    candidates = told.candidates if told is not None else []
    return next((one.needed for one in candidates if one.needed is not None), None)
