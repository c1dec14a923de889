"""The values at paths (`gateway.wire.json_paths`) in the arguments or the result of a call.

A key that is written in another case than the path's makes a value uncertain: some servers read it as the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, Final, cast

from penstock.gateway.wire.json_paths import JsonPaths

MOST: Final = 10_000
"""Most values that paths may find."""


class UnreadableCall(ValueError):
    """The call cannot be read so that a rule could decide; the message says why."""


def values_at(value: Any, paths: JsonPaths) -> list[Any]:
    """The values at some paths, in order; raises `UnreadableCall`."""
    for name in paths.stem:
        if not isinstance(value, dict):
            return []
        outer = cast(dict[str, Any], value)
        _refuse_twin(outer, name)
        if name not in outer:
            return []
        value = outer[name]
    if paths.behind_stem == paths.end:
        return [value]
    found, waiting = list[Any](), [(value, paths.behind_stem)]
    while waiting:
        one, bits = waiting.pop()
        if bits & paths.end:
            found.append(one)
        if isinstance(one, dict | list):
            inner = [(value, bits) for _, value, bits in _below(cast("dict[str, Any] | list[Any]", one), paths, bits)]
            waiting += reversed(inner)
            if len(waiting) + len(found) > MOST:
                raise UnreadableCall(f"it has more than {MOST:,} values at {', '.join(paths.written)}")
    return found


def _below(value: dict[str, Any] | list[Any], paths: JsonPaths, bits: int) -> Iterator[tuple[Any, Any, int]]:
    """(key or index, value, steps that come next) of each member or element that a path leads to or through."""
    named = paths.next_steps(bits)
    if isinstance(value, dict):
        for name in named.names:
            _refuse_twin(value, name)
        keys: Any = value if named.any_member else [name for name in named.names if name in value]
    elif named.any_element and not named.indexes:
        after = paths.into(bits, 0)
        yield from [(at, inner, after) for at, inner in enumerate(value)]
        return
    else:
        keys = range(len(value)) if named.any_element else [at for at in sorted(named.indexes) if at < len(value)]
    for key in keys:
        after = paths.into(bits, key)
        if after:
            yield key, value[key], after


def _refuse_twin(value: dict[str, Any], name: str) -> None:
    if name in value and len(value) == 1:
        return
    folded = name.casefold()
    twin = next((key for key in value if key != name and key.casefold() == folded), None)
    if twin is not None:
        raise UnreadableCall(f"it has the key {twin[:64]!r}, which some servers read as {name!r}")


def change_at(value: Any, paths: JsonPaths, change: Callable[[Any], Any], bits: int | None = None) -> Any:
    """The value with those at some paths changed; the same object when none was. Raises `UnreadableCall`."""
    bits = paths.begin if bits is None else bits
    if bits & paths.end:
        return change(value)
    made: Any = value
    if isinstance(value, dict | list):
        for place, inner, after in _below(cast("dict[str, Any] | list[Any]", value), paths, bits):
            new = change_at(inner, paths, change, after)
            if new is not inner:
                made = made if made is not value else copy(made)
                made[place] = new
    return made
