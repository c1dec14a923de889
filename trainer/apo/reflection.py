"""Questions for the reflecting model, and the reading of its answers. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from penstock.trainer.apo.edits import Edit
from penstock.trainer.apo.trials import Trial

MOST_TRANSCRIPT: Final = 4_000
"""Most characters of a transcript in a question: its beginning and its end."""
MOST_FAILURE: Final = 500
"""Most characters of a failure."""
_DECODER: Final = json.JSONDecoder()

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


class Hypothesis(NamedTuple):
    """A claim of a reflection."""

    failure: str
    """The failure in words."""
    edit: Edit
    """The edit that should fix it."""


def clipped(transcript: str) -> str:
    """Return a transcript's beginning and end if it is too long, else all of it."""
    half = MOST_TRANSCRIPT // 2
    return transcript if len(transcript) <= MOST_TRANSCRIPT else f"{transcript[:half]}\n[...]\n{transcript[-half:]}"


def format_trial(trial: Trial, number: int) -> str:
    """Return a rollout as text for the reflecting model."""
    said = clipped(trial.transcript)
    reward = "none" if trial.reward is None else f"{trial.reward:.2f}"
    return f"# Rollout {number}, task {trial.task}, reward {reward}\n{said}\nReason: {trial.reason or 'not given'}\n"


def ask_hypotheses(texts: Mapping[str, str], trials: Sequence[Trial], most: int) -> str:
    """Return the question for edits. Rollouts of one task are adjacent, so that they can be compared."""
    parts = [HYPOTHESES % most]
    for name, text in sorted(texts.items()):
        numbered = "\n".join(f"{at}| {line}" for at, line in enumerate(text.split("\n"), 1))
        parts.append(f"## Text {name}\n{numbered}\n")
    parts += [format_trial(trial, at) for at, trial in enumerate(trials, 1)]
    return "\n".join(parts)


def ask_scratch(texts: Mapping[str, str], slots: Sequence[str], trials: Sequence[Trial]) -> str:
    """Return the question for texts that do not begin from the present ones."""
    must = f" Each of these stands in them, as it is: {', '.join(slots)}." if slots else ""
    parts = [
        SCRATCH % (must, ", ".join(sorted(texts))),
        *(format_trial(trial, at) for at, trial in enumerate(trials, 1)),
    ]
    return "\n".join(parts)


def read_hypotheses(answer: str, texts: Mapping[str, str]) -> list[Hypothesis]:
    """Return the usable hypotheses of an answer; the rest is left out."""
    found: list[Hypothesis] = []
    given = _object(answer, "hypotheses").get("hypotheses")
    for one in cast(list[Any], given) if isinstance(given, list) else []:
        edit = _edit(cast(dict[str, Any], one), texts) if isinstance(one, dict) else None
        if edit is not None:
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
    """Return the whole texts of an answer; None when one is missing."""
    given = _object(answer, "texts").get("texts")
    if not isinstance(given, dict):
        return None
    found = [(name, cast(dict[str, Any], given).get(name)) for name in texts]
    read = {name: said for name, text in found if (said := _said(text)).strip()}
    return read if len(read) == len(texts) else None


def _object(answer: str, key: str) -> dict[str, Any]:
    """Return the last object of an answer that has this key, anywhere in it; empty when there is none."""
    found: dict[str, Any] = {}
    at = answer.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(answer, at)
            found = value if key in value else found
        except (ValueError, RecursionError):
            end = at + 1
        at = answer.find("{", end)
    return found


def without_surrogates(text: str) -> str:
    """Return the text without halves of characters (lone surrogates), which JSON can spell and nothing can send."""
    return text.encode(errors="ignore").decode()


def fenced(answer: str) -> str:
    """Return the text between the first and the last fence of an answer; the whole answer without fences."""
    found = re.search(r"```\w*\n?(.*)```", answer, re.DOTALL)
    return (found[1] if found else answer).strip()
