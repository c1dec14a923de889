"""Finds the registered text that is nearest to a text, and the first difference between them. Pure; not for the hot
path.

Pieces of each template are looked for in the text. The template with the largest share of found pieces is the nearest,
if that share is at least a half. So a prompt in which a date was written as text is still known on the next day, and
the prompt of another agent is not taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Final
from zlib import crc32

from penstock.gateway.model.coverage import TextDifference
from penstock.gateway.model.template import Template
from penstock.gateway.releases.prompts.alignment import tokens

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
