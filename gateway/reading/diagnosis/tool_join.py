"""Joins each tool run with the model call that asked for it, from both sides, and finds runs that no server saw. Pure.

A tool server is not told the id of the tool call that it runs for. The tape has both sides of it: an answer names tool
and arguments under an id, and a later request carries the result under the same id. `join` gives each run a grade:

* `certain`: tool and arguments match what an answer asked for, and the result matches what was carried under its id;
* `likely`: one side matches, or both do and only a run that failed before fits as well;
* `ambiguous`: several asks fit, or several runs fit one ask, and nothing tells them apart. All are named, none chosen;
* `none`: no answer asked for it. The host began it.

`tool_results` defines a match of names, of arguments and of results; `tool_calls` and `PairFinder` find the asks that
were open at the time, and `settle` chooses among several that fit. The strongest pairs are settled first; weaker pairs
decide nothing that those leave open.

Begin with `read_tool_requests`, then `join`, then `implied_runs`: a tool call whose result was carried and that no
server has run was run by the agent itself, between the end of the call that asked and the beginning of the one that
carried.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

from penstock.gateway.model.turn import Part
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall, ResultDelivery, ToolRequest, read_tool_requests
from penstock.gateway.reading.diagnosis.tool_results import (
    Likeness,
    MatchDegree,
    ReturnedResult,
    canonical,
    likeness,
    match_arguments,
    match_name,
    request_keys,
    run_keys,
)

# Finds the pairs that are the only possibility among equal ones. Pure.
#
# Given the asks that each tool run may be for, `settle` finds the pairs that cannot be otherwise if each of these
# asks has a run: a run that may be for one ask only, which no other run depends on, and an ask that has one run only,
# which no other ask depends on. The rest can be paired in several ways, of which none is chosen.

R = TypeVar("R", bound=Hashable)
A = TypeVar("A", bound=Hashable)


def settle(candidates: Mapping[R, Sequence[A]]) -> tuple[dict[R, A], dict[R, list[A]]]:
    """(the ask of each settled run, the possible asks of each other run). A run without candidates is in neither."""
    asks = {run: dict.fromkeys(found) for run, found in candidates.items() if found}
    runs: defaultdict[A, dict[R, None]] = defaultdict(dict)
    for run, found in asks.items():
        for ask in found:
            runs[ask][run] = None
    settled: dict[R, A] = {}
    look = deque(asks)
    while look:
        run = look.popleft()
        if run not in asks or (ask := _forced(run, asks, runs)) is None:
            continue
        settled[run] = ask
        touched = dict.fromkeys(other for it in asks[run] for other in runs[it] if other != run)
        for it in asks.pop(run):
            del runs[it][run]
        for other in runs.pop(ask):
            del asks[other][ask]
        look += touched
    return settled, {run: list(found) or list(candidates[run]) for run, found in asks.items()}


def _forced(run: R, asks: Mapping[R, Mapping[A, None]], runs: Mapping[A, Mapping[R, None]]) -> A | None:
    needing = [ask for ask in asks[run] if len(runs[ask]) == 1]
    if needing:
        return needing[0] if len(needing) == 1 else None
    if len(asks[run]) != 1:
        return None
    ask = next(iter(asks[run]))
    return None if any(len(asks[other]) == 1 for other in runs[ask] if other != run) else ask


# Finds the tool calls of answers that a tool run may be for. Pure.
#
# A run may be for an ask that was open when it began: the model call had begun, and no request had carried the
# result. Asks are found by tool and arguments, and, where these decide nothing for certain, by tool alone. Runs are
# examined in the order in which they began, so that each ask is put on its lists once and taken off once.

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


# Joins tool runs whose address named no rollout with the live rollouts whose answers may have asked for them. Pure.
#
# If an agent's MCP address is written in a configuration once for all (`/mcp/NAME`), its runs are in a rollout of
# their own for each MCP session. They are matched with the tool calls of all rollouts that were alive, as if these
# were one (`tool_join`): so a run is `certain` only when name, arguments and result match one tool call of one
# rollout and no other's. With less evidence the rules are stricter than within a rollout, because another agent's
# tool may have the same name: a run that matches by name and arguments alone is `likely` while nothing contradicts
# it. If the model was shown something else under the call's id, the run is `ambiguous` and nothing is chosen. A tool
# call without an answer waits for `PATIENCE_NS`.

PATIENCE_NS: Final = 600 * 10**9
"""Maximum time from an answer to the beginning of a tool run that it asked for, if no result was ever carried; ns."""
_STEP: Final = 1 << 40
"""Offset between the sequences of calls of different attempts, so that they differ."""
SEVERAL = "several tool calls of rollouts that were alive asked for the same, and nothing tells them apart"
NOT_SHOWN = "a rollout that was alive asked for it, but what its model was shown is not the result"
NOBODY = "no answer of a rollout that was alive asked for it"
CUT = "; not all rollouts that were alive were looked at"


@dataclass(frozen=True, slots=True)
class CandidateAttempt:
    """An attempt whose answers may have asked for a run."""

    place: str
    """ROLLOUT/ATTEMPT."""
    calls: Sequence[ModelCall]
    """Its model calls, in order."""
    runs: Sequence[ToolRun] = ()
    """Tool runs whose addresses named the attempt; the tool calls that asked for these are not considered again."""


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """The model call that a run is for."""

    grade: Grade
    reason: str
    place: str | None = None
    """ROLLOUT/ATTEMPT of the model call."""
    asked: ToolCallRef | None = None
    """The tool call, if it is certain or likely."""
    carried_by: int | None = None
    """Sequence of the call of the same attempt that carried the result."""
    candidates: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Sequences of all calls that may have asked, by attempt."""


def find_origins(
    asking: Sequence[CandidateAttempt], runs: Sequence[ToolRun], complete: bool = True
) -> dict[str, RunOrigin]:
    """The model call of each run, by the run's key. `complete`: whether `asking` are all attempts that were alive."""
    pool = [ask for number, one in enumerate(asking) for ask in _open_asks(one, number)]
    asks = {(ask.call.sequence, ask.choice, ask.place): ask for ask in pool if _in_time(ask, runs)}
    links = join(list(asks.values()), runs)
    by_key = {run.key: run for run in runs}
    return {link.run: _found(link, by_key[link.run], asking, asks, complete) for link in links}


def _open_asks(one: CandidateAttempt, number: int) -> Iterator[ToolRequest]:
    """The tool calls that no run of the attempt's own is for, with sequences unlike those of other attempts."""
    asks = read_tool_requests(_numbered(call, number * _STEP) for call in one.calls)
    told = {(it.sequence, it.choice, it.place) for link in join(asks, one.runs) for it in link.candidates}
    return (ask for ask in asks if (ask.call.sequence, ask.choice, ask.place) not in told)


def _numbered(call: ModelCall, base: int) -> ModelCall:
    retried = None if call.retry_of is None else base + call.retry_of
    return replace(call, sequence=base + call.sequence, retry_of=retried)


def _in_time(ask: ToolRequest, runs: Sequence[ToolRun]) -> bool:
    return bool(ask.deliveries) or any(_waited(ask, run) for run in runs)


def _waited(ask: ToolRequest, run: ToolRun) -> bool:
    answered = ask.call.end_ns or ask.call.start_ns
    return ask.call.start_ns <= run.start_ns <= answered + PATIENCE_NS


def _found(
    link: ToolRunLink,
    run: ToolRun,
    asking: Sequence[CandidateAttempt],
    asks: Mapping[tuple[int, int, int], ToolRequest],
    complete: bool,
) -> RunOrigin:
    candidates: dict[str, tuple[int, ...]] = {}
    for one in link.candidates:
        number, sequence = divmod(one.sequence, _STEP)
        place = asking[number].place
        candidates[place] = tuple(dict.fromkeys((*candidates.get(place, ()), sequence)))
    if not candidates:
        return RunOrigin("none", NOBODY if complete else NOBODY + CUT)
    if link.asked is None:
        return RunOrigin("ambiguous", SEVERAL, candidates=candidates)
    ask = asks[link.asked.sequence, link.asked.choice, link.asked.place]
    if link.carried_by is None and ask.deliveries:
        return RunOrigin("ambiguous", NOT_SHOWN, candidates=candidates)
    if link.carried_by is None and not _waited(ask, run):
        return RunOrigin("none", NOBODY)
    number, sequence = divmod(link.asked.sequence, _STEP)
    place = asking[number].place
    carried = None if link.carried_by is None else link.carried_by % _STEP
    shown = "no call carries its result yet" if carried is None else f"#{carried} carries its result"
    # A rollout that was not examined may fit as well.
    sure = link.grade == "certain" and complete
    reason = f"{place}#{sequence} asked for it, as no other rollout that was alive did; {shown}"
    asked = link.asked._replace(sequence=sequence)
    return RunOrigin(
        "certain" if sure else "likely", reason if complete else reason + CUT, place, asked, carried, candidates
    )
