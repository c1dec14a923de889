"""Makes predicates of the values in a filter: (operator, value as written, now in ns) -> a predicate over a field's
values.

A predicate is an object whose fields show what it compares, so that an index can compare its columns in the same way
(`filters.sql`). Its maker raises `TermError` for a value that it does not understand, with the values that it allows.
"""

from __future__ import annotations

import json
import operator as comparisons
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from fnmatch import translate
from typing import Any, Final

from penstock.gateway.model.times import UNITS, nanoseconds

Matcher = Callable[[Any], bool]
"""True if one value of a field matches."""
MatcherFactory = Callable[[str, str, int], Matcher]

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": comparisons.gt,
    ">=": comparisons.ge,
    "<": comparisons.lt,
    "<=": comparisons.le,
    "=": comparisons.eq,
}


class TermError(ValueError):
    """An unusable field, operator or value. The term is not known here; `parse` adds it."""

    def __init__(self, problem: str, allowed: Sequence[str] = (), nearest: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.allowed, self.nearest = problem, allowed, nearest


@dataclass(frozen=True, slots=True)
class NumberMatcher:
    """Matches numbers on one side of a limit, or equal to it."""

    operator: str
    """One of > >= < <= =."""
    limit: float

    def __call__(self, value: float) -> bool:
        return _COMPARE[self.operator](value, self.limit)


@dataclass(frozen=True, slots=True)
class WordMatcher:
    """Matches any of some words."""

    words: tuple[str, ...]

    def __call__(self, value: str) -> bool:
        return value in self.words


@dataclass(frozen=True, slots=True)
class SubstringMatcher:
    """Matches texts that contain one of these casefolded parts. `folded`: the text is casefolded already."""

    parts: tuple[str, ...]
    folded: bool

    def __call__(self, value: str) -> bool:
        text = value if self.folded else value.casefold()
        return any(part in text for part in self.parts)


@dataclass(frozen=True, slots=True)
class GlobMatcher:
    """Matches texts of this pattern, case ignored."""

    wanted: re.Pattern[str]

    def __call__(self, value: str) -> bool:
        return self.wanted.match(value) is not None


def pattern(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of texts: `=` exactly, `~` a part, else a pattern with `*` and `?`, case ignored."""
    if operator == "=":
        return WordMatcher((value,))
    if operator == "~":
        return SubstringMatcher((value.casefold(),), folded=False)
    return GlobMatcher(re.compile(translate(value.replace("[", "[[]")), re.IGNORECASE))


def part(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of a part of a casefolded text, which may be JSON."""
    return SubstringMatcher(forms(value), folded=True)


def forms(text: str) -> tuple[str, ...]:
    """The forms in which a text may occur in a casefolded one: unchanged, or escaped for JSON in either of the two
    usual ways."""
    found = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    return tuple(sorted({form.casefold() for form in found}))


def count(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of whole numbers from 0."""
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise TermError(f"{value!r} is not a whole number", ("0", "1", "2", "..."))
    return _compared(operator, int(value))


def whole(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of whole numbers, also negative ones."""
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise TermError(f"{value!r} is not a whole number", ("-1", "0", "1", "..."))
    return _compared(operator, int(value))


def decimal(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of decimal numbers."""
    if not re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", value):
        raise TermError(f"{value!r} is not a number", ("-1", "0.5", "1", "..."))
    return _compared(operator, float(value))


def latency(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of nanoseconds, from a duration with its unit."""
    ns = nanoseconds(value)
    if ns is None:
        raise TermError(f"{value!r} is not a number with a unit, such as 250ms", tuple(UNITS))
    return _compared(operator, ns)


def instant(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of ns since the epoch, from an ISO time or a duration before now."""
    ago = nanoseconds(value)
    return _compared(operator, now_ns - ago if ago is not None else _instant(value))


def since(operator: str, value: str, now_ns: int) -> Matcher:
    """A matcher of instants at or after an ISO time, or a duration before now."""
    return instant(">=", value, now_ns)


def _instant(value: str) -> int:
    try:
        when = datetime.fromisoformat(value)
        seconds = when.timestamp() if when.tzinfo else when.replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        forms = ("2026-08-01", "2026-08-01T12:30:00Z", "2h", "30m")
        raise TermError(f"{value!r} is neither an ISO time (UTC unless it says) nor a time ago", forms) from None
    return int(seconds * 1e9)


def _compared(operator: str, limit: float) -> NumberMatcher:
    return NumberMatcher(operator if operator in _COMPARE else "=", limit)


class WordMatcherFactory:
    """Makes matchers of one of a few words; a group is a word that stands for several of them."""

    def __init__(self, *allowed: str, **groups: Sequence[str]) -> None:
        self._groups = groups
        self.words = (*map(str, allowed), *(group for group in groups if group not in allowed))

    def __call__(self, operator: str, value: str, now_ns: int) -> Matcher:
        """The matcher of one of the words, or of a group's words."""
        if value not in self.words:
            near = get_close_matches(value, self.words, n=1)
            raise TermError(f"{value!r} is not one of its values", self.words, near[0] if near else None)
        return WordMatcher(tuple(map(str, self._groups.get(value, (value,)))))
