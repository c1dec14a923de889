"""An engine is one of ours, or a function or class of somebody's module, such as that of the documentation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.laboratories import Odd, searched
from fakes.process import ROOT

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.engines.beam import BeamEngine
from penstock.trainer.apo.engines.pooled_edits import PooledEditEngine
from penstock.trainer.apo.protocol import SearchBudget

MOST_LINES = 25
MODULE = """
async def propose(pool, evidence):
    return []

class Named:
    async def propose(self, pool, evidence):
        return []
    def finalists(self, pool):
        return []

made = Named()
number = 3

class Needy:
    def __init__(self, depth):
        self.depth = depth
    propose = None
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module of somebody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_engine.py").write_text(MODULE)
    yield tmp_path
    for name in ("my_engine", "my_broken"):
        sys.modules.pop(name, None)


def test_engines_of_ours_are_made_anew_for_each_run() -> None:
    assert isinstance(make_engine("ours"), PooledEditEngine)
    assert isinstance(make_engine("beam"), BeamEngine)
    assert make_engine("beam") is not make_engine("beam")


@pytest.mark.parametrize("name", ["propose", "Named", "made"])
async def test_a_function_a_class_and_an_object_are_engines(name: str) -> None:
    engine = make_engine(f"my_engine:{name}")
    assert await engine.propose(None, None) == []  # pyright: ignore[reportArgumentType]  # it looks at neither
    assert hasattr(engine, "finalists") == (name != "propose")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_other:engine", r"^engine: there is no module 'my_other' here or on the Python path$"),
        ("my_engine.deep:engine", r"^engine: there is no module 'my_engine\.deep' here"),
        ("my_engine:engine", r"^engine: 'my_engine' has no 'engine'$"),
        (".my_engine:propose", r"^engine: '\.my_engine' is not the name of a module"),
        (":propose", r"^engine: '' is not the name of a module"),
        ("my_engine:number", r"^engine: my_engine:number is a int: neither a function, nor has it `propose`"),
        ("my_engine:Needy", r"^engine: my_engine:Needy cannot be made without arguments"),
    ],
)
def test_what_is_no_engine_is_named(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_engine(name)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import nonesuch_at_all", (ModuleNotFoundError, "nonesuch_at_all")),
        ("import my_bro", (ModuleNotFoundError, "my_bro")),
        ("import json\njson.nothing", (AttributeError, "module 'json' has no attribute 'nothing'")),
    ],
)
def test_what_a_module_itself_lacks_is_not_hidden(here: Path, text: str, problem: tuple[type[Exception], str]) -> None:
    (here / "my_broken.py").write_text(f"{text}\n")
    with pytest.raises(problem[0], match=rf"{problem[1]}'?$"):
        make_engine("my_broken:engine")


# --- the engine of the documentation ---


def test_the_engine_of_the_documentation_is_short() -> None:
    text = (ROOT / "examples" / "apo_engine.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES


async def test_the_engine_of_the_documentation_optimises() -> None:
    gains: list[float] = []
    for seed in range(4):
        laboratory = Odd("headroom", seed)
        result = await searched(laboratory, make_engine("examples.apo_engine:propose"), SearchBudget(600), seed)
        gains.append(laboratory.value(result.winner or laboratory.seed) - laboratory.value(laboratory.seed))
    assert min(gains) >= 0
    assert sum(gains) / len(gains) > 0.1


async def test_the_engine_of_the_documentation_keeps_a_good_prompt() -> None:
    laboratory = Odd("none", change=lambda trial: 1.0)
    result = await searched(laboratory, make_engine("examples.apo_engine:propose"), SearchBudget(600))
    assert result.winner is None
    assert result.budget.used_reflections == 0
