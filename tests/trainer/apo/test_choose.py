"""Engines of somebody else's: a function or a class by name, and the one of the documentation, which optimises."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.laboratories import Odd, searched
from fakes.process import ROOT

from examples import apo_engine
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.budget import Budget
from penstock.trainer.apo.choose import make_engine

MOST_LINES = 25


def test_the_engine_of_the_documentation_is_short() -> None:
    text = (ROOT / "examples" / "apo_engine.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES


async def test_the_engine_of_the_documentation_optimises() -> None:
    gains: list[float] = []
    for seed in range(4):
        laboratory = Odd("headroom", seed)
        result = await searched(laboratory, make_engine("examples.apo_engine:propose"), Budget(600), seed)
        gains.append(laboratory.value(result.winner or laboratory.seed) - laboratory.value(laboratory.seed))
    assert min(gains) >= 0
    assert sum(gains) / len(gains) > 0.1


async def test_the_engine_of_the_documentation_keeps_a_good_prompt() -> None:
    laboratory = Odd("none", change=lambda trial: 1.0)
    result = await searched(laboratory, make_engine("examples.apo_engine:propose"), Budget(600))
    assert result.winner is None
    assert result.budget.used_reflections == 0


def test_a_class_is_made_and_a_module_of_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_engine.py").write_text(
        "class Mine:\n    async def propose(self, pool, evidence):\n        return []\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert type(make_engine("my_engine:Mine")).__name__ == "Mine"
    assert make_engine("examples.apo_engine:propose").propose is apo_engine.propose


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:x", "engine: there is no module 'no_such_module' here or on the Python path"),
        ("json:no_such", "engine: 'json' has no 'no_such'"),
    ],
)
def test_what_is_not_there_is_said(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(name)
