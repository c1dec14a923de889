"""Settings of a training run: as sections by name, and as the text of a `train.toml`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.trainer.config import TrainConfig, load

Sections = dict[str, dict[str, Any]]


def merged(given: Mapping[str, dict[str, Any]], more: Mapping[str, dict[str, Any]]) -> Sections:
    """Both, key by key; what is in both is as `more` has it."""
    return {name: given.get(name, {}) | more.get(name, {}) for name in {**given, **more}}


def toml(sections: Mapping[str, dict[str, Any]], **top: Any) -> str:
    """They as text, behind keys of no section: values that JSON has are written alike in TOML, and a path is its text.
    A list of tables is written as such."""
    lines = _lines(top)
    for name, section in sections.items():
        tables = {key: found for key, value in section.items() if (found := _tables(value))}
        lines += [f"[{name}]", *_lines({key: value for key, value in section.items() if key not in tables})]
        for key, found in tables.items():
            lines += [line for one in found for line in (f"[[{name}.{key}]]", *_lines(one))]
    return "\n".join(lines) + "\n"


def _tables(value: Any) -> list[dict[str, Any]]:
    """The tables of a list of tables; none where it is something else."""
    found = cast(list[Any], value) if isinstance(value, list) else []
    return [cast(dict[str, Any], one) for one in found if isinstance(one, dict)]


def _lines(section: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value, default=str)}" for key, value in section.items()]


def read(home: Path, text: str) -> TrainConfig:
    """What a `train.toml` with this text says."""
    path = home / "train.toml"
    path.write_text(text)
    return load(path)


def documented(page: Path) -> str:
    """The first TOML block of a page."""
    return page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
