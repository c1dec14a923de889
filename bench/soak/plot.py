"""Plots a soak: a chart for each figure over the calls. Pure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from bench.soak.harness import Outcome
from bench.soak.samples import Sample
from penstock.console.views.pages import drawing
from penstock.console.views.svg import Chart, LineSeries

FIGURES: dict[str, Callable[[Sample], float]] = {
    "anonymous memory, MB": lambda one: one.anon_mb,
    "CPU of a call, ms": lambda one: one.cpu_ms,
    "calls/s": lambda one: one.per_second,
    "p50 of fast calls, ms": lambda one: one.fast.p50,
}
TOP = 2.0
"""Where an axis ends, as a multiple of the figure's mean: a spike would hide the rest."""


def plot(outcome: Outcome) -> str:
    """Return an SVG. Figures of an interval in which a process ended are left out; a vertical line is a kill or a
    reload."""
    samples, faults = [one for one in outcome.samples if one.whole], [at for _, at in outcome.faults]
    charts = [
        Chart(
            name, "", [LineSeries(name, [(one.calls, figure(one)) for one in samples], 1)], "calls", events=faults,
            bounds=(0, TOP * mean(map(figure, samples))),
        )
        for name, figure in FIGURES.items()
    ]  # fmt: skip
    heading = f"{outcome.samples[-1].calls:,} calls. Dashed: kill -9 or reload. An axis ends at {TOP:g} times the mean."
    return drawing({"": charts}, heading)
