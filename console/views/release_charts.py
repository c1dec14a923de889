"""The charts of a release: traffic over time; reward, difference and evidence over the counted rollouts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.console.views.release_series import EvidencePoint, History
from penstock.console.views.release_summary import (
    ARMS,
    EValueThreshold,
    decision_thresholds,
    difference,
    latest,
    ramp_thresholds,
    share,
)
from penstock.console.views.svg import Chart, LineSeries
from penstock.console.views.text import moment
from penstock.gateway.model.release import ReleaseView


def charts(view: ReleaseView, history: History, points: Sequence[EvidencePoint], now_ns: int) -> Iterator[Chart]:
    """All charts that can be drawn so far."""
    yield _traffic(view, history, now_ns)
    if points:
        yield _rewards(view, points)
        yield _difference(view, points)
        yield _e_values(view, points)
        yield _guards(view, points)


def _traffic(view: ReleaseView, history: History, now_ns: int) -> Chart:
    splits = [(float(entry.at_ns), share(entry.after, entry.split) * 100) for entry in history.audit]
    end = now_ns if view.release.live else view.release.changed_ns
    if splits and end > splits[-1][0]:
        splits.append((float(end), splits[-1][1]))
    counts = view.release.policy.observation_noun
    now = f"{share(view.release.stage, view.release.split) * 100:g} % of new {counts} get {view.release.candidate} now"
    line = LineSeries(f"candidate {view.release.candidate}", splits, 1, stepped=True)
    within_a_day = not splits or splits[-1][0] - splits[0][0] < 86_400e9
    cut = slice(11, 19) if within_a_day else slice(5, 16)
    return Chart(
        "Traffic", f"Share of new {counts} on the candidate over time. {now}.", [line], "UTC", f"new {counts} on it",
        bounds=(0, 100), tick_x=lambda x: moment(int(x))[cut], tick_y="{:g} %".format,
    )  # fmt: skip


def _rewards(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    lines = [LineSeries(arm, _values(points, f"{arm}.reward"), style) for style, arm in enumerate(ARMS)]
    means = ", ".join(f"{line.name} {line.points[-1][1]:.3f}" for line in lines if line.points)
    return Chart(
        "Reward",
        f"Mean reward of each arm, from 0 to 1. Now: {means or 'none'}.",
        lines,
        f"counted {view.release.policy.observation_noun}",
        "mean reward",
    )


def _difference(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    band = [(float(at), *interval) for at, _, interval in points if interval is not None]
    line = LineSeries("candidate less stable, midpoint", [(x, (low + high) / 2) for x, low, high in band], 1)
    limits = [("no difference", 0.0)]
    if view.release.margin:
        limits.append(("margin", -view.release.margin))
    said = difference(view) or "not known yet"
    return Chart(
        "Difference", f"Candidate less stable with its 95 % confidence sequence. Now: {said}.", [line],
        f"counted {view.release.policy.observation_noun}", "difference of mean reward", band=band, limits=limits,
    )  # fmt: skip


def _e_values(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    found = [*ramp_thresholds(view.release, view.figures)[:2], *_later_harm(view)]
    lines = [
        LineSeries(one.name, _values(points, one.figure), style) for one, style in zip(found, (2, 1, 3), strict=False)
    ]
    limits = [(f"{one.name} {one.follows} at {one.limit:g}", one.limit) for one in found if one.follows != "nothing"]
    said = ", ".join(f"{one.name} {one.value:.3g} of {one.limit:g}" for one in found)
    return Chart(
        "Evidence",
        f"e-values of the reward. Now: {said}.",
        lines,
        f"counted {view.release.policy.observation_noun}",
        "e-value",
        limits=limits,
        log=True,
    )


def _later_harm(view: ReleaseView) -> Iterator[EValueThreshold]:
    where = latest(view.figures)[1]
    if where:
        harm = decision_thresholds(view.release, view.figures)[0]
        yield harm._replace(name=harm.name + where)


def _guards(view: ReleaseView, points: Sequence[EvidencePoint]) -> Chart:
    """The guards and one line for the splits, that of the stage that strays most: more lines could not be told
    apart."""
    found = [
        one for one in decision_thresholds(view.release, view.figures) if one.name.startswith(("guard ", "split "))
    ]
    guards = [one for one in found if one.name.startswith("guard ")]
    lines = [LineSeries(one.name, _values(points, one.figure), style) for style, one in enumerate(guards)]
    lines.append(LineSeries("split, the stage that strays most", list(_strays(points)), len(guards)))
    limits = {one.limit: sorted({it.follows for it in found if it.limit == one.limit}) for one in found}
    said = ", ".join(f"{one.name} {one.value:.3g} of {one.limit:g}" for one in found)
    counts = view.release.policy.observation_noun
    return Chart(
        "Guardrails", f"e-values of the guards and of the split. Now: {said}.", lines, f"counted {counts}", "e-value",
        limits=[(f"{' or '.join(follows)} at {limit:g}", limit) for limit, follows in limits.items()], log=True,
    )  # fmt: skip


def _strays(points: Iterable[EvidencePoint]) -> Iterator[tuple[float, float]]:
    for point in points:
        splits = [value for name, value in point.figures.items() if "srm." in name]
        if splits:
            yield float(point.counted), max(splits)


def _values(points: Iterable[EvidencePoint], key: str) -> list[tuple[float, float]]:
    return [(float(point.counted), value) for point in points if (value := point.figures.get(key)) is not None]
