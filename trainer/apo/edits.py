"""Edits: a line added, deleted or replaced. Edits of several proposals combine into one text. Pure.

An edit names its place by the line itself and not by a number, so that it still fits after other edits. Edits of
different reflections with the same aim are recognised (`alike`), and edits of the same line exclude each other.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

Kind = Literal["add", "delete", "replace"]
ALIKE: Final = 0.6
"""Share of words that two texts must have in common to be alike (Jaccard)."""
_WORD: Final = re.compile(r"[\w']+|\{\w+\}")


class Edit(NamedTuple):
    """A change of one line of one text."""

    resource: str
    """Resource of the text."""
    kind: Kind
    """`add` puts `text` behind the line, or at the end where the line is empty."""
    line: str = ""
    """The line to delete or replace, or behind which to add."""
    text: str = ""
    """The new line."""

    @property
    def length(self) -> int:
        """Characters that the text grows by."""
        written = 0 if self.kind == "delete" else len(self.text) + 1
        return written - (0 if self.kind == "add" else len(self.line) + 1)


def words(text: str) -> frozenset[str]:
    """Return the set of words of a text, in lower case."""
    return frozenset(_WORD.findall(text.lower()))


def alike(one: Edit, other: Edit) -> bool:
    """True if two edits have the same aim: they delete the same line, or write nearly the same words."""
    if one.resource != other.resource or (one.kind == "delete") != (other.kind == "delete"):
        return False
    if one.kind == "delete":
        return one.line.strip() == other.line.strip()
    if (one.kind == "replace" or other.kind == "replace") and one.line.strip() != other.line.strip():
        return False
    a, b = words(one.text), words(other.text)
    return bool(a | b) and len(a & b) / len(a | b) >= ALIKE


def exclude(one: Edit, other: Edit) -> bool:
    """True if only one of two edits can be made: both delete or replace the same line."""
    takes = ("delete", "replace")
    same = one.resource == other.resource and one.line.strip() == other.line.strip()
    return same and one.kind in takes and other.kind in takes


def applied(texts: Mapping[str, str], edits: Iterable[Edit]) -> dict[str, str]:
    """Return the texts after the edits, in their order. Of equal lines the first is changed. An edit that deletes or
    replaces a missing line changes nothing; one that adds behind a missing line adds at the end. A line that exists
    already is not written again: adding it changes nothing, and replacing another line by it deletes that line."""
    lines = {name: text.split("\n") for name, text in texts.items()}
    for edit in edits:
        if edit.resource in lines:
            _apply(lines[edit.resource], edit)
    return {name: "\n".join(parts) for name, parts in lines.items()}


def _apply(lines: list[str], edit: Edit) -> None:
    place = next((at for at, line in enumerate(lines) if line.strip() == edit.line.strip()), None)
    there = edit.kind != "delete" and any(
        line.strip() == edit.text.strip() for at, line in enumerate(lines) if edit.kind == "add" or at != place
    )
    if edit.kind != "add":
        if place is not None:
            lines[place : place + 1] = [edit.text] if edit.kind == "replace" and not there else []
    elif not there:
        lines.insert(len(lines) if place is None or not edit.line.strip() else place + 1, edit.text)


def diff_edits(before: str, after: str, resource: str) -> list[Edit]:
    """Return the edits that lead from one text to another, line by line. Where equal lines make that impossible, such
    as several empty ones, all lines but one are deleted, and that one is replaced by the whole text."""
    old, new = before.split("\n"), after.split("\n")
    found: list[Edit] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if tag != "equal":
            found += _paired(old[a:b], new[c:d], old[a - 1] if a else "", resource)
    if applied({resource: before}, found)[resource] == after:
        return found
    return [*(Edit(resource, "delete", line) for line in old[1:]), Edit(resource, "replace", old[0], after)]


def _paired(gone: Sequence[str], come: Sequence[str], behind: str, resource: str) -> list[Edit]:
    found = [Edit(resource, "replace", one, other) for one, other in zip(gone, come, strict=False)]
    found += [Edit(resource, "delete", line) for line in gone[len(come) :]]
    for line in come[len(gone) :]:
        found.append(Edit(resource, "add", behind, line))
        behind = line
    return found
