"""Plots a soak: each figure as a share of its own mean, so that all fit on one page. Pure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from bench.release_plots import lines
from bench.soak.harness import Outcome
from bench.soak.samples import Sample

FIGURES: dict[str, tuple[str, Callable[[Sample], float]]] = {
    "memory": ("MB", lambda one: one.anon_mb),
    "CPU": ("ms/call", lambda one: one.cpu_ms),
    "speed": ("calls/s", lambda one: one.per_second),
    "p50": ("ms", lambda one: one.fast.p50),
}
TOP = 2.0


def plot(outcome: Outcome) -> str:
    """Return an SVG. Figures of an interval in which a process ended are left out; a vertical line is a kill or a
    reload."""
    samples, series = [one for one in outcome.samples if one.whole], dict[str, list[tuple[float, float]]]()
    for name, (unit, figure) in FIGURES.items():
        usual = mean(map(figure, samples))
        series[f"{name} ({usual:,.3g} {unit})"] = [(one.calls, figure(one) / usual) for one in samples]
    title = f"{outcome.samples[-1].calls:,} calls; 100 % is the mean, in brackets; dotted: kill -9 or reload"
    return lines(title, "calls", "share of the mean", series, TOP, 1.0, [at for _, at in outcome.faults])
