"""`result.json`: what a run keeps of itself when it has ended, how it is made and found, and the changes of the texts,
line by line, with the rollouts that led to each. The fields are documented in docs/apo-report.md.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import Field, ValidationError

from penstock.console.views.table import abbreviate
from penstock.gateway.model.base import Mode, Noun
from penstock.gateway.model.run import MOST_CANDIDATES, CandidateState, CandidateTree, RunCandidate
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig, digest
from penstock.trainer.apo.protocol import AgentTask, Candidate, Trial
from penstock.trainer.apo.report.leaks import Leak, leaks
from penstock.trainer.apo.search import SearchResult, Splits, State

NAME: Final = "result.json"
CLAIM: Final = 300
INPUT: Final = 160


class CandidateTexts(Noun):
    id: str
    texts: dict[str, str]
    versions: dict[str, str]

    @property
    def length(self) -> int:
        return sum(map(len, self.texts.values()))


class CandidateRecord(RunCandidate):
    """A candidate, as the tape has it (`RunCandidate`), and what led to it."""

    claim: str = ""
    causes: list[str] = Field(default_factory=list[str])


class FinalistRecord(Noun):
    candidate: str
    state: State
    gain: float
    e_value: float
    needed: float
    pairs: int
    rate: float


class TrialRecord(Noun):
    candidate: str
    task: str
    number: int
    reward: float | None
    rollout: str


class SealedTask(Noun):
    id: str
    key: str
    input: str


class RunUsage(Noun):
    rollouts: dict[Mode, int]
    reflections: int
    tokens: int
    money: float


class RunResult(Noun):
    format: Literal[1] = 1
    run: str
    engine: str
    settings: str
    draw: int
    placebo: bool
    ended_ns: int
    why: str
    seed: CandidateTexts
    winner: CandidateTexts | None
    line_causes: dict[str, list[str]]
    candidates: list[CandidateRecord]
    race: list[FinalistRecord]
    validation: list[TrialRecord]
    tests: list[TrialRecord]
    tasks: list[SealedTask]
    used: RunUsage
    leaks: list[Leak]
    published: list[str] = Field(default_factory=list[str])


def results(directories: Sequence[Path]) -> list[RunResult]:
    """Return the results in directories, by their names. Raises `ConfigError` for one without, or one that is none."""
    found: dict[Path, RunResult] = {}
    for directory in directories:
        # Those of its seeds and its placebo are in subdirectories.
        paths = [path.resolve() for path in sorted(directory.rglob(NAME))]
        if not paths:
            raise ConfigError(f"{directory} has no {NAME}, nor has a directory in it: no run has ended there yet")
        found |= {path: read_result(path) for path in paths}
    return list(found.values())


def read_result(path: Path) -> RunResult:
    try:
        return RunResult.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        said = str(error).splitlines()
        raise ConfigError(f"{path} is no result of a run that this penstock reads: {' '.join(said[:3])}") from None


class LineChange(NamedTuple):
    mark: Literal[" ", "-", "+"]
    line: str
    causes: Sequence[str] = ()


def changes(result: RunResult) -> dict[str, list[LineChange]]:
    """Return the changes by resource, of texts that have changed; empty without a winner."""
    before, after = result.seed.texts, {} if result.winner is None else result.winner.texts
    return {
        name: list(_changes(before[name], text, result.line_causes))
        for name, text in after.items()
        if text != before[name]
    }


def _changes(before: str, after: str, causes: Mapping[str, Sequence[str]]) -> Iterator[LineChange]:
    old, new = before.split("\n"), after.split("\n")
    for tag, a, b, c, d in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from (LineChange(" ", line) for line in old[a:b])
        else:
            yield from (LineChange("-", line, causes.get(line.strip(), ())) for line in old[a:b])
            yield from (LineChange("+", line, causes.get(line.strip(), ())) for line in new[c:d])


def line_causes(
    before: Mapping[str, str], after: Mapping[str, str], known: Mapping[str, Sequence[str]], every: Sequence[str]
) -> dict[str, list[str]]:
    """Return the causes of each line that has changed: the ones known for the line, else all of the candidate's."""
    changed = (one for name, text in after.items() for one in _changes(before[name], text, {}) if one.mark != " ")
    lines = (one.line.strip() for one in changed)
    return {line: list(known.get(line, every)) for line in lines if line}


def candidate_records(result: SearchResult) -> list[CandidateRecord]:
    pool, found = result.pool, list[CandidateRecord]()
    began: dict[str, int] = {}
    for at, trial in enumerate(pool.trials):
        began.setdefault(trial.candidate, at)
    racers = {racer.candidate: racer for racer in result.racers}
    for one in pool.candidates.values():
        racer = racers.get(one.id)
        state: CandidateState = "tried" if racer is None else racer.state
        if one.id == pool.seed.id:
            state = "seed"
        elif result.winner is not None and one.id == result.winner.id:
            state = "winner"
        record = CandidateRecord(
            id=one.id, parent=one.parent if one.parent in pool.candidates else None, claim=one.claim,
            causes=list(one.causes), state=state, step=began.get(one.id, len(pool.trials)),
            rollouts=len(pool.of(one.id)), mean=pool.mean(one.id), length=one.length,
        )  # fmt: skip
        if racer is not None:
            record.pairs, record.gain = racer.pairs, racer.gain
            record.e_value, record.needed = racer.e_value, racer.needed
        found.append(record)
    return found


def candidate_tree(result: SearchResult) -> CandidateTree:
    """Return the candidates for the tape: all that fit, else finalists, the highest means, and their ancestors."""
    every = {one.id: one for one in candidate_records(result)}
    kept: dict[str, None] = {}
    for one in sorted(every.values(), key=lambda one: (one.state == "tried", -(one.mean or 0.0), -one.rollouts)):
        line = [one.id]
        while (parent := every[line[-1]].parent) in every and parent not in line:
            line.append(str(parent))
        new = [name for name in line if name not in kept]
        if len(kept) + len(new) <= MOST_CANDIDATES:
            kept |= dict.fromkeys(new)
    shown = [
        RunCandidate(**one.model_dump(exclude={"causes", "claim"}), claim=abbreviate(one.claim, CLAIM)[:400])
        for one in every.values()
        if one.id in kept
    ]
    return CandidateTree(candidates=shown, left_out=len(every) - len(shown))


def build_result(
    config: ApoConfig, result: SearchResult, tests: Sequence[Trial], splits: Splits,
    versions: Mapping[str, Mapping[str, str]], placebo: bool,
) -> RunResult:  # fmt: skip
    """Return the result of a run. `tests`: trials of the test; `versions`: on the tape, by candidate and resource. The
    winner is compared with the tasks of all splits, and with the reasons of the search."""
    pool, budget, race = result.pool, result.budget, len(result.validation)
    seed, winner = pool.seed, result.winner
    every = [*splits.train, *splits.validation, *splits.test]

    def texts(one: Candidate) -> CandidateTexts:
        return CandidateTexts(id=one.id, texts=dict(one.texts), versions=dict(versions.get(one.id, {})))

    def sealed(task: AgentTask) -> SealedTask:
        said = json.dumps(task.input, ensure_ascii=False)
        return SealedTask(id=task.id, key=task.key, input=said if len(said) <= INPUT else f"{said[:INPUT]}…")

    def trials(found: Sequence[Trial]) -> list[TrialRecord]:
        return [TrialRecord.model_validate(trial, from_attributes=True) for trial in found]

    found = RunResult(
        run=config.run.name, engine=config.engine, settings=digest(config), draw=config.run.seed,
        placebo=placebo, ended_ns=time.time_ns(), why=result.why, seed=texts(seed), winner=None,
        line_causes={}, candidates=candidate_records(result),
        race=[FinalistRecord.model_validate(racer, from_attributes=True) for racer in result.racers],
        validation=trials(result.validation), tests=trials(tests),
        tasks=list(map(sealed, splits.test)) if tests else [],
        used=RunUsage(
            rollouts={"train": budget.used_rollouts - race, "val": race, "test": len(tests)},
            reflections=budget.used_reflections, tokens=budget.used_tokens, money=budget.used_money,
        ),
        leaks=[],
    )  # fmt: skip
    if winner is not None:
        found.winner = texts(winner)
        found.line_causes = line_causes(seed.texts, winner.texts, winner.line_causes, winner.causes)
        found.leaks = leaks(seed.texts, winner.texts, every, ((one.task, one.reason) for one in pool.trials))
    return found
