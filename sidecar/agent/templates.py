"""Templates of arguments and variables: `{question}` is a field of the task. Pure.

    {question}  {item.id}  {choices.0}    a field of the task, a field of a field, an item of a list
    {input}  {input.token}                the whole task as JSON; a field whose name is one of the next line
    {rollout} {attempt} {openai_url} {anthropic_url} {token}
    {{  }}                                a brace

Text is inserted as it is, everything else as JSON. A brace that begins none of these stays, so JSON can be written
without escapes. A field that the task does not have is an error: an agent must not get half a question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*)\}")


class TaskTemplateError(ValueError):
    """Raised when a template names a field that the task does not have."""


def fill(template: str, task: Any, names: Mapping[str, str]) -> str:
    """The template filled with the task's fields and the other `names`; raises `TaskTemplateError`."""

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        return names[match[1]] if match[1] in names else _text(_find(template, match[1], task))

    return _FIELD.sub(value, template)


def to_json(value: Any) -> str:
    """A value in the form that agents get: one line of JSON, in readable text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _find(template: str, path: str, task: Any) -> Any:
    first, *rest = path.split(".")
    steps = rest if first == "input" else [first, *rest]
    value = task
    for step in steps:
        if isinstance(value, dict) and step in value:
            value = cast(dict[str, Any], value)[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(cast(list[Any], value)):
            value = cast(list[Any], value)[int(step)]
        else:
            raise TaskTemplateError(f"{template!r} asks for {path!r}, which the task does not have: {_has(value)}")
    return value


def _has(value: Any) -> str:
    if isinstance(value, dict):
        return f"its fields are {', '.join(sorted(map(str, cast(dict[str, Any], value)))[:20]) or 'none'}"
    if isinstance(value, list):
        return f"there is a list of {len(cast(list[Any], value))}"
    return f"there is {to_json(value)[:60]}"
