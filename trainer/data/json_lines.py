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
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    found: list[Line] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(Line(number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{key}: {path}, line {number}: not JSON: {error.msg}") from None
    return found
