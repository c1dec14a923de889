"""Searches a text for many templates at once: templates with common anchors share the search for them.

The anchors of the templates are the branches of a tree: the first, the last, then the others from left to right, until
one template is left. The anchors on the way to a node are searched for once. Of the anchors that may come next, those
with a common beginning are searched for together: at each occurrence of that beginning, a binary search finds which of
them stand there. An anchor is looked for only as far as the anchors after it leave room. So fifty versions of one
prompt cost little more than one: a search for each anchor, not for each template. On hostile text each anchor costs a
few searches of its own.

Each template that is found must still be matched by itself (`find_anchor`): this search only removes
templates that cannot match, because an anchor does not occur after the one before it, or leaves no room for the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from penstock.gateway.model.resource import Template

# One template in a text: an anchored scan, without patterns and without backtracking.
#
# The anchors are searched for from left to right, each behind the one before it, between the first, with which the
# text must begin, and the last, with which it must end. That gives every anchor its leftmost place. If one of them
# occurs once more before the next one, a value looks like an anchor, and the text is *ambiguous*. If none does, there
# is no other way to split the text: in another split, the last anchor with another place would be further right, and
# yet before the next.
#
# Time is linear in the text, whatever is in the slots: each part of it is searched for one anchor, and once more.

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


ALIKE = 16
"""Anchors that share this many characters at their beginning are searched for together."""


class TemplateTree:
    """Templates that are searched for together. Immutable."""

    def __init__(self, templates: Iterable[Template]) -> None:
        self._roots: dict[str, dict[str, _Node]] = {}
        for template in templates:
            first, *others = template.anchors
            roots = self._roots.setdefault(first, {})
            roots.setdefault(others[-1] if others else "", _Node(1, len(first))).templates.append(template)
        self._firsts = _PrefixIndex(self._roots)
        todo = [root for roots in self._roots.values() for root in roots.values()]
        while todo:
            todo += todo.pop().grown()

    def possible(self, text: str) -> Iterator[Template]:
        """The templates whose anchors may all occur in the text, in their order."""
        todo = [(root, len(first)) for first in self._firsts.at(text, 0) for root in self._ending(first, text)]
        while todo:
            node, at = todo.pop()
            if at + node.rest <= len(text):
                yield from node.templates
                todo += [found for alike in node.groups for found in alike.occurrences(text, at)]

    def _ending(self, first: str, text: str) -> Iterator[_Node]:
        return (root for last, root in self._roots[first].items() if text.endswith(last))


@dataclass(slots=True)
class _Node:
    """The templates that begin with the same anchors."""

    depth: int
    """Number of these anchors, from the left."""
    done: int
    """Their total length; characters."""
    templates: list[Template] = field(default_factory=list[Template])
    """The templates that begin with these anchors; once grown, only those that have no others."""
    groups: list[_AnchorGroup] = field(default_factory=list["_AnchorGroup"])
    """The anchors that may come next."""
    rest: int = 0
    """The least literal text of the anchors still to come; characters."""

    def grown(self) -> Iterable[_Node]:
        """Move the templates into child nodes, unless there is only one; returns the nodes that must still grow."""
        self.rest = min(it.literal for it in self.templates) - self.done
        if len(self.templates) == 1:
            return ()
        further: dict[str, _Node] = {}
        for template in self.templates:
            for anchor in template.anchors[self.depth : -1][:1]:
                node = _Node(self.depth + 1, self.done + len(anchor))
                further.setdefault(anchor, node).templates.append(template)
        self.templates = [it for it in self.templates if self.depth >= len(it.anchors) - 1]
        self.groups = [_AnchorGroup(group, self.done) for group in _groups(further)]
        return further.values()


def _groups(nodes: Mapping[str, _Node]) -> Iterable[Mapping[str, _Node]]:
    groups: defaultdict[str, dict[str, _Node]] = defaultdict(dict)
    for anchor, node in nodes.items():
        groups[anchor[:ALIKE]][anchor] = node
    return groups.values()


class _AnchorGroup:
    """Anchors with a common beginning."""

    def __init__(self, nodes: Mapping[str, _Node], done: int) -> None:
        self._nodes = nodes
        self._room = min(it.literal for node in nodes.values() for it in node.templates) - done
        self._anchors = _PrefixIndex(nodes)
        self._begin = _beginning(min(nodes)[:LONG], max(nodes)[:LONG])

    def occurrences(self, text: str, at: int) -> Iterator[tuple[_Node, int]]:
        """The nodes of those anchors that occur in a text from an index on, each with the end of its leftmost
        occurrence."""
        missing = dict(self._nodes)
        stop = max(len(text) - self._room + len(self._begin), 0)
        for _ in range(TRIES * len(missing)):
            at = text.find(self._begin, at, stop)
            if at < 0:
                return
            here = [anchor for anchor in self._anchors.at(text, at) if anchor in missing]
            yield from ((missing.pop(anchor), at + len(anchor)) for anchor in here)
            if not missing:
                return
            at += 1
        for anchor, node in missing.items():
            found = find_anchor(text, anchor, at, len(text))
            if found >= 0:
                yield node, found + len(anchor)


def _beginning(one: str, other: str) -> str:
    """The common beginning of two texts; the first sorts before the second or equals it."""
    differs = (at for at, (ours, theirs) in enumerate(zip(one, other, strict=False)) if ours != theirs)
    return one[: next(differs, len(one))]


class _PrefixIndex:
    """Sorted texts, to find by binary search which of them another text begins with."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(texts)
        self._longest = max(map(len, self._texts), default=0)
        self._shorter: list[int] = []
        for at, text in enumerate(self._texts):
            before = at - 1
            while before >= 0 and not text.startswith(self._texts[before]):
                before = self._shorter[before]
            self._shorter.append(before)

    def at(self, text: str, place: int) -> Iterator[str]:
        """The texts with which another text continues at an index: the last of these that does not sort after it, and
        those that this one begins with."""
        at = bisect_right(self._texts, text[place : place + self._longest]) - 1
        while at >= 0:
            if text.startswith(self._texts[at], place):
                yield self._texts[at]
            at = self._shorter[at]
