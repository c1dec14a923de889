"""One template in a text: an anchored scan, without patterns and without backtracking.

The anchors are searched for from left to right, each behind the one before it, between the first, with which the text
must begin, and the last, with which it must end. That gives every anchor its leftmost place. If one of them occurs once
more before the next one, a value looks like an anchor, and the text is *ambiguous*. If none does, there is no other way
to split the text: in another split, the last anchor with another place would be further right, and yet before the next.

Time is linear in the text, whatever is in the slots: each part of it is searched for one anchor, and once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal, TypeAlias

from penstock.gateway.model.template import Template

Reason: TypeAlias = Literal["miss", "ambiguous"]
AnchorSpan: TypeAlias = tuple[int, int]
"""Offsets of the beginning and the end of an anchor; characters."""
LONG = 256
TRIES = 4
"""Characters of a long anchor that are searched for first, and the number of such searches before one for the whole
anchor."""


def match(template: Template, text: str) -> Mapping[str, str] | Reason:
    """The values of a template's slots in this text; `miss` if it does not match, `ambiguous` if it does in two
    ways."""
    anchors = template.anchors
    if len(anchors) == 1:
        return {} if text == anchors[0] else "miss"
    start, stop = len(anchors[0]), len(text) - len(anchors[-1])
    if start > stop or not (text.startswith(anchors[0]) and text.endswith(anchors[-1])):
        return "miss"
    inner = _leftmost(text, anchors[1:-1], start, stop)
    if inner is None:
        return "miss"
    spans = [(0, start), *inner, (stop, len(text))]
    if _again(text, spans):
        return "ambiguous"
    slots = {slot: text[one[1] : next_[0]] for slot, (one, next_) in zip(template.slots, pairwise(spans), strict=True)}
    # A slot name that occurs more than once has one value.
    return slots if len(slots) == len(template.slots) or template.render(slots) == text else "miss"


def _leftmost(text: str, anchors: Iterable[str], at: int, stop: int) -> list[AnchorSpan] | None:
    """The leftmost place of each anchor; None where one is missing."""
    spans: list[AnchorSpan] = []
    for anchor in anchors:
        found = find_anchor(text, anchor, at, stop)
        if found < 0:
            return None
        at = found + len(anchor)
        spans.append((found, at))
    return spans


def _again(text: str, spans: list[AnchorSpan]) -> bool:
    """True if an inner anchor occurs once more before the one behind it."""
    behind = pairwise(spans[1:])
    return any(find_anchor(text, text[begin:end], begin + 1, until) >= 0 for (begin, end), (until, _) in behind)


def find_anchor(text: str, anchor: str, at: int, stop: int) -> int:
    """The same as `text.find`, which takes longer to prepare than to search when the anchor is long: this tries the
    anchor's beginning first."""
    size = len(anchor)
    if size <= LONG or stop - at < size:
        return text.find(anchor, at, stop) if stop - at >= size else -1
    begin = anchor[:LONG]
    for _ in range(TRIES):
        at = text.find(begin, at, stop - size + LONG)
        if at < 0 or text.startswith(anchor, at):
            return at
        at += 1
    return text.find(anchor, at, stop)
