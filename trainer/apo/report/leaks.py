"""The leak test: finds copies and other improper words in new lines of a text. Pure.

It checks the lines that the winner has and the seed has not. It finds

* `PHRASE` words in a row that are in a task, or in a grader's reason;
* values of tasks (a customer's name, an order's number, an expected answer): words with a digit or a capital letter,
  and values of three words and more; and words with a digit of graders' reasons;
* words to the grader (`GRADER`);
* slots that were lost or added.

Words that are in the seed too are no leak, and neither are words of many tasks (more than `RARE` of them): these are
the subject. It finds copies, not paraphrases: if it finds nothing, a person must still read the difference.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from penstock.gateway.model.base import Noun
from penstock.gateway.model.resource import Template, TemplateError, check_candidate
from penstock.trainer.apo.protocol import AgentTask

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
Kind = Literal["task", "reason", "grader", "slot"]


class Leak(Noun):
    """Something in a text that should not be there."""

    kind: Kind
    resource: str
    line: str
    found: str
    where: str = ""


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
    kind: Kind
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
