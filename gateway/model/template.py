"""A version of a prompt: text with named slots, `Hello {customer}, it is {date}.` A literal brace is doubled: `{{`.

The text between the slots are its *anchors*; there is one more of them than slots, and the first and the last may be
empty. Values are data: what stands in one is never expanded, whatever it looks like.
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
"""Characters of its longest anchor from which a template can be told from others."""
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
    """Names of the slots in order; a name may stand more than once and then has one value."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """The template that a text writes down; TemplateError names what is wrong and where."""
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
        """How much of it is literal text; characters."""
        return sum(map(len, self.anchors))

    @cached_property
    def utf8(self) -> Template:
        """The same as bytes: each character of its anchors is a byte of their UTF-8."""
        return Template(tuple(map(utf8, self.anchors)), self.slots)

    @cached_property
    def written(self) -> Template:
        """The same as a JSON string, quotes included, with no more escapes than JSON asks for: bytes, as in `utf8`."""
        first, *others = (json.dumps(anchor, ensure_ascii=False)[1:-1] for anchor in self.anchors)
        *inner, last = (f'"{first}', *others)
        anchors = (one.encode("utf-8", "backslashreplace").decode("latin-1") for one in (*inner, f'{last}"'))
        return Template(tuple(anchors), self.slots)

    def check(self, values: Mapping[str, str]) -> None:
        """TemplateError names the slots that have no value, and the values that have no slot."""
        if set(values) != set(self.slots):
            check_slots(Counter(set(self.slots)), Counter(values.keys()))

    def render(self, values: Mapping[str, str]) -> str:
        """The text with a value in each slot; TemplateError as `check`."""
        self.check(values)
        pieces = [self.anchors[0]]
        for slot, anchor in zip(self.slots, self.anchors[1:], strict=True):
            pieces += [values[slot], anchor]
        return "".join(pieces)

    @property
    def weakness(self) -> str | None:
        """Why texts cannot be told by this template, for a person; None when they can."""
        if max(map(len, self.anchors)) < SHORTEST:
            return (
                f"its longest text between slots is shorter than {SHORTEST} characters: it would match almost anything"
            )
        touching = zip(self.slots, self.slots[1:], self.anchors[1:-1], strict=False)
        pair = next(((one, other) for one, other, between in touching if not between), None)
        return None if pair is None else f"nothing stands between {{{pair[0]}}} and {{{pair[1]}}}"


def utf8(text: str) -> str:
    """The bytes of a text's UTF-8 as a text with a character for each, which takes a byte of memory. In UTF-8 no
    character stands in the bytes of others, so that what is found in it is what would be found in the text itself."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")


def _slot(source: str, at: int, found: str) -> str:
    """The name in `{name}`."""
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
    """Refuses a candidate that loses or adds a slot: TemplateError with `missing {x}`, `added {y}`."""
    check_slots(Counter(stable.slots), Counter(candidate.slots))


def check_slots(wanted: Counter[str], given: Counter[str]) -> None:
    """Refuses slots that are not just those wanted, each as often."""
    missing = [f"missing {{{slot}}}" for slot in (wanted - given).elements()]
    added = [f"added {{{slot}}}" for slot in (given - wanted).elements()]
    if missing or added:
        raise TemplateError(", ".join(missing + added))
