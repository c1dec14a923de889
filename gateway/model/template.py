"""A version of a prompt: text with named slots, `Hello {customer}, it is {date}.` A literal brace is doubled: `{{`.

The texts between the slots are its *anchors*; there is one more of them than slots, and the first and the last may be
empty. Values are data: a value is never expanded, whatever it looks like.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

SHORTEST = 6
"""Least characters of a template's longest anchor: with fewer it cannot be told from other text."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_BRACE = re.compile(r"\{\{|\}\}|\{[^{}\n]*\}|[{}]")


class TemplateError(ValueError):
    """A text that is no template, values or a candidate that do not fit one. The message names the slot."""


@dataclass(frozen=True)
class Template:
    """Anchors with a slot between each two."""

    anchors: tuple[str, ...]
    """Literal text, one more than slots."""
    slots: tuple[str, ...]
    """Names of the slots in order; a name may occur several times and then has one value."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """The template that a text defines; raises TemplateError, which gives the mistake and its place."""
        anchors, slots, at = [""], list[str](), 0
        for brace in _BRACE.finditer(source):
            anchors[-1] += source[at : brace.start()]
            at, found = brace.end(), brace.group()
            if found in ("{{", "}}"):
                anchors[-1] += found[0]
            else:
                slots.append(_slot(source, brace.start(), found))
                anchors.append("")
        anchors[-1] += source[at:]
        return cls(tuple(anchors), tuple(slots))

    @cached_property
    def source(self) -> str:
        """The text that `parse` reads as this template."""
        literal = [anchor.replace("{", "{{").replace("}", "}}") for anchor in self.anchors]
        slots = [f"{{{slot}}}" for slot in self.slots]
        return "".join(piece for pair in zip(literal, [*slots, ""], strict=True) for piece in pair)

    @cached_property
    def literal(self) -> int:
        """Number of characters of literal text."""
        return sum(map(len, self.anchors))

    @cached_property
    def utf8(self) -> Template:
        """The template as bytes: each character of its anchors is a byte of their UTF-8."""
        return Template(tuple(map(utf8, self.anchors)), self.slots)

    @cached_property
    def written(self) -> Template:
        """The template as a JSON string, quotes included, with no more escapes than JSON requires: bytes, as in
        `utf8`."""
        first, *others = (json.dumps(anchor, ensure_ascii=False)[1:-1] for anchor in self.anchors)
        *inner, last = (f'"{first}', *others)
        anchors = (one.encode("utf-8", "backslashreplace").decode("latin-1") for one in (*inner, f'{last}"'))
        return Template(tuple(anchors), self.slots)

    def check(self, values: Mapping[str, str]) -> None:
        """Raise TemplateError, which names the slots that have no value and the values that have no slot, if there are
        any."""
        if set(values) != set(self.slots):
            check_slots(Counter(set(self.slots)), Counter(values.keys()))

    def render(self, values: Mapping[str, str]) -> str:
        """The text with a value in each slot; raises TemplateError as `check`."""
        self.check(values)
        pieces = [self.anchors[0]]
        for slot, anchor in zip(self.slots, self.anchors[1:], strict=True):
            pieces += [values[slot], anchor]
        return "".join(pieces)

    @property
    def weakness(self) -> str | None:
        """Why texts cannot be recognised by this template, for a person; None when they can."""
        if max(map(len, self.anchors)) < SHORTEST:
            return (
                f"its longest text between slots is shorter than {SHORTEST} characters: it would match almost anything"
            )
        touching = zip(self.slots, self.slots[1:], self.anchors[1:-1], strict=False)
        pair = next(((one, other) for one, other, between in touching if not between), None)
        return None if pair is None else f"nothing stands between {{{pair[0]}}} and {{{pair[1]}}}"


def utf8(text: str) -> str:
    """A text with a character for each byte of the given text's UTF-8; such a text takes a byte of memory for each. No
    character's UTF-8 is part of another's, so that a search in it finds what a search in the text itself would."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")


def _slot(source: str, at: int, found: str) -> str:
    """The name in `{name}`; raises TemplateError if it is no slot."""
    line, column = source.count("\n", 0, at) + 1, at - source.rfind("\n", 0, at)
    where = f"line {line}, column {column}"
    if len(found) == 1:
        raise TemplateError(f"{where}: a single {found}; a slot is {{name}}, a literal brace is written {found * 2}")
    if _NAME.fullmatch(found[1:-1]) is None:
        raise TemplateError(
            f"{where}: {found[:80]} is no slot: a name is a letter or _, then at most 63 letters, digits or _; "
            "a literal brace is doubled"
        )
    return found[1:-1]


def check_candidate(stable: Template, candidate: Template) -> None:
    """Refuse a candidate that loses or adds a slot: raises TemplateError with `missing {x}`, `added {y}`."""
    check_slots(Counter(stable.slots), Counter(candidate.slots))


def check_slots(wanted: Counter[str], given: Counter[str]) -> None:
    """Refuse slots that are not exactly the wanted ones, each as often; raises TemplateError."""
    missing = [f"missing {{{slot}}}" for slot in (wanted - given).elements()]
    added = [f"added {{{slot}}}" for slot in (given - wanted).elements()]
    if missing or added:
        raise TemplateError(", ".join(missing + added))
