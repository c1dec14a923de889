"""`result.json`: what a run keeps of itself when it has ended, how it is made and found, the changes of the texts, line
by line, with the rollouts that led to each, and the leak test of the winner. The fields are documented in
docs/apo-report.md.
"""

from __future__ import annotations

import difflib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from pydantic import Field, ValidationError

from penstock.console.views.table import abbreviate
from penstock.gateway.model.base import Mode, Noun
from penstock.gateway.model.resource import Template, TemplateError, check_candidate
from penstock.gateway.model.run import MOST_CANDIDATES, CandidateState, CandidateTree, RunCandidate
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig, digest
from penstock.trainer.apo.protocol import AgentTask, Candidate, Trial
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


LeakKind = Literal["task", "reason", "grader", "slot"]


class Leak(Noun):
    """Something in a text that should not be there."""

    kind: LeakKind
    resource: str
    line: str
    found: str
    where: str = ""


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


# The leak test: finds copies and other improper words in new lines of a text. Pure.
#
# It checks the lines that the winner has and the seed has not. It finds
#
# * `PHRASE` words in a row that are in a task, or in a grader's reason;
# * values of tasks (a customer's name, an order's number, an expected answer): words with a digit or a capital letter,
#   and values of three words and more; and words with a digit of graders' reasons;
# * words to the grader (`GRADER`);
# * slots that were lost or added.
#
# Words that are in the seed too are no leak, and neither are words of many tasks (more than `RARE` of them): these
# are the subject. It finds copies, not paraphrases: if it finds nothing, a person must still read the difference.

PHRASE: Final = 6
RARE: Final = 0.1
"""Largest share of the tasks with a phrase or a value that still counts as a leak; one task always counts."""
LEAST: Final = 3
LONGEST: Final = 200
"""Most characters of a value that is searched as a whole; in longer ones phrases are found."""
GRADER: Final = (
    "grader", "graders", "grading", "graded", "judge", "judges", "judged", "evaluator", "evaluated", "rubric",
    "reward", "rewards", "rewarded", "score", "scores", "scored", "full marks", "full credit", "test case",
    "test cases", "ignore previous", "ignore all previous", "ignore the above", "disregard previous",
    "disregard all previous", "disregard the above",
)  # fmt: skip
_WORD: Final = re.compile(r"[^\W_]+(?:['._-][^\W_]+)*")
_SLOT: Final = re.compile(r"\{[^{}\n]*\}")


class SourceText(NamedTuple):
    task: str
    text: str


def leaks(
    seed: Mapping[str, str], winner: Mapping[str, str], tasks: Sequence[AgentTask], reasons: Iterable[tuple[str, str]]
) -> list[Leak]:
    """Return the leaks. `reasons`: (task id, a grader's reason for a rollout of it)."""
    known = _spaced("\n".join(seed.values()))
    inputs = [SourceText(task.id, text) for task in tasks for text in _leaves(task.input)]
    said = [SourceText(*reason) for reason in reasons if reason[1]]
    most = max(1, int(RARE * len(tasks)))
    values = _rare([(text.strip(), task) for task, text in inputs if _telling(text)], most)
    words = [(word, task) for task, text in said for word in _WORD.findall(text)]
    figures = _rare([pair for pair in words if len(pair[0]) >= LEAST and any(map(str.isdigit, pair[0]))], most)
    found: list[Leak] = []
    kind: LeakKind
    for resource, text in winner.items():
        old = {line.strip() for line in seed.get(resource, "").split("\n")}
        for line in (line.strip() for line in text.split("\n")):
            if not line or line in old:
                continue
            said_words = _WORD.findall(line.lower())
            rows = (" ".join(said_words[at : at + PHRASE]) for at in range(len(said_words) - PHRASE + 1))
            phrases = [one for one in rows if f" {one} " not in known]
            kind, copied = "task", _copied(phrases, inputs, most) or _held(line, values, known)
            if not copied:
                kind, copied = "reason", _copied(phrases, said, most) or _held(line, figures, known)
            found += [Leak(kind=kind, resource=resource, line=line, found=what, where=at) for what, at in copied]
            spoken = [word for word in GRADER if f" {word} " in _spaced(line) and f" {word} " not in known]
            found += [Leak(kind="grader", resource=resource, line=line, found=word) for word in spoken]
    return [*found, *_slots(seed, winner)]


def _spaced(text: str) -> str:
    """Return a text's words in lower case, with a space around each, so that a search finds whole words."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def _copied(phrases: Sequence[str], sources: Sequence[SourceText], most: int) -> list[tuple[str, str]]:
    """Return the first phrase of a line that few tasks have, with one of these tasks; empty without one."""
    spaced = [(task, _spaced(text)) for task, text in sources] if phrases else []
    for phrase in phrases:
        having = list(dict.fromkeys(task for task, text in spaced if f" {phrase} " in text))
        if 0 < len(having) <= most:
            return [(phrase, having[0])]
    return []


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        parts = cast(dict[str, Any], value).values() if isinstance(value, dict) else cast(list[Any], value)
        for one in parts:
            yield from _leaves(one)
    elif isinstance(value, str):
        yield value
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def _telling(value: str) -> bool:
    """True if a value in a prompt shows that it was copied: a common word does not."""
    if not LEAST <= len(value.strip()) <= LONGEST:
        return False
    return len(_WORD.findall(value)) > 2 or any(one.isdigit() or one.isupper() for one in value)


def _rare(pairs: Iterable[tuple[str, str]], most: int) -> dict[str, str]:
    tasks: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for value, task in pairs:
        tasks[value][task] = None
    return {value: next(iter(having)) for value, having in tasks.items() if len(having) <= most}


def _held(line: str, values: Mapping[str, str], known: str) -> list[tuple[str, str]]:
    """Return the longest value that a line has as whole words, with its task; a single word must match in case."""
    exact, spaced = f" {' '.join(_WORD.findall(line))} ", _spaced(line)
    found: list[tuple[str, str]] = []
    for value, task in values.items():
        words = _WORD.findall(value)
        one = " ".join(words)
        there = f" {one} " in exact if len(words) == 1 else f" {one.lower()} " in spaced
        if words and there and f" {one.lower()} " not in known:
            found.append((value, task))
    return sorted(found, key=lambda pair: -len(pair[0]))[:1]


def _slots(seed: Mapping[str, str], winner: Mapping[str, str]) -> Iterator[Leak]:
    for resource, after in winner.items():
        before = seed.get(resource, "")
        try:
            template = Template.parse(before)
        except TemplateError:
            # A text that was never a template has no slots to lose.
            continue
        try:
            check_candidate(template, Template.parse(after))
        except TemplateError as error:
            # The first line whose slots are not those of the other text.
            change = Counter(_SLOT.findall(after))
            change.subtract(_SLOT.findall(before))
            lines = [line.strip() for text in (after, before) for line in text.split("\n")]
            line = next((line for line in lines if any(change[slot] for slot in _SLOT.findall(line))), "")
            yield Leak(kind="slot", resource=resource, line=line, found=str(error))
