"""`penstock release watch` and `penstock runs watch`: a release or a run until it ends, drawn in place or as lines.

It is read whenever it may have changed. The change feed reports changes; the watcher then waits for a moment, so that
many changes need one look, and rollouts are counted by then. Neither the progress of a stage before the canary nor a
deadline that passes nor the silence of a run is reported: for these it looks without a change. It waits for a gateway
that restarts, because its user wants to know the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.live import Live

from penstock.console.commands.terminal import console
from penstock.console.commands.verify import history
from penstock.console.views import releases, runs
from penstock.console.views.pages import History, release_page
from penstock.gateway.client.connection import ClientError
from penstock.gateway.client.console import whole_file
from penstock.gateway.model.answers import ChangeKind
from penstock.gateway.model.foreign_text import terminal_safe_json
from penstock.gateway.model.release import ReleaseView
from penstock.gateway.model.run import ENDS, Curve, Run, RunEvent

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

SETTLE_S: Final = 0.3
"""Seconds between a change and the look that it causes."""
AWAY_S: Final = 1.0
"""Seconds between two looks while the gateway is away."""
PREPARING_S = 1.0
"""Seconds between two looks at a stage before the canary."""
RELEASE_LONGEST_S = 60.0
"""Maximum seconds between two looks."""
RUN_LONGEST_S = 10.0
"""Seconds between two looks without a change, because the feed does not report when a run falls silent."""
LAST = 3
"""Number of the chain's entries that are shown."""
EVENTS, MOST_EVENTS = 8, 1000
"""Maximum numbers of events that are shown on a screen, and of new ones that are printed as lines after a look."""
METRICS = 16
"""Number of metrics that are shown unless the user names some: the first ones that the trainer reported."""
T = TypeVar("T")


async def poll_on_change(
    client: Client,
    look: Callable[[], Awaitable[T]],
    patience: Callable[[T], float | None],
    kinds: Sequence[ChangeKind] = (),
    names: Sequence[str] = (),
) -> AsyncGenerator[T]:
    """The result of `look`, at once and after each change of these kinds and names. `patience`: seconds until the
    next look without a change; None when it is the last. Raises `ClientError` when the first look fails, or one is
    refused."""
    cursor, changed, seen = (await client.stats(spans=0)).cursor, asyncio.Event(), False

    async def listen() -> None:
        async for _ in client.changes(cursor, kinds, names):
            changed.set()

    listening = asyncio.ensure_future(listen())
    try:
        while True:
            changed.clear()
            try:
                found = await look()
            except ClientError as error:
                if not seen or not error.temporary:
                    raise
                await _until(listening, changed, AWAY_S)
                continue
            seen = True
            yield found
            seconds = patience(found)
            if seconds is None:
                return
            await _until(listening, changed, seconds)
    finally:
        listening.cancel()


async def _until(listening: asyncio.Task[None], changed: asyncio.Event, seconds: float) -> None:
    """Waits for a change and those that follow closely, at most `seconds`; raises the error that ended the
    listening."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([listening, waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if listening.done():
        listening.result()
    await asyncio.sleep(SETTLE_S)


async def show(
    found: AsyncGenerator[T],
    screen: Console,
    noun: Callable[[T], BaseModel] | None,
    picture: Callable[[T], RenderableType],
    tell: Callable[[T, T | None], None],
) -> T | None:
    """Shows the results of looks until the last: a `noun` of each as JSON, else drawn in place or passed to `tell`,
    which prints lines. `tell` also gets the result before. Returns the last one."""
    before: T | None = None
    live = screen.is_terminal and noun is None
    # It is drawn anew every second, so that ages advance; this sends the gateway no request.
    drawn = Live(console=screen, get_renderable=lambda: "" if before is None else picture(before), refresh_per_second=1)
    with drawn if live else nullcontext():
        async for one in found:
            if noun is not None:
                print(terminal_safe_json(noun(one).model_dump_json(exclude_none=True)), flush=True)
            elif not live:
                tell(one, before)
            before = one
            if live:
                drawn.refresh()
    return before


# -- a release ----


class ReleaseSnapshot(NamedTuple):
    """The state of a release at a moment."""

    view: ReleaseView
    history: History
    awaited: tuple[int, int]
    """Assigned rollouts of each arm that are not counted yet."""


NOTHING = History([], [], [])


async def read_release(client: Client, name: str, known: History = NOTHING, whole: bool = False) -> ReleaseSnapshot:
    """A release now. `whole`: with all assignments and outcomes, except that those in `known` are not read again; else
    only with those that are awaited."""
    view = await client.release(name)
    release, before = view.release, len(known.seen)
    found = await history(client, release, before if whole else release.counted)
    rest = [one.arm for one in found.assigned[len(found.seen) :]]
    if whole:
        assigned, seen = [*known.assigned[:before], *found.assigned], [*known.seen, *found.seen]
        found = History(found.audit, assigned, seen)
    return ReleaseSnapshot(view, found, (rest.count("stable"), rest.count("candidate")))


def release_snapshots(client: Client, name: str, whole: bool) -> AsyncGenerator[ReleaseSnapshot]:
    """A release whenever it may have changed, until it ends. Known assignments and outcomes are not read again."""
    known = NOTHING

    async def next_look() -> ReleaseSnapshot:
        nonlocal known
        found = await read_release(client, name, known, whole)
        known = found.history if whole else NOTHING
        return found

    return poll_on_change(client, next_look, lambda found: _patience(found.view))


def _patience(view: ReleaseView) -> float | None:
    """Seconds until the next change that the feed does not report; None when the release has ended."""
    if not view.release.live:
        return None
    if view.doing is not None:
        return PREPARING_S
    if view.oldest_ns is None or view.release.stage != "canary":
        return RELEASE_LONGEST_S
    policy = view.release.policy
    due = view.oldest_ns / 1e9 + policy.outcome_deadline_s - time.time()
    longest = policy.early_deadline_s if view.waiting_early else RELEASE_LONGEST_S
    return min(max(due, PREPARING_S), max(longest, PREPARING_S), RELEASE_LONGEST_S)


async def watch_release(client: Client, name: str, html: Path | None, json: bool) -> None:
    """Shows a release until it ends, and keeps its page in the file `html` up to date."""
    screen = console()

    async def written() -> AsyncGenerator[ReleaseSnapshot]:
        async for found in release_snapshots(client, name, html is not None):
            if html is not None:
                with whole_file(html) as file:
                    file.write(release_page(found.view, found.history, time.time_ns()).encode())
            yield found

    def tell(found: ReleaseSnapshot, before: ReleaseSnapshot | None) -> None:
        """Prints each new entry once, for output that is no terminal."""
        for entry in found.history.audit[0 if before is None else len(before.history.audit) :]:
            screen.print(releases.entry(entry, found.view.release), soft_wrap=True)

    last = await show(written(), screen, _view if json else None, _picture, tell)
    if last is not None and not screen.is_terminal and not json:
        screen.print(_picture(last))


def _view(found: ReleaseSnapshot) -> ReleaseView:
    return found.view


def _picture(found: ReleaseSnapshot) -> RenderableType:
    view, history, awaited = found
    return releases.status(view, history.audit, awaited, time.time_ns(), LAST)


# -- a run ----


class RunSnapshot(NamedTuple):
    """The state of a run at a moment; its events newest first."""

    run: Run
    curves: list[Curve]
    events: list[RunEvent]


async def read_run(client: Client, name: str, events: int) -> RunSnapshot:
    """A run now, with this number of its newest events."""
    run, curves = await client.run(name), await client.curves(name, max_points=runs.TREND)
    return RunSnapshot(run, curves, [event async for event in client.run_events(name, events)])


def run_snapshots(client: Client, name: str, metrics: Sequence[str], events: int) -> AsyncGenerator[RunSnapshot]:
    """A run whenever it has changed, until it ends, with the curves of these metrics."""

    def patience(found: RunSnapshot) -> float | None:
        return None if found.run.status in ENDS else RUN_LONGEST_S

    async def next_look() -> RunSnapshot:
        found = await read_run(client, name, events)
        return found._replace(curves=_wanted(found.curves, metrics))

    return poll_on_change(client, next_look, patience, ["run"], [name])


async def watch_run(client: Client, name: str, metrics: Sequence[str], json: bool) -> None:
    """Shows a run until it ends. `metrics`: patterns of the metrics to show, the first ones if empty."""
    screen = console()
    found = run_snapshots(client, name, metrics, EVENTS if screen.is_terminal and not json else MOST_EVENTS)
    await show(found, screen, _run if json else None, _run_picture, lambda look, before: _tell(look, before, screen))


def _wanted(curves: Sequence[Curve], patterns: Sequence[str]) -> list[Curve]:
    found = [curve for curve in curves if any(fnmatchcase(curve.metric, pattern) for pattern in patterns)]
    return found if patterns else list(curves[:METRICS])


def _run(found: RunSnapshot) -> Run:
    return found.run


def _run_picture(found: RunSnapshot) -> RenderableType:
    return runs.watched(found.run, found.curves, found.events, time.time_ns())


def _tell(found: RunSnapshot, before: RunSnapshot | None, screen: Console) -> None:
    """Prints each new event once, and the run's step and status when these have changed."""
    for event in reversed(found.events):
        if before is None or event not in before.events:
            screen.print(runs.event(event), soft_wrap=True)
    if before is None or (found.run.step, found.run.status) != (before.run.step, before.run.status):
        screen.print(runs.line(found.run, found.curves), soft_wrap=True)
