"""The changes of a text, line by line, and the rollouts that led to each change. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from penstock.trainer.apo.report.result import RunResult


class LineChange(NamedTuple):
    """A line of a difference."""

    mark: Literal[" ", "-", "+"]
    """Kept, removed, or new."""
    line: str
    causes: Sequence[str] = ()
    """Rollouts that led to it; empty if unknown."""


def changes(result: RunResult) -> dict[str, list[LineChange]]:
    """Return the changes by resource, of texts that have changed; empty without a winner."""
    if result.winner is None:
        return {}
    texts = result.winner.texts
    return {
        name: list(_changes(result.seed.texts[name], text, result.line_causes))
        for name, text in texts.items()
        if text != result.seed.texts[name]
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
    found: dict[str, list[str]] = {}
    for name, text in after.items():
        for change in _changes(before[name], text, {}):
            if change.mark != " " and change.line.strip():
                found[change.line.strip()] = list(known.get(change.line.strip(), every))
    return found
