"""Tables for a terminal of any width, and for a pipe. Pure.

Each column says what happens to it when there is little room. It stays (ids, which people copy), is narrowed, or is
left out in its turn; columns that are empty in every row are left out first. A line below the table names the columns
left out. If even that does not fit, lines are longer than the terminal is wide: an id is never cut.

A pipe or a file has endless room (`ENDLESS`): there is every column, a row is one line, columns are at least two spaces
apart, and an empty cell is a `-`. So `grep` finds whole rows and `awk -F ' +'` the same columns every time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from penstock.gateway.model.base import NOBODY
from penstock.gateway.model.foreign_text import terminal_safe

# Values in readable form: durations, sizes, numbers, ages; and text that is safe on a terminal. Pure.

LONG = 1 << 16
"""Characters up to which all words of a text are examined when it is abbreviated: each word takes fifty bytes of
memory."""


def clean(value: object) -> str:
    """Text whose control characters are made visible, so that a terminal obeys none."""
    return terminal_safe(str(value))


def plain(value: object, style: str = "") -> Text:
    """A value as a cell; empty for None."""
    return Text("" if value is None else clean(value), style=style)


def duration(ns: int | None) -> str:
    """A duration in readable form, such as 12 µs, 3.4 ms, 1.25 s, 2 m 05 s or 3 h 07 m; empty for None."""
    if ns is None:
        return ""
    if ns < 60 * 10**9:
        whole, unit = next((step for step in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")) if ns >= step[0]), (1, "ns"))
        value = ns / whole
        return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    minutes, seconds = divmod(ns // 10**9, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {seconds:02} s"


def size(count: int) -> str:
    """A number of bytes with a binary unit: `1.5 MiB`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def moment(ns: int) -> str:
    """A time of day in UTC, to the millisecond."""
    return f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%d %H:%M:%S}.{ns // 10**6 % 1000:03}"


def age(ns: int, now_ns: int) -> str:
    """The time since then, in one unit: `5 m`."""
    seconds = max(0, now_ns - ns) // 10**9
    steps = ((86400, "d"), (3600, "h"), (60, "m"))
    return next((f"{seconds // step} {unit}" for step, unit in steps if seconds >= step), f"{seconds} s")


def ago(ns: int, now_ns: int) -> str:
    """The time since then, in one unit: `5 m ago`, or `now` below a second."""
    return "now" if now_ns - ns < 10**9 else f"{age(ns, now_ns)} ago"


def number(value: float | None) -> str:
    """A number with at most six digits; empty for None."""
    return "" if value is None else f"{value:.6g}"


def abbreviate(text: str, limit: int | None) -> str:
    """A text on one line, cut with a note of how many characters are missing; the text itself if `limit` is None."""
    if limit is None:
        return text
    if len(text) > LONG:
        start = " ".join(text[:LONG].split())
        return f"{start[:limit].rstrip()} … {len(text) - limit:,} characters more"
    line = " ".join(text.split())
    return line if len(line) <= limit + 20 else f"{line[:limit].rstrip()} … {len(line) - limit:,} characters more"


def asked_by(who: str, key: str) -> str:
    """The author of a change: the name of the key, which is known, and the name that nobody has checked."""
    if not key:
        return f"{who} (unverified)"
    return key if who in (key, NOBODY) else f"{key} (says {who})"


def joined(*pieces: str | Text) -> Text:
    """Pieces on a line, two spaces apart; empty ones leave no gap."""
    texts = (plain(piece) if isinstance(piece, str) else piece for piece in pieces)
    return Text("  ").join(text for text in texts if text)


class Line:
    """Pieces on a line, two spaces apart. A line that is too long is broken between pieces."""

    def __init__(self, *pieces: str | Text) -> None:
        self._pieces = pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for piece in map(joined, self._pieces):
            if line and piece and line.cell_len + GAP + piece.cell_len > options.max_width:
                yield line
                line = piece
            else:
                line = joined(line, piece)
        yield line


class Indented:
    """Something some columns further right, without blanks at the ends of lines, which rich's padding has."""

    def __init__(self, shown: RenderableType, columns: int) -> None:
        self._shown, self._columns = shown, columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrower = options.update_width(max(1, options.max_width - self._columns))
        for line in console.render_lines(self._shown, narrower, pad=False):
            yield Segment(" " * self._columns)
            yield from line
            yield Segment.line()


def compact(value: Any) -> str:
    """JSON on one line; empty for None."""
    return "" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def tally(number: int | None) -> str:
    """A number, or `?` if it is unknown."""
    return "?" if number is None else f"{number:,}"


def money(amount: float | None) -> str:
    """US dollars: two decimals, below one three digits, below a cent two; empty for None."""
    if amount is None:
        return ""
    if amount >= 0.995 or not amount:
        return f"${amount:,.2f}"
    # Sums in another order differ in their last digits: as decimals they are cut at the same one.
    exact = Decimal(repr(round(amount, 12)))
    return f"${Decimal(f'{exact:.{3 if amount >= 0.01 else 2}g}').normalize():f}"


ENDLESS: Final = 1_000_000
"""The width of output that is no terminal."""
GAP: Final = 2
"""Spaces between columns."""
EMPTY: Final = "-"
"""The text of an empty cell in output of endless width."""
_ONE_LINE = {9: "␉", 10: "␊"}

Narrowing = Literal["never", "cut", "fold", "words"]
"""The ways in which a column gets narrower: not at all; its cells end in `…`; its cells are folded; or folded between
words only."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and what happens to it when there is little room."""

    name: str
    goes: int | None = None
    """Its turn to be left out, the lowest first; None: it always stays."""
    narrows: Narrowing = "never"
    """How it is narrowed, before any column is left out."""
    least: int = 0
    """The width in characters below which it is not narrowed."""
    right: bool = False
    """Aligned right, as figures are."""
    optional: bool = False
    """Left out, without a note, when it is empty in every row."""


def figure(name: str, goes: int | None = None) -> Column:
    """A right-aligned column of numbers. `goes`: its turn to be left out."""
    return Column(name, goes, right=True)


class TableLayout(NamedTuple):
    """The layout of a table for some width."""

    widths: dict[int, int]
    """Widths of the columns that are shown, by their index."""
    left_out: list[int]
    """Indices of the columns that are left out."""


class Listing:
    """Rows below a heading. Rendered, it is as wide as the console allows."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns
        self.rows: list[list[Text]] = []

    def add_row(self, *cells: Text | str) -> None:
        """Adds a row: a cell for each column. Raises `ValueError` for another number of cells."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([_one_line(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        empty = EMPTY if options.max_width >= ENDLESS else ""
        found = lay_out(self.columns, self.rows, options.max_width)
        yield from self._lines(console, found.widths, [Text(column.name, "dim") for column in self.columns])
        for row in self.rows:
            yield from self._lines(console, found.widths, [cell or Text(empty) for cell in row])
        if found.left_out:
            names = ", ".join(self.columns[place].name for place in found.left_out)
            yield Text(f"Not shown: {names}. A wider terminal or --json has all.", style="dim")

    def _lines(self, console: Console, widths: Mapping[int, int], cells: Sequence[Text]) -> Iterator[Text]:
        """A row, in as many lines as its longest cell needs."""
        parts = [self._cell(console, self.columns[place], cells[place], width) for place, width in widths.items()]
        for line in zip_longest(*parts, fillvalue=Text()):
            made = Text(no_wrap=True, overflow="ignore")
            for (place, width), part in zip(widths.items(), line, strict=True):
                space = " " * (width - part.cell_len)
                pieces = (space, part) if self.columns[place].right else (part, space)
                made.append(" " * GAP if made else "")
                for piece in pieces:
                    made.append(piece)
            made.rstrip()
            yield made

    def _cell(self, console: Console, column: Column, cell: Text, width: int) -> Sequence[Text]:
        if cell.cell_len <= width:
            return [cell]
        if column.narrows == "cut":
            cut = cell.copy()
            cut.truncate(width, overflow="ellipsis")
            return [cut]
        return list(cell.wrap(console, width, overflow="fold"))


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[Text]], room: int) -> TableLayout:
    """The columns that are shown, and their widths."""
    lines = [[column.name, *(row[place].plain for row in rows)] for place, column in enumerate(columns)]
    empty = [not any(cells[1:]) for cells in lines]
    whole = [max(map(cell_len, cells)) for cells in lines]
    least = [min(wide, _least(column, cells)) for wide, column, cells in zip(whole, columns, lines, strict=True)]
    shown = list(range(len(columns)))
    if room < ENDLESS:
        shown = [place for place in shown if not (columns[place].optional and empty[place])]
    if _total([least[place] for place in shown]) > room:
        shown = [place for place in shown if columns[place].goes is None or not empty[place]]
    turns = sorted((goes, place) for place in shown if (goes := columns[place].goes) is not None)
    gone = _gone([place for _, place in turns], {place: least[place] for place in shown}, room)
    shown = [place for place in shown if place not in gone]
    widths = _narrowed([whole[p] for p in shown], [least[p] for p in shown], room)
    return TableLayout(dict(zip(shown, widths, strict=True)), sorted(gone))


def _gone(turns: Sequence[int], least: Mapping[int, int], room: int) -> set[int]:
    """The columns that are left out: in their turn, until the rest fits; then those for which there is room come
    back."""
    kept, gone = dict(least), set[int]()
    for place in turns:
        if _total(list(kept.values())) <= room:
            break
        gone.add(place)
        del kept[place]
    for place in reversed(turns):
        if place in gone and _total([*kept.values(), least[place]]) <= room:
            gone.remove(place)
            kept[place] = least[place]
    return gone


def _least(column: Column, cells: Sequence[str]) -> int:
    """The smallest width to which a column can be narrowed."""
    if column.narrows == "never":
        return ENDLESS
    longest_word = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
    return max(column.least, cell_len(column.name), longest_word if column.narrows == "words" else 0)


def _narrowed(whole: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that fit, as far as the columns can be narrowed: the widest column shrinks first."""
    widths = [min(wide, max(few, room)) for wide, few in zip(whole, least, strict=True)]
    while _total(widths) > room:
        able = [place for place, width in enumerate(widths) if width > least[place]]
        if not able:
            break
        widths[max(able, key=lambda place: widths[place])] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _one_line(cell: Text | str) -> Text:
    made = cell.copy() if isinstance(cell, Text) else Text(cell)
    made.plain = clean(made.plain.translate(_ONE_LINE))
    return made
