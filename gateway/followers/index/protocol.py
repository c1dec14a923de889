"""Questions of a gateway to the process of its index, and the answers: MessagePack in both directions."""

from __future__ import annotations

from bisect import bisect_left
from operator import neg
from typing import Any, TypeAlias

import msgspec

from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.reading.filters.fields import Target


class FindRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for the positions of a filter's rows."""

    target: Target
    filter: str
    now_ns: int
    """The time from which `started>2h` counts back."""
    before: int | None
    """Only positions below this one; None: all."""
    limit: int


class FindResult(msgspec.Struct, tag=True, frozen=True):
    """Positions, newest first: cursors of spans, numbers of rollouts. None that the filter takes is missing; some that
    it does not take may be among them."""

    positions: list[int]
    complete: bool
    """True if there are no more."""
    reached: int = 0
    """If there are more: the position from which on all were searched."""
    names: list[str] = []
    """For rollouts: their ids."""
    hits: list[int] = []
    """For rollouts with a filter of spans: the cursor of a span that it takes; else empty."""

    def below(self, before: int) -> FindResult | None:
        """The part below a position; None if not all of it is known."""
        at = bisect_left(self.positions, 1 - before, key=neg)
        if at == len(self.positions) and not self.complete:
            return None
        return FindResult(self.positions[at:], self.complete, self.reached, self.names[at:], self.hits[at:])


class SumRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for sums over the calls that a filter of spans takes."""

    by: BreakdownDimension
    filter: str
    now_ns: int
    limit: int
    """Most rows of the answer."""


class SumResult(msgspec.Struct, tag=True, frozen=True):
    """A row for each value, as `Breakdown` has them."""

    rows: list[dict[str, Any]]
    values: int
    """The number of different values."""


class TotalRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for sums over all spans."""


class TotalResult(msgspec.Struct, tag=True, frozen=True):
    """The sums of `Stats`, with the names that they have there."""

    counted_spans: int
    since_ns: int | None
    by_kind: dict[str, int]
    by_status: dict[str, int]
    models: list[dict[str, Any]]
    """A row for each model, as `SumResult` has them."""
    by_tool: list[dict[str, Any]]
    rewards: dict[str, Any]


class FilesRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for files with all rows of the index."""


class FilesResult(msgspec.Struct, tag=True, frozen=True):
    """The files of each table: `spans`, `rollouts`, `attempts`, `passages`. Those of a snapshot stay for at least a
    second (`snapshots`)."""

    files: dict[str, list[str]]


class StatusRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for the progress and size of the index."""


class RebuildRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks to delete the index and begin anew."""


class IndexState(msgspec.Struct, tag=True, frozen=True):
    """The progress and size of the index."""

    cursor: int
    """The last change of the tape in the index."""
    newest: int
    """The newest change of the tape."""
    files: int
    """Sealed files."""
    bytes: int
    """Size of the sealed files."""
    fresh: int
    """Spans that are not sealed yet."""
    forgotten: int
    """Forgotten rollouts that are still in files."""


class IndexLag(msgspec.Struct, tag=True, frozen=True):
    """No answer yet, because the index is far behind the tape."""

    cursor: int


class IndexFailure(msgspec.Struct, tag=True, frozen=True):
    """No answer: `reason` says why."""

    reason: str
    again: bool = False
    """True if the same question continues the search from where it stopped."""


IndexRequest: TypeAlias = FindRequest | SumRequest | TotalRequest | FilesRequest | StatusRequest | RebuildRequest
IndexReply: TypeAlias = FindResult | SumResult | TotalResult | FilesResult | IndexState | IndexLag | IndexFailure
