"""`penstock runs watch`: a training run in progress, in a terminal or as lines."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, RenderableType

from penstock.console.commands.terminal import console
from penstock.console.commands.watch import poll_on_change, show
from penstock.console.views import runs
from penstock.gateway.model.run import ENDS, Curve, Run, RunEvent

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

LONGEST_S = 10.0
"""Seconds between two looks without a change, because the feed does not report when a run falls silent."""
EVENTS, MOST_EVENTS = 8, 1000
"""Maximum numbers of events that are shown on a screen, and of new ones that are printed as lines after a look."""
METRICS = 16
"""Number of metrics that are shown unless the user names some: the first ones that the trainer reported."""


class RunSnapshot(NamedTuple):
    """The state of a run at a moment; its events newest first."""

    run: Run
    curves: list[Curve]
    events: list[RunEvent]


async def read_snapshot(client: Client, name: str, events: int) -> RunSnapshot:
    """A run now, with this number of its newest events."""
    run, curves = await client.run(name), await client.curves(name, max_points=runs.TREND)
    return RunSnapshot(run, curves, [event async for event in client.run_events(name, events)])


def snapshots(client: Client, name: str, metrics: Sequence[str], events: int) -> AsyncGenerator[RunSnapshot]:
    """A run whenever it has changed, until it ends, with the curves of these metrics."""

    def patience(found: RunSnapshot) -> float | None:
        return None if found.run.status in ENDS else LONGEST_S

    async def next_look() -> RunSnapshot:
        found = await read_snapshot(client, name, events)
        return found._replace(curves=_wanted(found.curves, metrics))

    return poll_on_change(client, next_look, patience, ["run"], [name])


async def watch(client: Client, name: str, metrics: Sequence[str], json: bool) -> None:
    """Shows a run until it ends. `metrics`: patterns of the metrics to show, the first ones if empty."""
    screen = console()
    found = snapshots(client, name, metrics, EVENTS if screen.is_terminal and not json else MOST_EVENTS)
    await show(found, screen, _run if json else None, _picture, lambda look, before: _tell(look, before, screen))


def _wanted(curves: Sequence[Curve], patterns: Sequence[str]) -> list[Curve]:
    found = [curve for curve in curves if any(fnmatchcase(curve.metric, pattern) for pattern in patterns)]
    return found if patterns else list(curves[:METRICS])


def _run(found: RunSnapshot) -> Run:
    return found.run


def _picture(found: RunSnapshot) -> RenderableType:
    return runs.watched(found.run, found.curves, found.events, time.time_ns())


def _tell(found: RunSnapshot, before: RunSnapshot | None, screen: Console) -> None:
    """Prints each new event once, and the run's step and status when these have changed."""
    for event in reversed(found.events):
        if before is None or event not in before.events:
            screen.print(runs.event(event), soft_wrap=True)
    if before is None or (found.run.step, found.run.status) != (before.run.step, before.run.status):
        screen.print(runs.line(found.run, found.curves), soft_wrap=True)
