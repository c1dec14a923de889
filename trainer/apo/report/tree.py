"""The tree of a run's candidates, while it goes on and at its end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.console.views.text import abbreviate
from penstock.gateway.model.run import MOST_CANDIDATES, CandidateState, CandidateTree, RunCandidate
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.gate import Racer
from penstock.trainer.apo.report.result import CandidateRecord
from penstock.trainer.apo.search import SearchResult

CLAIM: Final = 300
"""Most characters of a claim on the tape."""


def candidate_records(result: SearchResult) -> list[CandidateRecord]:
    """Return all candidates, in the order of their proposal."""
    began: dict[str, int] = {}
    for at, trial in enumerate(result.pool.trials):
        began.setdefault(trial.candidate, at)
    racers = {racer.candidate: racer for racer in result.racers}
    return [_tried(one, result, began, racers.get(one.id)) for one in result.pool.candidates.values()]


def _tried(one: Candidate, result: SearchResult, began: Mapping[str, int], racer: Racer | None) -> CandidateRecord:
    return CandidateRecord(
        id=one.id,
        parent=one.parent if one.parent in result.pool.candidates else None,
        claim=one.claim,
        causes=list(one.causes),
        state=_state(one, result, racer),
        step=began.get(one.id, len(result.pool.trials)),
        rollouts=len(result.pool.of(one.id)),
        mean=result.pool.mean(one.id),
        length=one.length,
        pairs=0 if racer is None else len(racer.differences),
        gain=None if racer is None else racer.gain,
        e_value=None if racer is None else racer.evidence,
        needed=None if racer is None else racer.needed,
    )


def _state(one: Candidate, result: SearchResult, racer: Racer | None) -> CandidateState:
    if one.id == result.pool.seed.id:
        return "seed"
    if result.winner is not None and one.id == result.winner.id:
        return "winner"
    return "tried" if racer is None else racer.state


def candidate_tree(result: SearchResult) -> CandidateTree:
    """Return the candidates for the tape: all that fit, else finalists, those with the highest means, and their
    ancestors."""
    every = {one.id: one for one in candidate_records(result)}
    kept: dict[str, None] = {}
    for one in sorted(every.values(), key=lambda one: (one.state == "tried", -(one.mean or 0.0), -one.rollouts)):
        line = [name for name in _line(one, every) if name not in kept]
        if len(kept) + len(line) <= MOST_CANDIDATES:
            kept |= dict.fromkeys(line)
    shown = [_short(one) for one in every.values() if one.id in kept]
    return CandidateTree(candidates=shown, left_out=len(every) - len(shown))


def _line(one: CandidateRecord, every: Mapping[str, CandidateRecord]) -> Sequence[str]:
    """Return a candidate and its ancestors."""
    found = [one.id]
    while (parent := every[found[-1]].parent) in every and parent not in found:
        found.append(str(parent))
    return found


def _short(one: CandidateRecord) -> RunCandidate:
    return RunCandidate(**one.model_dump(exclude={"causes", "claim"}), claim=abbreviate(one.claim, CLAIM)[:400])
