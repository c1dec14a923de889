"""Line charts as inline SVG, made by hand: no script, no font, no file from elsewhere. Pure.

Lines differ by their dashes as well as their colours, which are variables of the page's style and so follow light and
dark. Each chart has a title and a description for people who cannot see it; the page puts its numbers into a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count

from penstock.console.views.table import clean

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 12, 34
STYLES = 6
"""Number of line styles; more lines repeat them."""
LOWEST = 1e-3
"""Lower bound of a logarithmic axis: smaller e-values tell nothing more."""
HIGHEST = 1e9
MOST = 1e300
"""Absolute value beyond which values are drawn at the edge."""
CLOSE = 1e-13
"""Relative distance below which the ends of an axis count as one point."""
Pair = tuple[float, float]


@dataclass(slots=True)
class LineSeries:
    """A series of a chart."""

    name: str
    points: list[Pair]
    """(x, y), x rising."""
    style: int = 0
    """Number of its style; below `STYLES`."""
    stepped: bool = False
    """Whether a value holds until the next one."""
    dots: bool = False
    """Whether the values are drawn as dots, without a line."""


@dataclass(slots=True)
class Chart:
    """A line chart: its texts, series, areas and level lines."""

    title: str
    description: str
    lines: list[LineSeries]
    x: str
    """Label of the horizontal axis."""
    y: str = ""
    """Label of the vertical axis; empty for none."""
    band: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    """(x, low, high) of an area."""
    limits: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Names and heights of level lines."""
    log: bool = False
    bounds: Pair | None = None
    """(low, high) of the vertical axis; found from the values if None."""
    tick_x: Callable[[float], str] = "{:,.0f}".format
    tick_y: Callable[[float], str] = "{:g}".format


def text(value: object) -> str:
    """A foreign text as HTML text or attribute value: it contains neither markup nor control characters."""
    visible = clean(value).encode("utf-8", "replace").decode()
    return escape(visible, quote=True)


def legend(chart: Chart) -> str:
    """The legend of a chart as an HTML list."""
    items = [
        f'<li><svg class="key" viewBox="0 0 34 10" aria-hidden="true"><path class="line s{line.style % STYLES}" '
        f'd="M1 5H33"/></svg>{text(line.name)}</li>'
        for line in chart.lines
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def svg(chart: Chart, name: str) -> str:
    """The chart as SVG; `name` makes its ids unique on the page."""
    scale = _Scale(chart)
    parts = [*_grid(chart, scale), *_band(chart, scale), *_limits(chart, scale)]
    parts += [_line(line, scale) for line in chart.lines if line.points]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{text(chart.title)}</title><desc id="{name}-text">{text(chart.description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


class _Scale:
    """Maps the values of a chart to coordinates of its drawing."""

    def __init__(self, chart: Chart) -> None:
        self._log = chart.log
        xs = [x for line in chart.lines for x, _ in line.points] + [x for x, _, _ in chart.band]
        ys = [y for line in chart.lines for _, y in line.points] + [y for _, y in chart.limits]
        ys += [y for _, low, high in chart.band for y in (low, high)]
        self.x0, self.x1 = _wide(min(xs, default=0.0), max(xs, default=1.0))
        self.y0, self.y1 = chart.bounds or (
            _decades(ys) if chart.log else _wide(min(ys, default=0), max(ys, default=1))
        )

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high, here = self.y0, self.y1, min(max(value, self.y0), self.y1)
        if self._log:
            low, high, here = math.log10(low), math.log10(high), math.log10(here)
        return HEIGHT - BOTTOM - (here - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def ticks_y(self) -> list[float]:
        return _powers(self.y0, self.y1) if self._log else _round_steps(self.y0, self.y1, 5)

    def ticks_x(self) -> list[float]:
        return [self.x0 + (self.x1 - self.x0) * part / 4 for part in range(5)]


def _wide(low: float, high: float) -> Pair:
    """A range that is more than a point, with ends whose difference is a finite number."""
    low, high = (min(max(end, -MOST), MOST) for end in (low, high))
    largest = max(abs(low), abs(high), 1 / MOST)
    if high - low > CLOSE * largest:
        return low, high
    # At 1e17 adding 0.5 changes nothing.
    reach = max(0.5, 10 * CLOSE * largest)
    return low - reach, high + reach


def _decades(values: Sequence[float]) -> Pair:
    """Powers of ten around the values."""
    low = min(max(min(values, default=1.0), LOWEST), 0.1)
    high = min(max(max(values, default=10.0), 10.0), HIGHEST)
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)


def _powers(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [10.0**power for power in range(first, last + 1, 1 + (last - first) // 6)]


def _round_steps(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers, or one more."""
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * part for part in (1, 2, 5, 10) if size * part >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(at * step, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(chart: Chart, scale: _Scale) -> Iterator[str]:
    for value in scale.ticks_y():
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text(chart.tick_y(value))}</text>'
    anchors = ("start", "middle", "middle", "middle", "end")
    for value, anchor in zip(scale.ticks_x(), anchors, strict=True):
        at = f'x="{scale.x(value):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="{anchor}"'
        yield f'<text class="tick" {at}>{text(chart.tick_x(value))}</text>'
    yield f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{text(chart.x)}</text>'
    if chart.y:
        at = f'transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)" text-anchor="middle"'
        yield f'<text class="tick" {at}>{text(chart.y)}</text>'


def _band(chart: Chart, scale: _Scale) -> Iterator[str]:
    if chart.band:
        there = [f"{scale.x(x):.1f} {scale.y(high):.1f}" for x, _, high in chart.band]
        back = [f"{scale.x(x):.1f} {scale.y(low):.1f}" for x, low, _ in reversed(chart.band)]
        yield f'<path class="band" d="M{"L".join(there + back)}Z"/>'


def _limits(chart: Chart, scale: _Scale) -> Iterator[str]:
    """Level lines; labels that would overlap are moved apart."""
    taken: list[float] = []
    for name, value in sorted(chart.limits, key=lambda limit: -limit[1]):
        y = scale.y(value)
        place = next(at for at in (y - 4 + 12 * n for n in count()) if all(abs(at - other) >= 11 for other in taken))
        taken.append(place)
        yield f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT + 6}" y="{place:.1f}">{text(name)}</text>'


def _line(line: LineSeries, scale: _Scale) -> str:
    (first, *others), path = [(scale.x(x), scale.y(y)) for x, y in line.points], list[str]()
    if line.dots:
        dots = "".join(f"M{x:.1f} {y:.1f}h0.1" for x, y in (first, *others))
        return f'<path class="line s{line.style % STYLES}" style="stroke-width: 5" d="{dots}"/>'
    path.append(f"M{first[0]:.1f} {first[1]:.1f}")
    path += [f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f} {y:.1f}" for x, y in others]
    if not others:
        path.append("h0.1")
    return f'<path class="line s{line.style % STYLES}" d="{"".join(path)}"/>'
