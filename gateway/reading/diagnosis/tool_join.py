"""Joins each tool run with the model call that asked for it, from both sides, and finds runs that no server saw. Pure.

A tool server is not told the id of the tool call that it runs for. The tape has both sides of it: an answer names tool
and arguments under an id, and a later request carries the result under the same id. `join` gives each run a grade:

* `certain`: tool and arguments match what an answer asked for, and the result matches what was carried under its id;
* `likely`: one side matches, or both do and only a run that failed before fits as well;
* `ambiguous`: several asks fit, or several runs fit one ask, and nothing tells them apart. All are named, none chosen;
* `none`: no answer asked for it. The host began it.

`tool_arguments` (forward) and `tool_results` (backward) define a match, `tool_calls` and `tool_pairs` which asks were
open at the time, and `tool_matching` which of several that fit is chosen. The strongest pairs are settled first; weaker
pairs decide nothing that those leave open.

Begin with `read_tool_requests`, then `join`, then `implied_runs`: a tool call whose result was carried and that no
server has run was run by the agent itself, between the end of the call that asked and the beginning of the one that
carried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.gateway.model.turn import Part
from penstock.gateway.reading.diagnosis.tool_calls import ResultDelivery, ToolRequest
from penstock.gateway.reading.diagnosis.tool_matching import settle
from penstock.gateway.reading.diagnosis.tool_pairs import BOTH, FORWARD, CandidatePair, PairFinder, ToolRun
from penstock.gateway.reading.diagnosis.tool_results import Likeness, ReturnedResult

Grade = Literal["certain", "likely", "ambiguous", "none"]
HOW = {Likeness.SAME: "", Likeness.WRAPPED: ", wrapped by the host", Likeness.CUT: ", cut short by the host"}
UNUSED = "it was asked for by answers alone of which nothing tells that the agent went on from them"


class ToolCallRef(NamedTuple):
    """A tool call of an answer."""

    sequence: int
    """Sequence of the model call."""
    call_id: str | None
    """The tool-call id, where the wire format has one."""
    choice: int = 0
    """Index of the choice, of n answers."""
    place: int = 0
    """Its index among the tool calls of the answer, from 0."""


@dataclass(frozen=True, slots=True)
class ToolRunLink:
    """The join of a tool run with the tool call that it was for."""

    run: str
    """The run's key."""
    grade: Grade
    """The certainty of the link."""
    reason: str
    """The reason for the grade, in plain words."""
    asked: ToolCallRef | None = None
    """The tool call that asked for it, if that is certain or likely."""
    candidates: tuple[ToolCallRef, ...] = ()
    """All tool calls that may have asked for it."""
    carried_by: int | None = None
    """Sequence of the model call that carried its result."""


@dataclass(frozen=True, slots=True)
class ImpliedRun:
    """A tool run inside the agent, known only from the tool call and its result."""

    asked: tuple[ToolCallRef, ...]
    """The tool call that asked for it; several where the conversation does not decide."""
    name: str
    """Name of the tool, as the model knows it."""
    arguments: str
    """The arguments as the model generated them."""
    result: Part
    """The result that the model was shown."""
    carried_by: int
    """Sequence of the model call that carried the result."""
    start_ns: int
    """Earliest time at which it may have begun; ns."""
    end_ns: int
    """Latest time at which it may have ended; ns."""


class _JoinState:
    """The state of a join: the pairs of each run, the asks that are taken, and the links so far."""

    def __init__(self, asks: Sequence[ToolRequest], runs: Sequence[ToolRun], skew_ns: int) -> None:
        self.runs = {run.key: run for run in sorted(runs, key=lambda it: (it.start_ns, it.key))}
        self.returned = {key: ReturnedResult(run.result, run.error) for key, run in self.runs.items()}
        self.finder = PairFinder(asks, sorted({run.server for run in runs}), skew_ns)
        self.pairs = {key: self.finder.of(run, self.returned[key]) for key, run in self.runs.items()}
        self.taken: dict[ToolRequest, ToolRun] = {}
        self.contested: set[ToolRequest] = set()
        self.links: dict[str, ToolRunLink] = {}

    def open(self) -> list[str]:
        return [key for key in self.runs if key not in self.links]

    def free(self, pair: CandidatePair) -> bool:
        return pair.ask not in self.taken and pair.ask not in self.contested

    def take(self, key: str, pair: CandidatePair, grade: Grade, reason: str) -> None:
        self.taken.setdefault(pair.ask, self.runs[key])
        asked = _candidate(pair.ask)
        carried = _carrier(pair)
        self.links[key] = ToolRunLink(key, grade, reason, asked, (asked,), carried)

    def leave(self, key: str, asks: Iterable[ToolRequest], reason: str) -> None:
        """Links a run as ambiguous: it may have been for `asks`, and for the asks of all its pairs."""
        listed = tuple(dict.fromkeys(map(_candidate, [*asks, *(pair.ask for pair in self.pairs[key])])))
        self.links[key] = ToolRunLink(key, "ambiguous", reason, None, listed)


def join(asks: Sequence[ToolRequest], runs: Sequence[ToolRun], skew_ns: int = 0) -> list[ToolRunLink]:
    """One link for each run, in their order. `asks`: the asks of the same rollout, from `read_tool_requests`.
    `skew_ns`: maximum difference between the clock that timed the runs and the one that timed the model calls."""
    case = _JoinState(asks, runs, skew_ns)
    for rank in (7, 6, 5, BOTH):
        _both_sides(case, rank)
    _tool_and_arguments(case)
    _results(case)
    host = "no answer asked for it: the host began it"
    return [case.links.get(run.key) or ToolRunLink(run.key, "none", host) for run in runs]


def implied_runs(asks: Iterable[ToolRequest], links: Iterable[ToolRunLink]) -> list[ImpliedRun]:
    """The tool runs inside the agent, in the order of their calls. Tool calls that a link names, even as a candidate
    only, are left out."""
    told = {(it.sequence, it.choice, it.place) for link in links for it in link.candidates}
    found: dict[int, ImpliedRun] = {}
    for ask in asks:
        shared = [it for it in ask.deliveries if len(it.asks) > 1]
        for delivery in shared[: len(shared[0].asks)] if shared else ask.deliveries[:1]:
            asked = tuple(map(_candidate, delivery.asks))
            if id(delivery) not in found and not any((it.sequence, it.choice, it.place) in told for it in asked):
                found[id(delivery)] = _implied(ask, asked, delivery)
    return list(found.values())


def _implied(ask: ToolRequest, asked: tuple[ToolCallRef, ...], delivery: ResultDelivery) -> ImpliedRun:
    began = [it.call.start_ns if it.call.end_ns is None else it.call.end_ns for it in delivery.asks]
    start, end = min([*began, delivery.start_ns]), delivery.start_ns
    return ImpliedRun(asked, ask.name, ask.arguments, delivery.shown.part, delivery.sequence, start, end)


def _both_sides(case: _JoinState, rank: int) -> None:
    pairs = {key: [it for it in case.pairs[key] if it.rank >= rank and case.free(it)] for key in case.open()}
    for key, pair in _settled(case, pairs):
        carried = f"call {_carrier(pair)} carries its result{HOW[pair.likeness]}"
        case.take(key, pair, "certain", f"call {pair.ask.call.sequence} asked for it, and {carried}")


def _tool_and_arguments(case: _JoinState) -> None:
    pairs: dict[str, list[CandidatePair]] = {}
    wanted: set[ToolRequest] = set()
    for key in case.open():
        best = max((pair.rank for pair in case.pairs[key]), default=0)
        found = [pair for pair in case.pairs[key] if pair.rank >= min(best, FORWARD + 1)]
        if not found:
            continue
        live = [pair for pair in found if pair.ask.deliveries or (pair.ask.call.whole and not pair.ask.given_up)]
        if not live:
            case.leave(key, [], UNUSED)
            continue
        found, free = live, [pair for pair in live if case.free(pair)]
        answered = case.runs[key].result is not None and any(pair.ask.deliveries for pair in free)
        if answered or len(free) == len(found):
            pairs[key] = free
        else:
            _run_again(case, key, [pair.ask for pair in found])
            wanted.update(pair.ask for pair in free)
    for key, pair in _settled(case, pairs):
        if pair.ask in wanted:
            case.leave(key, [], "another run fits the same call, and nothing tells which of them was for it")
            continue
        if not pair.ask.deliveries and pair.ask.rivals:
            case.leave(key, [], UNUSED)
            continue
        asked = f"call {pair.ask.call.sequence} asked for it"
        carried = (
            "what was carried under its id is not its result" if pair.ask.deliveries else "no call carries a result"
        )
        case.take(key, pair, "likely", f"{asked}; {carried}")


def _run_again(case: _JoinState, key: str, asks: Sequence[ToolRequest]) -> None:
    """Links a run whose ask already has another run, and perhaps other asks."""
    run, later = case.runs[key], case.taken.get(asks[0])
    unanswered = run.result is None and (run.end_ns or run.start_ns) <= (later.start_ns if later else 0)
    if len(asks) == 1 and unanswered:
        reason = f"call {asks[0].call.sequence} asked for it; it brought no result, and the tool ran again"
        case.take(key, CandidatePair(asks[0], FORWARD), "likely", reason)
    else:
        case.leave(key, [], "another run fits the same call, and nothing tells what this one was for")


def _results(case: _JoinState) -> None:
    found = {key: case.finder.by_result(case.runs[key], case.returned[key]) for key in case.open()}
    pairs = {key: [pair for pair in its if case.free(pair)] for key, its in found.items()}
    for key, pair in _settled(case, pairs):
        asked = f"what call {pair.ask.call.sequence} asked, by another name or with other arguments"
        case.take(key, pair, "likely", f"call {_carrier(pair)} carries its result for {asked}")


def _settled(case: _JoinState, pairs: Mapping[str, Sequence[CandidatePair]]) -> list[tuple[str, CandidatePair]]:
    """The pairs that are the only possibility. Runs with several are left ambiguous, and weaker pairs do not decide
    them later."""
    settled, left = settle({key: [pair.ask for pair in found] for key, found in pairs.items()})
    for key, asks in left.items():
        case.leave(key, asks, _why_not(asks, left))
    case.contested.update(ask for asks in left.values() for ask in asks)
    return [(key, next(pair for pair in pairs[key] if pair.ask is ask)) for key, ask in settled.items()]


def _why_not(asks: Sequence[ToolRequest], left: Mapping[str, Sequence[ToolRequest]]) -> str:
    if len(asks) > 1:
        return f"{len(asks)} tool calls asked for the same, and nothing tells them apart"
    rivals = sum(asks[0] in others for others in left.values())
    return f"{rivals} equal runs fit the one tool call, and nothing tells which of them was for it"


def _carrier(pair: CandidatePair) -> int | None:
    return pair.delivery and pair.delivery.sequence


def _candidate(ask: ToolRequest) -> ToolCallRef:
    return ToolCallRef(ask.call.sequence, ask.id, ask.choice, ask.place)
