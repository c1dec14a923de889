"""Tests that the documentation names exist: a promise whose test is gone is a promise no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("reliability.md", "security.md")
NAMED = re.compile(r"`([\w/]*test_\w+\.py)(?:::(test_\w+))?`")


def named() -> list[tuple[str, str]]:
    """(file, test or nothing) that pages of promises name, once each."""
    return sorted({found for page in PAGES for found in NAMED.findall(read(page))})


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "test"), named())
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    """A name may leave folders out, and is then of one file only."""
    tail = Path(file.removeprefix("tests/")).parts
    (found,) = [path for path in (ROOT / "tests").rglob(tail[-1]) if path.parts[-len(tail) :] == tail]
    assert not test or re.search(rf"^(async )?def {test}\(", found.read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_some() -> None:
    assert len([test for _, test in named() if test]) > 20


def test_every_promise_of_security_has_tests() -> None:
    """Each row names tests, not files alone, and nothing else stands in their cell."""
    section = read("security.md").partition("\n## What is promised\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[0] == ["promise", "tests"]
    assert len(rows) > 25
    for promise, *cells in rows[1:]:
        (tests,) = cells
        assert promise.endswith("."), promise
        assert all(NAMED.fullmatch(one) and "::" in one for one in tests.split(", ")), promise
