"""docs/runs.md and docs/tape.md say what is: limits, commands, and a reader of blocks that reads ours."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, get_args

import msgspec
import pytest
import zstandard

from penstock.gateway.cli.tables import GROUPS
from penstock.gateway.model import run
from penstock.gateway.runs import operations
from penstock.gateway.runs.blocks import Row, record

DOCS = Path(__file__).parents[3] / "docs"
RUNS, TAPE = (DOCS / "runs.md").read_text(), (DOCS / "tape.md").read_text()
WORDS = {text: " ".join(text.split()) for text in (RUNS, TAPE)}
"""A page without its line breaks."""


class Msgpack:
    """The name that the documented reader uses."""

    unpackb = staticmethod(msgspec.msgpack.decode)


@pytest.mark.parametrize("packed", [False, True])
def test_the_documented_reader_reads(packed: bool) -> None:
    rows = [Row(step, 10**18 + step, {"all": step / 3} | ({"some": -1.5} if step % 3 else {})) for step in range(1, 20)]
    code = re.search(r"```python\n(def rows.*?)```", TAPE, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"msgpack": Msgpack, "zstandard": zstandard, "itertools": itertools, "struct": struct}
    exec(code[1], names)
    assert [Row(*row) for row in names["rows"](record(rows, packed))] == rows


def test_the_documented_numbers_are_those_of_the_code() -> None:
    limits = {
        "points of a request": run.MOST_POINTS,
        "values of a request": run.MOST_VALUES,
        "metrics of a run": run.MOST_METRICS,
        "configuration": run.MOST_CONFIG,
        "events of a request": run.MOST_EVENTS,
        "text of an event or a message": run.LONGEST_TEXT,
        "buckets of an answer, all metrics together": run.MOST_READ,
    }
    for what, most in limits.items():
        assert f"| {what} | {most:,}" in RUNS, what
    assert f"have {operations.FOLD} rows they become one" in WORDS[TAPE]
    assert f"`lease_s`, {run.NewRun(kind='sft').lease_s:g} s unless given" in WORDS[RUNS]


def test_the_documented_names_are_those_of_the_code() -> None:
    commands = re.findall(r"^\| `penstock runs (\w+)` \|", RUNS, re.MULTILINE)
    assert commands == list(GROUPS["runs"].commands)
    for word in (*get_args(run.Kind), *get_args(run.Status)):
        assert f"`{word}`" in RUNS
    (allowed,) = re.findall(r"letters, digits and `([^`]+)`", RUNS)
    signs = "".join(allowed.split())
    pattern = re.compile(run.METRIC)
    found = {chr(code) for code in range(32, 127) if pattern.match("a" + chr(code)) and not chr(code).isalnum()}
    assert found == set(signs)
    assert {chr(code) for code in range(32, 127) if pattern.match(chr(code))} - {"_"} == set(ascii_letters + digits)
