"""Upstreams for a terminal. Pure, as `console.views.rollouts` is."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import clean, duration, plain
from penstock.gateway.model.upstream import UpstreamView

UPSTREAMS = (
    Column("upstream"), Column("state"), Column("since", 3, right=True, optional=True),
    Column("at most", 2, right=True, optional=True), figure("running"), figure("waiting"), figure("waited", 1),
    figure("refused", 4),
)  # fmt: skip
"""The times since an upstream was paused, and at most until it refuses calls, are shown while any upstream is paused.
The latter is a length of time, not a number of calls."""


def upstreams(rows: Iterable[UpstreamView]) -> Listing:
    """A line for each upstream."""
    made = Listing(*UPSTREAMS)
    for one in rows:
        state = Text("paused", style="yellow") if one.paused else _health(one)
        times = (_seconds(one.paused_s), _seconds(one.bound_s))
        counts = (f"{count:,}" for count in (one.running, one.waiting, one.waited, one.refused))
        made.add_row(plain(one.name), state, *times, *counts)
    return made


def _health(one: UpstreamView) -> Text:
    made = Text("open", "green") if one.health == "good" else Text(f"{one.health}: {clean(one.failing)}", "red")
    if one.check is not None:
        made.append(f", check {'passed' if one.check == 'passed' else 'failed: ' + clean(one.check)}")
    return made


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(int(value * 1e9))
