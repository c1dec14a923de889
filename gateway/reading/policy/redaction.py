"""Takes the values that a rule names out of arguments and results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, cast

from penstock.gateway.reading.policy.conditions import text_of
from penstock.gateway.reading.policy.path_values import UnreadableCall, change_at
from penstock.gateway.reading.policy.rules import Redaction
from penstock.gateway.wire.json_paths import compiled_paths

TAKEN_OUT: Final = "[redacted]"
"""Stands in place of a value that was taken out."""


def redacted(value: Any, paths: list[str], rule: Redaction) -> Any:
    """The value with the rule's matches at these paths replaced; the same object when there are none. Raises
    `UnreadableCall`."""
    replace = _whole if rule.pattern is None else _within(re.compile(rule.pattern))
    try:
        return change_at(value, compiled_paths(*paths), replace)
    except RecursionError:
        raise UnreadableCall("it is nested too deep") from None


def _whole(value: Any) -> Any:
    return TAKEN_OUT


def _within(pattern: re.Pattern[str]) -> Callable[[Any], Any]:
    def replace(value: Any) -> Any:
        if isinstance(value, dict | list):
            return _each(cast("dict[str, Any] | list[Any]", value), replace)
        if value is None or isinstance(value, bool):
            return value
        text = text_of(value)
        made = pattern.sub(TAKEN_OUT, text)
        return value if made == text else made

    return replace


def _each(value: dict[str, Any] | list[Any], replace: Callable[[Any], Any]) -> Any:
    made: Any = value
    for place in list(value) if isinstance(value, dict) else range(len(value)):
        inner: Any = value[cast(Any, place)]
        new = replace(inner)
        if new is not inner:
            made = made if made is not value else value.copy()
            made[place] = new
    return made
