"""Messages, read so strictly that no server can read another call out of the same bytes.

JSON readers differ in how they take repeated keys, keys in another case, invalid numbers, and bytes that are no UTF-8.
A message that has any of these is `UnreadableCall`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from penstock.gateway.reading.policy.conditions import UnreadableCall, change_at, text_of
from penstock.gateway.reading.policy.rules import Redaction
from penstock.gateway.wire.dialects.json_scan import compiled_paths
from penstock.gateway.wire.dialects.loose_json import AmbiguousJsonError, unambiguous

CALL: Final = "tools/call"
_ENVELOPE: Final = ("jsonrpc", "id", "method", "params", "result", "error")
_PARAMS: Final = ("name", "arguments", "_meta", "task")
_FOLDED: Final = {name: {key.casefold(): key for key in keys} for name, keys in (("", _ENVELOPE), ("params", _PARAMS))}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A `tools/call`, as its server reads it."""

    tool: str
    arguments: Any
    """The arguments as they are in the message; an empty object where there are none."""
    message: dict[str, Any]
    """The whole message."""

    @property
    def as_task(self) -> bool:
        """True if the result is to come later, as the answer to another request."""
        return self.message["params"].get("task") is not None


def strict(raw: bytes) -> Any:
    """Decode JSON; raises `UnreadableCall` where readers could differ."""
    try:
        return unambiguous(raw)
    except AmbiguousJsonError as ambiguous:
        raise UnreadableCall(str(ambiguous)) from None


def tool_calls(body: bytes) -> list[ToolCall | None]:
    """The tool calls among the messages of a body; None for a message that runs no tool. Raises `UnreadableCall`."""
    value = strict(body)
    several = cast(list[Any], value) if isinstance(value, list) else [value]
    return [tool_call(one) for one in several]


def tool_call(value: Any) -> ToolCall | None:
    """A message that was read strictly; None if it runs no tool. Raises `UnreadableCall`."""
    if not isinstance(value, dict):
        raise UnreadableCall("it is no object")
    message = cast(dict[str, Any], value)
    _check_names(message, "")
    if message.get("method") != CALL:
        return None
    params = message.get("params")
    if not isinstance(params, dict):
        raise UnreadableCall("it has no params")
    named = cast(dict[str, Any], params)
    _check_names(named, "params")
    tool, arguments = named.get("name"), named.get("arguments")
    if not isinstance(tool, str):
        raise UnreadableCall("its params.name is not text")
    return ToolCall(tool, {} if arguments is None else arguments, message)


def _check_names(value: dict[str, Any], where: str) -> None:
    folded = _FOLDED[where]
    for name in value:
        meant = folded.get(name) or folded.get(name.casefold())
        if meant is not None and meant != name:
            raise UnreadableCall(f"it has the key {name[:64]!r}, which some servers read as {meant!r}")


def encode_messages(messages: Sequence[Any], several: bool) -> bytes:
    """A body of these messages; raises `UnreadableCall` for a number that JSON cannot hold."""
    try:
        return json.dumps(messages if several else messages[0], separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise UnreadableCall("it has a number that is too large to be written again") from None
    except RecursionError:
        raise UnreadableCall("it is nested too deep") from None


# Takes the values that a rule names out of arguments and results.

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
