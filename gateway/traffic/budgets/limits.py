"""A budget as it is counted: in whole numbers, so that sums are exact. Pure.

Money is counted in billionths of a dollar, and what a call may cost is rounded up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import translate
from math import ceil
from typing import Final

from penstock.gateway.model.budget import Budget, BudgetUnit

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
        return b"%b%b\0" % (self.prefix, of.encode("ascii"))

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


_OWN_NAME: Final = re.compile(r"arn:(?!.*:(?:foundation-model|inference-profile)/)")
"""An ARN that names no public model."""


def _pattern(patterns: Iterable[str]) -> re.Pattern[str]:
    # A bracket in a name is no pattern, as in prices.
    return re.compile("|".join(translate(one.replace("[", "[[]")) for one in patterns))


def nanodollars(dollars: float) -> int:
    """Dollars as a counted amount, at most `MOST`: an upstream may report any number of tokens."""
    return ceil(min(dollars * PARTS["usd"], MOST))
