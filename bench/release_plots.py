"""Small plots as SVG: lines and stacked bars, readable on light and dark pages.

Colours are those of Okabe and Ito (2008), which people who see fewer colours can tell apart; lines differ by their
dashes as well, and parts of a bar stand in the order of the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
DASHES = ("none", "10 4", "2 4", "12 4 2 4", "5 3", "14 3 2 3 2 3", "1 3")
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 44, 50

Line = Sequence[tuple[float, float]]


def lines(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Line],
    top: float = 1.0,
    mark: float | None = None,
    events: Sequence[float] = (),
) -> str:
    """Return a plot of shares over rollouts, one line each; `across` and `up` name the axes, `mark` draws a level,
    `events` places."""
    right = max(x for line in series.values() for x, _ in line)
    parts = [_frame(title, across, up, right, top)]
    if mark is not None:
        y = _y(mark, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#888"/>')
        parts.append(_text(WIDTH - RIGHT - 4, y - 5, _percent(mark), "end"))
    for event in events:
        x = f'x1="{_x(event, right):.1f}" x2="{_x(event, right):.1f}"'
        parts.append(f'<line {x} y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#888" stroke-dasharray="2 3"/>')
    for style, (name, line) in enumerate(series.items()):
        points = " ".join(f"{_x(x, right):.1f},{_y(min(y, top), top):.1f}" for x, y in line)
        parts.append(f'<polyline points="{points}" {_stroke(style)}><title>{escape(name)}</title></polyline>')
    parts.append(_legend(list(series), lambda style, x: f'<path d="M{x:.1f} 32h28" {_stroke(style)}/>', 28))
    return _svg(parts)


def bars(title: str, across: str, up: str, kinds: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Return a plot of stacked shares: a bar for each row, a colour for each kind, from below as in the legend."""
    parts = [_frame(title, across, up, None, 1.0)]
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    for place, (name, shares) in enumerate(rows.items()):
        x, below = LEFT + step * (place + 0.15), 0.0
        for colour, share in zip(COLOURS, shares, strict=False):
            y = _y(below + share, 1.0)
            height = _y(below, 1.0) - y
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.7:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
            if share >= 0.04:
                parts.append(_text(x + step * 0.35, y + height / 2 + 4, _percent(share, 1), "middle", "#fff"))
            below += share
        parts.append(_text(x + step * 0.35, HEIGHT - BOTTOM + 18, name, "middle"))
    square = '<rect x="{x:.1f}" y="27" width="10" height="10" fill="{colour}"/>'
    parts.append(_legend(kinds, lambda style, x: square.format(x=x, colour=COLOURS[style]), 10))
    return _svg(parts)


def _x(value: float, right: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / right


def _y(value: float, top: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#777", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{escape(text)}</text>'
    )


def _percent(share: float, digits: int = 0) -> str:
    return f"{share * 100:.{digits}f} %"


def _stroke(style: int) -> str:
    return f'fill="none" stroke="{COLOURS[style]}" stroke-width="2" stroke-dasharray="{DASHES[style]}"'


def _frame(title: str, across: str, up: str, right: float | None, top: float) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts = [_text(LEFT, 18, title, size=14), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, "middle")]
    parts.append(f'<g transform="translate(13 {middle:.1f}) rotate(-90)">{_text(0, 0, up, "middle")}</g>')
    for quarter in range(5):
        y = _y(top * quarter / 4, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#888" stroke-opacity="0.25"/>')
        parts.append(_text(LEFT - 8, y + 4, _percent(top * quarter / 4), "end"))
        if right is not None:
            parts.append(
                _text(_x(right * quarter / 4, right), HEIGHT - BOTTOM + 18, f"{right * quarter / 4:,.0f}", "middle")
            )
    return "".join(parts)


def _legend(names: Sequence[str], key: Callable[[int, float], str], wide: int) -> str:
    """Return the legend; `key` draws the sample before a name, `wide` units wide."""
    parts: list[str] = []
    x = float(LEFT)
    for style, name in enumerate(names):
        parts.append(key(style, x))
        parts.append(_text(x + wide + 4, 36, name, size=11))
        x += wide + 16 + 6.0 * len(name)
    return "".join(parts)


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return head + "\n".join(parts) + "</svg>\n"
