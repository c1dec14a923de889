"""Finds the tool calls of answers that a tool run may be for. Pure.

A run may be for an ask that was open when it began: the model call had begun, and no request had carried the result.
Asks are found by tool and arguments, and, where these decide nothing for certain, by tool alone. Runs are examined in
the order in which they began, so that each ask is put on its lists once and taken off once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.gateway.reading.diagnosis.tool_arguments import (
    MatchDegree,
    canonical,
    match_arguments,
    match_name,
    request_keys,
    run_keys,
)
from penstock.gateway.reading.diagnosis.tool_calls import ResultDelivery, ToolRequest
from penstock.gateway.reading.diagnosis.tool_results import Likeness, ReturnedResult, likeness

MOST_OPEN: Final = 64
"""Maximum number of asks of one kind without a result that are still waited for; older ones are given up."""
BOTH: Final = 4
"""The lowest rank of a pair in which both sides match."""
FORWARD: Final = 2
"""The lowest rank of a pair in which tool and arguments match."""
_BY_LIKENESS: Final = {Likeness.SAME: 7, Likeness.WRAPPED: 6, Likeness.CUT: 5}


@dataclass(frozen=True, slots=True)
class ToolRun:
    """A tool call that a tool server received."""

    key: str
    """Key of the run among all runs."""
    server: str
    """Name of the server in the gateway."""
    tool: str
    """Name of the tool on the server."""
    arguments: Any
    """The arguments as a JSON value."""
    result: Any
    """The result of `tools/call` as a JSON value: `content`, `structuredContent`, `isError`; None without one."""
    start_ns: int
    """Time at which the server received the request; ns."""
    end_ns: int | None
    """Time at which it had answered; ns; None before."""
    status: str = "ok"
    """Final status of its span."""
    error: str | None = None
    """The message of a JSON-RPC error."""


@dataclass(frozen=True, slots=True)
class CandidatePair:
    """A run and an ask that it may be for."""

    ask: ToolRequest
    rank: int
    """Strength of the evidence: from `BOTH` on both sides, from `FORWARD` on tool and arguments; 1: the result
    alone."""
    delivery: ResultDelivery | None = None
    """The delivery of its result; None without one."""
    likeness: Likeness = Likeness.NONE
    """Likeness of the delivered result and the run's."""


class _OpenRequests:
    """The open asks of a kind, as time advances."""

    def __init__(self) -> None:
        self.asks: list[ToolRequest] = []
        self._next = 0
        self._open: list[ToolRequest] = []

    def at(self, now: int, skew: int) -> list[ToolRequest]:
        while self._next < len(self.asks) and self.asks[self._next].call.start_ns <= now + skew:
            self._open.append(self.asks[self._next])
            self._next += 1
        kept = [ask for ask in self._open if not ask.deliveries or _last(ask) >= now - skew]
        waiting = [ask for ask in kept if not ask.deliveries][:-MOST_OPEN]
        self._open = [ask for ask in kept if ask not in waiting] if waiting else kept
        return self._open


class PairFinder:
    """Finds the asks of runs, which must come in the order in which they began."""

    def __init__(self, asks: Sequence[ToolRequest], servers: Sequence[str], skew_ns: int) -> None:
        self._servers, self._skew = servers, skew_ns
        self._kinds: defaultdict[tuple[str, str | None], _OpenRequests] = defaultdict(_OpenRequests)
        self._asks = asks
        self._shown: defaultdict[str, list[ToolRequest]] | None = None
        for ask in sorted(asks, key=lambda it: it.call.start_ns):
            for key in request_keys(ask.name):
                self._kinds[key, ask.canonical].asks.append(ask)
                self._kinds[key, None].asks.append(ask)

    def of(self, run: ToolRun, returned: ReturnedResult) -> list[CandidatePair]:
        """The pairs of a run in which tool and arguments match."""
        same = canonical(run.arguments)
        found = [self._pair(run, returned, ask, MatchDegree.SAME) for ask in self._found(run, same)]
        if not any(pair.rank > BOTH for pair in found):
            known = {id(pair.ask) for pair in found}
            others = [ask for ask in self._found(run, None) if id(ask) not in known]
            found += [self._pair(run, returned, ask) for ask in others]
        return [pair for pair in found if pair.rank >= FORWARD]

    def by_result(self, run: ToolRun, returned: ReturnedResult) -> list[CandidatePair]:
        """The pairs in which the result matches, whatever tool and arguments were."""
        if not returned.distinct:
            return []
        asks = {id(ask): ask for look in returned.lookup_keys for ask in self._by_look().get(look, ())}
        found = [self._pair(run, returned, ask) for ask in asks.values() if self._began_in_time(run, ask)]
        return [pair for pair in found if pair.likeness == Likeness.SAME]

    def _found(self, run: ToolRun, arguments: str | None) -> Iterator[ToolRequest]:
        seen: set[int] = set()
        for key in sorted(run_keys(run.server, run.tool)):
            kind = self._kinds.get((key, arguments))
            for ask in kind.at(run.start_ns, self._skew) if kind else ():
                if id(ask) not in seen:
                    seen.add(id(ask))
                    yield ask

    def _began_in_time(self, run: ToolRun, ask: ToolRequest) -> bool:
        return ask.call.start_ns - self._skew <= run.start_ns <= _last(ask) + self._skew

    def _pair(
        self, run: ToolRun, returned: ReturnedResult, ask: ToolRequest, given: MatchDegree | None = None
    ) -> CandidatePair:
        others = [server for server in self._servers if server != run.server]
        name = match_name(ask.name, run.server, run.tool, others)
        if given is None:
            given = match_arguments(ask.value, run.arguments) if name else MatchDegree.NO
        whole = name == given == MatchDegree.SAME
        forward = whole or {name, given} == {MatchDegree.SAME, MatchDegree.PART}
        like, delivery = self._carried(run, returned, ask)
        if like and (whole or (forward and returned.distinct)):
            return CandidatePair(ask, _BY_LIKENESS[like] if whole else BOTH, delivery, like)
        began_late = bool(ask.deliveries) and run.start_ns > ask.deliveries[0].start_ns + self._skew
        # If one side has no arguments, a host may have added any: such a match proves nothing by itself.
        some = forward and bool(ask.value) and bool(run.arguments)
        rank = 0 if began_late else FORWARD + 1 if whole else FORWARD if some else 0
        return CandidatePair(ask, rank or int(bool(like)), delivery, like)

    def _carried(
        self, run: ToolRun, returned: ReturnedResult, ask: ToolRequest
    ) -> tuple[Likeness, ResultDelivery | None]:
        """The best likeness of the results that were carried after the run had ended."""
        if run.end_ns is None or (run.result is None and run.error is None):
            return Likeness.NONE, None
        late = [it for it in ask.deliveries if it.start_ns + self._skew >= run.end_ns]
        compared = [(likeness(returned, it.shown), -at, it) for at, it in enumerate(late)]
        like, _, delivery = max(compared, default=(Likeness.NONE, 0, None))
        return like, delivery if like else None

    def _by_look(self) -> defaultdict[str, list[ToolRequest]]:
        if self._shown is None:
            self._shown = defaultdict(list)
            for ask in self._asks:
                for look in {look for it in ask.deliveries for look in it.shown.lookup_keys}:
                    self._shown[look].append(ask)
        return self._shown


def _last(ask: ToolRequest) -> int:
    return max(it.start_ns for it in ask.deliveries)
