"""A run that is over, by what its directory has: what did not come about then is made up for."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.optimising import Ended, Optimising
from fakes.process import PATHS

ENGINE = "async def propose(pool, evidence):\n    return []\n"


async def searched(here: Optimising, config: Path, *words: str) -> Ended:
    """A run of an engine that knows nothing, to its end."""
    (here.home / "idle_engine.py").write_text(ENGINE)
    return await here.ended(
        await here.start("train", "apo", config, *words, env={"PYTHONPATH": f"{PATHS}:{here.home}"})
    )


async def test_a_run_that_ended_with_a_result_and_without_a_report_is_ended_by_the_same_command(
    here: Optimising,
) -> None:
    config = here.config(engine="idle_engine:propose")
    report = here.home / "run-shop" / "report.html"
    report.mkdir(parents=True)
    first = await searched(here, config)
    assert (first.code, f"{report} cannot be written" in first.output) == (1, True), first.output
    assert (await here.client.run("shop")).status == "failed"
    report.rmdir()
    second = await searched(here, config)
    assert second.code == 0, second.output
    run = await here.client.run("shop")
    assert (run.status, str(run.message).partition(";")[0]) == ("succeeded", "the engine knows no more")
    assert "<html" in report.read_text()
    third = await searched(here, config)
    assert (third.code, (await here.client.run("shop")).resumed) == (0, run.resumed), third.output


async def test_a_common_report_that_cannot_be_written_is_a_sentence(here: Optimising) -> None:
    config = here.config(engine="idle_engine:propose")
    report = here.home / "run-shop" / "report.html"
    report.mkdir(parents=True)
    ended = await searched(here, config, "--seeds", "2")
    assert (ended.code, "Traceback" in ended.output) == (1, False), ended.output
    assert f"{report} cannot be written: Is a directory" in ended.output


@pytest.mark.parametrize("seeds", ["0", "101"])
async def test_seeds_are_as_many_as_a_configuration_may_have(here: Optimising, seeds: str) -> None:
    ended = await here.apo(here.config(), "--seeds", seeds)
    assert (ended.code, "--seeds" in ended.output) == (2, True), ended.output
