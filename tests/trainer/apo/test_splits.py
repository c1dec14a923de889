"""Splits part all tasks by whole keys, near their shares, the same for the same seed; too few tasks are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.protocol import AgentTask
from penstock.trainer.apo.search import LEAST, SHARES, Splits, agent_tasks, split

keys = st.lists(st.integers(0, 25).map("k{}".format), min_size=20, max_size=120)


def tasks_of(keys: list[str]) -> list[AgentTask]:
    return [AgentTask(f"t{at}", f"question {at}", key) for at, key in enumerate(keys)]


def parts(found: Splits) -> dict[str, list[AgentTask]]:
    return {"train": [*found.train], "validation": [*found.validation], "test": [*found.test]}


def drawn(keys: list[str], seed: int) -> Splits:
    """The splits of tasks with these keys; examples with too few of them are left out."""
    try:
        return split(tasks_of(keys), seed)
    except ConfigError:
        assume(False)
        raise


# --- splits ---


@given(keys=keys, seed=st.integers(0, 5))
def test_every_task_is_in_one_split_with_all_of_its_key_and_in_order(keys: list[str], seed: int) -> None:
    found = parts(drawn(keys, seed))
    every = [task for one in found.values() for task in one]
    assert sorted(every) == sorted(tasks_of(keys))
    homes = [{task.key for task in one} for one in found.values()]
    assert sum(map(len, homes)) == len(set(keys)), "no key is in two splits"
    for one in found.values():
        places = [int(task.id[1:]) for task in one]
        assert places == sorted(places)


@given(keys=keys, seed=st.integers(0, 5))
def test_splits_are_as_near_their_shares_as_whole_keys_allow(keys: list[str], seed: int) -> None:
    found, largest = parts(drawn(keys, seed)), max(Counter(keys).values())
    for name, one in found.items():
        wanted = SHARES[name] * len(keys)
        assert wanted - 2 * largest <= len(one) <= wanted + largest
        assert len(one) >= LEAST


@pytest.mark.parametrize("count", [20, 40, 100, 241])
def test_tasks_without_keys_are_parted_by_shares_to_the_task(count: int) -> None:
    found = parts(split(tasks_of([f"k{at}" for at in range(count)]), 0))
    assert {name: len(one) for name, one in found.items()} == {
        name: pytest.approx(share * count, abs=1) for name, share in SHARES.items()
    }


@given(keys=keys, seed=st.integers(0, 5))
def test_a_seed_decides_and_is_sealed(keys: list[str], seed: int) -> None:
    one, again = drawn(keys, seed), drawn(keys, seed)
    assert parts(one) == parts(again)
    assert one.seal == again.seal


def test_other_seeds_part_otherwise_and_other_inputs_have_another_seal() -> None:
    tasks = tasks_of([f"k{at}" for at in range(60)])
    seals = {split(tasks, seed).seal for seed in range(10)}
    assert len(seals) == 10
    changed = [task._replace(input="another") if task.id == "t7" else task for task in tasks]
    assert split(changed, 0).seal != split(tasks, 0).seal


def test_a_new_task_of_a_known_key_does_not_decide_what_is_drawn_for_others() -> None:
    # Keys are drawn by their names: the order of lines in the file decides nothing.
    tasks = tasks_of([f"k{at % 20}" for at in range(60)])
    turned = tasks[::-1]
    homes = [{task.id for task in split(one, 3).test} for one in (tasks, turned)]
    assert homes[0] == homes[1]


@pytest.mark.parametrize("keys", [["one"] * 100, [f"k{at}" for at in range(11)], ["a"] * 50 + ["b"] * 50, []])
def test_too_few_tasks_or_keys_are_refused_with_the_way_out(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"tasks: the \w+ split has \d+ of \d+ tasks .* needs 4; give more tasks"):
        split(tasks_of(keys), 0)


# --- tasks ---


def test_tasks_are_named_by_their_place() -> None:
    assert agent_tasks(["a", {"b": 1}], None) == [AgentTask("t0", "a", "t0"), AgentTask("t1", {"b": 1}, "t1")]


def test_tasks_that_are_the_same_stay_together_without_a_key() -> None:
    # Else a task of the test could be one that the engine has seen.
    found = agent_tasks([{"q": 1, "r": 2}, "x", {"r": 2, "q": 1}, "x"], None)
    assert [task.key for task in found] == ["t0", "t1", "t0", "t1"]


def test_keys_are_values_of_fields_by_their_path() -> None:
    inputs: list[Any] = [{"c": {"id": "x"}}, {"c": {"id": 7}}, {"c": {"id": None}}, {"c": {"id": {"b": 1, "a": 2}}}]
    assert [task.key for task in agent_tasks(inputs, "c.id")] == ["x", "7", "null", '{"a": 2, "b": 1}']


@pytest.mark.parametrize("value", [{"c": {}}, {"c": "x"}, {"d": 1}, "text", None, [{"c": {"id": 1}}]])
def test_a_task_without_its_key_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^tasks\.key: task 2 has no field 'c\.id'"):
        agent_tasks([{"c": {"id": 1}}, value], "c.id")
