"""What a person sees of a run: no step takes two lines, and the bar says what is done while nothing else moves."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from fakes.goldens import check_text
from fakes.pty_program import pty_program

from penstock.trainer.runs.supervision import LOG_WIDTH, LogDisplay, point_line

VALUES = {
    "tokens_per_second": 1234.5678, "staleness/mean": 0.5, "mismatch_k3": 1.2e-05, "clip_fraction": 0.01234,
    "kl": 0.001234, "entropy": 0.4321, "loss": -0.012345, "failed": 0.0, "reward": 0.8541667,
    "evaluation/lookup/reward": 0.9230769, "evaluation/lookup/reward_low": 0.8557,
    "evaluation/lookup/reward_high": 0.96, "evaluation/lookup/pass@1": 0.9230769, "groups/differ": 0.75,
    "rollouts": 96.0,
}  # fmt: skip
"""Of a step of `train grpo` with an evaluation."""
SCENE = f"""
import sys
from penstock.trainer.runs.supervision import display
with display(20) as shown:
    shown.line("info", "vLLM is started; it writes to penstock-data/demo-rl/seed-0/run/vllm.log")
    shown.point(9, {{"reward": 0.5}})
    shown.point(10, {VALUES!r})
    shown.phase(11, "compares the prompts with the last weights")
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
async def test_a_step_and_the_bar_are_a_line_each(columns: int) -> None:
    """The bar's clock goes on: it is waited for, while the program waits for a key."""
    async with pty_program([sys.executable, "-c", SCENE], os.environ, (columns, 12)) as program:
        whole = r"(?:weights.*, [1-9] s|…).*10/20 0:00:0\d"
        screen = await program.until(lambda text: re.search(whole, text) is not None)
        program.write("\n")
        assert await program.ended() == 0
    check_text(
        f"run-display-{columns}.txt", re.sub(r"0:00:0\d", "0:00:0N", re.sub(r", \d s", ", N s", screen)).rstrip() + "\n"
    )


@pytest.mark.slow
async def test_the_clock_goes_on_while_nothing_moves() -> None:
    scene = SCENE.replace("compares the prompts with the last weights", "waits for vLLM")
    async with pty_program([sys.executable, "-c", scene], os.environ, (80, 12)) as program:
        _ = await program.until(lambda text: "step 11 waits for vLLM, 0 s" in text)
        _ = await program.until(lambda text: "step 11 waits for vLLM, 1 s" in text)
        program.write("\n")
        assert await program.ended() == 0


def test_what_matters_most_has_room_first() -> None:
    assert point_line(10, 20, VALUES, 40) == "step 10/20  reward 0.8542  loss -0.01235"
    line = point_line(10, None, VALUES, 79)
    assert line.startswith("step 10  reward 0.8542  evaluation/lookup/reward 0.9231 [0.86, 0.96]")
    assert len(line) <= 79
    assert "rollouts 96" not in point_line(10, 20, VALUES, 10_000)


def test_a_line_of_a_log_is_no_wider_than_most_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    LogDisplay(20).point(10, VALUES)
    (line,) = capsys.readouterr().err.splitlines()
    assert LOG_WIDTH - 30 < len(line) <= LOG_WIDTH


RED = """
import sys
from penstock.trainer.runs.supervision import display
with display(None) as shown:
    shown.line("warning", "a claim \\x1b[31mof a model\\x1b]0;title\\x07 \\ud83d\\ntwo lines")
    sys.stdin.readline()
"""

OBEYED_BY_NOBODY = "warning: a claim ␛[31mof a model␛]0;title␇ \ufffd\ntwo lines"


@pytest.mark.slow
async def test_a_terminal_obeys_nothing_that_a_model_says() -> None:
    async with pty_program([sys.executable, "-c", RED], os.environ, (80, 12)) as program:
        screen = await program.until(lambda text: "two lines" in text)
        program.write("\n")
        assert await program.ended() == 0
    assert OBEYED_BY_NOBODY in screen


@pytest.mark.slow
def test_a_log_can_be_shown_on_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", RED], input=b"\n", capture_output=True, check=True)
    assert done.stderr.decode() == OBEYED_BY_NOBODY + "\n"
