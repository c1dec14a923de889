"""Agents that sample otherwise than training assumes are counted, and the run warns of them once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.mistakes import tells
from fakes.settings import Sections
from fakes.staging import staged

pytestmark = pytest.mark.timeout(300)

AGENT = ["--callable=fakes.unteachable:samples_otherwise_at_odd_numbers", "--preload", "--reward=fakes.asking:reward"]


async def test_the_share_is_told_once_and_on_every_step(tmp_path: Path, model: Path) -> None:
    own: Sections = {"model": {"rank": 4}, "rollouts": {"run": ["--workers=6", *AGENT]}}
    async with staged(tmp_path, model, 2, own) as stage:
        await stage.to_the_end()
        async with stage.client as client:
            shares = [point.values["sampled_otherwise"] async for point in client.points("run") if point.step]
            warnings = [one.text async for one in client.run_events("run") if one.level == "warning"]
    (said,) = [one for one in warnings if "sampled otherwise" in one]
    assert shares == [pytest.approx(1 / 3)] * 2
    found = ("2 of 6 calls (33%)", "temperature 1", "temperature 0.2 (2), top_p 0.9 (2)", "set rollouts.temperature")
    assert tells(said, *found)
