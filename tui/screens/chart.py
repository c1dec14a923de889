"""Curves in a terminal: raw points in braille dots, smoothed ones as a line of marks, with numbers at the axes. Pure.

A cell has two dots across and four down. Values that are no finite numbers leave a gap. Where curves meet, the later
one is visible; each has a mark of its own, so colours are never needed. textual-plot is a widget, so `--plain` could
not print it, and needs numpy; importing plotext takes 0.4 s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from rich.text import Text

from penstock.console.views.table import clean, number

MARKS: Final = ("•", "×", "○", "+")
COLOURS: Final = ("cyan", "magenta", "yellow", "green")
DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille dots by row and column of a cell (Unicode chapter 21.1)."""
LARGEST: Final = sys.float_info.max
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
    """Curves on common axes. `limit`: the name and value of a level that is drawn across."""
    values = [y for line in lines for _, y in (*line.points, *line.smooth) if y is not None]
    if not values:
        return Text("no finite value yet", style="dim")
    low, high = min(values), max(values)
    if limit is not None:
        low, high = min(low, limit[1]), max(high, limit[1])
    if low == high:
        low, high = max(-LARGEST, low - abs(low) * 0.1 - 1e-9), min(LARGEST, high + abs(high) * 0.1 + 1e-9)
    xs = [x for line in lines for x, _ in (*line.points, *line.smooth)]
    labels = [number(float(f"{value:.4g}")) for value in (high, low / 2 + high / 2, low)]
    margin = max(map(len, labels)) + 1
    canvas = _Canvas(max(LEAST, width - margin), max(3, height), (min(xs), max(xs)), (low, high))
    if limit is not None:
        canvas.level(limit[1])
    for place, line in enumerate(lines):
        canvas.draw(line, place)
    return Text("\n").join(_lines(canvas, labels, margin, limit))


def _lines(canvas: _Canvas, labels: Sequence[str], margin: int, limit: tuple[str, float] | None) -> Iterator[Text]:
    at = {0: labels[0], canvas.rows // 2: labels[1], canvas.rows - 1: labels[2]}
    for row in range(canvas.rows):
        line = Text(f"{at.get(row, ''):>{margin - 1}}│", style="dim", no_wrap=True)
        for cell, place in canvas.row(row):
            line.append(cell, COLOURS[place % len(COLOURS)] if place >= 0 else "dim")
        if limit is not None and canvas.row_of(limit[1]) == row:
            line.append(f" {clean(limit[0])}", "dim")
        yield line
    first, last = (number(float(f"{x:.6g}")) for x in canvas.x)
    yield Text(" " * margin + first + last.rjust(canvas.columns - len(first)), style="dim", no_wrap=True)


def legend(lines: Sequence[TerminalCurve]) -> Text:
    """The legend: the mark and name of each curve."""
    made = Text()
    for place, line in enumerate(lines):
        style = COLOURS[place % len(COLOURS)]
        made.append(f"{'  ' if place else ''}{MARKS[place % len(MARKS)]} ", style).append(clean(line.name))
    return made


class _Canvas:
    """A grid of cells with dots and marks."""

    def __init__(self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.columns, self.rows, self.x, self.y = columns, rows, x, y
        self._dots = [[0] * columns for _ in range(rows)]
        self._marks = [[""] * columns for _ in range(rows)]
        self._owner = [[-1] * columns for _ in range(rows)]

    def _place(self, x: float, y: float) -> tuple[int, int]:
        """The position of a point: dots from the left and from the top."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0]) if self.x[1] > self.x[0] else 0.5
        # Halved first, because the difference of two finite doubles may be infinite.
        up = (y / 2 - self.y[0] / 2) / (self.y[1] / 2 - self.y[0] / 2)
        return round(across * (2 * self.columns - 1)), round((1 - up) * (4 * self.rows - 1))

    def row_of(self, y: float) -> int:
        """The row of cells that a value is in."""
        return self._place(self.x[0], y)[1] // 4

    def level(self, y: float) -> None:
        """Draw a dashed horizontal line at the value `y`."""
        row = self.row_of(y)
        for column in range(self.columns):
            self._marks[row][column] = "┄"

    def draw(self, line: TerminalCurve, place: int) -> None:
        """Draw points as dots, and the smoothed curve with the mark of the curve."""
        for x, y in line.points:
            if y is not None:
                across, down = self._place(x, y)
                self._dots[down // 4][across // 2] |= DOTS[down % 4][across % 2]
                self._owner[down // 4][across // 2] = place
        cells = [self._place(x, y) for x, y in line.smooth]
        for (left, up), (right, down) in pairwise(cells):
            for column in range(left // 2, right // 2):
                share = (2 * column - left) / max(1, right - left)
                self._mark(column, round((up + max(0.0, share) * (down - up)) / 4 - 0.375), place)
        for across, down in cells[-1:]:
            self._mark(across // 2, down // 4, place)

    def _mark(self, column: int, row: int, place: int) -> None:
        row = min(self.rows - 1, max(0, row))
        self._marks[row][column], self._owner[row][column] = MARKS[place % len(MARKS)], place

    def row(self, row: int) -> Iterator[tuple[str, int]]:
        """Each cell and the index of its curve, -1 for none."""
        for mark, dots, owner in zip(self._marks[row], self._dots[row], self._owner[row], strict=True):
            yield mark if mark and (owner >= 0 or not dots) else chr(0x2800 + dots) if dots else " ", owner
