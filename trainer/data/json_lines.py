"""Files of JSON lines, read whole before a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from penstock.gateway.model.toml import ConfigError


class Line(NamedTuple):
    """A line that is not empty."""

    number: int
    """From 1."""
    value: Any


def json_lines(key: str, path: Path) -> list[Line]:
    """The values of a file that a setting names. Raises `ConfigError` with the setting, the file, the line and what is
    wrong."""
    try:
        # JSON may have other characters in it that Python takes for ends of lines.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    found: list[Line] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(Line(number, _value(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{key}: {path}, line {number}: not JSON: {error.msg}") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{key}: {path}, line {number}: cannot be used: {error}") from None
    return found


def _value(line: str) -> Any:
    """What a line stands for, which must be what can be sent on. Raises `ValueError` and `RecursionError`."""
    value = json.loads(line, parse_constant=_refuse)
    try:
        # Only an escape can spell half a character.
        _ = json.dumps(value, ensure_ascii=False).encode() if "\\u" in line else b""
    except UnicodeEncodeError:
        raise ValueError("it has half a character, which cannot be sent") from None
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
