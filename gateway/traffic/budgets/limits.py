"""A budget as it is counted: in whole numbers, so that sums are exact. Pure.

Money is counted in billionths of a dollar, and what a call may cost is rounded up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import translate
from functools import cache, lru_cache
from math import ceil
from typing import Final, NamedTuple

from penstock.gateway.model.state import MONTH, TOTAL, Budget, BudgetUnit
from penstock.gateway.model.times import nanoseconds

PARTS: Final[dict[BudgetUnit, int]] = {"calls": 1, "tokens": 1, "usd": 10**9}
"""Counted amount of one unit."""
MOST: Final = 1 << 62
"""Most that a call may claim, or have used: more than any budget has, and less than a record can hold."""


@dataclass(frozen=True)
class Limit:
    """A budget, prepared for counting."""

    budget: Budget
    most: int = field(init=False)
    """Counted amount that may be used."""
    prefix: bytes = field(init=False)
    """Prefix of the keys of its sums. A budget whose unit, window or owner changes begins anew."""
    _only: re.Pattern[str] | None = field(init=False)
    _model: re.Pattern[str] | None = field(init=False)

    def __post_init__(self) -> None:
        budget = self.budget
        counted = f"{budget.name}\0{budget.unit}/{budget.window}/{budget.per}\0"
        object.__setattr__(self, "most", round(budget.limit * PARTS[budget.unit]))
        object.__setattr__(self, "prefix", counted.encode("ascii"))
        object.__setattr__(self, "_only", _pattern(budget.only) if budget.only else None)
        object.__setattr__(self, "_model", None if budget.model == "*" else _pattern([budget.model.lower()]))

    def key(self, of: str) -> bytes:
        """The key of the sum of one owner."""
        return sum_key(self.prefix, of)

    def of(self, key: bytes) -> str:
        """The owner in the key of a sum; the inverse of `key`."""
        return key[len(self.prefix) : -1].decode("ascii")

    def is_for(self, of: str) -> bool:
        """True if the budget counts this owner."""
        return self._only is None or self._only.fullmatch(of) is not None

    def is_about(self, model: str | None) -> bool:
        """True if the budget counts calls for this model. A call for an unknown model may be for any, and so may one
        for a model that an AWS account has named itself."""
        if self._model is None or model is None or _OWN_NAME.match(model) is not None:
            return True
        return self._model.fullmatch(model.lower()) is not None

    def shown(self, amount: int) -> float:
        """A counted amount, in the budget's unit."""
        return amount / PARTS[self.budget.unit]


@lru_cache(maxsize=8192)
def sum_key(prefix: bytes, of: str) -> bytes:
    """The key of a sum (`Limit.key`). Cached: owners make many calls."""
    return b"%b%b\0" % (prefix, of.encode("ascii"))


_OWN_NAME: Final = re.compile(r"arn:(?!.*:(?:foundation-model|inference-profile)/)")
"""An ARN that names no public model."""


def _pattern(patterns: Iterable[str]) -> re.Pattern[str]:
    # A bracket in a name is no pattern, as in prices.
    return re.compile("|".join(translate(one.replace("[", "[[]")) for one in patterns))


def nanodollars(dollars: float) -> int:
    """Dollars as a counted amount, at most `MOST`: an upstream may report any number of tokens."""
    return ceil(min(dollars * PARTS["usd"], MOST))


# The windows in which budgets are counted, one after the other from 1970 on, in UTC. Pure.


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
