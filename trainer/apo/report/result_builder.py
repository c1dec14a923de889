"""Gathers the result of a run at its end. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import AgentTask
from penstock.trainer.apo.report.changes import line_causes
from penstock.trainer.apo.report.leaks import leaks
from penstock.trainer.apo.report.result import (
    CandidateTexts,
    FinalistRecord,
    Leak,
    RunResult,
    RunUsage,
    SealedTask,
    TrialRecord,
)
from penstock.trainer.apo.report.tree import candidate_records
from penstock.trainer.apo.search import SearchResult
from penstock.trainer.apo.splits import Splits
from penstock.trainer.apo.trials import Trial

INPUT: Final = 160
"""Most characters of a task's input in the result."""


class RunIdentity(NamedTuple):
    """The settings of a run that are in its result."""

    run: str
    engine: str
    digest: str
    draw: int
    placebo: bool


class RunOutcome(NamedTuple):
    """The parts of an ended run."""

    settings: RunIdentity
    result: SearchResult
    tests: Sequence[Trial]
    splits: Splits
    versions: Mapping[str, Mapping[str, str]]
    """Versions on the tape, by candidate and resource."""


def build_result(ended: RunOutcome, found: Sequence[Leak], published: Sequence[str], now_ns: int) -> RunResult:
    """Return the result. `found`: from `winner_leaks`; `published`: sentences on the release of the winner."""
    settings, result = ended.settings, ended.result
    seed, winner = result.pool.seed, result.winner
    return RunResult(
        run=settings.run,
        engine=settings.engine,
        settings=settings.digest,
        draw=settings.draw,
        placebo=settings.placebo,
        ended_ns=now_ns,
        why=result.why,
        seed=_texts(seed, ended.versions),
        winner=None if winner is None else _texts(winner, ended.versions),
        line_causes={} if winner is None else _causes(seed, winner),
        candidates=candidate_records(result),
        race=_raced(result),
        validation=list(map(_ran, result.validation)),
        tests=list(map(_ran, ended.tests)),
        tasks=[_task(task) for task in ended.splits.test] if ended.tests else [],
        used=_used(result, ended.tests),
        leaks=list(found),
        published=list(published),
    )


def winner_leaks(result: SearchResult, splits: Splits) -> list[Leak]:
    """Return the leaks in the winner. It is compared with the tasks of all splits, and with the reasons of the
    search."""
    if result.winner is None:
        return []
    every = [*splits.train, *splits.validation, *splits.test]
    reasons = ((trial.task, trial.reason) for trial in result.pool.trials)
    return leaks(result.pool.seed.texts, result.winner.texts, every, reasons)


def _texts(candidate: Candidate, versions: Mapping[str, Mapping[str, str]]) -> CandidateTexts:
    return CandidateTexts(id=candidate.id, texts=dict(candidate.texts), versions=dict(versions.get(candidate.id, {})))


def _causes(seed: Candidate, winner: Candidate) -> dict[str, list[str]]:
    return line_causes(seed.texts, winner.texts, winner.line_causes, winner.causes)


def _raced(result: SearchResult) -> list[FinalistRecord]:
    return [
        FinalistRecord(
            candidate=racer.candidate,
            state=racer.state,
            gain=racer.gain,
            e_value=racer.evidence,
            needed=racer.needed,
            pairs=len(racer.differences),
            rate=racer.rate,
        )
        for racer in result.racers
    ]


def _ran(trial: Trial) -> TrialRecord:
    return TrialRecord(
        candidate=trial.candidate, task=trial.task, number=trial.number, reward=trial.reward, rollout=trial.rollout
    )


def _task(task: AgentTask) -> SealedTask:
    said = json.dumps(task.input, ensure_ascii=False)
    return SealedTask(id=task.id, key=task.key, input=said if len(said) <= INPUT else f"{said[:INPUT]}…")


def _used(result: SearchResult, tests: Iterable[Trial]) -> RunUsage:
    budget, race = result.budget, len(result.validation)
    return RunUsage(
        rollouts={"train": budget.used_rollouts - race, "val": race, "test": len(list(tests))},
        reflections=budget.used_reflections,
        tokens=budget.used_tokens,
        money=budget.used_money,
    )
