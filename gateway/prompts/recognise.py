"""Which registered prompt is this text, and what stands in its slots? An anchored scan: no patterns, no backtracking.

The anchors of a template are searched for from left to right, each behind the one before it, between the first, with
which the text must begin, and the last, with which it must end. That gives every anchor its leftmost place. The same
scan of the text read backwards gives the rightmost ones. If they agree there is one way to split the text into slots;
if not, a value holds what looks like an anchor, and the text is *ambiguous*. Both scans take time linear in the text,
whatever is in the slots.

A text that no template matches, or those of several resources, or one that can be split in two ways, is left alone. Of
several versions of one resource the one with most literal text counts. What is recognised is rendered again and must
give the very same text.

Agents send the same system text with every call: the newest answers are kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from gateway.prompts.template import SHORTEST, Template

Reason: TypeAlias = Literal["miss", "ambiguous"]
HEAD = 48
MARK = 64
"""Characters of the first anchor by which templates are looked up, and of the piece that tells similar ones apart."""
LONG = 256
TRIES = 4
"""Characters of a long anchor that are searched for, and how often before all of it is."""
KEPT = 128
KEPT_CHARACTERS = 1 << 17
"""How many texts are remembered, and how long they may be."""


@dataclass(frozen=True, slots=True)
class Known:
    """A registered text: what an agent sends when it means this resource."""

    resource: str
    """Name of the resource."""
    template: Template
    """A version of it that agents are known to send."""
    tool: str | None = None
    """The tool that it describes; None for a prompt."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """A text that is one registered prompt."""

    known: Known
    slots: Mapping[str, str]
    """What stands in its slots."""
    sha256: str
    """Of the text, in UTF-8; hex."""


class Recogniser:
    """Tells registered texts. Immutable; made anew when something is registered."""

    def __init__(self, known: Iterable[Known]) -> None:
        """Templates that have a `weakness` are not used."""
        self.known = tuple(dict.fromkeys(it for it in known if it.template.weakness is None))
        self._index: dict[str | None, dict[int, dict[str, list[tuple[str, Known]]]]] = {}
        for it, mark in zip(self.known, marks([it.template for it in self.known]), strict=True):
            head = it.template.anchors[0][:HEAD]
            lengths = self._index.setdefault(it.tool, {})
            lengths.setdefault(len(head), defaultdict(list))[head].append((mark, it))
        self.tools = self._index.keys() - {None}
        """The tools whose descriptions are known."""
        self._remembered = lru_cache(KEPT)(self._recognise)
        self.only = lru_cache(KEPT)(self._only)
        """The same recogniser, but one that knows nothing but the resource of this name."""

    def __bool__(self) -> bool:
        return bool(self.known)

    def _only(self, resource: str) -> Recogniser:
        return Recogniser(it for it in self.known if it.resource == resource)

    def forget(self) -> None:
        """Forgets the texts that it has seen, to measure what the first time takes."""
        self._remembered.cache_clear()

    def recognise(self, text: str, tool: str | None = None) -> Recognised | Reason:
        """The one registered prompt (or description of a tool) that a text is; otherwise why there is none."""
        return (self._remembered if len(text) <= KEPT_CHARACTERS else self._recognise)(text, tool)

    def _recognise(self, text: str, tool: str | None) -> Recognised | Reason:
        found: list[tuple[Known, Mapping[str, str] | None]] = []
        for size, heads in self._index.get(tool, {}).items():
            for mark, known in heads.get(text[:size], ()):
                split = match(known.template, text) if mark in text else "miss"
                if split != "miss":
                    found.append((known, None if split == "ambiguous" else split))
        if not found:
            return "miss"
        (known, slots), *others = sorted(found, key=lambda it: it[0].template.literal, reverse=True)
        if slots is None or any(_rivals(known, other) for other, _ in others):
            return "ambiguous"
        return Recognised(known, slots, sha256(text))


def _rivals(known: Known, other: Known) -> bool:
    return other.resource != known.resource or other.template.literal == known.template.literal


def marks(templates: list[Template]) -> list[str]:
    """For each template a piece of an anchor that the fewest others have, to tell similar ones apart at once.

    Of its rarest anchor, it is what surrounds the first difference from the anchors next to it in sorted order, which
    are those that begin like it for longest.
    """
    counts = Counter(anchor for template in templates for anchor in set(template.anchors))
    order = sorted(counts)
    rank = {anchor: at for at, anchor in enumerate(order)}
    found: list[str] = []
    for template in templates:
        anchor = min(template.anchors, key=lambda it: (len(it) < SHORTEST, counts[it], -len(it)))
        at = rank[anchor]
        beside = [*order[max(at - 1, 0) : at], *order[at + 1 : at + 2]]
        differs = max((_shared(anchor, other) for other in beside), default=0)
        found.append(anchor[max(differs - MARK // 2, 0) :][:MARK])
    return found


def _shared(one: str, other: str) -> int:
    """Characters with which both begin; found by halving, since anchors may be long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def sha256(text: str) -> str:
    """Of a text in UTF-8; hex. Half a surrogate pair counts as the bytes that it would have."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def match(template: Template, text: str) -> Mapping[str, str] | Reason:
    """What stands in a template's slots in this text."""
    anchors = template.anchors
    if len(anchors) == 1:
        return {} if text == anchors[0] else "miss"
    start, stop = len(anchors[0]), len(text) - len(anchors[-1])
    if start > stop or not (text.startswith(anchors[0]) and text.endswith(anchors[-1])):
        return "miss"
    inner = anchors[1:-1]
    ends = _scan(text, inner, start, stop)
    if ends is None:
        return "miss"
    if inner and ends != _scan_back(template, text, start, stop):
        return "ambiguous"
    slots = _values(template, text, [start, *ends], stop)
    return slots if template.render(slots) == text else "miss"


def _scan(text: str, anchors: Iterable[str], at: int, stop: int) -> list[int] | None:
    """Where each anchor ends at the leftmost."""
    ends: list[int] = []
    for anchor in anchors:
        found = _find(text, anchor, at, stop)
        if found < 0:
            return None
        at = found + len(anchor)
        ends.append(at)
    return ends


def _scan_back(template: Template, text: str, start: int, stop: int) -> list[int]:
    """Where each inner anchor ends at the rightmost. `str.rfind` takes quadratic time on repetitive text."""
    size = len(text)
    ends = _scan(text[::-1], template.mirrored, size - stop, size - start)
    inner = template.anchors[1:-1]
    return [size - end + len(anchor) for end, anchor in zip(reversed(ends or ()), inner, strict=True)]


def _find(text: str, anchor: str, at: int, stop: int) -> int:
    """`text.find`, for which preparing takes longer than searching when the anchor is long: its beginning is tried."""
    if len(anchor) <= LONG:
        return text.find(anchor, at, stop)
    begin = anchor[:LONG]
    for _ in range(TRIES):
        at = text.find(begin, at, stop)
        if at < 0 or text.startswith(anchor, at, stop):
            return at
        at += 1
    return text.find(anchor, at, stop)


def _values(template: Template, text: str, begins: list[int], stop: int) -> Mapping[str, str]:
    """The text of each slot: from the end of the anchor before it to the beginning of the next."""
    sizes = [len(anchor) for anchor in template.anchors[1:-1]]
    finishes = [begin - size for begin, size in zip(begins[1:], sizes, strict=True)] + [stop]
    spans = zip(template.slots, begins, finishes, strict=True)
    return {slot: text[begin:finish] for slot, begin, finish in spans}
