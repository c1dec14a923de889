"""Finds the rules that can match in a JSON body at all, without parsing its values. Pure.

The escapes of the whole body are undone at once, once for each level of JSON in JSON, so that a string that a rule
could match appears in one piece. A pattern that matches by the beginning or end of its text is always kept.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from penstock.gateway.wire.json_paths import JsonPaths
from penstock.gateway.wire.masking.body_search import DEEPEST, RuleSet
from penstock.gateway.wire.masking.text import CpuBudget, MaskingPattern

_UNICODE: Final = re.compile(rb"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})")
_SHORT: Final = [(b'\\"', b'"'), (b"\\/", b"/"), (b"\\n", b"\n"), (b"\\t", b"\t"), (b"\\r", b"\r"), (b"\\b", b"\b"),
                 (b"\\f", b"\f")]  # fmt: skip
_BACKSLASH: Final = b"\xff"
"""Stands for a backslash meanwhile: no text in UTF-8 has this byte."""


def candidate_rules(rules: RuleSet, body: bytes, clock: CpuBudget) -> RuleSet:
    """The rules that may find something in a body of JSON; raises `PatternTimeout`."""
    levels = _levels(body)
    if levels is None:
        return rules
    patterns, paths = rules.patterns, [one for one in rules.paths if any(_named(one[1], level) for level in levels)]
    together = rules.any_pattern
    if together is None or together.at_edges or _stands(together, levels, clock):
        patterns = [one for one in patterns if one[1].at_edges or _stands(one[1], levels, clock)]
    else:
        patterns = []
    return RuleSet(patterns, paths, together if len(patterns) > 1 else None)


def is_json(body: bytes) -> bool:
    """True if the body certainly is one JSON value."""
    try:
        _ = msgspec.json.decode(body, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _stands(pattern: MaskingPattern, levels: list[bytes], clock: CpuBudget) -> bool:
    return any(pattern.occurs_in(level, clock) for level in levels)


def _named(paths: JsonPaths, level: bytes) -> bool:
    return any(name is None or name + b'"' in level or name + b"'" in level for name in paths.names)


def _levels(body: bytes) -> list[bytes] | None:
    """The body, and the body with its escapes undone once, twice ...; None if they cannot be undone for sure."""
    levels = [body]
    while b"\\" in levels[-1]:
        if _BACKSLASH in levels[-1] or len(levels) > DEEPEST:
            return None
        levels.append(_undone(levels[-1]))
    return levels


def _undone(text: bytes) -> bytes:
    text = text.replace(b"\\\\", _BACKSLASH)
    for escape, meant in _SHORT:
        if escape in text:
            text = text.replace(escape, meant)
    if b"\\u" in text:
        text = _UNICODE.sub(_character, text)
    # Removes backslashes of invalid escapes, so that the levels come to an end.
    return text.replace(b"\\", b"").replace(_BACKSLASH, b"\\")


def _character(found: re.Match[bytes]) -> bytes:
    high, low, one = found.groups()
    if one is not None and int(one, 16) == 0x5C:
        return _BACKSLASH
    if one is None:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00).encode()
    return chr(int(one, 16)).encode("utf-8", "surrogatepass")
