"""The evidence of a release as a race: one lane for each e-value, to the bound at which the gateway acts. Pure.

An e-value begins at 1 and grows while the data speak for its claim; crossing its bound is the decision (notes of
`releases.canary`). A lane is logarithmic, because evidence multiplies. The number of rollouts that are likely left is
the remaining way of the logarithm, divided by its growth for each counted rollout: a range from two paces, that of the
last half and that of all rollouts. It is a guess, and the pane says how it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.pages import EvidencePoint
from penstock.console.views.releases import EValueThreshold, decision_thresholds, wait_conditions
from penstock.console.views.table import Column, Listing, clean, figure, joined, plain
from penstock.gateway.model.release import ReleaseView
from penstock.tui.panes.chart import TerminalCurve, chart, legend

FEWEST: Final = 8
"""The fewest counted rollouts with which a pace is shown."""
LEAST_LANE: Final = 8
CHART_HEIGHT: Final = 8
LANES = (
    Column("evidence"), Column("from 1 to the bound"), figure("e-value"), figure("bound"), Column("then", 1),
    Column("likely left", narrows="words", least=16),
)  # fmt: skip


class RemainingRollouts(NamedTuple):
    """The counted rollouts that are likely left until a bound."""

    least: int
    most: int | None
    """None when the bound is never reached at one of the two paces."""


def remaining_rollouts(measure: EValueThreshold, points: Sequence[EvidencePoint]) -> RemainingRollouts | None:
    """The rollouts that are likely left; None when that is unknown, or when the evidence does not move towards its
    bound.
    """
    grown = [(point.counted, _log(point.figures.get(measure.figure, 1.0))) for point in points]
    if not grown or grown[-1][0] < FEWEST or measure.crossed:
        return None
    last, now = grown[-1]
    middle = next(((at, log) for at, log in grown if at >= last / 2), (0, 0.0))
    paces = [now / last, (now - middle[1]) / (last - middle[0]) if last > middle[0] else 0.0]
    forward = [pace for pace in paces if pace > 0]
    if not forward:
        return None
    rest = math.log(measure.limit) - now
    return RemainingRollouts(
        math.ceil(rest / max(forward)), math.ceil(rest / min(forward)) if len(forward) == 2 else None
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else 0.0


def race(view: ReleaseView, points: Sequence[EvidencePoint], width: int) -> RenderableType:
    """The lanes, the leading one, and the growth of the evidence."""
    release = view.release
    if not release.assigned:
        return Text("No rollout has been assigned yet: the race begins with the canary.")
    found = decision_thresholds(release, view.figures)
    leads = max(found, key=_share)
    made = Listing(*LANES)
    lane = max(LEAST_LANE, min(40, width - 74))
    for one in found:
        then = f"{one.follows} (reached)" if one.crossed else one.follows
        name = f"{one.name} ◀ leads" if one is leads and _share(one) > 0 and release.live else one.name
        words = _words(one, remaining_rollouts(one, points), release.live)
        made.add_row(plain(name), _lane(one, lane), f"{one.value:.3g}", f"{one.limit:g}", then, words)
    told = (joined(Text("waits for", style="dim"), clean(one)) for one in wait_conditions(view))
    return Group(made, *_pace(release.live, points), *told, *_curves(found, points, width))


def _share(one: EValueThreshold) -> float:
    """The share of the way to the bound, from 0 to 1."""
    return min(1.0, max(0.0, _log(one.value) / math.log(one.limit)))


def _lane(one: EValueThreshold, size: int) -> Text:
    full = min(size, int(_share(one) * size + 1e-9))
    style = "green" if one.follows in ("promotes", "passes") else "red"
    head = "▶" if full < size else ""
    return Text.assemble(("━" * full + head, style), ("┄" * (size - full - 1), "dim"), "▌")


def _words(one: EValueThreshold, found: RemainingRollouts | None, live: bool) -> str:
    if one.crossed or not live:
        return ""
    if found is None:
        return "not moving"
    if found.most is None:
        return f"{found.least:,} or more"
    return f"about {found.least:,}" if found.least == found.most else f"{found.least:,} to {found.most:,}"


def _pace(live: bool, points: Sequence[EvidencePoint]) -> Iterator[Text]:
    if not live:
        return
    counted = points[-1].counted if points else 0
    if counted < FEWEST:
        yield Text(f"How many are left is told from {FEWEST} counted rollouts on; there are {counted}.", style="dim")
    else:
        said = (
            f"Likely left: counted rollouts, at the pace of the last {counted - counted // 2:,} and of all {counted:,}."
        )
        yield Text(said, style="dim")


def _curves(found: Sequence[EValueThreshold], points: Sequence[EvidencePoint], width: int) -> Iterator[RenderableType]:
    """The growth of the evidence: the two leading lanes, each as the share of the way to its bound."""
    if len(points) < 3:
        return
    leading = sorted(found, key=_share, reverse=True)[:2]
    lines = [TerminalCurve(one.name, (), [(0.0, 0.0), *_way(one, points)]) for one in leading]
    yield from (Text(), Text("The way to the bound over the counted rollouts (1 is the bound)", style="dim"))
    yield chart([*lines], min(width - 8, 120), CHART_HEIGHT, ("bound", 1.0))
    yield legend(lines)


def _way(one: EValueThreshold, points: Sequence[EvidencePoint]) -> list[tuple[float, float]]:
    bound = math.log(one.limit)
    return [(float(point.counted), _log(point.figures.get(one.figure, 1.0)) / bound) for point in points]
