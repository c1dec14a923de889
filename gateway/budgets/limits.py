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

from penstock.gateway.model.budget import Budget, Unit

PARTS: Final[dict[Unit, int]] = {"calls": 1, "tokens": 1, "usd": 10**9}
"""Of one of a unit: what is counted."""
MOST: Final = 1 << 62
"""What a call may claim, or have used, at most: more than any budget has, and less than a record can hold."""


@dataclass(frozen=True)
class Limit:
    """A budget, made ready."""

    budget: Budget
    most: int = field(init=False)
    """What may be used, counted."""
    prefix: bytes = field(init=False)
    """What the keys of its sums begin with. A budget that is counted otherwise than before begins anew."""
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
        """Key of a sum."""
        return b"%b%b\0" % (self.prefix, of.encode("ascii"))

    def of(self, key: bytes) -> str:
        """The inverse of `key`."""
        return key[len(self.prefix) : -1].decode("ascii")

    def is_for(self, of: str) -> bool:
        """Whether this one has a budget."""
        return self._only is None or self._only.fullmatch(of) is not None

    def is_about(self, model: str | None) -> bool:
        """Whether it is about calls for this model. A call of which nobody knows the model may be for any, as one for
        what an account of AWS calls so is."""
        if self._model is None or model is None or _OWN_NAME.match(model) is not None:
            return True
        return self._model.fullmatch(model.lower()) is not None

    def shown(self, amount: int) -> float:
        """What is counted, in its unit."""
        return amount / PARTS[self.budget.unit]


_OWN_NAME: Final = re.compile(r"arn:(?!.*:(?:foundation-model|inference-profile)/)")
"""An ARN that tells no model."""


def _pattern(patterns: Iterable[str]) -> re.Pattern[str]:
    # A bracket is one of the name, as in prices.
    return re.compile("|".join(translate(one.replace("[", "[[]")) for one in patterns))


def nanodollars(dollars: float) -> int:
    """What is counted of them. An upstream may report any number of tokens."""
    return ceil(min(dollars * PARTS["usd"], MOST))
