"""It learns, for real: the demo at reduced size, with a real vLLM, a real gateway, real agents and a real trainer."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes.process import ROOT, child

STEPS = 10


@pytest.mark.timeout(2400)
async def test_an_unmodified_agent_gets_better(tmp_path: Path, vllm_python: Path) -> None:
    """Killed in the middle, it goes on, and ends as if nothing had been."""
    pytest.importorskip("torch", reason="there is no torch here: `make test-learns` brings it along")
    async with demo(tmp_path) as first:
        await said(first, rf"step {STEPS // 2}/{STEPS}  ")
        os.kill(child(first.pid, b"train\0grpo"), signal.SIGKILL)
        assert await first.wait() != 0
    async with demo(tmp_path) as second:
        _ = await said(second, r"Held-out questions answered rightly: 104 ")
        assert await second.wait() == 0
    told = (tmp_path / "summary.txt").read_text(encoding="utf-8")
    greedy = {int(step or 0): int(right) for step, right in re.findall(r"step(?: (\d+))? +(\d+) of 104", told)}
    assert greedy.keys() == {0, 5, STEPS}
    assert greedy[0] <= 31
    # What is seen is half of them and more; one of the two evaluations may have a bad moment.
    assert max(greedy[5], greedy[STEPS]) >= greedy[0] + 26
    assert "<svg" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert (tmp_path / "run" / "best").resolve().name in {"lookup.5", f"lookup.{STEPS}"}


@asynccontextmanager
async def demo(home: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """It computes with one thread: where others use the cores, too, the threads of a model as small as this spend
    several times as long waiting for each other as they compute. What it has started ends with it."""
    command = [sys.executable, "-m", "examples.lookup_rl", "--out", str(home), "--steps", str(STEPS)]
    pipes = asyncio.subprocess.PIPE
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    made = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=env, stdout=pipes, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def said(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The first line of output with this in it."""
    assert process.stdout is not None
    lines: list[str] = []
    async for line in process.stdout:
        lines.append(line.decode())
        if match := re.search(pattern, lines[-1]):
            return match
    raise AssertionError("it ended:\n" + "".join(lines[-40:]))
