"""Searches the texts of one body, also JSON in strings of JSON, and masks the rules' finds.

In JSON a pattern is searched for in strings, keys and integers. An integer becomes 0, or 1 and zeros; so do other
numbers at a masked path; `true` and `false` become null. So JSON stays JSON, and numbers keep their type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.wire.dialects.json_scan import BodyFormatError, JsonNode, Path, looks_like_json, plain, walk
from penstock.gateway.wire.json_paths import JsonPaths
from penstock.gateway.wire.masking.streams import ChannelTable, may_continue
from penstock.gateway.wire.masking.text import (
    CpuBudget,
    JoinedText,
    MaskableText,
    MaskingPattern,
    PatternTimeout,
    literal,
)

DEEPEST: Final = 6
"""Most levels of JSON in strings of JSON."""
_DIGITS: Final = re.compile(rb"\d")


class MaskingError(Exception):
    """A rule cannot be applied for sure; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules that may find something in a body."""

    patterns: Sequence[tuple[str, MaskingPattern]]
    paths: Sequence[tuple[str, JsonPaths]]
    any_pattern: MaskingPattern | None
    """One that finds something if any pattern does; None if they cannot be joined."""

    @property
    def is_empty(self) -> bool:
        """True if there are no rules."""
        return not self.patterns and not self.paths

    @property
    def first(self) -> str:
        """The name of the first rule."""
        return next(iter([*self.patterns, *self.paths]))[0]


@dataclass(slots=True)
class MaskingResult:
    """The result of masking a call's bodies."""

    found: dict[str, int] = field(default_factory=dict[str, int])
    """The number of masked places, by rule."""
    failed: str | None = None
    """The rule that could not be applied, and why."""

    def add(self, name: str) -> None:
        self.found[name] = self.found.get(name, 0) + 1


class BodySearch:
    """The search of one body."""

    def __init__(self, rules: RuleSet, clock: CpuBudget, notes: MaskingResult) -> None:
        self.rules, self.clock, self.notes = rules, clock, notes

    def with_rules(self, rules: RuleSet) -> BodySearch:
        """The same search with fewer rules."""
        return BodySearch(rules, self.clock, self.notes)

    def search_text(self, text: MaskableText, path: Path = (), depth: int = 0, piece: bool = False) -> bool:
        """Searches a text, and its values if it is JSON. True if it is JSON. `piece`: True if a stream may have cut it
        off from others."""
        self.mask_patterns(text)
        if not looks_like_json(text.data):
            return False
        try:
            documents = walk(text.data)
        except BodyFormatError as malformed:
            # It only begins like JSON, or is a piece of JSON, which is searched when it is joined.
            if not piece:
                self._none_quoted(text.data, path, malformed)
            return False
        if depth >= DEEPEST:
            raise MaskingError(f"{self.rules.first}: JSON in JSON is nested deeper than {DEEPEST} levels")
        for found in documents:
            self.search_values(text, found, path, depth + 1)
        return True

    def search_values(
        self, outer: MaskableText, found: Sequence[JsonNode], path: Path = (), depth: int = 0, pieces: bool = False
    ) -> None:
        """Searches the values of a JSON document. `pieces`: True if it is an event of a stream."""
        for one in found:
            there = (*path, *one.path) if path else one.path
            rule = next((name for name, paths in self.rules.paths if paths.lead_to(there)), None)
            if rule is not None and not (one.kind == "key" and not self._inside(there)):
                self._mask(outer, one, rule)
            elif one.kind in ("text", "key"):
                _ = self.search_text(literal(outer, one.start, one.end), there, depth, pieces and may_continue(one))
            elif one.kind == "integer":
                self._number(outer, one)
            elif one.kind == "deep":
                # A rule may find something in it, and it is not searched.
                self._mask(outer, one, self.rules.first)

    def search_channels(self, channels: ChannelTable) -> None:
        """Searches texts that a stream has cut apart."""
        read: set[int] = set()
        for path, parts, exact in channels.joined():
            text = JoinedText(parts) if len(parts) > 1 else parts[0]
            if len(parts) == 1 and not looks_like_json(text.data):
                continue
            # Malformed JSON may be a piece of JSON that was read.
            if self.search_text(text, path, piece=not exact or read.issuperset(map(id, parts))):
                read.update(map(id, parts))

    def _inside(self, path: Path) -> bool:
        """True if a key is below the value of a path. The key that the path names is kept."""
        return any(paths.lead_to(path[:-1]) for _, paths in self.rules.paths)

    def _mask(self, outer: MaskableText, one: JsonNode, rule: str) -> None:
        if one.start == one.end:
            return
        said = outer.data[one.start : one.end]
        new = emptied(len(said)) if one.kind == "deep" else zeroed(said) if one.kind in ("integer", "other") else None
        if new != said and outer.write(one.start, one.end, new):
            self.notes.add(rule)

    def _number(self, outer: MaskableText, one: JsonNode) -> None:
        said = outer.data[one.start : one.end]
        for name, pattern in self.rules.patterns:
            if pattern.occurs_in(said, self.clock) and outer.write(one.start, one.end, zeroed(said)):
                self.notes.add(name)

    def _none_quoted(self, text: bytes, path: Path, malformed: BodyFormatError) -> None:
        """Raises `MaskingError` if a path may lead into a text that begins like JSON and is malformed."""
        for _ in range(DEEPEST + 1):
            for name, paths in self.rules.paths:
                if paths.quoted_below(path, text):
                    raise MaskingError(f"{name}: JSON in a string cannot be read: {malformed}")
            if b"\\" not in text:
                return
            text = plain(text)

    def mask_patterns(self, text: MaskableText) -> None:
        """Masks the patterns' finds in a text."""
        rules, data = self.rules, text.data
        if not data or (rules.any_pattern is not None and not rules.any_pattern.occurs_in(data, self.clock)):
            return
        for name, pattern in rules.patterns:
            try:
                for start, end in pattern.find(data, self.clock):
                    if text.write(start, end):
                        self.notes.add(name)
            except PatternTimeout as slow:
                raise MaskingError(f"{name}: {slow}") from None


def emptied(size: int) -> bytes:
    """The JSON of that size that replaces a list or object."""
    return b"null".ljust(size) if size >= 4 else b"[" + b"]".rjust(size - 1)


def zeroed(said: bytes) -> bytes:
    """A number of the same length and type without its value; null for a word."""
    if said[:1] not in b"-0123456789" or not _DIGITS.search(said):
        return (b"null" if len(said) >= 4 else b"0").ljust(len(said))
    begin = 1 if said.startswith(b"-") else 0
    whole = len(said) - begin - len(said[begin:].lstrip(b"0123456789"))
    rest = _DIGITS.sub(b"0", said[begin + whole :])
    return said[:begin] + (b"0" if whole == 1 else b"1" + b"0" * (whole - 1)) + rest
