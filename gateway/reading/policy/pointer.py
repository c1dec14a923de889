"""JSON pointers (RFC 6901), with `*` for every member of a list or an object.

A key that is written in another case than the pointer's makes a value uncertain: some servers read it as the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, Final, cast

EVERY: Final = "*"
MOST: Final = 10_000
"""Most values that a pointer with `*` may find."""


class UnreadableCall(ValueError):
    """The call cannot be read so that a rule could decide; the message says why."""


def parse_pointer(pointer: str) -> tuple[str, ...]:
    """Split a pointer into its keys; raises `ValueError`."""
    if pointer and not pointer.startswith("/"):
        raise ValueError("a JSON pointer is empty or begins with /, such as /path or /edits/*/path")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


def resolve_pointer(value: Any, path: tuple[str, ...]) -> list[Any]:
    """The values at a path; raises `UnreadableCall`."""
    values = [value]
    for key in path:
        values = [inner for outer in values for inner in _below(outer, key)]
        if len(values) > MOST:
            raise UnreadableCall(f"it has more than {MOST:,} values at {'/'.join(('', *path))}")
    return values


def _below(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, dict):
        for name in _names(cast(dict[str, Any], value), key):
            yield value[name]
    elif isinstance(value, list):
        for place in _places(cast(list[Any], value), key):
            yield value[place]


def _names(value: dict[str, Any], key: str) -> list[str]:
    if key == EVERY:
        return list(value)
    if key in value and len(value) == 1:
        return [key]
    folded = key.casefold()
    twin = next((name for name in value if name != key and name.casefold() == folded), None)
    if twin is not None:
        raise UnreadableCall(f"it has the key {twin[:64]!r}, which some servers read as {key!r}")
    return [key] if key in value else []


def _places(value: list[Any], key: str) -> list[int]:
    if key == EVERY:
        return list(range(len(value)))
    return [int(key)] if key.isascii() and key.isdigit() and int(key) < len(value) else []


def change_at(value: Any, path: tuple[str, ...], change: Callable[[Any], Any]) -> Any:
    """The value with those at a path changed; the same object when none was. Raises `UnreadableCall`."""
    if not path:
        return change(value)
    key, rest = path[0], path[1:]
    made: Any = value
    if isinstance(value, dict):
        places: list[Any] = [*_names(cast(dict[str, Any], value), key)]
    else:
        places = [*_places(cast(list[Any], value), key)] if isinstance(value, list) else []
    for place in places:
        inner = change_at(value[place], rest, change)
        if inner is not value[place]:
            made = made if made is not value else copy(made)
            made[place] = inner
    return made
