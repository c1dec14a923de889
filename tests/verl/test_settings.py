"""What is wrong with the settings of verl is said before anything starts, where there is neither torch nor verl."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-verl`")

from fakes.process import ROOT
from fakes.settings import documented, read

from penstock.gateway.model.toml import ConfigError

MODEL, VERL = '[model]\npath = "model"\n', '[engine]\nkind = "verl"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (MODEL + "[engine]\nranks = 2", 'engine: ranks: several ranks or nodes need kind = "verl"'),
        (MODEL + VERL + "ranks = 3\nnodes = 2", "engine: ranks: 3 are not as many on each of 2 nodes"),
        (MODEL + VERL + "ranks = 0", "engine.ranks: 0 is not"),
        (MODEL + 'weights = "full"\n' + VERL + "[loss]\nkl = 0.1", 'loss.kl: with engine.kind = "verl" the reference'),
        (MODEL + '[engine]\nkind = "ray"', r"engine.kind: 'ray' is not 'local' or 'verl'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, text)


def test_the_documented_recipe_is_valid(tmp_path: Path) -> None:
    engine = read(tmp_path, documented(ROOT / "docs" / "scale-out.md")).engine
    assert (engine.kind, engine.ranks, engine.nodes) == ("verl", 16, 2)
