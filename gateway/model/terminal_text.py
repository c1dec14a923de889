"""Foreign text without characters that a terminal obeys: replaced by others, or escaped. Pure."""

from __future__ import annotations

import re
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
