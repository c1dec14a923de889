"""`make demo-apo` runs from start to end at 80 columns, and shows what it promises."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from fakes.process import ROOT
from fakes.shell import demo

pytestmark = pytest.mark.slow

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")


@pytest.mark.timeout(600)
async def test_the_demo_shows_a_better_prompt_its_diff_and_its_promotion(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "COLUMNS": "80"}
    done = await demo("examples.apo_demo", tmp_path, patience_s=580, **env).run()
    said = done.text
    assert (done.code, done.err) == (0, ""), said
    steps = (
        "$ penstock train apo",
        "+Greet the customer by name.",
        "promoted ✓",
        "In short:",
        "Everything is stopped.",
    )
    places = [said.index(step) for step in steps]
    assert places == sorted(places)
    flat = " ".join(said.split())
    before, after = map(float, re.findall(r"(0\.\d+) of what the shop wants[^,]*, and (0\.\d+) is", flat)[0])
    assert before < 0.5 < 0.8 < after
    assert max(map(len, said.splitlines())) <= 80
    assert len(said.splitlines()) < 160, "a first reader reads it whole"
    assert not re.search(r"^\S+/a\d+ succeeded", said, re.MULTILINE), "no line for each rollout"
    assert os.listdir(tmp_path) == []


def test_make_help_names_it() -> None:
    command = ("make", "--no-print-directory", "help")
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^  make demo-apo +See a prompt get better", shown, re.MULTILINE)
    command = ("make", "--no-print-directory", "--dry-run", "demo-apo")
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m examples.apo_demo" in asked
