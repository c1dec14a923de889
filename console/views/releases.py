"""Releases for a terminal. Pure, as `console.views.rollouts` is. Colours only repeat what words and signs say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.console.views.coverage import lines
from penstock.console.views.noun import NounRows, NounSelection, NounView
from penstock.console.views.release_summary import (
    EValueThreshold,
    StageStatus,
    arms,
    audience,
    decision_thresholds,
    difference,
    left_out,
    path,
    share,
    stage_name,
    units,
    version_changes,
    versions,
    wait_conditions,
)
from penstock.console.views.table import Column, Listing, age, asked_by, clean, figure, joined, moment, plain
from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import AuditTrailEntry, Forecast, Release, ReleaseView
from penstock.gateway.model.toml import pluralized

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

BAR = 20
"""Characters of a full bar, which stands for the limit."""
LAST = 5
"""Number of the chain's last entries that a status shows."""
SIGNS = {"done": "✓", "skipped": "skipped", "failed": "✗", "now": "", "ahead": ""}
EVIDENCE = (
    Column("evidence"),
    Column("how far", 1),
    figure("e-value"),
    figure("limit", 2),
    Column("then"),
)
COLOURS = {"promoted": "green", "rolled_back": "red", "aborted": "yellow", "held": "magenta", "canary": "cyan"}


class ReleaseSelection(NounSelection):
    """The options of the list of releases."""

    live: bool = False
    """Only those that can still change what an agent gets."""


async def _fetch(client: Client, selection: ReleaseSelection) -> NounRows[Release]:
    none = "There are no releases yet: `penstock release start NAME --candidate VERSION` starts one."
    return NounRows(await client.releases(live=selection.live), "No release is live." if selection.live else none)


def _stage(release: Release) -> Text:
    waiting = f" ({release.waits})" if release.waits else ""
    return Text(clean(stage_name(release.stage) + waiting), style=COLOURS.get(release.stage, ""))


RELEASES = NounView[ReleaseSelection, Release](
    "releases",
    Release,
    _fetch,
    selection=ReleaseSelection,
    key=lambda one: one.id,
    columns={
        Column("release"): lambda one, _: plain(one.id),
        Column("stage"): lambda one, _: _stage(one),
        Column("from", 6): lambda one, _: plain(versions(one, "stable")),
        Column("to"): lambda one, _: plain(versions(one, "candidate")),
        figure("split", 4): lambda one, _: f"{share(one.stage, one.split):.0%}",
        figure("assigned", 2): lambda one, _: f"{one.assigned:,}",
        figure("counted", 1): lambda one, _: f"{one.counted:,}",
        figure("age", 3): lambda one, now_ns: age(one.created_ns, now_ns),
        Column("why", 5, narrows="fold", least=24): lambda one, _: plain(one.reason),
    },
    concerns=frozenset({"releases", "rollouts"}),
    every_s=5.0,
)


def status(
    view: ReleaseView, audit: Sequence[AuditTrailEntry], awaited: tuple[int, int] | None, now_ns: int, last: int = LAST
) -> Group:
    """The state of a release, to fit a screen. `awaited`: assigned rollouts of each arm that are not counted yet."""
    release = view.release
    pieces: list[RenderableType] = [_head(release, now_ns), _way(path(release, audit)), plain(release.reason)]
    if release.assigned:
        found = decision_thresholds(release, view.figures)
        pieces += [Text(), _arms(view, awaited), *_notes(view), Text(), _evidence(found)]
    reach = [line for name, one in view.coverage.items() for line in lines(name, one, now_ns)]
    pieces += [Text(), *(joined("coverage", line) for line in reach)]
    pieces += [joined("waits for", clean(one)) for one in wait_conditions(view)]
    return Group(*pieces, *(entry(one) for one in audit[-last:]))


def _head(release: Release, now_ns: int) -> Text:
    only = audience(release.only)
    split = f"{release.split:.0%} of new {release.policy.observation_noun}" if release.stage == "canary" else ""
    change = f"{version_changes(release)}{f' for {only}' if only else ''}"
    since = f"for {age(release.changed_ns, now_ns)}"
    return joined(Text(clean(release.id), style="bold"), _stage(release), split, change, since)


def _way(steps: Iterable[StageStatus]) -> Text:
    """The path of a release: `draft ✓ → checked skipped → ▶ 5% → promoted`."""
    words = [
        Text(
            f"{'▶ ' if step.mark == 'now' else ''}{clean(step.name)} {SIGNS[step.mark]}".strip(),
            style="bold" if step.mark == "now" else "",
        )
        for step in steps
    ]
    return Text(" → ").join(words)


def _arms(view: ReleaseView, awaited: tuple[int, int] | None) -> Listing:
    release = view.release
    heads = (f"stable {clean(versions(release, 'stable'))}", f"candidate {clean(versions(release, 'candidate'))}")
    made = Listing(Column(" ", narrows="fold", least=12), *map(figure, heads))
    for row in arms(release, view.figures, awaited):
        made.add_row(*map(plain, row))
    return made


def _notes(view: ReleaseView) -> Iterator[Text]:
    for warning in view.warnings:
        yield joined(Text("warning", "bold yellow"), clean(warning))
    if (shown := difference(view)) is not None:
        yield joined("difference", shown)
    if left := left_out(view.release, view.figures):
        yield Text(
            f"{pluralized(left, view.release.policy.observation_noun[:-1])} left out: cancelled, or on both versions"
        )
    if (shown := units(view.release)) is not None:
        yield joined("units", clean(shown))


def _evidence(found: Iterable[EValueThreshold]) -> Listing:
    made = Listing(*EVIDENCE)
    for one in found:
        then = Text(one.follows)
        if one.crossed:
            then = Text(
                f"{one.follows} (reached)", "bold green" if one.follows in ("promotes", "passes") else "bold red"
            )
        made.add_row(plain(one.name), bar(one.value, one.limit), f"{one.value:.3g}", f"{one.limit:g}", then)
    return made


def bar(value: float, limit: float, size: int = BAR) -> str:
    """A bar for an e-value between 1 and its limit, on a logarithmic scale."""
    share = math.log(value) / math.log(limit) if value > 1 else 0.0
    full = min(size, int(share * size + 1e-9))
    return "█" * full + "·" * (size - full)


def entry(one: AuditTrailEntry) -> Text:
    """An entry of the chain on a line."""
    who = "by the rules" if one.who == GATEWAY else f"by {clean(asked_by(one.who, one.key))}"
    what = f"{one.action.replace('_', ' ')} → {stage_name(one.after)}"
    split = f"{one.split:.0%}" if one.after == "canary" else ""
    return joined(Text(moment(one.at_ns)[:19], style="dim"), clean(what), split, who, clean(one.why))


def history(release: Release, entries: Sequence[AuditTrailEntry]) -> Group:
    """The whole chain with its evidence."""
    lines: list[RenderableType] = [joined(Text(clean(release.id), style="bold"), _stage(release))]
    for one in entries:
        lines.append(Text(f"{one.number:>3}  ").append_text(entry(one)))
        if one.evidence:
            figures = "  ".join(f"{clean(name)} {clean(_figure(value))}" for name, value in one.evidence.items())
            lines.append(Padding.indent(Text(figures, style="dim"), 5))
    return Group(*lines)


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def started(release: Release, expected: Forecast | None = None) -> Text:
    """A sentence about a release that was just started, and its forecast."""
    name = clean(release.id)
    said = Text(f"{name} is started: {clean(version_changes(release))}. penstock release watch {name}")
    return said if expected is None else said.append(f"\n{forecast_text(release, expected)}")


def forecast_text(release: Release, expected: Forecast) -> str:
    """The forecast for a release with an equal candidate, in sentences."""
    if expected.rollouts is None and expected.mean is not None:
        return "No forecast: with this policy a release may take more rollouts than are played for one."
    if expected.rollouts is None or expected.held is None or expected.mean is None:
        return "No forecast: too few rollouts of the stable version have a reward."
    days = "" if expected.days is None else f", {days_in_words(expected.days)} at {expected.per_day or 0:,.0f} a day"
    taken = f"{expected.rollouts:,} rollouts{', each of another unit' if release.policy.by_unit else ''}"
    margin = "" if release.policy.hold_split else f" and a margin of {release.margin:.3g}"
    return (
        f"Forecast for an equal candidate, at a mean reward of {expected.mean:.2f}{margin}: decided after about "
        f"{taken}{days}; {round(expected.held * expected.played)} of {expected.played} played "
        "releases were held."
    )


def days_in_words(days: float) -> str:
    """A length of time in its largest fitting unit: `about 2.5 days`."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= size:
            return f"about {days / size:.1f} {unit}"
    return "less than a minute"


def decided(release: Release) -> Text:
    """The state of a release after a person's decision, on a line."""
    return joined(clean(release.id), _stage(release), clean(release.reason))
