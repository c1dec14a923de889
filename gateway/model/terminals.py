"""Text that others wrote, without characters that a terminal obeys: shown by others, or escaped. Pure."""

from __future__ import annotations

import re
from typing import Final

_DIRECTIONS: Final = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C, 0x200E, 0x200F)
_VISIBLE: Final = (
    {n: chr(0x2400 + n) for n in range(32) if n not in (9, 10)}
    | {0x7F: "␡"}
    | dict.fromkeys((*range(0x80, 0xA0), *_DIRECTIONS, *range(0xD800, 0xE000)), "\ufffd")
)
"""Halves of surrogate pairs are among them: no terminal can be sent one."""
_IN_JSON: Final = re.compile(f"[{''.join(map(chr, (*range(0x7F, 0xA0), *_DIRECTIONS)))}]")
"""Those that JSON does not escape by itself."""


def shown(text: str) -> str:
    """The text with others in their place, one for one."""
    return text.translate(_VISIBLE)


def harmless(json: str) -> str:
    """The same JSON with escapes in their place: they stand in nothing but strings."""
    return _IN_JSON.sub(lambda it: f"\\u{ord(it[0]):04x}", json)
