"""Line charts as inline SVG, made by hand: no script, no font, no file from elsewhere. Pure.

Lines differ by their dashes as well as their colours. Each chart has a title and a description for people who cannot
see it; the page puts its numbers into a table. On a page the values under the pointer are shown: each place along the
axis has a transparent column, whose text is visible while the pointer (or a finger) is on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from html import escape
from itertools import count, pairwise
from typing import Final, Literal, NamedTuple

from penstock.console.views.table import clean, moment, number

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 12, 34
LETTER = 6.2
"""Width of a letter of a label, in units of the drawing."""
STYLES = 6
"""Number of line styles; more lines repeat them."""
TICKS = 6
"""About how many ticks an axis has, where their labels have room."""
LABELLED = 6
"""Most marks of a series that have their values beside them; more would cover each other."""
COLUMNS = 48
"""Most places along the axis whose values are shown under the pointer."""
NAME = 24
"""Most characters of a series' name under the pointer."""
LOWEST = 1e-3
"""Lower bound of a logarithmic axis: smaller e-values tell nothing more."""
HIGHEST = 1e9
MOST = 1e300
"""Absolute value beyond which values are drawn at the edge."""
CLOSE = 1e-13
"""Relative distance below which the ends of an axis count as one point."""
SECOND = 10**9
DAY = 86_400 * SECOND
SPANS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
"""Seconds between two ticks of an axis with times; beyond these it is a round number of days."""
LIGHT: Final = {
    "text": "#1b1b1f", "dim": "#5b5b66", "back": "#fdfdfd", "rule": "#d9d9e0", "band": "#0072b21f", "limit": "#b3261e",
    "c0": "#5b5b66", "c1": "#0072b2", "c2": "#d55e00", "c3": "#009e73", "c4": "#cc79a7", "c5": "#e69f00",
}  # fmt: skip
DARK: Final = {
    "text": "#e7e7ec", "dim": "#a2a2ae", "back": "#16161a", "rule": "#34343c", "band": "#56b4e92b", "limit": "#ff8a80",
    "c0": "#b4b4c0", "c1": "#56b4e9", "c2": "#e69f00", "c3": "#009e73", "c4": "#cc79a7", "c5": "#f0e442",
}  # fmt: skip
"""Colours of light and dark pages, those of lines by Okabe and Ito."""
STYLE = """
.dim, .tick { color: var(--dim); fill: var(--dim); } .tick, .value { font-size: 11px; } .value { fill: var(--text); }
.over { paint-order: stroke; stroke: var(--back); stroke-width: 4px; stroke-linejoin: round; }
.grid { stroke: var(--rule); } .limit { stroke: var(--limit); stroke-dasharray: 2 3; } .band { fill: var(--band); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; } .s0 { stroke: var(--c0); }
.s1 { stroke: var(--c1); stroke-dasharray: 9 4; } .s2 { stroke: var(--c2); stroke-dasharray: 2 5; }
.s3 { stroke: var(--c3); stroke-dasharray: 12 4 2 4; } .s4 { stroke: var(--c4); stroke-dasharray: 5 5; }
.s5 { stroke: var(--c5); stroke-dasharray: 14 3 2 3 2 3; } .line.mark, .line.only { stroke-dasharray: none; }
.line.mark { stroke-width: 7; } .line.dots { stroke-width: 5; }
"""
Pair = tuple[float, float]
Axis = Literal["number", "whole", "time"]
"""Kinds of values along an axis: numbers, whole numbers (steps, rollouts), or times in ns since the epoch."""


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
    intervals: Mapping[float, Pair] = field(default_factory=dict[float, Pair])
    """(low, high) around the value at an x."""

    @property
    def marked(self) -> bool:
        """True if each value is a mark with its figure beside it."""
        return len(self.points) == 1 or (self.dots and len(self.points) <= LABELLED)

    def said(self, x: float, y: float) -> str:
        """A value with its interval."""
        low, high = self.intervals.get(x, (None, None))
        return number_text(y) + ("" if low is None else f" ({number_text(low)} to {number_text(high)})")


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
    events: Sequence[float] = ()
    """Places of vertical lines."""
    log: bool = False
    bounds: Pair | None = None
    """(low, high) of the vertical axis; found from the values if None."""
    axis: Axis = "whole"
    """The kind of values along the horizontal axis."""
    names: Sequence[str] = ()
    """Names along the horizontal axis, in place of the numbers 0, 1, 2 ..."""
    unit: str = ""
    """Unit of the vertical axis, as it follows a number: ` %`."""

    def place(self, x: float) -> str:
        """A place along the horizontal axis in words."""
        if self.names:
            return self.names[round(x)]
        return moment(int(x))[:19] if self.axis == "time" else f"{x:,.10g}"


class Tick(NamedTuple):
    """A place on an axis, and what is written there."""

    value: float
    label: str


def number_text(value: float | None) -> str:
    """A number with four digits; empty for None."""
    return "" if value is None else number(float(f"{value:.4g}"))


def text(value: object) -> str:
    """A foreign text as HTML text or attribute value: it contains neither markup nor control characters."""
    visible = clean(value).encode("utf-8", "replace").decode()
    return escape(visible, quote=True)


def painted(style: str, colours: Mapping[str, str]) -> str:
    """A style sheet with these colours in place of its variables, for viewers that know no variables."""
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], style)


# -- the ticks of an axis: round numbers, each with a label that says exactly where it stands ----


def ticks(low: float, high: float, axis: Axis = "number", most: int = TICKS) -> list[Tick]:
    """About `most` places between two ends, evenly spaced; no two labels are the same."""
    if axis == "time":
        return _times(low, high, most)
    rough = (Decimal(high) - Decimal(low)) / most
    size = Decimal(1).scaleb(rough.adjusted())
    step = next(part * size for part in (1, 2, 5, 10) if part * size >= rough)
    if axis == "whole":
        step = max(step, Decimal(1))
    first = (Decimal(low) / step).to_integral_value(ROUND_CEILING)
    last = (Decimal(high) / step).to_integral_value(ROUND_FLOOR)
    found = [(first + at) * step for at in range(int(last - first) + 1)]
    largest = max((abs(value) for value in found), default=step)
    plain = largest < 10**7 and step.adjusted() >= -6
    return [Tick(float(value), _label(value, step, plain)) for value in found]


def _label(value: Decimal, step: Decimal, plain: bool) -> str:
    if plain or not value:
        return f"{value:,.{max(0, -step.adjusted()) if value else 0}f}"
    return f"{value:.{max(0, value.adjusted() - step.adjusted())}e}"


def _times(low: float, high: float, most: int) -> list[Tick]:
    rough = (high - low) / most
    days = math.ceil(rough / DAY)
    step = next((span * SECOND for span in SPANS if span * SECOND >= rough), days * DAY)
    # The shortest part of a moment that tells them apart.
    start = 0 if high - low > 300 * DAY else 5 if high - low >= DAY else 11
    end = 10 if step >= DAY else 16 if step >= 60 * SECOND else 19
    every = range(int(-(-low // step)), int(high // step) + 1)
    return [Tick(at * step, moment(at * step)[start:end]) for at in every]


def _powers(low: float, high: float) -> list[Tick]:
    first, last = round(math.log10(low)), round(math.log10(high))
    return [Tick(10.0**at, f"{10.0**at:g}") for at in range(first, last + 1, 1 + (last - first) // 6)]


class _Scale:
    """Maps the values of a chart to coordinates of its drawing."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        xs = [x for line in chart.lines for x, _ in line.points] + [x for x, _, _ in chart.band]
        ys = [y for line in chart.lines for _, y in line.points] + [y for _, y in chart.limits]
        ys += [y for line in chart.lines for pair in line.intervals.values() for y in pair]
        ys += [y for _, low, high in chart.band for y in (low, high)]
        self.x0, self.x1 = _wide(min(xs, default=0.0), max(xs, default=1.0), SECOND if chart.axis == "time" else 0)
        if chart.names:
            self.x0, self.x1 = -0.5, len(chart.names) - 0.5
        self.y0, self.y1 = chart.bounds or (
            _decades(ys) if chart.log else _wide(min(ys, default=0), max(ys, default=1))
        )

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high, here = self.y0, self.y1, min(max(value, self.y0), self.y1)
        if self._chart.log:
            low, high, here = math.log10(low), math.log10(high), math.log10(here)
        return HEIGHT - BOTTOM - (here - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def ticks_y(self) -> list[Tick]:
        return _powers(self.y0, self.y1) if self._chart.log else ticks(self.y0, self.y1)

    def ticks_x(self) -> list[Tick]:
        if names := self._chart.names:
            every = -(-sum(len(name) + 2 for name in names) * LETTER // (WIDTH - LEFT - RIGHT))
            return [Tick(at, name) for at, name in enumerate(names) if at % every == 0]
        # As many as have room for their labels.
        every = (ticks(self.x0, self.x1, self._chart.axis, most) for most in range(TICKS, 0, -1))
        room = 0.75 * (WIDTH - LEFT - RIGHT) / LETTER
        return next(found for found in every if len(found) < 3 or sum(len(one.label) + 2 for one in found) <= room)


def _wide(low: float, high: float, least: float = 0) -> Pair:
    """A range that is more than a point, and than `least`, with ends whose difference is a finite number."""
    low, high = (min(max(end, -MOST), MOST) for end in (low, high))
    largest = max(abs(low), abs(high), 1 / MOST)
    if high - low > max(CLOSE * largest, least):
        return low, high
    # At 1e17 adding 0.5 changes nothing.
    reach = max(least or 0.5, 10 * CLOSE * largest)
    return low - reach, high + reach


def _decades(values: Sequence[float]) -> Pair:
    """Powers of ten around the values."""
    low = min(max(min(values, default=1.0), LOWEST), 0.1)
    high = min(max(max(values, default=10.0), 10.0), HIGHEST)
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)


# -- the drawing ----


def legend(chart: Chart) -> str:
    """The legend of a chart as an HTML list; empty for a single line, whose name is the title's."""
    items = [
        f'<li><svg class="key" viewBox="0 0 34 10" aria-hidden="true"><path class="{_class(line)}" '
        f'd="{_key(line, 1, 5)}"/></svg>{text(line.name)}</li>'
        for line in chart.lines
    ]
    return f'<ul class="legend">{"".join(items)}</ul>' if len(items) > 1 else ""


def keys(chart: Chart) -> list[str]:
    """The legend of a chart as SVG, a text for each row; empty for a single line."""
    if len(chart.lines) == 1:
        return []
    names = [shortened(line.name, int((WIDTH - 54) / LETTER)) for line in chart.lines]
    wide = max(map(len, names), default=0) * LETTER + 44
    across, rows = int((WIDTH - 10) // wide), list[str]()
    for at, (line, name) in enumerate(zip(chart.lines, names, strict=True)):
        x = 10 + at % across * wide
        rows += [""] * (at % across == 0)
        rows[-1] += f'<path class="{_class(line)}" d="{_key(line, x, -4, 24)}"/>'
        rows[-1] += f'<text class="tick" x="{x + 28:.1f}" y="0">{text(name)}</text>'
    return rows


def _key(line: LineSeries, x: float, y: int, wide: int = 32) -> str:
    return f"M{x + wide / 2:g} {y}h0.1" if line.marked or line.dots else f"M{x:g} {y}h{wide}"


def _class(line: LineSeries) -> str:
    return f"line s{line.style % STYLES}" + (" mark" if line.marked else " dots" if line.dots else "")


def svg(chart: Chart, name: str) -> str:
    """The chart as SVG for a page; `name` makes its ids unique on the page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{text(chart.title)}</title><desc id="{name}-text">{text(chart.description)}</desc>'
        f"{drawn(chart)}{''.join(_columns(chart, _Scale(chart)))}</svg>"
    )


def drawn(chart: Chart) -> str:
    """The grid, lines and labels of a chart, as elements of SVG."""
    scale = _Scale(chart)
    levels, names = _limits(chart, scale)
    parts = [*_grid(chart, scale), *_band(chart, scale), *levels]
    only = " only" if len(chart.lines) == 1 else ""
    parts += [path for line in chart.lines if line.points for path in _line(line, scale, only)]
    return "".join([*parts, *names, *_values(chart, scale)])


def _grid(chart: Chart, scale: _Scale) -> Iterator[str]:
    for value, label in scale.ticks_y():
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        said = text(label + chart.unit)
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{said}</text>'
    for value, label in scale.ticks_x():
        x, half = scale.x(value), len(label) * LETTER / 2
        anchor = "end" if x + half > WIDTH else "start" if x < half else "middle"
        yield f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>'
        at = f'x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="{anchor}"'
        yield f'<text class="tick" {at}>{text(label)}</text>'
    yield f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{text(chart.x)}</text>'
    if chart.y:
        at = f'transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)" text-anchor="middle"'
        yield f'<text class="tick" {at}>{text(chart.y)}</text>'


def _band(chart: Chart, scale: _Scale) -> Iterator[str]:
    if chart.band:
        there = [f"{scale.x(x):.1f} {scale.y(high):.1f}" for x, _, high in chart.band]
        back = [f"{scale.x(x):.1f} {scale.y(low):.1f}" for x, low, _ in reversed(chart.band)]
        yield f'<path class="band" d="M{"L".join(there + back)}Z"/>'


def _limits(chart: Chart, scale: _Scale) -> tuple[list[str], list[str]]:
    """(level and vertical lines, their names). The names are drawn above all lines; those that would overlap are moved
    apart."""
    levels = [f'<path class="limit" d="M{scale.x(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>' for x in chart.events]
    names, taken = list[str](), list[float]()
    for name, value in sorted(chart.limits, key=lambda limit: -limit[1]):
        y = scale.y(value)
        levels.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        names.append(f'<text class="tick over" x="{LEFT + 6}" y="{_free(y - 4, taken):.1f}">{text(name)}</text>')
    return levels, names


def _free(y: float, taken: list[float]) -> float:
    """The first height from `y` downwards where no other label is; it is taken then."""
    # A label at the edge goes upwards, for there is nothing below.
    way = 12 if y < HEIGHT - BOTTOM - 24 else -12
    place = next(at for at in (y + way * n for n in count()) if all(abs(at - other) >= 11 for other in taken))
    taken.append(place)
    return place


def _line(line: LineSeries, scale: _Scale, only: str) -> Iterator[str]:
    (first, *others), path = [(scale.x(x), scale.y(y)) for x, y in line.points], list[str]()
    for x, (low, high) in line.intervals.items():
        ends = f"M{scale.x(x) - 4:.1f} {scale.y(low):.1f}h8m-4 0V{scale.y(high):.1f}m-4 0h8"
        yield f'<path class="line s{line.style % STYLES} only" d="{ends}"/>'
    if line.dots or line.marked:
        path = [f"M{x:.1f} {y:.1f}h0.1" for x, y in (first, *others)]
    else:
        path = [f"M{first[0]:.1f} {first[1]:.1f}"]
        path += [f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f} {y:.1f}" for x, y in others]
    yield f'<path class="{_class(line)}{only}" d="{"".join(path)}"/>'


def _values(chart: Chart, scale: _Scale) -> Iterator[str]:
    """The figures beside marks, moved apart where they would overlap."""
    taken: dict[bool, list[float]] = {}
    for line in (line for line in chart.lines if line.marked):
        for x, y in line.points:
            said, at = line.said(x, y) + chart.unit, scale.x(x)
            left = at + 10 + len(said) * LETTER > WIDTH
            height = _free(scale.y(y) + 4, taken.setdefault(left, []) if len(line.points) == 1 else [])
            place = f'x="{at - 9:.1f}" text-anchor="end"' if left else f'x="{at + 9:.1f}"'
            yield f'<text class="value" {place} y="{height:.1f}">{text(said)}</text>'


# -- the values under the pointer ----


def _columns(chart: Chart, scale: _Scale) -> Iterator[str]:
    values = [{x: line.said(x, y) + chart.unit for x, y in line.points} for line in chart.lines]
    xs = thinned(sorted({x for found in values for x in found}), COLUMNS)
    edges = [scale.x(x) for x in xs]
    # Each column goes up to the middle between its place and the next.
    edges = [LEFT, *((one + other) / 2 for one, other in pairwise(edges)), WIDTH - RIGHT]
    for x, left, right in zip(xs, edges, edges[1:], strict=False):
        said = [
            f"{shortened(line.name, NAME)}: {found[x]}"
            for line, found in zip(chart.lines, values, strict=True)
            if x in found
        ]
        if len(chart.lines) == 1:
            said = [found[x] for found in values]
        yield _column(scale.x(x), left, right, [f"{chart.x} {chart.place(x)}", *said])


def _column(x: float, left: float, right: float, said: Sequence[str]) -> str:
    wide, high = max(map(len, said)) * LETTER + 12, 14 * len(said) + 6
    # Beside the line, on the side with more room.
    at = x + 6 if x < (LEFT + WIDTH) / 2 else x - 6 - wide
    rows = "".join(f'<text class="value" x="{at + 6:.1f}" y="{TOP + 13 + 14 * n}">{text(one)}</text>'
                   for n, one in enumerate(said))  # fmt: skip
    return (
        f'<g class="at"><rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        f'<g><path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        f'<rect x="{at:.1f}" y="{TOP}" width="{wide:.1f}" height="{high}" rx="3"/>{rows}</g></g>'
    )


def shortened(name: str, most: int) -> str:
    """A name of at most `most` letters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def thinned(values: Sequence[float], most: int) -> list[float]:
    """At most `most` of the values and the last one, evenly."""
    every = max(1, -(-len(values) // most))
    return [value for at, value in enumerate(values) if at % every == 0 or at == len(values) - 1]
