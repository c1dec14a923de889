"""Joins tool runs whose address named no rollout with the live rollouts whose answers may have asked for them. Pure.

If an agent's MCP address is written in a configuration once for all (`/mcp/NAME`), its runs are in a rollout of their
own for each MCP session. They are matched with the tool calls of all rollouts that were alive, as if these were one
(`tool_join`): so a run is `certain` only when name, arguments and result match one tool call of one rollout and no
other's. With less evidence the rules are stricter than within a rollout, because another agent's tool may have the same
name: a run that matches by name and arguments alone is `likely` while nothing contradicts it. If the model was shown
something else under the call's id, the run is `ambiguous` and nothing is chosen. A tool call without an answer waits
for `PATIENCE_NS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.gateway.reading.diagnosis.tool_calls import ModelCall, ToolRequest, read_tool_requests
from penstock.gateway.reading.diagnosis.tool_join import Grade, ToolCallRef, ToolRunLink, join
from penstock.gateway.reading.diagnosis.tool_pairs import ToolRun

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
