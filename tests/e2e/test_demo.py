"""The demo runs from start to end, on its own, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes import shell
from fakes.process import ROOT

from examples.demo import demo, tools


@pytest.mark.slow
async def test_the_demo_runs_and_cleans_up(tmp_path: Path) -> None:
    done = await shell.demo("examples.demo.demo", tmp_path).run()
    assert done.text.lstrip().startswith("Starting a local model and a gateway")
    assert done.code == 0, done.err + done.text
    assert done.text.count("The answer is 437.\nYou said: Thank you, that is all.") == 2
    assert done.text.count("The answer is 437.\n") >= 3
    recorded = done.text.partition("What the gateway has recorded:")[2]
    assert all(word in recorded for word in ("demo-openai", "demo-anthropic", "demo-tools", "437", "gpt-5-mini"))
    shown = recorded.partition("$ penstock show demo-tools")[2].splitlines()
    asked, ran = ([line for line in shown if mark in line][-1] for mark in ("1 tool call", "tools/call multiply"))
    spans = [line for line in shown if "#" in line]
    assert spans.index(ran) == spans.index(asked) + 1, "the tool stands below the call that asked for it"
    assert ran.index("#") > asked.index("#")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
async def test_a_demo_that_is_interrupted_ends_without_a_word(tmp_path: Path) -> None:
    place = shell.demo("examples.demo.demo", tmp_path)
    process = await place.start()
    assert process.stdout is not None
    async with asyncio.timeout(place.patience):
        while not (await process.stdout.readline()).startswith(b"$ "):
            pass
    process.send_signal(signal.SIGINT)
    _, complaints = await place.end_of(process)
    assert process.returncode == 130
    assert b"demo.py" not in complaints
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
async def test_the_demo_of_the_sidecar_shows_the_same_bytes(tmp_path: Path) -> None:
    done = await shell.demo("examples.sidecar_demo", tmp_path).run()
    assert (done.code, done.err) == (0, ""), done.text
    assert done.text.count("The answer is 437.\nYou said: Thank you, that is all.") == 2
    assert "api.openai.com got 3 requests each time: the same bytes." in done.text
    assert "demo-sidecar  running  3 model calls" in done.text
    assert os.listdir(tmp_path) == []


def test_the_start_page_shows_what_the_demo_prints() -> None:
    """Its commands and the shape of the tree; times, ports and counts differ."""
    picture = (ROOT / "docs" / "index.md").read_text().partition("## What `make demo` prints\n")[2].partition("## ")[0]
    for line in ("$ penstock rollouts", "$ penstock show demo-tools", "tools/call multiply", *demo.SCRIPTS):
        assert line in picture


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ({"id": 1, "method": "prompts/list"}, tools.UNKNOWN_METHOD),
        ({"id": 1, "method": "tools/call", "params": {"name": "divide"}}, tools.BAD_PARAMS),
    ],
)
def test_its_server_of_tools_refuses_what_it_does_not_have(sent: dict[str, Any], code: int) -> None:
    answered = tools.answer(sent)
    assert answered is not None
    assert answered["error"]["code"] == code


def test_its_server_of_tools_answers_no_notification() -> None:
    assert tools.answer({"method": "notifications/initialized"}) is None


async def test_without_the_sdks_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr(demo, "find_spec", nothing)
    assert await asyncio.to_thread(demo.main) == 1
    assert "pip install '.[demo]'" in capsys.readouterr().err


@pytest.mark.smoke
@pytest.mark.parametrize(("target", "installed"), [("demo", "[demo,tui]"), ("test", "[core]")])
def test_the_two_commands_install_no_more_than_they_need_and_say_what(
    target: str, installed: str, tmp_path: Path
) -> None:
    # Under another make, one would say which directories it enters and leaves.
    command = ("make", "--no-print-directory", "--dry-run", target, f"VENV={tmp_path}/venv")
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"-e '\.(\S+)'", asked) == [installed]
    assert "--quiet" not in asked
    assert asked.startswith('echo "Installing Penstock')
