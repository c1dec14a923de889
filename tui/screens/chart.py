"""Charts in a terminal: curves and bars of braille dots. Pure.

A cell has two dots across and four down. Scales have round numbers, each at the row or column of its value. Values that
are no finite numbers leave a gap. Where curves meet, the later one is visible; each of several has a mark of its own,
so colours are never needed. textual-plot is a widget, so `--plain` could not print it, and needs numpy; importing
plotext takes 0.4 s.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from penstock.console.views.table import clean, number

MARKS: Final = ("•", "×", "○", "+")
COLOURS: Final = ("cyan", "magenta", "yellow", "green")
DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille dots by row and column of a cell (Unicode chapter 21.1)."""
LARGEST: Final = sys.float_info.max
SMALLEST, EXACT = 1e-290, 1e-12
"""The least step of a scale, and as a share of its values; smaller ones are no longer exact."""
MIDDLE: Final = 1.5
"""The dots from the top of a cell to its middle."""
APART: Final = 8
"""The columns between two marks of a curve."""
LEAST: Final = 12
"""The fewest columns of a drawing."""


@dataclass(frozen=True, slots=True)
class TerminalCurve:
    """A curve with a name."""

    name: str
    points: Sequence[tuple[float, float | None]]
    """(x, y), sorted by x; y is None if it is no finite number."""
    smooth: Sequence[tuple[float, float]] = ()
    """The smoothed curve; empty for none."""


def smooth_points(points: Sequence[tuple[float, float | None]], over: float = 0.1) -> list[tuple[float, float]]:
    """An exponential mean over about the share `over` of the finite points."""
    known = [(x, y) for x, y in points if y is not None]
    weight = 1 / max(1.0, len(known) * over)
    found: list[tuple[float, float]] = []
    for x, y in known:
        found.append((x, y if not found else found[-1][1] * (1 - weight) + y * weight))
    return found


def chart(lines: Sequence[TerminalCurve], width: int, height: int, limit: tuple[str, float] | None = None) -> Text:
    """Curves on common axes, in so many columns and lines. `limit`: name and value of a level that is drawn across."""
    values = [y for line in lines for _, y in (*line.points, *line.smooth) if y is not None]
    if not values:
        return Text("no finite value yet", style="dim")
    low, high = min(values), max(values)
    if limit is not None:
        low, high = min(low, limit[1]), max(high, limit[1])
    if low == high:
        low, high = max(-LARGEST, low - abs(low) * 0.1 - 1e-9), min(LARGEST, high + abs(high) * 0.1 + 1e-9)
    xs = [x for line in lines for x, _ in (*line.points, *line.smooth)]
    behind = 0 if limit is None else cell_len(clean(limit[0])) + 1
    axes = _Axes(width - behind, height, (min(xs), max(xs)), (low, high))
    canvas = _Canvas(axes)
    if limit is not None:
        canvas.level(limit[1])
    for place, line in enumerate(lines):
        canvas.draw(line, place, marked=len(lines) > 1)
    notes = {} if limit is None else {axes.row_of(limit[1]): f" {clean(limit[0])}"}
    return axes.framed(canvas.row, notes, [(x, number(x)) for x in ticks(*axes.x, axes.columns // 12)])


def bars(layers: Sequence[Sequence[float]], width: int, height: int, labels: Callable[[int], str]) -> Text:
    """Bars from 0 up, in so many columns and lines: one for each place, and each layer in front of the one before, in a
    colour of its own. Where there are more places than dots, a bar is the highest of its places. `labels`: the text
    below a place."""
    most, high = len(layers[0]), max((max(layer) for layer in layers), default=0.0) or 1.0
    axes = _Axes(width, height, (0.0, float(most)), (0.0, high))
    dots = 2 * axes.columns
    tall = [[4 * axes.rows - axes.down(value) if value else 0 for value in layer] for layer in layers]

    def tops(layer: Sequence[int], dot: int) -> int:
        """The height of a layer at a column of dots; broad bars stand apart."""
        first, end = dot * most // dots, max(dot * most // dots + 1, (dot + 1) * most // dots)
        apart = most * 4 <= dots and (dot + 1) * most // dots != first
        return 0 if apart else max(layer[first:end])

    columns = [[tops(layer, dot) for dot in range(dots)] for layer in tall]

    def row(row: int) -> Iterator[tuple[str, int]]:
        base = 4 * (axes.rows - 1 - row)
        for column in range(axes.columns):
            cell, owner = 0, -1
            for place, layer in enumerate(columns):
                full = [min(4, max(0, layer[2 * column + half] - base)) for half in (0, 1)]
                if any(full):
                    # One colour a cell: that of the layer in front, and its dots alone.
                    cell, owner = sum(DOTS[3 - dot][half] for half in (0, 1) for dot in range(full[half])), place
            yield chr(0x2800 + cell) if cell else " ", owner

    wide = max(len(labels(place)) for place in range(most)) + 2
    step = max(1, -(-most * wide // axes.columns))
    return axes.framed(row, {}, [(place + 0.5, labels(place)) for place in range(0, most, step)])


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that lie evenly from `low` to `high`: at most `most`, at least
    one. The ends themselves when no round number is between them."""
    if not (math.isfinite(high - low) and high > low):
        return [low] if high == low else [low, high]
    size = 10.0 ** math.floor(math.log10((high - low) / max(1, most)))
    for step in (size, 2 * size, 5 * size, 10 * size, 20 * size, 50 * size):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if 0 <= last - first < max(1, most):
            return [float(f"{count * step:.12g}") for count in range(first, last + 1)]
    return [low]


def scale(low: float, high: float, rows: int) -> tuple[tuple[float, float], dict[int, str]]:
    """The values in the middle of the last row and of the first, and the labels of rows: round numbers, evenly apart,
    that hold `low` to `high` in the least room."""
    best: tuple[float, float, int] | None = None
    for apart in (min(2, rows - 1), 3, 4) if rows < 16 else (4, 5, 6):
        if apart >= rows:
            break
        size = (high - low) * apart / (rows - 1)
        if not math.isfinite(size) or size < max(SMALLEST, EXACT * max(abs(low), abs(high))):
            continue
        power = 10.0 ** math.floor(math.log10(size))
        for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
            base = math.floor(low / step + 1e-9) * step
            if base + step * (rows - 1) / apart >= high - step * 1e-9:
                best = min(best or (step / apart, base, apart), (step / apart, base, apart))
                break
    if best is None:
        return (low, high), {0: f"{high:.17g}", rows - 1: f"{low:.17g}"}
    unit, base, apart = best
    values = {rows - 1 - row: base + row * unit for row in range(0, rows, apart)}
    digits = 2 + math.ceil(math.log10(max(map(abs, values.values())) / unit))
    labels = {row: f"{float(f'{value / unit:.0f}') * unit:.{max(6, digits)}g}" for row, value in values.items()}
    return (base, base + unit * (rows - 1)), dict(sorted(labels.items()))


class _Axes:
    """The frame of a drawing: a scale on the left and one below. A label stands at the row or column of its value."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.rows = max(3, height - 2)
        self.x, (self.y, self.labels) = x, scale(*y, self.rows)
        self.margin = max(map(len, self.labels.values()))
        self.columns = max(LEAST, width - self.margin - 1)

    def place(self, x: float, y: float) -> tuple[int, int]:
        """The position of a point: dots from the left and from the top."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0]) if self.x[1] > self.x[0] else 0.5
        return round(across * (2 * self.columns - 1)), self.down(y)

    def down(self, y: float) -> int:
        """The dots from the top to a value."""
        # Halved first, because the difference of two finite doubles may be infinite.
        up = (y / 2 - self.y[0] / 2) / (self.y[1] / 2 - self.y[0] / 2)
        return min(4 * self.rows - 1, max(0, round((1 - up) * 4 * (self.rows - 1) + MIDDLE)))

    def row_of(self, y: float) -> int:
        """The row of cells that a value is in."""
        return self.down(y) // 4

    def framed(
        self,
        row: Callable[[int], Iterator[tuple[str, int]]],
        notes: Mapping[int, str],
        below: Sequence[tuple[float, str]],
    ) -> Text:
        """The rows of a drawing with its scales. `row`: the cells of a row with the index of their curve, -1 for none;
        `notes`: texts behind rows; `below`: the labels of the lower scale."""
        lines: list[Text] = []
        for at in range(self.rows):
            label = self.labels.get(at, "")
            line = Text(f"{label:>{self.margin}}{'┤' if label else '│'}", style="dim", no_wrap=True)
            for cell, place in row(at):
                line.append(cell, f"not dim {COLOURS[place % len(COLOURS)]}" if place >= 0 else "")
            lines.append(line.append(notes.get(at, "")))
        rule, names = ["─"] * self.columns, [" "] * (self.columns + self.margin + 1)
        for x, label in below:
            column = self.place(x, self.y[0])[0] // 2
            begin = min(max(0, column + self.margin + 1 - len(label) // 2), len(names) - len(label))
            # A label that would touch the one before it is left out, with its mark.
            if begin >= 0 and not "".join(names[max(0, begin - 1) : begin + len(label)]).strip():
                rule[column] = "┬"
                names[begin : begin + len(label)] = label
        lines.append(Text(f"{'':{self.margin}}└{''.join(rule)}", style="dim", no_wrap=True))
        return Text("\n").join([*lines, Text("".join(names).rstrip(), style="dim", no_wrap=True)])


def legend(lines: Sequence[TerminalCurve]) -> Text:
    """The legend: the mark and name of each curve."""
    made = Text()
    for place, line in enumerate(lines):
        style = COLOURS[place % len(COLOURS)]
        made.append(f"{'  ' if place else ''}{MARKS[place % len(MARKS)]} ", style).append(clean(line.name))
    return made


class _Canvas:
    """A grid of cells with dots and marks."""

    def __init__(self, axes: _Axes) -> None:
        self._axes = axes
        self._dots = [[0] * axes.columns for _ in range(axes.rows)]
        self._marks = [[""] * axes.columns for _ in range(axes.rows)]
        self._owner = [[-1] * axes.columns for _ in range(axes.rows)]

    def level(self, y: float) -> None:
        """Draw a dashed horizontal line at the value `y`."""
        row = self._axes.row_of(y)
        for column in range(self._axes.columns):
            self._marks[row][column] = "┄"

    def draw(self, line: TerminalCurve, place: int, marked: bool) -> None:
        """Draw the points, and a line: the smoothed one, else from point to point. `marked`: with the mark of the curve
        now and then, where there are others."""
        for x, y in line.points:
            if y is not None:
                self._dot(*self._axes.place(x, y), place)
        for one, other in pairwise(line.smooth or line.points):
            if one[1] is not None and other[1] is not None:
                self._line(self._axes.place(one[0], one[1]), self._axes.place(other[0], other[1]), place)
        if marked:
            self._mark([(x, y) for x, y in line.smooth or line.points if y is not None], place)

    def _dot(self, across: int, down: int, place: int) -> None:
        self._dots[down // 4][across // 2] |= DOTS[down % 4][across % 2]
        self._owner[down // 4][across // 2] = place

    def _line(self, one: tuple[int, int], other: tuple[int, int], place: int) -> None:
        steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
        for step in range(steps + 1):
            share = step / steps
            across, down = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
            self._dot(across, down, place)

    def _mark(self, points: Sequence[tuple[float, float]], place: int) -> None:
        """Put the mark of a curve on some of its points: on the last one, and on others that are far enough from it."""
        free: float = math.inf
        for x, y in reversed(points):
            across, down = self._axes.place(x, y)
            if across // 2 <= free:
                self._marks[down // 4][across // 2], self._owner[down // 4][across // 2] = (
                    MARKS[place % len(MARKS)],
                    place,
                )
                free = across // 2 - APART

    def row(self, row: int) -> Iterator[tuple[str, int]]:
        """Each cell and the index of its curve, -1 for none."""
        for mark, dots, owner in zip(self._marks[row], self._dots[row], self._owner[row], strict=True):
            # A level is behind the curves, the mark of a curve before them.
            yield mark if mark and (owner >= 0) == (mark in MARKS) else chr(0x2800 + dots) if dots else " ", owner
