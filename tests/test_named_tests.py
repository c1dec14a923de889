"""Tests that the documentation names exist: a promise whose test is gone is a promise no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`([\w/]*test_\w+\.py)(?:::(test_\w+))?`")


def named() -> list[tuple[str, str]]:
    """(file, test or nothing) that docs/reliability.md names, once each."""
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    return sorted({(file, test) for file, test in NAMED.findall(text)})


@pytest.mark.parametrize(("file", "test"), named())
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    """A name may leave folders out, and is then of one file only."""
    tail = Path(file.removeprefix("tests/")).parts
    (found,) = [path for path in (ROOT / "tests").rglob(tail[-1]) if path.parts[-len(tail) :] == tail]
    assert not test or re.search(rf"^(async )?def {test}\(", found.read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_some() -> None:
    assert len([test for _, test in named() if test]) > 20
