"""Reads files of JSON lines, whole, before a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from penstock.gateway.model.toml import ConfigError


class JsonLine(NamedTuple):
    """A line that is not empty."""

    number: int
    """Line number, from 1."""
    value: Any


def json_lines(key: str, path: Path) -> list[JsonLine]:
    """Return the values of a file that a setting names. Raises `ConfigError` with the setting, the file, the line and
    the error."""
    try:
        # Not `splitlines`: JSON strings may contain other characters that it takes for ends of lines.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    found: list[JsonLine] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(JsonLine(number, _value(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{key}: {path}, line {number}: not JSON: {error.msg}") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{key}: {path}, line {number}: cannot be used: {error}") from None
    return found


def _value(line: str) -> Any:
    """Return the value of a line, which must be valid to send on. Raises `ValueError` and `RecursionError`."""
    value = json.loads(line, parse_constant=_refuse)
    try:
        # Only an escape can contain half a character (a lone surrogate).
        _ = json.dumps(value, ensure_ascii=False).encode() if "\\u" in line else b""
    except UnicodeEncodeError:
        raise ValueError("it has half a character, which cannot be sent") from None
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
