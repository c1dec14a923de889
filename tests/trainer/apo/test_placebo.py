"""The placebo: the search learns nothing from rewards, race and test are real, and an honest method then stays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.apo.laboratory import NAME, Simulated
from bench.apo.worlds import Family, world
from penstock.gateway.model.base import Mode
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.engines.pooled_edits import PooledEditEngine
from penstock.trainer.apo.protocol import Candidate, Reflection, SearchBudget, Trial, TrialSpec
from penstock.trainer.apo.search import PlaceboLaboratory, PromptSearch, SearchResult, split
from penstock.trainer.apo.session import runs_of


class Sums:
    """The reward of candidate "good" is 1, and that of "bad" 0. A batch takes as many turns of the loop as it says."""

    def __init__(self, turns: Sequence[int] = ()) -> None:
        self.turns = list(turns)

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        for _ in range(self.turns.pop(0) if self.turns else 0):
            await asyncio.sleep(0)
        return [Trial(*order, float(order.candidate == "good"), f"because of {order.candidate}") for order in orders]

    async def reflect(self, prompt: str, number: int) -> Reflection:
        return Reflection(prompt)

    def most(self, prompt: str) -> tuple[int, float]:
        return 1, 0.0

    def problem(self, candidate: Candidate) -> str:
        return ""


def orders(candidate: str, count: int) -> list[TrialSpec]:
    return [TrialSpec(candidate, f"t{at}", 0) for at in range(count)]


async def test_feedback_of_the_search_says_nothing_of_candidates_and_has_no_reasons() -> None:
    placebo = PlaceboLaboratory(Sums(), 0)
    # Engines that run one candidate a batch: the means would stay if rewards were shuffled within batches.
    batches = [await placebo.run([], orders(name, 50)) for name in ("good", "bad") * 10]
    means = [sum(trial.reward or 0 for trial in batch) / 50 for batch in batches[4:]]
    assert all(0.2 < mean < 0.8 for mean in means)
    assert {trial.reason for batch in batches for trial in batch} == {""}


@pytest.mark.parametrize("mode", ["val", "test"])
async def test_race_and_test_are_real(mode: Mode) -> None:
    trials = await PlaceboLaboratory(Sums(), 0).run([], orders("good", 20), mode)
    assert {(trial.reward, trial.reason) for trial in trials} == {(1.0, "because of good")}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(0, 5))
def test_what_is_drawn_does_not_depend_on_which_batch_ends_first(turns: list[int], seed: int) -> None:
    async def all_at_once(given: list[int]) -> list[Any]:
        placebo = PlaceboLaboratory(Sums(given), seed)
        return await asyncio.gather(*(placebo.run([], orders(name, 6)) for name in ("good", "bad", "good", "bad")))

    assert asyncio.run(all_at_once(turns)) == asyncio.run(all_at_once([]))


async def test_a_batch_that_fails_does_not_hold_up_the_next() -> None:
    class Fails(Sums):
        async def run(
            self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
        ) -> list[Trial]:
            if orders[0].candidate == "wrong":
                raise ValueError
            return await super().run(candidates, orders, mode)

    placebo = PlaceboLaboratory(Fails(), 0)
    both = [placebo.run([], orders("wrong", 1)), placebo.run([], orders("good", 1))]
    async with asyncio.timeout(5):
        first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, ValueError)
    assert isinstance(second, list)


async def searched(family: Family, draw: int, placebo: bool) -> SearchResult:
    """A search with `ours` in a scripted world."""
    made = world(family, draw)
    splits = split(made.tasks, draw)
    real = Simulated(made, draw)
    seed = Candidate({NAME: made.seed})
    laboratory = PlaceboLaboratory(real, draw) if placebo else real
    return await PromptSearch(
        laboratory, PooledEditEngine(), seed, splits.train, splits.validation, SearchBudget(200), draw
    ).run()


@pytest.mark.parametrize("family", ["headroom", "none"])
async def test_with_a_placebo_a_search_lets_nothing_through(family: Family) -> None:
    found = [await searched(family, draw, placebo=True) for draw in range(4)]
    assert [one.winner for one in found] == [None] * 4
    assert all(one.budget.used_rollouts <= 200 for one in found)


async def test_without_one_the_same_searches_find_something() -> None:
    found = [await searched("headroom", draw, placebo=False) for draw in range(4)]
    assert sum(one.winner is not None for one in found) >= 2


# -- several runs ------------------------------------------------------------------------------------------------------


def config() -> ApoConfig:
    return ApoConfig.model_validate(
        {
            "run": {"name": "shop", "directory": "out", "seed": 7},
            "texts": {"prompts": ["shop"]},
            "reflection": {"model": "m"},
            "publish": {"release": "auto"},
        }
    )


def test_one_run_is_what_it_was() -> None:
    assert runs_of(config()) == [config()]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"seeds": 2}, [("shop.s0", "out/s0", 7), ("shop.s1", "out/s1", 8)]),
        ({"placebo": True}, [("shop.placebo", "out/placebo", 7)]),
        (
            {"seeds": 2, "placebo": True},
            [("shop.placebo.s0", "out/placebo/s0", 7), ("shop.placebo.s1", "out/placebo/s1", 8)],
        ),
    ],
)
def test_several_have_names_directories_and_seeds_of_their_own_and_release_nothing(
    asked: dict[str, Any], names: list[tuple[str, str, int]]
) -> None:
    found = runs_of(config(), **asked)
    assert [(one.run.name, one.run.directory.as_posix(), one.run.seed) for one in found] == names
    assert {one.publish.release for one in found} == {"none"}
