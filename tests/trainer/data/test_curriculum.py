"""Tasks whose rewards differ are taken more often, none is forgotten, and a run that goes on takes the same ones."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from penstock.trainer.data.tasks import PRIOR, Curriculum, RolloutTask

TASKS = [RolloutTask(number, {"n": number}) for number in range(40)]


def step(curriculum: Curriculum, number: int, count: int, rates: np.ndarray, draw: np.random.Generator) -> list[int]:
    """Takes a step's tasks and notes eight rollouts of each, of 0 and 1; returns how many of each group were 1."""
    tasks = curriculum.draw(number, 0, count)
    curriculum.register_groups({f"{number}-{place}": task for place, task in enumerate(tasks)})
    right = [int(draw.binomial(8, rates[task.number])) for task in tasks]
    rewards = {f"{number}-{place}": [1.0] * one + [0.0] * (8 - one) for place, one in enumerate(right)}
    curriculum.record_rewards(rewards)
    return right


def test_what_differs_is_taken_more_often_and_nothing_is_forgotten() -> None:
    """Ten of forty tasks are of medium difficulty; the others are always solved, or never."""
    rates = np.array([0.5] * 10 + [0.0] * 15 + [1.0] * 15)
    curriculum, draw, taken = Curriculum(TASKS, 3), np.random.default_rng(0), Counter[int]()
    for number in range(1, 101):
        taken.update(task.number for task in curriculum.draw(number, 0, 8))
        step(curriculum, number, 8, rates, draw)
    medium = sum(taken[number] for number in range(10))
    # In turn, each quarter of the tasks has a quarter of the places.
    assert medium > 0.5 * taken.total()
    assert min(taken[number] for number in range(40)) >= 3


def test_a_task_that_changes_is_found_again() -> None:
    """All that is solved at first is left alone; then one of them is not solved any more."""
    rates, draw = np.array([0.5] * 10 + [1.0] * 30), np.random.default_rng(0)
    curriculum = Curriculum(TASKS, 0)
    for number in range(1, 41):
        step(curriculum, number, 8, rates, draw)
    before = curriculum.weights()[30]
    rates[30] = 0.5
    for number in range(41, 121):
        step(curriculum, number, 8, rates, draw)
    assert curriculum.weights()[30] > 2 * before


def test_a_run_that_goes_on_takes_the_same_tasks() -> None:
    """What is known goes through JSON as through a checkpoint."""
    rates = np.linspace(0, 1, 40)
    whole, draw = Curriculum(TASKS, 1), np.random.default_rng(2)
    for number in range(1, 6):
        step(whole, number, 8, rates, draw)
    other = Curriculum(TASKS, 1)
    other.restore(json.loads(json.dumps(whole.state())))
    assert [other.draw(number, 0, 40) for number in (6, 7)] == [whole.draw(number, 0, 40) for number in (6, 7)]
    assert other.figures() == whole.figures()
    with pytest.raises(ValueError, match=r"made with 40 tasks, and rollouts\.tasks has 39"):
        Curriculum(TASKS[1:], 1).restore(whole.state())


def test_helpings_of_a_step_share_no_task_until_all_are_taken() -> None:
    curriculum = Curriculum(TASKS, 5)
    helpings = [task.number for start in range(0, 40, 8) for task in curriculum.draw(1, start, 8)]
    assert sorted(helpings) == list(range(40))
    assert curriculum.draw(1, 40, 8) == curriculum.draw(1, 0, 8)
    assert curriculum.draw(2, 0, 8) != curriculum.draw(1, 0, 8)
    assert Curriculum(TASKS, 6).draw(1, 0, 8) != curriculum.draw(1, 0, 8)


def test_the_weight_is_the_variance_with_an_optimistic_prior() -> None:
    curriculum = Curriculum(TASKS[:3], 0)
    curriculum.register_groups({"a": TASKS[0], "b": TASKS[1]})
    curriculum.record_rewards({"a": [1.0, 0.0, 0.0, 0.0], "b": [0.1, 0.1, 0.1, 0.1]})
    highest = 0.25 * 0.75
    assert curriculum.weights() == pytest.approx([highest, PRIOR * highest / (4 + PRIOR), highest])
    assert curriculum.figures() == pytest.approx({"curriculum/tried": 2 / 3, "curriculum/equal": 0.5})
    # While nothing differs, what was tried least comes first; the scale of rewards says nothing.
    other = Curriculum(TASKS[:3], 0)
    other.register_groups({"a": TASKS[0]})
    other.record_rewards({"a": [50.0] * 4})
    assert other.weights() == pytest.approx([PRIOR / (4 + PRIOR), 1.0, 1.0])
