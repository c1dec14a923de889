"""Values in readable form: durations, sizes, numbers, ages; and text that is safe on a terminal. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from penstock.gateway.model.audit import NOBODY
from penstock.gateway.model.terminal_text import terminal_safe

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
    """The author of a change: the name of the key, which is known, and the name that was only claimed."""
    if not key:
        return f"{who} (claimed)"
    return key if who in (key, NOBODY) else f"{key} (says {who})"


def joined(*pieces: str | Text) -> Text:
    """Pieces on a line, two spaces apart; empty ones leave no gap."""
    texts = (plain(piece) if isinstance(piece, str) else piece for piece in pieces)
    return Text("  ").join(text for text in texts if text)


def compact(value: Any) -> str:
    """JSON on one line; empty for None."""
    return "" if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def tally(number: int | None) -> str:
    """A number, or `?` if it is unknown."""
    return "?" if number is None else f"{number:,}"
