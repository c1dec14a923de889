"""`penstock runs watch`: a training run as it goes on, in a terminal or as lines."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, RenderableType
from rich.live import Live

from penstock.gateway.cli.terminal import console
from penstock.gateway.cli.watch import whenever
from penstock.gateway.display import runs
from penstock.gateway.model.change import Change
from penstock.gateway.model.run import ENDS, Curve, Run, RunEvent

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

LONGEST_S = 10.0
"""Between two looks without a change, because the feed does not tell when a run falls silent; s."""
EVENTS, MOST_EVENTS = 8, 1000
"""Events that are shown on a screen, and between two looks as lines."""
METRICS = 16
"""Metrics that are shown unless some are asked for: the first ones that its trainer reported."""


class Look(NamedTuple):
    """A run at a moment; its events newest first."""

    run: Run
    curves: list[Curve]
    events: list[RunEvent]


async def look(client: Client, name: str, events: int) -> Look:
    """A run now, with so many of its newest events."""
    run, curves = await client.run(name), await client.curves(name, max_points=runs.TREND)
    return Look(run, curves, [event async for event in client.run_events(name, events)])


def looks(client: Client, name: str, events: int) -> AsyncGenerator[Look]:
    """A run whenever it has changed, until it ends."""

    def concerns(change: Change) -> bool:
        return change.kind == "run" and change.name == name

    def patience(found: Look) -> float | None:
        return None if found.run.status in ENDS else LONGEST_S

    return whenever(client, concerns, lambda: look(client, name, events), patience)


async def watch(client: Client, name: str, metrics: Sequence[str], json: bool) -> None:
    """Shows it until it ends; `metrics` are patterns of those that are shown, the first ones when there are none."""
    shown: list[Look] = []
    screen = console()
    live = screen.is_terminal and not json
    display: AbstractContextManager[Live | None] = nullcontext()
    if live:
        display = Live(console=screen, get_renderable=lambda: _picture(shown), refresh_per_second=1)
    with display as drawn:
        async for found in looks(client, name, EVENTS if live else MOST_EVENTS):
            found = found._replace(curves=_wanted(found.curves, metrics))
            if json:
                print(found.run.model_dump_json(exclude_none=True), flush=True)
            elif not live:
                _tell(found, shown[-1] if shown else None, screen)
            shown[:] = [found]
            if drawn is not None:
                drawn.refresh()


def _wanted(curves: Sequence[Curve], patterns: Sequence[str]) -> list[Curve]:
    found = [curve for curve in curves if any(fnmatchcase(curve.metric, pattern) for pattern in patterns)]
    return found if patterns else list(curves[:METRICS])


def _picture(shown: Sequence[Look]) -> RenderableType:
    """The newest look."""
    if not shown:
        return ""
    run, curves, events = shown[-1]
    return runs.watched(run, curves, events, time.time_ns())


def _tell(found: Look, before: Look | None, screen: Console) -> None:
    """Each new event once, and how the run stands when that has changed."""
    for event in reversed(found.events):
        if before is None or event not in before.events:
            screen.print(runs.event(event), soft_wrap=True)
    if before is None or (found.run.step, found.run.status) != (before.run.step, before.run.status):
        screen.print(runs.line(found.run, found.curves), soft_wrap=True)
