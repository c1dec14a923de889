"""Recognises registered prompts: finds the prompt that a text is, and the values of its slots.

All templates are searched for together (`gateway.releases.prompts.anchors`), which leaves a few candidates; each of
these is matched by itself (`prompts.anchors`). Both take time linear in the text, whatever is in the
slots.

A text is left alone if no template matches it, if templates of several resources do, or if it can be split in two ways.
Of several matching versions of one resource, the one with most literal text counts. A recognised text is rendered again
and must give the very same text.

Texts are compared as the bytes of their UTF-8 (`Template.utf8`): in a Python string one character beyond Latin-1 would
make each of the others take two or four bytes, and everything twice as slow.

Agents send the same system text with every call. The newest results are cached by the literal in the request, so a text
that was seen before is not even decoded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Final
from zlib import crc32

from penstock.gateway.model.coverage import TextDifference
from penstock.gateway.model.resource import PromptText, Template, ToolText, utf8
from penstock.gateway.releases.prompts.anchors import Reason, TemplateTree, match
from penstock.gateway.releases.prompts.common_template import tokens
from penstock.gateway.releases.prompts.placeholder import MARK
from penstock.gateway.wire.dialects.request_body import decoded

KEPT = 128
KEPT_BYTES = 1 << 17
"""Most literals that are cached, and most bytes of each."""


@dataclass(frozen=True, slots=True)
class RegisteredText:
    """A registered text: the text that agents send for a resource."""

    resource: str
    """Name of the resource."""
    template: Template
    """A version of the resource that agents are known to send."""
    tool: str | None = None
    """The tool that the text describes; None for a prompt."""

    @classmethod
    def of(cls, resource: str, content: PromptText | ToolText) -> RegisteredText:
        """The registered text of a version that agents are known to send."""
        return cls(resource, content.template, content.tool if isinstance(content, ToolText) else None)


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A text that is one registered prompt."""

    known: RegisteredText
    slots: Mapping[str, str]
    """The values of its slots."""
    sha256: str
    """Hash of the text in UTF-8; hex."""


@dataclass(frozen=True, slots=True)
class RecognitionResult:
    """The cached result for a literal."""

    what: TextMatch | Reason
    """The registered prompt, or why there is none."""
    marked: bool
    """True if the literal may hold a placeholder."""


class Recogniser:
    """Recognises registered texts. Immutable; made anew when something is registered."""

    def __init__(self, known: Iterable[RegisteredText]) -> None:
        """Templates that have a `weakness` are not used."""
        self.known = tuple(dict.fromkeys(it for it in known if it.template.weakness is None))
        self._of: dict[str | None, dict[Template, list[RegisteredText]]] = {}
        for it in self.known:
            self._of.setdefault(it.tool, {}).setdefault(it.template.utf8, []).append(it)
        self._trees = {tool: TemplateTree(templates) for tool, templates in self._of.items()}
        self.tools = self._trees.keys() - {None}
        """The tools whose descriptions are registered."""
        self._remembered = lru_cache(KEPT)(self._tell)
        self.only = lru_cache(KEPT)(self._only)
        """Returns a recogniser for the one resource of this name."""

    def __bool__(self) -> bool:
        return bool(self.known)

    def _only(self, resource: str) -> Recogniser:
        return Recogniser(it for it in self.known if it.resource == resource)

    def forget(self) -> None:
        """Empty the cache, to measure a first call."""
        self._remembered.cache_clear()

    def recognise_literal(self, literal: bytes, tool: str | None = None) -> RecognitionResult:
        """The result for a JSON string literal: a system text, or the description of a tool."""
        return (self._remembered if len(literal) <= KEPT_BYTES else self._tell)(literal, tool)

    def _tell(self, literal: bytes, tool: str | None) -> RecognitionResult:
        # A literal without escapes is the text already.
        said = utf8(decoded(literal)) if b"\\" in literal else str(memoryview(literal)[1:-1], "latin-1")
        # One character is found ten times as fast, and most texts have no brace.
        return RecognitionResult(self._recognise(said, tool), MARK[0] in said and MARK in said)

    def recognise(self, text: str, tool: str | None = None) -> TextMatch | Reason:
        """The one registered prompt (or description of a tool) that a text is, or the reason why there is none."""
        return self._recognise(utf8(text), tool)

    def _recognise(self, text: str, tool: str | None) -> TextMatch | Reason:
        found: list[tuple[RegisteredText, Mapping[str, str] | None]] = []
        for template in self._trees[tool].possible(text) if tool in self._trees else ():
            split = match(template, text)
            if split != "miss":
                found += [(known, None if split == "ambiguous" else split) for known in self._of[tool][template]]
        if not found:
            return "miss"
        (known, values), *others = sorted(found, key=lambda it: it[0].template.literal, reverse=True)
        if values is None or any(_rivals(known, other) for other, _ in others):
            return "ambiguous"
        slots = {slot: _text(value) for slot, value in values.items()}
        return TextMatch(known, slots, hashlib.sha256(text.encode("latin-1")).hexdigest())


def _text(value: str) -> str:
    """The text whose `utf8` this is."""
    return value if value.isascii() else value.encode("latin-1").decode("utf-8", "surrogatepass")


def _rivals(known: RegisteredText, other: RegisteredText) -> bool:
    return other.resource != known.resource or other.template.literal == known.template.literal


def sha256(text: str) -> str:
    """SHA-256 of a text in UTF-8; hex. Half a surrogate pair counts as the bytes that it would have."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# Finds the registered text that is nearest to a text, and the first difference between them. Pure; not for the hot
# path.
#
# Pieces of each template are looked for in the text. The template with the largest share of found pieces is the
# nearest, if that share is at least a half. So a prompt in which a date was written as text is still known on the
# next day, and the prompt of another agent is not taken for it.

PIECES: Final = 24
RUN, SHORT_RUN, FEW = 5, 3, 100
SHORT: Final = 8
"""Most pieces of a template that are looked for; tokens of each, fewer for a template of few tokens; and the least
characters of a piece."""
NEAR: Final = 0.5
TELLS: Final = 4
"""Least characters of an anchor's beginning that count as found in a text."""
WORDS: Final = 48
"""Most characters that are shown."""
_LAST_WORD = re.compile(r"\S{0,24}\Z")


@dataclass(frozen=True, slots=True)
class SentVersion:
    """A version that agents are known to send."""

    resource: str
    """Name of the resource."""
    version: str
    """Name of the version."""
    template: Template
    """The version's text."""
    tool: str | None = None
    """The tool that the text describes; None for a prompt."""


class NearestTextFinder:
    """Finds the nearest of some versions."""

    def __init__(self, sent: Iterable[SentVersion]) -> None:
        self._sent = [(one, _pieces(one.template)) for one in sent]

    def of(self, text: str, tools: Iterable[str | None] = (None,)) -> SentVersion | None:
        """The version that is nearest to a text; None if none is near. `tools`: names of the tool that the text
        describes, None for a system text."""
        asked = set(tools)
        # Versions have most pieces in common: each piece is looked for once.
        there = {piece: False for one, pieces in self._sent if one.tool in asked for piece in pieces}
        there = {piece: piece in text for piece in there}
        found = [
            (sum(map(there.__getitem__, pieces)) / len(pieces), one)
            for one, pieces in self._sent
            if one.tool in asked and pieces
        ]
        share, one = max(found, key=lambda it: it[0], default=(0.0, None))
        return one if share >= NEAR else None


def _pieces(template: Template) -> list[str]:
    """A selection of pieces that versions of one prompt share wherever their texts agree: those with the lowest
    checksums."""
    cut = [tokens(anchor) for anchor in template.anchors]
    size = RUN if sum(map(len, cut)) > FEW else SHORT_RUN
    runs = {run for one in cut for run in _runs(one, size)}
    every = [run for run in runs if len(run) >= SHORT] or [anchor for anchor in template.anchors if anchor]
    return sorted(every, key=lambda run: crc32(run.encode("utf-8", "surrogatepass")))[:PIECES]


def _runs(cut: list[str], size: int) -> Iterator[str]:
    return ("".join(cut[at : at + size]) for at in range(len(cut) - size + 1) if not cut[at].isspace())


def difference(sent: SentVersion, text: str) -> TextDifference | None:
    """The first difference between a text and a version; None where all of the version's anchors are in their
    places."""
    found = _differs(sent.template.anchors, text)
    if found is None:
        return None
    at, anchor, same = found
    word = _LAST_WORD.search(anchor[:same])
    back = len(word[0]) if word is not None and text[:at].endswith(word[0]) else 0
    return TextDifference(
        version=sent.version,
        at=at - back,
        found=text[at - back : at - back + WORDS],
        wanted=anchor[same - back : same - back + WORDS],
    )


def _differs(anchors: tuple[str, ...], text: str) -> tuple[int, str, int] | None:
    """(offset where the text differs, the expected anchor, number of its characters that are there); None where nothing
    differs."""
    first, *others = anchors
    at = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, text, strict=False))))
    if at < len(first) or not others:
        return None if text == first else (at, first, at)
    for anchor in others[:-1]:
        found = text.find(anchor, at)
        if found < 0:
            return _furthest(text, anchor, at)
        at = found + len(anchor)
    last = others[-1]
    return None if len(text) - len(last) >= at and text.endswith(last) else _furthest(text, last, at)


def _furthest(text: str, anchor: str, at: int) -> tuple[int, str, int]:
    """The result of `_differs` for a missing anchor: the end of its longest beginning that occurs behind an offset."""
    low, high = 0, len(anchor)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.find(anchor[:middle], at) >= 0 else (low, middle - 1)
    return (text.find(anchor[:low], at) + low, anchor, low) if low >= TELLS else (at, anchor, 0)
