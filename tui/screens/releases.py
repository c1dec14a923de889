"""The screens of releases and of the resources that they change.

A release shows its arms side by side, its evidence as a race to its bounds, and decisions for a person. A resource
shows its versions, the changes of each, and their users.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import releases, resources
from penstock.console.views.noun import NounRows
from penstock.console.views.pages import EvidencePoint, History, evidence_series
from penstock.console.views.releases import (
    EValueThreshold,
    audience,
    decision_thresholds,
    left_out,
    share,
    stage_name,
    units,
    version_changes,
    wait_conditions,
)
from penstock.console.views.table import Column, Listing, ago, clean, compact, figure, joined, plain
from penstock.gateway.client.resources import read_history
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import ARMS, Release, ReleaseView
from penstock.gateway.model.resource import Need, Resource, ResourceView
from penstock.tui.screens.chart import TerminalCurve, chart, legend
from penstock.tui.view import NounScreen, Pane, ViewAction, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

MOST: Final = 5_000
"""The most assignments with which the growth of the evidence is computed."""


@dataclass(frozen=True, slots=True)
class ReleaseDetails:
    """A release with its evidence and its audit chain."""

    view: ReleaseView
    history: History
    points: Sequence[EvidencePoint]
    """The growth of the evidence; empty when there is none, or more than `MOST` assignments."""
    awaited: tuple[int, int] | None
    """Assigned rollouts of each arm that are not counted yet; None when they were not read."""


def _act(
    id: str, verb: str, does: Callable[[Release], str], possible: Callable[[Release], str | None], reason: bool = False
) -> ViewAction[NounRows[Release]]:
    """An action that makes a decision. `verb`: its name in the API."""

    def unavailable(data: NounRows[Release], row: str | None) -> str | None:
        found = releases.RELEASES.find(data, row)
        return "no release is chosen" if found is None else possible(found)

    def question(data: NounRows[Release], row: str | None) -> str:
        one = releases.RELEASES.find(data, row)
        assert one is not None
        only = audience(one.only)
        whom = f"calls of {only}" if only else "all calls"
        now = releases.of_new(share(one.stage, one.split), one)
        return (
            f"{one.id}: {one.resource} {version_changes(one)}, for {whom}. It is {stage_name(one.stage)}; "
            f"{now} get {one.candidate}, {one.assigned:,} were assigned so far. {does(one)}"
        )

    async def act(client: Client, data: NounRows[Release], row: str | None, said: ActionRequest) -> str:
        moved = await client.decide(row or "", verb, said)
        return f"{moved.id} is {stage_name(moved.stage)}."

    return ViewAction(id, unavailable, question, act, reason)


def _ended(one: Release) -> str | None:
    return None if one.live else f"{one.id} has ended: it is {stage_name(one.stage)}"


def _not_held(one: Release) -> str | None:
    return _ended(one) or (f"{one.id} is held already; resume goes on" if one.stage == "held" else None)


def _held(one: Release) -> str | None:
    return _ended(one) or (None if one.stage == "held" else f"{one.id} is not held: it is {stage_name(one.stage)}")


def _awaits(one: Release) -> str | None:
    return _ended(one) or (None if one.waits == "approval" else f"{one.id} does not wait for approval")


class ReleasesView(NounScreen[Release, ReleaseDetails]):
    noun = releases.RELEASES
    help = "canaries and what decides them; freeze, promote, roll back"
    actions: ClassVar[Sequence[ViewAction[Any]]] = (
        _act("release.promote", "promote",
             lambda one: f"Make {one.candidate} stable now, whatever the evidence says?", _ended, True),
        _act("release.rollback", "rollback",
             lambda one: f"Send every new call to {one.stable}, also of rollouts that have {one.candidate}? "
             "The release ends with it.", _ended, True),
        _act("release.freeze", "hold",
             lambda one: "Hold it where it is: no new rollout is assigned to the candidate until it is resumed?",
             _not_held, True),
        _act("release.resume", "resume", lambda one: f"Go on with it in {stage_name(one.held_in)}?", _held),
        _act("release.approve", "approve", lambda one: "Let it leave the stage that waits for a person?", _awaits),
        _act("release.abort", "abort",
             lambda one: f"End it? New rollouts get {one.stable}; who has {one.candidate} keeps it.", _ended, True),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._grown: tuple[tuple[str, int, int], Sequence[EvidencePoint]] | None = None

    def forget(self) -> None:
        self._grown = None

    async def load(self, client: Client) -> NounRows[Release]:
        found = await super().load(client)
        return replace(found, rows=sorted(found.rows, key=lambda one: not one.live))

    async def load_details(self, client: Client, data: NounRows[Release], id: str) -> ReleaseDetails:
        """Ask for the release's evidence, its audit chain and, unless there are too many, its assignments."""
        view = await client.release(id)
        release = view.release
        few = release.assigned <= MOST
        found = await read_history(client, id, 0 if few else release.assigned)
        history = History.of(release, *found, after=0 if few else release.assigned)
        if not few:
            return ReleaseDetails(view, history, (), None)
        rest = [one.arm for one in history.assigned[len(history.seen) :]]
        points = await self._points(release, history)
        return ReleaseDetails(view, history, points, (rest.count("stable"), rest.count("candidate")))

    async def _points(self, release: Release, history: History) -> Sequence[EvidencePoint]:
        """The growth of the evidence; computed again only when it has grown."""
        state = release.id, release.revision, len(history.seen)
        if self._grown is None or self._grown[0] != state:
            self._grown = state, await asyncio.to_thread(evidence_series, release, history, 100)
        return self._grown[1]

    def head(self, data: NounRows[Release], now_ns: int) -> Text:
        live = sum(one.live for one in data.rows)
        waiting = sum(one.waits == "approval" or one.stage == "held" for one in data.rows if one.live)
        asks = f"{waiting:,} wait for a person" if waiting else ""
        return joined(f"{live:,} live of {len(data.rows):,}", Text(asks, style="bold yellow"))

    def panes(
        self, data: NounRows[Release], id: str | None, closer: ReleaseDetails | None, now_ns: int
    ) -> Sequence[Pane]:
        if closer is None:
            return ()
        view, chain = closer.view, closer.history.audit
        return [
            Pane("Race", lambda width, height: race(view, closer.points, width, height)),
            pane("Arms", releases.status(view, chain, closer.awaited, now_ns)),
            pane("Coverage", _coverage(closer, now_ns)),
            pane("Policy", _policy(view.release)),
            pane("Audit", releases.history(view.release, list(reversed(chain)))),
        ]


def _coverage(closer: ReleaseDetails, now_ns: int) -> RenderableType:
    """The calls that the release reaches, and the outcomes that are counted."""
    view, release = closer.view, closer.view.release
    only = audience(release.only)
    figures = view.figures
    left = left_out(release, figures)
    counted = release.counted - left
    missing = sum(
        int(value) for name, value in figures.items() if name.endswith(tuple(f"{arm}.missing" for arm in ARMS))
    )
    lines = {
        "reaches": f"calls of {only}; all others keep their stable version" if only else "every call",
        "assigned": units(release) or f"{release.assigned:,} rollouts",
        "counted": f"{counted:,}, of which {missing:,} had no outcome by the deadline" if counted else "none yet",
        "left out": f"{left:,}: cancelled, or on both versions",
        "awaited": f"{view.waiting:,}",
        "oldest": f"{view.oldest}, assigned {ago(view.oldest_ns, now_ns)}" if view.oldest and view.oldest_ns else "",
    }
    told = [joined(Text(f"{name:9}", style="dim"), plain(value)) for name, value in lines.items() if value]
    return Group(*told, *(joined(Text("waits for", style="dim"), clean(one)) for one in wait_conditions(view)))


def _policy(release: Release) -> RenderableType:
    """All settings, as they were fixed when the release began."""
    settings = release.policy.model_dump(mode="json", exclude_none=True)
    made = Listing(Column("setting"), Column("value", narrows="fold", least=30))
    for name, value in settings.items():
        made.add_row(name, plain(value if isinstance(value, str) else compact(value)))
    return Group(Text("Its policy, as it was when it began", style="dim"), made)


# -- the race: one lane for each e-value, to the bound at which the gateway acts ----
#
# An e-value begins at 1 and grows while the data speak for its claim; crossing its bound is the decision (notes of
# `releases.canary`). A lane is logarithmic, because evidence multiplies. The number of rollouts that are likely left is
# the remaining way of the logarithm, divided by its growth for each counted rollout: a range from two paces, that of
# the last half and that of all rollouts. It is a guess, and the pane says how it is made.


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


def race(view: ReleaseView, points: Sequence[EvidencePoint], width: int, height: int | None = None) -> RenderableType:
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
    waits = [joined(Text("waits for", style="dim"), clean(one)) for one in wait_conditions(view)]
    told = [*_pace(release.live, points), *waits]
    # The table has a heading; above and below the chart are an empty line, its title and its legend.
    room = 0 if height is None else height - len(found) - 1 - len(told) - 3
    return Group(made, *told, *_curves(found, points, width, max(CHART_HEIGHT, room)))


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


def _curves(
    found: Sequence[EValueThreshold], points: Sequence[EvidencePoint], width: int, height: int
) -> Iterator[RenderableType]:
    """The growth of the evidence: the two leading lanes, each as the share of the way to its bound."""
    if len(points) < 3:
        return
    leading = sorted(found, key=_share, reverse=True)[:2]
    lines = [TerminalCurve(one.name, (), [(0.0, 0.0), *_way(one, points)]) for one in leading]
    yield from (Text(), Text("The way to the bound over the counted rollouts (1 is the bound)", style="dim"))
    yield chart([*lines], width, height, ("bound", 1.0))
    yield legend(lines)


def _way(one: EValueThreshold, points: Sequence[EvidencePoint]) -> list[tuple[float, float]]:
    bound = math.log(one.limit)
    return [(float(point.counted), _log(point.figures.get(one.figure, 1.0)) / bound) for point in points]


# -- resources ----


DIFFERENCES: Final = 20
"""The newest versions, whose changes are resources."""
USED = (
    Column("version"), Column("stable for", narrows="words", least=16), Column("live releases", 1, narrows="words"),
    Column("pinned rollouts", 2, narrows="fold", least=16),
)  # fmt: skip


class ResourcesView(NounScreen[ResourceView, list[Need]]):
    noun = resources.RESOURCES
    help = "prompts, tool texts and models: versions, differences, and where each is used; c compares two versions"

    def head(self, data: NounRows[ResourceView], now_ns: int) -> Text:
        versions = sum(len(one.versions) for one in data.rows)
        return Text(f"{len(data.rows):,} resources, {versions:,} versions")

    async def load_details(self, client: Client, data: NounRows[ResourceView], id: str) -> list[Need]:
        return await client.needed_versions(id)

    def panes(
        self, data: NounRows[ResourceView], id: str | None, closer: list[Need] | None, now_ns: int
    ) -> Sequence[Pane]:
        one = self.noun.find(data, id)
        if one is None:
            return ()
        stable = next((version for version in one.versions if version.version == one.stable.version), one.versions[-1])
        return [
            pane("Versions", resources.resource(one, now_ns)),
            pane("Stable", resources.version(stable)),
            pane("Differences", Group(*_differences(one))),
            pane("Where used", Text("asking ...", style="dim") if closer is None else _used(closer)),
        ]


def _differences(one: ResourceView) -> Iterator[RenderableType]:
    """The changes of each version, newest first."""
    by_name = {version.version: version for version in one.versions}
    if len(one.versions) == 1:
        yield Text(f"{clean(one.name)} has one version; there is nothing to compare it with.")
    for version in reversed(one.versions[-DIFFERENCES:]):
        before = _before(one, version, by_name)
        if before is not None:
            note = joined(
                plain(version.note), Text(f"by {clean(version.author)}" if version.author else "", style="dim")
            )
            yield from (note, resources.difference(before, version), Text())


def _before(one: ResourceView, version: Resource, by_name: dict[str, Resource]) -> Resource | None:
    """The version from which it was made; else the one before it; None for the first."""
    if version.parent in by_name:
        return by_name[version.parent]
    place = one.versions.index(version)
    return one.versions[place - 1] if place else None


def _used(needs: Sequence[Need]) -> RenderableType:
    made = Listing(*USED)
    for need in needs:
        whom = "; ".join(audience(only) or "everybody" for only in need.audiences)
        made.add_row(plain(need.version), plain(whom), plain(" ".join(need.releases)), plain(" ".join(need.rollouts)))
    return made if made.rows else Text("Nobody needs any of its versions at the moment.")
