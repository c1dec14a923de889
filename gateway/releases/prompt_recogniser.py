"""Recognises registered prompts: finds the prompt that a text is, and the values of its slots; and the prompts that an
agent asks for by name. Pure.

All templates are searched for together (`TemplateTree`), which leaves a few candidates; each of these is matched by
itself (`match`). Both take time linear in the text, whatever is in the slots.

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
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Final, Literal, TypeAlias
from zlib import crc32

from penstock.gateway.model.resource import PromptText, Template, TextDifference, ToolText, utf8
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


# -- the registered text that is nearest to a text, and their first difference; not for the hot path ------------------
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


_ALONE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Scripts that put no spaces between words: a token a character.
_SPACE = r"[^\S\n]"
_TOKEN = re.compile(rf"[^\W{_ALONE}]+|(?<!{_SPACE}){_SPACE}|{_SPACE}+?(?={_SPACE}(?!{_SPACE}))|.", re.DOTALL)


def tokens(text: str) -> list[str]:
    """Words, runs of spaces, and every other character by itself; joined, they are the text. The first and the last
    space of a run are tokens, so that those around an empty value are the same as those around another."""
    return _TOKEN.findall(text)


# -- one template in a text: an anchored scan, without patterns and without backtracking ------------------------------
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


# -- many templates in a text: those with common anchors share the search for them ------------------------------------
#
# The anchors of the templates are the branches of a tree: the first, the last, then the others from left to right,
# until one template is left. The anchors on the way to a node are searched for once. Of the anchors that may come
# next, those with a common beginning are searched for together: at each occurrence of that beginning, a binary search
# finds which of them stand there. An anchor is looked for only as far as the anchors after it leave room. So fifty
# versions of one prompt cost little more than one: a search for each anchor, not for each template. On hostile text
# each anchor costs a few searches of its own.
#
# Each template that is found must still be matched by itself (`match`): this search only removes templates that
# cannot match, because an anchor does not occur after the one before it, or leaves no room for the others.

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


# -- prompts by name: `{{penstock:NAME}}`, or `{{penstock:NAME customer="Ann"}}` --------------------------------------
#
# The values of its slots are JSON strings. Placeholders count in system and developer text only, because these are
# written by the maker of the agent.

MARK = "{{penstock:"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SLOT = re.compile(r"\s+([A-Za-z_][A-Za-z0-9_]{0,63})=(?=\")")
_END = re.compile(r"\s*\}\}")
_string = json.JSONDecoder().raw_decode


class PlaceholderError(ValueError):
    """A placeholder that cannot be read; the message gives its place."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder in a text."""

    resource: str
    """The name of the prompt."""
    slots: dict[str, str]
    """Values for the prompt's slots."""
    begin: int
    """Offset of its first brace in the text; characters."""
    end: int
    """Offset behind its last brace; characters."""


def placeholders(text: str) -> list[Placeholder]:
    """The placeholders of a text, in order; raises PlaceholderError at the first that cannot be read."""
    found: list[Placeholder] = []
    at = text.find(MARK)
    while at >= 0:
        found.append(_read(text, at))
        at = text.find(MARK, found[-1].end)
    return found


def _read(text: str, begin: int) -> Placeholder:
    name = _NAME.match(text, begin + len(MARK))
    at, slots = begin if name is None else name.end(), dict[str, str]()
    while name is not None and (slot := _SLOT.match(text, at)) is not None:
        try:
            slots[slot[1]], at = _string(text, slot.end())
        except ValueError:
            break
    end = None if name is None else _END.match(text, at)
    if name is None or end is None:
        raise PlaceholderError(
            f"at character {begin}: {text[begin : begin + 60]!r} is no placeholder; "
            f'one is {MARK}NAME}}}} or {MARK}NAME slot="value"}}}}'
        )
    return Placeholder(name[0], slots, begin, end.end())
