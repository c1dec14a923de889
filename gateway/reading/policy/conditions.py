"""Tells whether a condition holds for arguments, or that this cannot be told.

A value of another type than the rule's is not simply another value: many servers take `"true"` for true and `"5"` for
5. So it is `UnreadableCall` where a server could take it for the rule's value, and rules treat it as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fnmatch import translate
from typing import Any, cast

from penstock.gateway.reading.policy.path_values import UnreadableCall, values_at
from penstock.gateway.reading.policy.rules import Condition
from penstock.gateway.wire.json_paths import JsonPaths, compiled_paths

ValueTest = Callable[[Any], bool]
"""True if a value passes the test; raises `UnreadableCall`."""


class CallArguments:
    """The arguments of one call, with the values found so far: many rules ask for the same paths."""

    __slots__ = ("_arguments", "_found")

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._found: dict[JsonPaths, list[Any] | UnreadableCall] = {}

    def at(self, path: JsonPaths) -> list[Any]:
        """The values at a path; raises `UnreadableCall`."""
        values = self._found.get(path)
        if values is None:
            values = self._found[path] = self._look(path)
        if isinstance(values, UnreadableCall):
            raise values
        return values

    def _look(self, path: JsonPaths) -> list[Any] | UnreadableCall:
        arguments = self._arguments
        if not isinstance(arguments, dict):
            return UnreadableCall("its arguments are no object")
        try:
            return values_at(cast(dict[str, Any], arguments), path)
        except UnreadableCall as unreadable:
            return unreadable


ConditionTest = Callable[[CallArguments], bool]
"""True if a condition holds; raises `UnreadableCall`."""


def compile_condition(condition: Condition) -> ConditionTest:
    """Compile a condition into a function."""
    path, tests, absent = compiled_paths(condition.at), _tests(condition), condition.absent

    def check(arguments: CallArguments) -> bool:
        values = arguments.at(path)
        if absent is not None and not values:
            return absent
        if absent:
            return False
        # Loops, not generators: this runs for every rule of every call.
        for value in values:
            for test in tests:
                if not test(value):
                    break
            else:
                return True
        return False

    return check


def _tests(condition: Condition) -> list[ValueTest]:
    made: list[ValueTest] = []
    if condition.equals is not None:
        made.append(_equals(condition.at, condition.equals))
    if condition.glob is not None:
        made.append(_text(re.compile(translate(condition.glob)).match))
    if condition.regex is not None:
        made.append(_text(re.compile(condition.regex).search))
    if condition.above is not None:
        made.append(_bound(condition.at, condition.above, 1))
    if condition.below is not None:
        made.append(_bound(condition.at, condition.below, -1))
    return made


def text_of(value: Any) -> str:
    """A text itself, or any other value's JSON. Raises `UnreadableCall` for a value that is nested too deep."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise UnreadableCall("it is nested too deep") from None


def _text(matches: Callable[[str], object]) -> ValueTest:
    return lambda value: matches(text_of(value)) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equals(at: str, wanted: str | float | bool) -> ValueTest:
    kind = type(wanted)

    def test(value: Any) -> bool:
        if type(value) is kind or (_is_number(value) and _is_number(wanted)):
            return value == wanted
        unlike = isinstance(wanted, bool) or text_of(value).strip().casefold() == text_of(wanted).casefold()
        if value is not None and (unlike or (_is_number(wanted) and _reads_as(value, wanted))):
            raise UnreadableCall(f"{text_of(value)[:64]} at {at} is another type than {text_of(wanted)[:64]}")
        return False

    return test


def _reads_as(value: Any, number: str | float | bool) -> bool:
    try:
        return isinstance(value, str) and float(value) == number
    except ValueError:
        return False


def _bound(at: str, bound: float, side: int) -> ValueTest:
    def test(value: Any) -> bool:
        if value is None:
            return False
        if not _is_number(value):
            raise UnreadableCall(f"{text_of(value)[:64]} at {at} is no number")
        return value > bound if side > 0 else value < bound

    return test
