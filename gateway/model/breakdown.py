"""Figures of calls, broken down by what they have in common."""

from __future__ import annotations

from pydantic import Field

from penstock.gateway.model.answers import ModelStats
from penstock.gateway.model.base import Noun
from penstock.gateway.model.grouping import By


class BreakdownRow(ModelStats):
    """Sums over the calls that have a value in common."""

    value: str
    """What they have in common; empty where they have nothing there."""
    rollouts: int = 0
    """Rollouts with such calls."""
    rewarded: int = 0
    """Those of them that have a reward."""
    reward: float | None = None
    """Mean reward of those."""


class Breakdown(Noun):
    """Sums over the calls of agents that a filter takes, the busiest value first. Calls that were made to try a release
    are in none."""

    by: By
    """What they are broken down by."""
    rows: list[BreakdownRow] = Field(default_factory=list[BreakdownRow])
    """A row for each value."""
    more: int = 0
    """How many more values there are."""
    complete: bool
    """True when the sums are over the whole tape; else they are over its newest spans, because there is no index, it is
    behind, or the filter is about the bytes of calls."""
    looked_at: int | None = None
    """How many of the newest spans were looked at, where not all were."""
