"""Foreign text for people: without characters that a terminal obeys, with invisible characters made visible. Pure."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_DIRECTIONS: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C, 0x200E, 0x200F)
_VISIBLE: Final = (
    {n: chr(0x2400 + n) for n in range(32) if n not in (9, 10)}
    | {0x7F: "␡"}
    | dict.fromkeys((*range(0x80, 0xA0), *_DIRECTIONS, *range(0xD800, 0xE000)), "\ufffd")
)
"""Characters that a terminal obeys, and those shown for them. Half surrogate pairs are among them: they cannot be sent
to a terminal."""
_IN_JSON: Final = re.compile(f"[{''.join(map(chr, (*range(0x7F, 0xA0), *_DIRECTIONS)))}]")
"""Matches those of these characters that JSON does not escape itself."""


def terminal_safe(text: str) -> str:
    """The text with visible characters in their place, one for one."""
    return text.translate(_VISIBLE)


def terminal_safe_json(json: str) -> str:
    """The same JSON with escapes in their place: such characters stand only in strings."""
    return _IN_JSON.sub(lambda it: f"\\u{ord(it[0]):04x}", json)


# Shows foreign text with every invisible character made visible. Pure.
#
# A model reads what a person overlooks: zero-width characters, tags (a second alphabet that no font shows),
# bidirectional marks, escape sequences of terminals, blanks that are no spaces. Each is shown by its code point,
# `<U+200B>`; a run of tags by the text that it spells, `<tags: ignore all>`.

_TAGS: Final = re.compile("[\U000e0020-\U000e007e]+")
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of invisible characters: controls, formats, unassigned, private, surrogates, separators."""
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks that are drawn as nothing, or as a space."""
_PLAIN: Final = frozenset("\n\t ")


def visible(text: str) -> str:
    """The text with invisible characters spelt out. Line breaks, tabs and spaces stay."""
    return "".join(map(_shown, _TAGS.sub(_spelt, text)))


def visible_name(text: str) -> str:
    """The same as `visible`, on one line."""
    return visible(text).replace("\n", "<U+000A>").replace("\t", "<U+0009>")


def count_invisible(text: str) -> int:
    """Number of invisible characters of a text."""
    return sum(_hidden(one) for one in text)


def _spelt(found: re.Match[str]) -> str:
    return f"<tags: {''.join(chr(ord(one) - 0xE0000) for one in found[0])}>"


def _shown(one: str) -> str:
    return f"<U+{ord(one):04X}>" if _hidden(one) else one


def _hidden(one: str) -> bool:
    if one in _PLAIN or "!" <= one <= "~":
        return False
    category = unicodedata.category(one)
    return category in _UNSEEN or category == "Zs" or one in _BLANK or unicodedata.name(one, "").startswith("VARIATION")
