"""How a line that is typed may go on. Pure.

Filters are completed by the gateway's own list of fields (`GET /api/filters`): a name, then an operator, then a value
where there is a choice. A command is the name of a screen and what that wants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.gateway.model.answers import FilterField

MOST = 12
"""Completions that are named."""
_TERM = re.compile(r"(?P<sign>-?)(?P<name>[a-z_.]*)(?P<operator>[:=<>~!]*)(?P<value>.*)", re.DOTALL)


def filters(text: str, fields: Sequence[FilterField]) -> list[str]:
    """How a filter may go on: whole texts, each one word further."""
    before, last = _split(text)
    match = _TERM.fullmatch(last)
    if match is None:
        return []
    sign, name, operator, value = match["sign"], match["name"], match["operator"], match["value"]
    if not operator:
        found = [f"{sign}{one.name}{one.operators[0]}" for one in fields if one.name.startswith(name)]
        return [before + one for one in found][:MOST]
    field = next((one for one in fields if one.name == name), None)
    if field is None:
        return []
    values = [one for one in field.values if one.startswith(value) and one != value]
    return [f"{before}{sign}{name}{operator}{one}" for one in values][:MOST]


def commands(text: str, wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """How a command may go on; `wanted`: what may stand behind each name."""
    before, last = _split(text)
    if not before:
        return [name for name in wanted if name.startswith(last) and name != last][:MOST]
    rest = wanted.get(before.split()[0], ())
    return [before + one for one in rest if one.startswith(last) and one != last][:MOST]


def _split(text: str) -> tuple[str, str]:
    """(what is finished, the last word)."""
    at = text.rfind(" ") + 1
    return text[:at], text[at:]


def briefly(likely: Sequence[str]) -> str:
    """Completions for the line below: their last words."""
    return "  ".join(_split(text)[1] for text in likely)
