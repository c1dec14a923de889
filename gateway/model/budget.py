"""Budgets: limits on what calls may use up, and their use so far."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from penstock.gateway.model.base import Noun
from penstock.gateway.model.times import NOTATION, nanoseconds
from penstock.gateway.model.toml import Section

BudgetScope = Literal["all", "key", "agent", "rollout", "run", "arm"]
BudgetUnit = Literal["calls", "tokens", "usd"]
MOST_USD: Final = 10**9
"""Most US dollars of a budget: sums are counted in billionths of a dollar."""
MONTH, TOTAL = "month", "total"
"""Windows that are not a length of time."""
_SECOND: Final = 10**9


class Budget(Section):
    """`[[budget]]`: what calls may use up."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """What refusals, `penstock budgets` and metrics call it."""
    per: BudgetScope = "all"
    """What has a budget of its own: each `key`, `agent`, `rollout`, training `run` or `arm` of a release. `all` is one
    budget for all calls."""
    only: list[str] = Field(default=[])
    """Which keys, agents, rollouts, runs or arms (`RELEASE:ARM`): names or patterns with `*` and `?`. Default: each."""
    model: str = Field(default="*", min_length=1, max_length=256)
    """Calls for which models it is about: a name, or a pattern with `*` and `?`."""
    unit: BudgetUnit
    """What is counted: `calls`, `tokens` (of prompts and of answers), or US dollars by the list of prices."""
    limit: float = Field(gt=0, le=1e15)
    """How many of them may be used up in a window."""
    window: str = "1d"
    """For how long: a time such as `1h`, a calendar `month`, or `total`, which never begins anew."""
    unknown: Literal["refuse", "pass"] = "refuse"
    """What happens to a call of which nobody can say how many tokens it uses, or whose model has no price: it is
    refused, or passes and counts only what its answer tells. Where `unit` is `calls`, it passes and counts as one."""

    @field_validator("window")
    @classmethod
    def _is_a_window(cls, value: str) -> str:
        if value not in (MONTH, TOTAL) and (nanoseconds(value) or 0) < _SECOND:
            raise ValueError(f"{value!r} is neither {MONTH!r} nor {TOTAL!r} nor a time from 1s on: {NOTATION}")
        return value

    @property
    def refuses_unknown(self) -> bool:
        """True if a call whose use cannot be told is refused."""
        return self.unit != "calls" and self.unknown == "refuse"

    @model_validator(mode="after")
    def _makes_sense(self) -> Budget:
        if self.unit != "usd" and self.limit != int(self.limit):
            raise ValueError(f"limit: {self.limit:g} {self.unit} are no whole number")
        if self.unit == "usd" and self.limit > MOST_USD:
            raise ValueError(f"limit: {self.limit:g} is more than {MOST_USD} US dollars")
        if self.per == "all" and self.only:
            raise ValueError('only: it names what has a budget of its own, and per = "all" gives that to none')
        return self


class BudgetUse(Noun):
    """The used and the reserved part of a budget in the present window."""

    budget: str
    """Its name."""
    per: BudgetScope
    """What has one of its own."""
    of: str = ""
    """Whose this one is: a key, an agent, a rollout, a run, or an arm; empty where it is that of all calls."""
    unit: BudgetUnit
    """What is counted."""
    limit: float
    """How much may be used."""
    used: float
    """What calls that are over have used."""
    guessed: float = 0.0
    """The part of it that nobody counted: an estimate, or what was reserved where there was not even that."""
    unread: int = 0
    """Calls that have passed although nobody can say what they have used."""
    reserved: float
    """What calls that run may use up to."""
    running: int
    """How many calls that are."""
    window: str
    """For how long, as configured."""
    since_ns: int
    """When the window began; 0 where it never ends; ns since the epoch."""
    frees_ns: int | None
    """When the next one begins; None where it never does."""

    @property
    def share(self) -> float:
        """The part of the limit that is used or reserved."""
        return (self.used + self.reserved) / self.limit


class BudgetPage(Noun):
    """Budgets and what is used of them: the fullest first."""

    budgets: list[BudgetUse]
    """As many as were asked for."""
    total: int
    """How many there are."""
    configured: list[str] = Field(default=[])
    """Names of the budgets in penstock.toml, also of those that have counted nothing."""
