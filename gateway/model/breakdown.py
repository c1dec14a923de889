"""Figures of calls, grouped by a value that they share."""

from __future__ import annotations

from datetime import date

from pydantic import Field

from penstock.gateway.model.answers import ModelStats
from penstock.gateway.model.base import Noun
from penstock.gateway.model.breakdown_dimensions import BreakdownDimension


class BreakdownRow(ModelStats):
    """Sums over the calls that have a value in common."""

    value: str
    """What they have in common; empty where they have nothing there."""
    cost: float | None = None
    """What its calls cost, as their providers say, or by the list of prices; None where none of them has a price."""
    unpriced: int = 0
    """Calls whose tokens were counted and for whose model there is no price; they are in no cost."""
    reported: int = 0
    """Calls whose cost is what their provider says, and not what the list does."""
    rollouts: int = 0
    """Rollouts with such calls."""
    rewarded: int = 0
    """Those of them that have a reward."""
    reward: float | None = None
    """Mean reward of those."""
    reward_quartiles: list[float] | None = None
    """Their least reward, that below which a quarter of them is, the middle, three quarters, and the highest."""


class UnreadRow(Noun):
    """A path of keys that stood in answers and was not read."""

    dialect: str
    """Their wire format."""
    key: str
    """The path, without the places in arrays."""
    kind: str
    """What stands there: text, tool_calls, token_ids, token_counts, logprobs or usage."""
    calls: int
    """How many answers had it."""
    first_ns: int
    """When the first of them began; ns since the epoch."""
    last_ns: int
    """When the last of them began; ns since the epoch."""
    example: str
    """The last of them: ROLLOUT/ATTEMPT#SEQUENCE."""


class UnreadList(Noun):
    """The parts of a tape's answers that were not read when they were recorded, the most frequent first."""

    rows: list[UnreadRow] = Field(default_factory=list[UnreadRow])
    """A row for each path of a wire format."""
    complete: bool
    """True when all calls that the filter takes were looked at; else these are the newest of them."""


class Breakdown(Noun):
    """Sums over the calls of agents that a filter takes, the busiest value first. Calls that were made to try a release
    are in none."""

    by: BreakdownDimension
    """What they are broken down by."""
    rows: list[BreakdownRow] = Field(default_factory=list[BreakdownRow])
    """A row for each value."""
    more: int = 0
    """How many more values there are."""
    currency: str = "USD"
    """Of costs."""
    prices_as_of: date
    """The day by which the list of prices was right."""
    complete: bool
    """True when the sums are over the whole tape; else they are over its newest spans, because there is no index, it is
    behind, or the filter is about the bytes of calls."""
    looked_at: int | None = None
    """How many of the newest spans were looked at, where not all were."""
