"""Budgets that are never exceeded: the highest possible cost is taken beforehand, and nothing begins that is not
covered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ROUNDING: Final = 1e-9
"""Tolerance for sums of money, as a share of the budget, because they are rounded."""


class BudgetExhausted(Exception):
    """A budget is used up; the message says which."""


@dataclass(slots=True)
class SearchBudget:
    """The limits of a run, and how much of them is used. None is no limit."""

    rollouts: int
    """Limit of rollouts."""
    reflections: int | None = None
    """Limit of calls of the reflecting model."""
    tokens: int | None = None
    """Limit of tokens of the reflecting model, in and out, hidden reasoning counted."""
    money: float | None = None
    """Limit of the cost of these tokens, in the currency of the configured prices."""
    reserved: int = 0
    """Rollouts of the limit that are reserved for later."""
    used_rollouts: int = 0
    used_reflections: int = 0
    used_tokens: int = 0
    used_money: float = 0.0

    @property
    def left(self) -> int:
        """Rollouts that are left, without the reserved ones."""
        return max(0, self.rollouts - self.reserved - self.used_rollouts)

    def take_rollouts(self, wanted: int) -> int:
        """Take `wanted` rollouts, or as many as are left; return the number. Raises `BudgetExhausted` when none is
        left."""
        if wanted and not self.left:
            but = f", but for {self.reserved:,} of the race" if self.reserved else ""
            raise BudgetExhausted(f"all {self.rollouts:,} rollouts (budget.rollouts) are used{but}")
        given = min(wanted, self.left)
        self.used_rollouts += given
        return given

    def take_reflection(self, most_tokens: int, most_money: float) -> None:
        """Take a reflection, and the most tokens and money that it can use. Raises `BudgetExhausted` when not all
        are left."""
        for name, used, wanted, most in (
            ("reflections", self.used_reflections, 1, self.reflections),
            ("tokens", self.used_tokens, most_tokens, self.tokens),
            ("money", self.used_money, most_money, self.money),
        ):
            if most is not None and used + wanted > most * (1 + ROUNDING):
                said = f"budget.{name}: {round(used, 6):,} of {most:,} are used"
                raise BudgetExhausted(f"{said}, and a reflection may need {round(wanted, 6):,}")
        self.used_reflections += 1
        self.used_tokens += most_tokens
        self.used_money += most_money

    def give_back(self, tokens: int, money: float) -> None:
        """Give back the tokens and money that a reflection took and has not used."""
        self.used_tokens -= tokens
        self.used_money -= money
