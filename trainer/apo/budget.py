"""Budgets that are kept exactly: what is about to be spent is taken first, and what is not there is not begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ROUNDING: Final = 1e-9
"""Share of a budget that sums of money may be wrong by, because they are rounded."""


class Spent(Exception):
    """A budget is used up; the message says which."""


@dataclass(slots=True)
class Budget:
    """What a run may still spend. None is no limit."""

    rollouts: int
    """Rollouts."""
    reflections: int | None = None
    """Calls of the reflecting model."""
    tokens: int | None = None
    """Tokens of the reflecting model, in and out, hidden reasoning counted."""
    money: float | None = None
    """What these tokens cost, in the currency of the configured prices."""
    kept: int = 0
    """Rollouts of these that are kept back for later."""
    used_rollouts: int = 0
    used_reflections: int = 0
    used_tokens: int = 0
    used_money: float = 0.0

    @property
    def left(self) -> int:
        """Rollouts that are left, but for those that are kept back."""
        return max(0, self.rollouts - self.kept - self.used_rollouts)

    def take_rollouts(self, wanted: int) -> int:
        """Takes as many of these as are left; raises `Spent` when none is."""
        if wanted and not self.left:
            but = f", but for {self.kept:,} of the race" if self.kept else ""
            raise Spent(f"all {self.rollouts:,} rollouts (budget.rollouts) are used{but}")
        given = min(wanted, self.left)
        self.used_rollouts += given
        return given

    def take_reflection(self, most_tokens: int, most_money: float) -> None:
        """Takes a reflection, and the most tokens and money that it can use. Raises `Spent` when not all are left."""
        for name, used, wanted, most in (
            ("reflections", self.used_reflections, 1, self.reflections),
            ("tokens", self.used_tokens, most_tokens, self.tokens),
            ("money", self.used_money, most_money, self.money),
        ):
            if most is not None and used + wanted > most * (1 + ROUNDING):
                said = f"budget.{name}: {round(used, 6):,} of {most:,} are used"
                raise Spent(f"{said}, and a reflection may need {round(wanted, 6):,}")
        self.used_reflections += 1
        self.used_tokens += most_tokens
        self.used_money += most_money

    def give_back(self, tokens: int, money: float) -> None:
        """What a reflection was given and has not used."""
        self.used_tokens -= tokens
        self.used_money -= money
