"""The demo runs from start to end, on its own, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.process import ROOT

from penstock.gateway.demo import demo


async def test_the_demo_runs_and_cleans_up(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.gateway.demo.demo"),
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(90):
        output, complaints = await process.communicate()
    said = output.decode()
    assert said.lstrip().startswith("Starting a local model and a gateway")
    assert process.returncode == 0, complaints.decode() + said
    assert said.count("The answer is 437.\nYou said: Thank you, that is all.") == 2
    recorded = said.partition("What the gateway has recorded:")[2]
    assert all(word in recorded for word in ("demo-openai", "demo-anthropic", "multiply", "437", "gpt-5-mini"))
    assert os.listdir(tmp_path) == []


async def test_without_the_sdks_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr(demo, "find_spec", nothing)
    assert await asyncio.to_thread(demo.main) == 1
    assert "pip install 'penstock-gateway[demo]'" in capsys.readouterr().err


def test_make_demo_installs_no_more_than_it_needs_and_says_what(tmp_path: Path) -> None:
    # Under another make, one would say which directories it enters and leaves.
    command = ("make", "--no-print-directory", "--dry-run", "demo", f"VENV={tmp_path}/venv")
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-e '.[demo]'" in asked
    assert "[dev]" not in asked
    assert "--quiet" not in asked
    assert asked.startswith('echo "Installing Penstock and the SDKs of OpenAI and Anthropic')
