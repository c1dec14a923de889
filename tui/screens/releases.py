"""The screen of releases: arms side by side, the evidence as a race to its bounds, and decisions for a person."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import releases as shown
from penstock.console.views.noun import NounRows
from penstock.console.views.release_page import EvidencePoint, History, series
from penstock.console.views.release_summary import (
    audience,
    left_out,
    share,
    stage_name,
    units,
    version_changes,
    wait_conditions,
)
from penstock.console.views.table import Column, Listing, ago, clean, compact, joined, plain
from penstock.gateway.client.resources import read_history
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import ARMS, Release, ReleaseView
from penstock.tui.panes.race import race
from penstock.tui.screens.noun import NounScreen
from penstock.tui.view import Pane, ViewAction, pane

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
        found = shown.RELEASES.find(data, row)
        return "no release is chosen" if found is None else possible(found)

    def question(data: NounRows[Release], row: str | None) -> str:
        one = shown.RELEASES.find(data, row)
        assert one is not None
        only = audience(one.only)
        whom = f"calls of {only}" if only else "all calls"
        now = f"{share(one.stage, one.split):.0%} of new {one.policy.observation_noun}"
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
    noun = shown.RELEASES
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
            self._grown = state, await asyncio.to_thread(series, release, history, 100)
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
            Pane("Race", lambda width: race(view, closer.points, width)),
            pane("Arms", shown.status(view, chain, closer.awaited, now_ns)),
            pane("Coverage", _coverage(closer, now_ns)),
            pane("Policy", _policy(view.release)),
            pane("Audit", shown.history(view.release, list(reversed(chain)))),
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
