"""Tasks that are held out, and what is asked at one go."""

from __future__ import annotations

import pytest
from fakes.laboratories import Odd
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.protocol import (
    AgentTask,
    BudgetExhausted,
    Evidence,
    Pool,
    SearchBudget,
    hold_out,
)


def evidence(tasks: list[AgentTask], budget: SearchBudget, hurry: int = 0) -> Evidence:
    laboratory = Odd("headroom", hurry=hurry)
    return Evidence(laboratory, Pool(laboratory.seed), tasks, budget, 0)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=60), st.integers(1, 70))
def test_parts_are_all_tasks_and_part_no_key(keys: list[str], count: int) -> None:
    tasks = [AgentTask(f"t{at}", at, key) for at, key in enumerate(keys)]
    learn, choose = hold_out(evidence(tasks, SearchBudget(0)), count)
    assert sorted(learn + choose) == sorted(task.id for task in tasks)
    assert 1 <= len(choose) <= len(tasks) // 2
    in_choose = {task.key for task in tasks if task.id in choose}
    shared = in_choose & {task.key for task in tasks if task.id in learn}
    assert not shared or len(set(keys)) == 1


@given(st.integers(1, 70))
def test_without_keys_exactly_so_many_are_held_out(count: int) -> None:
    tasks = [AgentTask(f"t{at}", at, f"t{at}") for at in range(50)]
    assert len(hold_out(evidence(tasks, SearchBudget(0)), count)[1]) == min(count, 25)


async def test_rollouts_of_which_not_all_are_left_are_not_begun() -> None:
    laboratory = Odd("headroom")
    found = evidence(laboratory.world.tasks, SearchBudget(3))
    pairs = [(laboratory.seed, task.id) for task in laboratory.world.tasks[:4]]
    with pytest.raises(BudgetExhausted, match="3 of 3 rollouts are left for the search, and its next step takes 4"):
        await found.run_all(pairs)
    assert found.budget.used_rollouts == 0
    assert [trial.task for trial in await found.run_all(pairs[:3])] == ["t000", "t001", "t002"]


@pytest.mark.parametrize("hurry", range(4))
async def test_answers_are_in_the_order_of_the_questions_and_the_last_ones_are_missing(hurry: int) -> None:
    found = evidence([], SearchBudget(0, reflections=2), hurry)
    alone = [await evidence([], SearchBudget(0)).reflect(prompt) for prompt in ("one", "two")]
    assert await found.reflect_all(["one", "two", "three"]) == [*alone, None]
    with pytest.raises(BudgetExhausted, match="reflections"):
        await found.reflect_all(["one"])
    assert await found.reflect_all([]) == []
