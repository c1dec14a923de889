"""Completes a line that is typed. Pure.

Filters are completed by the gateway's own list of fields (`GET /api/filters`): a name, then an operator, then a value
if the values are listed. A command is the name of a screen and its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.gateway.model.answers import FilterField

MOST = 12
"""The most completions."""
_TERM = re.compile(r"(?P<sign>-?)(?P<name>[a-z_.]*)(?P<operator>[:=<>~!]*)(?P<value>.*)", re.DOTALL)


def filters(text: str, fields: Sequence[FilterField]) -> list[str]:
    """Completions of a filter: whole texts, each one word longer."""
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
    """Completions of a command. `wanted`: the possible arguments of each name."""
    before, last = _split(text)
    if not before:
        return [name for name in wanted if name.startswith(last) and name != last][:MOST]
    rest = wanted.get(before.split()[0], ())
    return [before + one for one in rest if one.startswith(last) and one != last][:MOST]


def _split(text: str) -> tuple[str, str]:
    """(the finished words, the last word)."""
    at = text.rfind(" ") + 1
    return text[:at], text[at:]


def format_completions(likely: Sequence[str]) -> str:
    """Completions for the bottom line: their last words."""
    return "  ".join(_split(text)[1] for text in likely)
