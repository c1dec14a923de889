"""Small plots as SVG: lines and stacked bars, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf")
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 44, 50

Line = Sequence[tuple[float, float]]


def lines(title: str, across: str, series: Mapping[str, Line], top: float = 1.0, mark: float | None = None) -> str:
    """Shares over rollouts, one line each; `mark` draws a dashed level."""
    right = max(x for line in series.values() for x, _ in line)
    parts = [_frame(title, across, right, top)]
    if mark is not None:
        y = _y(mark, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#888" stroke-dasharray="5 4"/>')
        parts.append(_text(WIDTH - RIGHT - 4, y - 5, f"{mark:.0%}", "end"))
    for colour, (name, line) in zip(COLOURS, series.items(), strict=False):
        points = " ".join(f"{_x(x, right):.1f},{_y(min(y, top), top):.1f}" for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"><title>')
        parts.append(f"{escape(name)}</title></polyline>")
    parts.append(_legend(list(series)))
    return _svg(parts)


def bars(title: str, across: str, kinds: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Stacked shares: a bar for each row, a colour for each kind."""
    parts = [_frame(title, across, None, 1.0)]
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
                parts.append(_text(x + step * 0.35, y + height / 2 + 4, f"{share:.1%}", "middle", "#fff"))
            below += share
        parts.append(_text(x + step * 0.35, HEIGHT - BOTTOM + 18, name, "middle"))
    parts.append(_legend(kinds))
    return _svg(parts)


def _x(value: float, right: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / right


def _y(value: float, top: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#777", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{escape(text)}</text>'
    )


def _frame(title: str, across: str, right: float | None, top: float) -> str:
    parts = [_text(LEFT, 18, title, size=14), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, "middle")]
    for quarter in range(5):
        y = _y(top * quarter / 4, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#888" stroke-opacity="0.25"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{top * quarter / 4:.0%}", "end"))
        if right is not None:
            parts.append(
                _text(_x(right * quarter / 4, right), HEIGHT - BOTTOM + 18, f"{right * quarter / 4:,.0f}", "middle")
            )
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts: list[str] = []
    x = float(LEFT)
    for colour, name in zip(COLOURS, names, strict=False):
        parts.append(f'<rect x="{x:.1f}" y="27" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, 36, name, size=11))
        x += 26 + 6.0 * len(name)
    return "".join(parts)


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return head + "\n".join(parts) + "</svg>\n"
