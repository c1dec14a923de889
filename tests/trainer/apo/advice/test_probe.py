"""The probe, in scripted worlds: what it runs, what it leaves alone, and that it comes to the same again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from bench.apo.advice_worlds import RIGHT, AdviceLaboratory, AdviceWorld, advice_world
from bench.apo.advising import Case, advised, table
from bench.apo.laboratory import NAME
from penstock.gateway.model.base import Mode
from penstock.trainer.apo.advice.decision import derive_findings
from penstock.trainer.apo.advice.probe import Probe, ProbeReport
from penstock.trainer.apo.protocol import Candidate, Reflection, SearchBudget, Trial, TrialSpec
from penstock.trainer.apo.search import split


class Watched(AdviceLaboratory):
    """A laboratory that notes what it was asked, and whose reflecting model may have nothing to say."""

    def __init__(self, world: AdviceWorld, silent: bool = False) -> None:
        super().__init__(world, 7)
        self.ran: list[TrialSpec] = []
        self.modes: set[Mode] = set()
        self.silent = silent

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        self.ran += orders
        self.modes.add(mode)
        return await super().run(candidates, orders, mode)

    async def reflect(self, prompt: str, number: int) -> Reflection:
        return Reflection("I do not know.") if self.silent else await super().reflect(prompt, number)


async def probed(laboratory: Watched, world: AdviceWorld, budget: SearchBudget) -> ProbeReport:
    tasks = split(world.world.tasks, 7).train
    return await Probe(laboratory, laboratory, Candidate({NAME: world.world.seed}), tasks, budget, 7).run()


@pytest.mark.parametrize("rollouts", [24, 60, 75])
async def test_it_keeps_its_budget_names_each_rollout_once_and_stays_in_the_train_split(rollouts: int) -> None:
    world = advice_world("headroom", 3)
    laboratory = Watched(world)
    budget = SearchBudget(rollouts)
    found = await probed(laboratory, world, budget)
    assert len(laboratory.ran) == len(set(laboratory.ran)) == budget.used_rollouts == len(found.observations)
    assert rollouts - 4 <= budget.used_rollouts <= rollouts
    train = {task.id for task in split(world.world.tasks, 7).train}
    assert {order.task for order in laboratory.ran} <= train
    assert laboratory.modes == {"train"}
    assert {arm.stance for arm in found.arms} >= {"seed", "terse", "steps", "checklist", "scratch"}
    numbers = Counter(one.prompt for one in found.observations)
    assert max(numbers, key=lambda name: numbers[name]) == found.arms[0].candidate.id


async def test_begun_again_it_asks_for_the_same() -> None:
    world = advice_world("long", 3)
    first, second = Watched(world), Watched(world)
    assert await probed(first, world, SearchBudget(60)) == await probed(second, world, SearchBudget(60))
    assert first.ran == second.ran


async def test_without_failures_it_ends_early() -> None:
    made = advice_world("none", 3)
    perfect = replace(made.world, rules=tuple(replace(one, followed=1.1) for one in made.world.rules), _readings={})
    world = replace(made, world=perfect)
    budget = SearchBudget(60)
    found = await probed(Watched(world), world, budget)
    assert budget.used_rollouts == 16
    assert budget.used_reflections == 0
    assert derive_findings(found.arms, found.observations, 500).verdict == "nothing"


async def test_a_reflecting_model_that_says_nothing_is_named_as_the_problem() -> None:
    world = advice_world("headroom", 3)
    found = await probed(Watched(world, silent=True), world, SearchBudget(60))
    assert len(found.arms) == 1
    assert any(problem.startswith("checklist: ") for problem in found.problems)
    assert derive_findings(found.arms, found.observations, 500).verdict == "weights"


async def test_the_budget_of_reflections_is_kept() -> None:
    world = advice_world("headroom", 3)
    budget = SearchBudget(60, reflections=5)
    found = await probed(Watched(world), world, budget)
    assert budget.used_reflections == 5
    assert any("budget.reflections" in problem for problem in found.problems)


@pytest.mark.parametrize("kind", RIGHT)
def test_most_verdicts_are_right(kind: str) -> None:
    said = Counter(advised(Case(kind, seed, True, 60)).verdict for seed in range(2000, 2006))
    assert said[RIGHT[kind]] >= 4, said


def test_the_table_counts_what_was_said() -> None:
    rows = list(table([("none", "nothing"), ("none", "weights")], {"none": "nothing"}))
    assert rows[2] == "| none | nothing |  | 1 |  |  | 1 | 50% |"
    assert rows[3].endswith("50.0% of 2 |")
