"""JSON as nobody writes it and every parser reads it: odd spacing, needless escapes, keys that stand twice."""

from __future__ import annotations

import json
from random import Random
from typing import Any, cast

SPACES = ["", "", "", " ", "\n", "\r\n\t "]


def written(value: Any, rng: Random) -> str:
    """A value as JSON text with white space around it; a member of an object may stand before itself once more."""
    before, after = rng.choice(SPACES), rng.choice(SPACES)
    return f"{before}{_written(value, rng)}{after}"


def joined(text: str) -> str:
    """A text as it comes out of JSON: halves of surrogate pairs that met are one character."""
    return text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")


def _written(value: Any, rng: Random) -> str:
    if isinstance(value, dict):
        members = [member for key, it in cast(dict[str, Any], value).items() for member in _members(key, it, rng)]
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(written(it, rng) for it in cast(list[Any], value))}]"
    return _quoted(value, rng) if isinstance(value, str) else json.dumps(value)


def _members(key: str, value: Any, rng: Random) -> list[str]:
    times = 2 if rng.random() < 0.1 else 1
    return [f" {_quoted(key, rng)}\n:{written(value, rng)}" for _ in range(times)]


def _quoted(text: str, rng: Random) -> str:
    share = rng.choice([0, 0, 0.2, 1])
    return '"' + "".join(_escaped(it) if rng.random() < share else _plain(it) for it in text) + '"'


def _plain(character: str) -> str:
    # Half a surrogate pair has no UTF-8: it can only be escaped.
    return _escaped(character) if "\ud800" <= character <= "\udfff" else json.dumps(character, ensure_ascii=False)[1:-1]


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
