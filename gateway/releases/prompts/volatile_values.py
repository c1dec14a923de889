"""Values that change by their nature: dates, times, paths, versions, ids and names of models. Pure.

`Today is 2026-11-22` is the same text in every call of one day, and in none of the next. So such a value is never a
part of a prompt, even where all messages agree on it. A text that is wrongly taken for one does little harm: a slot
whose value never changes is written again as it came. A value that is missed reverts a release unnoticed.

Wording that looks like one is left alone: numbers of sections, decimals, limits, one word behind a slash (`/help`),
relative paths and URLs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["model", "date", "time", "path", "version", "id"]


class VolatileValue(NamedTuple):
    """A changing value in a text."""

    begin: int
    """Offset of its first character."""
    end: int
    """Offset behind its last character."""
    kind: Kind
    """Its kind, which names its slot."""


_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|"
    r"Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b\.?"
_YEAR = r"(?:19|20)\d\d"
_DAY = r"\d{1,2}(?:st|nd|rd|th|[.º])?"
_WORD = r"[^\W\d_]{3,12}\.?"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?"
_ZONE = (
    r"(?:Z\b|(?:UTC|GMT)(?:[+-]\d{1,2}(?::?\d\d)?)?|[ECMP][SD]T\b|[CEW]ES?T\b|[BIJK]ST\b|A[CEW][SD]T\b|"
    r"[+-]\d\d:?\d\d|(?:Africa|America|Asia|Atlantic|Australia|Europe|Indian|Pacific)/\w+)"
)
_TIME = rf"(?:{_CLOCK}(?:\s?[AaPp]\.?[Mm]\b\.?)?|\d{{1,2}}\s?(?:AM|PM|am|pm)\b)(?:\s?{_ZONE}|\s\({_ZONE}\))?"
_DATE = (
    rf"(?:{_WEEKDAY},? (?:the )?)?(?:{_MONTH} +{_DAY} +{_CLOCK}(?: {_ZONE})? +{_YEAR}"
    rf"|{_YEAR}([-/.])\d{{1,2}}\1\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\2(?:{_YEAR}|\d\d)|{_YEAR}-(?:0[1-9]|1[0-2])(?![\w-])"
    rf"|{_YEAR}\s?[年년]\s?\d{{1,2}}\s?[月월](?:\s?\d{{1,2}}\s?[日일])?"
    # A word between a day and a year is a month in some language.
    rf"|{_DAY}(?: of| de)? {_WORD},?(?: of| de)? {_YEAR}|{_DAY} (?:of )?{_MONTH}|{_MONTH} {_DAY}(?:,? {_YEAR})?"
    rf"|{_MONTH},? {_YEAR})"
)
_VERSION = r"v\d+(?:\.\d+)+(?:[-+]\w+)*|\d+\.\d+\.\d+(?:[-+.]\w+)*"
_NAMES = (
    r"(?i:chatgpt|claude|codestral|codex|command-[ar]|deepseek|devstral|gemini|gemma|glm|gpt|grok|haiku|kimi|llama|"
    r"magistral|minimax|ministral|mistral|mixtral|nova|opus|phi|qwen|sonnet)"
)
_TIER = r"(?:[Oo]pus|[Ss]onnet|[Hh]aiku|[Pp]ro|[Ff]lash|[Ll]ite|[Mm]ini|[Nn]ano|[Tt]urbo|[Ii]nstruct|[Pp]review|\d+B)"
_MODEL = (
    # Bounds keep a long line from being read anew from each of its places.
    rf"(?:[\w.-]{{1,100}}/)?(?:[\w-]{{1,100}}\.){{0,9}}{_NAMES}(?![A-Za-z])(?=[\w.:@-]{{0,100}}\d)[\w.:@-]*\w"
    rf"(?:\[\w+\])?|{_NAMES}(?: {_TIER}){{0,9}}[ -]\d+(?:\.\d+)*[a-z]?(?: {_TIER})*|o[1-9](?:-(?:mini|pro|preview))?"
)
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_ID = (
    # Hexadecimal digits of both kinds; a prefix with a distinguishing part; long mixtures; digits.
    r"0x[0-9a-fA-F]{4,}|"
    r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}|(?=[A-F]*\d)(?=\d*[A-F])[0-9A-F]{7,}|"
    r"[A-Za-z]{1,12}[_-](?=[A-Za-z]*\d)[A-Za-z0-9]{6,}|(?=(?:[A-Za-z]*\d){3})[A-Za-z0-9]{16,}|\d{8,}"
)
_PATH = r"(?:~|(?<![<}\])*/\\]))/[^\s/\"'`<>|{}()\[\],;:=*?]+(?:/[^\s/\"'`<>|{}()\[\],;:=*?]+)+/?|~/[^\s\"'`<>|,;:]*"
_LINE_OF_PATH = (
    # All of a line behind a label, spaces included, or one name.
    r"(?<=[:=>])[ \t]?[\"'`]?"
    r"(?P<value>~?/(?!/)(?:(?=[^\n\"'`<>,;:/]{0,1000}/)[^\n\"'`<>,;:]{0,4000}+|[^\s\"'`<>,;:]{0,4000}+))"
    r"(?=[\s\"'`]*(?:$|<))"
)
_WINDOWS_PATH = (
    r"[A-Za-z]:\\[^\s\"'`<>|,;:*?]*(?: [^\s\\\"'`<>|,;:*?]+\\[^\s\"'`<>|,;:*?]*)*|"
    r"\\\\\w[^\s\"'`<>|,;:*?]*\\[^\s\"'`<>|,;:*?]*"
)
_WHOLE = r"(?<![\w@:/-])(?<!\w\.)(?:{})(?!\w)"
_APART = r"(?<![^\W_])(?<!\d[-/.:])(?:{})(?![^\W_])"
"""A match may be one piece of a name with `-` or `_` in it."""
_PATTERNS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "model": (
        _WHOLE.format(_MODEL),
        r"(?i:model)(?: name| id| ID| named)?(?: is|:|=| named)\s?[\"'`]?"
        r"(?P<value>(?=[\w./:@-]{0,100}\d)[\w./:@-]*\w(?:\[\w+\])?)",
    ),
    "date": (
        _APART.format(rf"{_DATE}(?:T{_TIME})?"),
        rf"(?:[Tt]oday|[Nn]ow|[Dd]ay|[Dd]ate)\b[^\n.]{{0,16}}?\b(?P<value>{_WEEKDAY})",
        rf"[Yy]ear\W{{1,3}}(?:is )?(?P<value>{_YEAR})\b",
        rf"[Mm]onth\W{{1,3}}(?:is )?(?P<value>{_MONTH})",
    ),
    "time": (rf"(?<![\w.:/-]){_TIME}(?!\w)",),
    "path": (rf"(?<![\w.:]){_PATH}", _LINE_OF_PATH, rf"(?<!\w)(?:{_WINDOWS_PATH})"),
    "version": (
        _WHOLE.format(_VERSION),
        r"(?:[Vv]ersion|[Rr]elease|[Bb]uild)\W{0,3}(?:is )?(?P<value>v?\d+(?:\.\d+)*(?:[-+.]\w+)*)",
    ),
    "id": (_APART.format(_UUID), _WHOLE.format(_ID), r"(?<=#)\d{4,}\b"),
}
_COMPILED: Final[list[tuple[Kind, re.Pattern[str]]]] = [
    (kind, re.compile(one, re.MULTILINE)) for kind, some in _PATTERNS.items() for one in some
]
_SECTION = re.compile(r"(?:^|\n)[ \t]*(?:[#*>-]+[ \t]*)*(?:[Ss]ection )?$|[Ss]ection $")
_BETWEEN = re.compile(r",? (?:at )?|T")
"""Matches the text between the date and the time of one moment."""


def find_volatile_values(text: str) -> list[VolatileValue]:
    """The changing values of a text, in order; they do not overlap."""
    found: list[VolatileValue] = []
    for one in sorted(_all(text), key=lambda it: (it.begin, -it.end)):
        before = found[-1] if found else None
        if before is not None and one.begin < before.end:
            longer = max(before, one, key=lambda it: it.end - it.begin)
            found[-1] = VolatileValue(before.begin, max(before.end, one.end), longer.kind)
        elif before is not None and _one_moment(text, before, one):
            found[-1] = VolatileValue(before.begin, one.end, "date")
        else:
            found.append(one)
    return found


def kind_of(text: str, begin: int, end: int, values: Iterable[VolatileValue]) -> Kind | None:
    """The kind of the single changing value in a part of a text that has only punctuation besides; None where there is
    no such value."""
    found = [it for it in values if it.begin >= begin and it.end <= end]
    if len(found) != 1 or any(map(str.isalnum, text[begin : found[0].begin] + text[found[0].end : end])):
        return None
    return found[0].kind


def _all(text: str) -> Iterator[VolatileValue]:
    for kind, pattern in _COMPILED:
        for it in pattern.finditer(text):
            begin, end = it.span("value" if "value" in pattern.groupindex else 0)
            end = begin + len(text[begin:end].rstrip(" \t.,"))
            if begin < end and not (kind == "version" and _is_section(text, begin)):
                yield VolatileValue(begin, end, kind)


def _is_section(text: str, begin: int) -> bool:
    """True if a number stands where those of headings do."""
    return text[begin].isdigit() and _SECTION.search(text, max(0, begin - 20), begin) is not None


def _one_moment(text: str, one: VolatileValue, other: VolatileValue) -> bool:
    """True if a date and a time are one value."""
    both = {one.kind, other.kind} == {"date", "time"}
    return both and _BETWEEN.fullmatch(text, one.end, other.begin) is not None
