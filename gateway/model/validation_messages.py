"""Errors in values in plain words, made from pydantic's errors. Pure.

Each sentence follows the name of its field: it names the value and what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.gateway.model.base import ID_PATTERN

LONGEST: Final = 60
"""Most characters of a value that are shown."""
_TYPES: Final = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of a size that is kept",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
}
"""The expected value, by the type of the error."""
_BOUNDS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "greater_than": lambda c: f"more than {c['gt']:g}",
    "greater_than_equal": lambda c: f"{c['ge']:g} or more",
    "less_than": lambda c: f"less than {c['lt']:g}",
    "less_than_equal": lambda c: f"{c['le']:g} or less",
    "literal_error": lambda c: c["expected"],
    "enum": lambda c: c["expected"],
    "string_pattern_mismatch": lambda c: _pattern(c["pattern"]),
    "string_too_short": lambda c: f"text of {pluralized(c['min_length'], 'character')} or more",
    "string_too_long": lambda c: f"text of {pluralized(c['max_length'], 'character')} or less",
}
_PATTERNS: Final = {
    ID_PATTERN: "an id: up to 128 letters, digits and . _ -",
    r"^[A-Za-z0-9._-]{1,64}$": "a name: 1 to 64 letters, digits and . _ -",
    r"^[A-Za-z0-9._-]{1,253}$": "the name of a host: letters, digits and . _ -",
    r"^[0-9a-f]{64}$": "64 hexadecimal digits in lower case",
    r"^/[!-~]*$": "a path that begins with /",
    r"^[Xx]-[A-Za-z0-9-]{1,60}$": "the name of a header that begins with X-",
    r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$": "module:name",
    r"^[^\x00-\x1f\x7f]{1,64}$": "text of 1 to 64 characters that can be seen",
}
"""The expected value, by the pattern of its field; a pattern that is not here is shown itself."""
_USER_INFO: Final = re.compile(r"://[^/?#]*@")
_SIZES: Final = {"too_short": ("min_length", "or more"), "too_long": ("max_length", "or less")}


def sentence(error: Mapping[str, Any]) -> str:
    """The sentence for one of `ValidationError.errors()`, without its field."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "it is missing"
    if kind == "json_invalid":
        return f"it is not JSON: {context['error']}"
    if kind in _SIZES:
        name, most = _SIZES[kind]
        if context["actual_length"] is None:
            # pydantic stops counting the keys of an object that has too many.
            return f"it has more than {pluralized(context[name], 'item')}"
        return f"it has {pluralized(context['actual_length'], 'item')}, not {context[name]:,} {most}"
    wanted = _TYPES.get(kind) or (_BOUNDS[kind](context) if kind in _BOUNDS else None)
    if wanted is not None:
        return f"{_shown(error['input'])} is not {wanted}"
    found = f" (found {_shown(error['input'])})" if isinstance(error["input"], str | int | float) else ""
    return error["msg"].removeprefix("Value error, ") + found


def _pattern(pattern: str) -> str:
    return _PATTERNS.get(pattern, f"as {pattern} says")


def pluralized(number: int, noun: str) -> str:
    """A number with its noun: 1 call, 2 calls."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    # The text before the host of a URL may be a password.
    text = _USER_INFO.sub("://***@", repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
