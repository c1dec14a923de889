"""Whatever is killed, and whenever: a run that goes on runs nothing twice and comes to the same winner."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fakes.optimising import Optimising

from penstock.gateway.model.answers import Change

SETTINGS: dict[str, Any] = {"budget": {"rollouts": 160, "reflections": 30}}
Seen = Callable[[Change], bool]


def rollouts(number: int) -> Seen:
    """So many rollouts of the run have ended."""
    ended = set[str]()

    def enough(change: Change) -> bool:
        rollout = change.rollout
        if rollout is not None and rollout.id.startswith("shop.") and rollout.status in ("succeeded", "failed"):
            ended.add(rollout.id)
        return len(ended) >= number

    return enough


def reflections(number: int, over: bool) -> Seen:
    """So many reflections have begun, or are over."""
    begun = set[str]()

    def enough(change: Change) -> bool:
        span = change.span
        if span is not None and span.rollout == "shop.reflections" and (span.end_ns is not None or not over):
            begun.add(span.attempt)
        return len(begun) >= number

    return enough


POINTS: list[Seen] = [
    rollouts(3), rollouts(24), reflections(1, over=False), reflections(4, over=True), rollouts(60), rollouts(88),
    reflections(8, over=False), rollouts(113), rollouts(140), rollouts(150),
]  # fmt: skip
"""In the first batch, in and between reflections, in a round, in the race, in the test."""


@pytest.mark.timeout(300)
async def test_a_killed_trainer_runs_nothing_twice_and_comes_to_the_same_winner(here: Optimising) -> None:
    async with here.agents():
        whole = await here.apo(here.config("whole", **SETTINGS))
        config = here.config("shop", **SETTINGS)
        killed = 0
        for point in POINTS:
            process = await here.start("train", "apo", config)
            await here.seen(point)
            killed += process.returncode is None
            if process.returncode is None:
                process.kill()
            await here.ended(process)
        last = await here.apo(config)
    assert killed >= len(POINTS) - 1
    assert (whole.code, last.code) == (0, 0), last.output
    assert outcome(last.output) == outcome(whole.output)
    await check_nothing_twice(here)


async def check_nothing_twice(here: Optimising) -> None:
    """Each rollout has had one attempt, each question one answer, and there are as many as without a death."""
    names = {run: set[str]() for run in ("whole", "shop")}
    async for rollout in here.client.rollouts():
        run, _, name = rollout.id.partition(".")
        if name != "reflections":
            names[run].add(name)
            assert len(rollout.attempts) == 1, rollout
    assert names["shop"] == names["whole"]
    assert len(names["shop"]) >= 120
    answered = Counter(span.attempt for span in await here.reflections("shop") if span.status == "ok")
    assert set(answered.values()) == {1}
    assert len(answered) == len(await here.reflections("whole")) <= 30


def outcome(output: str) -> list[str]:
    """What the search, the race and the test have come to."""
    found = re.findall(r"\w+ is better by [^)]*\)|test, on tasks .*", output)
    told = list(dict.fromkeys(found))
    assert len(told) == 2, output
    return told


RUNNER = ["--workers=4", "--callable=examples.shop:agent", "--preload", "--reward=examples.shop:reward"]


@pytest.mark.timeout(300)
async def test_a_killed_gateway_is_waited_for_and_costs_nothing_that_was_finished(here: Optimising) -> None:
    """By the run, by its runner, and by reflections that were under way."""
    process = await here.start("train", "apo", here.config("shop", rollouts={"run": RUNNER}, budget={"rollouts": 100}))
    before: dict[str, int] = {}
    for point in (rollouts(10), reflections(2, over=False)):
        await here.seen(point)
        assert process.returncode is None
        before = await finished(here)
        await here.gateway.kill()
        await here.gateway.start(here.gateway.port)
    ended = await here.ended(process)
    assert ended.code == 0, ended.output
    after = await finished(here)
    assert {name: after[name] for name in before} == before
    answered = Counter(span.attempt for span in await here.reflections("shop") if span.status == "ok")
    assert set(answered.values()) == {1}
    found = await here.counted()
    assert found["train"] + found["val"] <= 100


async def finished(here: Optimising) -> dict[str, int]:
    """Rollouts that have ended, and how many attempts each has had."""
    ended = ("succeeded", "failed")
    return {one.id: len(one.attempts) async for one in here.client.rollouts() if one.status in ended}
