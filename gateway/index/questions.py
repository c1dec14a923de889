"""What a gateway asks the process of its index, and what it is told: MessagePack in both directions."""

from __future__ import annotations

from bisect import bisect_left
from operator import neg
from typing import Any, TypeAlias

import msgspec

from penstock.gateway.filters.fields import Target
from penstock.gateway.model.grouping import By


class Find(msgspec.Struct, tag=True, frozen=True):
    """Where are the rows that a filter takes?"""

    target: Target
    filter: str
    now_ns: int
    """What `started>2h` counts back from."""
    before: int | None
    """Only those below this position."""
    limit: int


class Found(msgspec.Struct, tag=True, frozen=True):
    """Positions, newest first: cursors of spans, numbers of rollouts. Among them may be some that a filter does not
    take; none that it takes is missing."""

    positions: list[int]
    complete: bool
    """There are no more."""
    reached: int = 0
    """Where there are more: all positions from this one on were looked at."""
    names: list[str] = []
    """Of rollouts their names."""
    hits: list[int] = []
    """Of rollouts the cursor of a span that a filter of spans takes; empty where it is of none."""

    def below(self, before: int) -> Found | None:
        """The rest of it, below a position; None where that is not all known."""
        at = bisect_left(self.positions, 1 - before, key=neg)
        if at == len(self.positions) and not self.complete:
            return None
        return Found(self.positions[at:], self.complete, self.reached, self.names[at:], self.hits[at:])


class Sum(msgspec.Struct, tag=True, frozen=True):
    """What do the calls come to that a filter of spans takes?"""

    by: By
    filter: str
    now_ns: int
    limit: int
    """Rows at most."""


class Summed(msgspec.Struct, tag=True, frozen=True):
    """A row for each value, as `Breakdown` has them."""

    rows: list[dict[str, Any]]
    values: int
    """How many there are."""


class Total(msgspec.Struct, tag=True, frozen=True):
    """What do all spans come to?"""


class Totalled(msgspec.Struct, tag=True, frozen=True):
    """The sums of `Stats`, with the names that they have there."""

    counted_spans: int
    since_ns: int | None
    by_kind: dict[str, int]
    by_status: dict[str, int]
    models: list[dict[str, Any]]
    """A row for each model, as `Summed` has them."""
    by_tool: list[dict[str, Any]]
    rewards: dict[str, Any]


class List(msgspec.Struct, tag=True, frozen=True):
    """Which files have all of it?"""


class Listed(msgspec.Struct, tag=True, frozen=True):
    """The files of each table: `spans`, `rollouts`, `attempts`, `passages`. Those of a snapshot are there for a second
    at least (`snapshots`)."""

    files: dict[str, list[str]]


class Status(msgspec.Struct, tag=True, frozen=True):
    """How far is it?"""


class Rebuild(msgspec.Struct, tag=True, frozen=True):
    """Delete it and begin anew."""


class State(msgspec.Struct, tag=True, frozen=True):
    """How far it is."""

    cursor: int
    """The last change that is in it."""
    newest: int
    """The newest change of the tape."""
    files: int
    """How many are sealed."""
    bytes: int
    """Their size."""
    fresh: int
    """Spans that are not sealed yet."""
    forgotten: int
    """Rollouts that were forgotten and are still in files."""


class Behind(msgspec.Struct, tag=True, frozen=True):
    """It cannot answer yet, because it reads a tape that is far ahead of it."""

    cursor: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """It cannot answer: why."""

    reason: str
    again: bool = False
    """It has come a step further, and goes on there when it is asked the same again."""


Question: TypeAlias = Find | Sum | Total | List | Status | Rebuild
Answer: TypeAlias = Found | Summed | Totalled | Listed | State | Behind | Failed
