"""The programs of the page about lakes run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fakes.entries import conversation
from fakes.process import ROOT

from penstock.gateway.app import open_store
from penstock.gateway.followers.lake.lake import Lake
from penstock.gateway.followers.lake.location import LakeLocation
from penstock.gateway.model.prices import Prices

PAGE = (ROOT / "docs" / "lake.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ENGINES = {
    "duckdb": "│ m-1     │     3 │",
    "polars": "m-1",
    "ray": "4 [{'rollout': 'r1'",
    "pyspark": "2023-11-14| llm|",
}
"""What each engine prints of the lake below, at least."""


def test_there_is_a_program_for_each_engine() -> None:
    assert len(PROGRAMS) == len(ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(300)
def test_the_programs_of_the_page_run(engine: str, tmp_path: Path) -> None:
    if engine == "pyspark" and (find_spec("pyspark") is None or shutil.which("java") is None):
        pytest.skip("pyspark (400 MB) and Java are not installed: pip install pyspark, apt install openjdk-17-jre")
    (program,) = [one for one in PROGRAMS if f"import {engine}" in one or f"from {engine}" in one]
    with open_store(tmp_path / "data") as store:
        store.secret()
        store.write(conversation(3))
        lake = Lake(store, LakeLocation(str(tmp_path / "lake")), Prices())
        while lake.step() is not None:
            pass
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ENGINES[engine] in done.stdout
