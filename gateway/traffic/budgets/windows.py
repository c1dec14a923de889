"""The windows in which budgets are counted, one after the other from 1970 on, in UTC. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from typing import Final, NamedTuple

from penstock.gateway.model.budget import MONTH, TOTAL
from penstock.gateway.model.times import nanoseconds


class BudgetWindow(NamedTuple):
    """The begin and end of one window."""

    since_ns: int
    ends_ns: int | None
    """None if it never ends."""


_last: Final[dict[str, BudgetWindow]] = {}
"""The latest window of each kind: most calls are in the same one."""


def window_at(window: str, at_ns: int) -> BudgetWindow:
    """The window that a moment is in. A length of time begins at its multiples: `1h` on the hour, `1d` at midnight."""
    known = _last.get(window)
    if known is None or at_ns < known.since_ns or (known.ends_ns is not None and at_ns >= known.ends_ns):
        known = _last[window] = _window_at(window, at_ns)
    return known


def _window_at(window: str, at_ns: int) -> BudgetWindow:
    if window == TOTAL:
        return BudgetWindow(0, None)
    if window == MONTH:
        day = datetime.fromtimestamp(at_ns // 10**9, UTC)
        following = (day.year + 1, 1) if day.month == 12 else (day.year, day.month + 1)
        return BudgetWindow(_first(day.year, day.month), _first(*following))
    length = _length(window)
    since = at_ns - at_ns % length
    return BudgetWindow(since, since + length)


@cache
def _length(window: str) -> int:
    found = nanoseconds(window)
    assert found, "a budget was checked when it was read"
    return found


def _first(year: int, month: int) -> int:
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp()) * 10**9
