"""Questions for the reflecting model, the reading of its answers, and the edits in them. Pure.

An edit is a line added, deleted or replaced. It names its place by the line itself and not by a number, so that it
still fits after other edits: edits of several proposals combine into one text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

from penstock.trainer.apo.protocol import Trial, without_surrogates

T = TypeVar("T")
Kind = Literal["add", "delete", "replace"]
MOST_TRANSCRIPT: Final = 4_000
"""Most characters of a transcript in a question: its beginning and its end."""
MOST_FAILURE: Final = 500
_DECODER: Final = json.JSONDecoder()
_WORD: Final = re.compile(r"[\w']+|\{\w+\}")
HYPOTHESES: Final = """\
You improve the texts that an AI agent is given. Below are the texts, line by line, and rollouts of the agent with the \
reward that each got (0 is worst, 1 is best) and the grader's reason.

Find failures that rollouts have in common. For each, say what goes wrong, and the smallest edit of the texts that \
would mend it. Do not copy answers of tasks into the texts, do not name single customers or items, and do not speak to \
the grader: the texts will be judged on tasks that you do not see. Keep every {slot} as it is.

Answer with JSON alone:
{"hypotheses": [{"failure": "...", "resource": "NAME", "kind": "add" | "delete" | "replace", "line": NUMBER, \
"text": "..."}]}
`line` is the number of the line that is deleted or replaced, or behind which a line is added (0: at the end). At most \
%d hypotheses, the surest first.
"""

SCRATCH: Final = """\
Write new texts for an AI agent from scratch; the ones that it had have failed, and are not shown. Below are rollouts \
of the agent with the reward that each got (0 is worst, 1 is best) and the grader's reason.

Say what the agent is for and what the reasons ask of it. Do not copy answers of tasks into the texts, do not name \
single customers or items, and do not speak to the grader.%s

Answer with JSON alone: {"texts": {"NAME": "..."}} with these names: %s
"""


class Edit(NamedTuple):
    """A change of one line of one text."""

    resource: str
    kind: Kind
    """`add` puts `text` behind the line, or at the end where the line is empty."""
    line: str = ""
    """The line to delete or replace, or behind which to add."""
    text: str = ""

    @property
    def length(self) -> int:
        written = 0 if self.kind == "delete" else len(self.text) + 1
        return written - (0 if self.kind == "add" else len(self.line) + 1)


def words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))


def exclude(one: Edit, other: Edit) -> bool:
    """True if only one of two edits can be made: both delete or replace the same line."""
    takes = ("delete", "replace")
    same = one.resource == other.resource and one.line.strip() == other.line.strip()
    return same and one.kind in takes and other.kind in takes


def applied(texts: Mapping[str, str], edits: Iterable[Edit]) -> dict[str, str]:
    """Return the texts after the edits, in their order. Of equal lines the first is changed. An edit that deletes or
    replaces a missing line changes nothing; one that adds behind a missing line adds at the end. A line that exists
    already is not written again: adding it changes nothing, and replacing another line by it deletes that line."""
    found = {name: text.split("\n") for name, text in texts.items()}
    for edit in edits:
        if (lines := found.get(edit.resource)) is None:
            continue
        place = next((at for at, line in enumerate(lines) if line.strip() == edit.line.strip()), None)
        there = edit.kind != "delete" and any(
            line.strip() == edit.text.strip() for at, line in enumerate(lines) if edit.kind == "add" or at != place
        )
        if edit.kind != "add":
            if place is not None:
                lines[place : place + 1] = [edit.text] if edit.kind == "replace" and not there else []
        elif not there:
            lines.insert(len(lines) if place is None or not edit.line.strip() else place + 1, edit.text)
    return {name: "\n".join(lines) for name, lines in found.items()}


class Hypothesis(NamedTuple):
    failure: str
    edit: Edit


def clipped(transcript: str) -> str:
    half = MOST_TRANSCRIPT // 2
    return transcript if len(transcript) <= MOST_TRANSCRIPT else f"{transcript[:half]}\n[...]\n{transcript[-half:]}"


def format_trials(trials: Sequence[Trial]) -> str:
    parts: list[str] = []
    for at, trial in enumerate(trials, 1):
        reward = "none" if trial.reward is None else f"{trial.reward:.2f}"
        said, reason = clipped(trial.transcript), trial.reason or "not given"
        parts.append(f"# Rollout {at}, task {trial.task}, reward {reward}\n{said}\nReason: {reason}\n")
    return "\n".join(parts)


def ask_hypotheses(texts: Mapping[str, str], trials: Sequence[Trial], most: int) -> str:
    """Return the question for edits. Rollouts of one task are adjacent, so that they can be compared."""
    parts = [HYPOTHESES % most]
    for name, text in sorted(texts.items()):
        numbered = "\n".join(f"{at}| {line}" for at, line in enumerate(text.split("\n"), 1))
        parts.append(f"## Text {name}\n{numbered}\n")
    return "\n".join(filter(None, [*parts, format_trials(trials)]))


def ask_scratch(texts: Mapping[str, str], slots: Sequence[str], trials: Sequence[Trial]) -> str:
    """Return the question for texts that do not begin from the present ones."""
    must = f" Each of these stands in them, as it is: {', '.join(slots)}." if slots else ""
    return "\n".join(filter(None, [SCRATCH % (must, ", ".join(sorted(texts))), format_trials(trials)]))


def read_hypotheses(answer: str, texts: Mapping[str, str]) -> list[Hypothesis]:
    """Return the usable hypotheses of an answer; the rest is left out."""
    found: list[Hypothesis] = []
    for one in _values(answer, "hypotheses", list[Any]):
        if isinstance(one, dict) and (edit := _edit(cast(dict[str, Any], one), texts)) is not None:
            found.append(Hypothesis(_said(cast(dict[str, Any], one).get("failure"))[:MOST_FAILURE], edit))
    return found


def _edit(given: Mapping[str, Any], texts: Mapping[str, str]) -> Edit | None:
    name, kind, at, text = (given.get(key) for key in ("resource", "kind", "line", "text"))
    name = next(iter(texts)) if len(texts) == 1 else name
    if not isinstance(name, str) or name not in texts or kind not in ("add", "delete", "replace"):
        return None
    lines = texts[name].split("\n")
    line = lines[at - 1] if isinstance(at, int) and 1 <= at <= len(lines) else ""
    text = " ".join(_said(text).split("\n")).strip()
    if (kind != "add" and not line.strip()) or (kind != "delete" and not text):
        return None
    return Edit(name, kind, line, "" if kind == "delete" else text)


def _said(given: Any) -> str:
    return without_surrogates(given) if isinstance(given, str) else ""


def read_texts(answer: str, texts: Mapping[str, str]) -> dict[str, str] | None:
    given = _values(answer, "texts", dict[str, Any])
    found = {name: text for name in texts if (text := _said(given.get(name))).strip()}
    return found if len(found) == len(texts) else None


def _values(answer: str, key: str, kind: Callable[[], T]) -> T:
    """Return the value of a key in the last object that has it, anywhere in an answer; an empty one without any."""
    found: Any = None
    at = answer.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(answer, at)
            found = value.get(key, found)
        except (ValueError, RecursionError):
            end = at + 1
        at = answer.find("{", end)
    empty = kind()
    return found if isinstance(found, type(empty)) else empty


def fenced(answer: str) -> str:
    """Return the text between the first and the last fence of an answer; the whole answer without fences."""
    found = re.search(r"```\w*\n?(.*)```", answer, re.DOTALL)
    return (found[1] if found else answer).strip()
