"""A prompt that an agent asks for by name: `{{penstock:NAME}}`, or `{{penstock:NAME customer="Ann"}}`.

The values of its slots are JSON strings. Placeholders count in system and developer text only, because these are
written by the maker of the agent.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

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
