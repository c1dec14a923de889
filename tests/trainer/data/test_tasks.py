"""Tasks and the endless walk through them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.data.tasks import RolloutTask, draw_tasks, read_tasks

some = st.integers(1, 12).map(lambda count: [RolloutTask(number, {"n": number}) for number in range(count)])


@given(some, st.integers(0, 40), st.integers(0, 30), st.integers(0, 5))
def test_a_walk_is_the_same_in_whatever_strides_it_is_taken(
    tasks: list[RolloutTask], start: int, count: int, seed: int
) -> None:
    whole = draw_tasks(tasks, 0, start + count, seed)
    assert draw_tasks(tasks, start, count, seed) == whole[start:]


@given(some, st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_has_every_task_once(tasks: list[RolloutTask], epoch: int, seed: int) -> None:
    found = draw_tasks(tasks, epoch * len(tasks), len(tasks), seed)
    assert sorted(task.number for task in found) == list(range(len(tasks)))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    tasks = [RolloutTask(number, number) for number in range(50)]
    orders = [draw_tasks(tasks, epoch * 50, 50, seed) for epoch in range(2) for seed in range(2)]
    assert all(one != other for place, one in enumerate(orders) for other in orders[:place])


def test_a_file_is_read_and_what_is_wrong_with_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "why?"}\n\n7\n')
    assert read_tasks("rollouts.tasks", path) == [RolloutTask(0, {"question": "why?"}), RolloutTask(1, 7)]
    path.write_text('{"question": 1}\n{oops\n')
    with pytest.raises(ConfigError, match=r"rollouts\.tasks: .*tasks\.jsonl, line 2: not JSON"):
        read_tasks("rollouts.tasks", path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no tasks"):
        read_tasks("rollouts.tasks", path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tasks("rollouts.tasks", tmp_path / "none.jsonl")


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('"one\u2028two\x85three"\r\n"four"\n', encoding="utf-8", newline="")
    assert [task.input for task in read_tasks("rollouts.tasks", path)] == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "\\ud83d"}', "half a character"),
        ('{"question": NaN}', "NaN is no number in JSON"),
        ("[" * 100_000, "recursion"),
        ("1" * 5000, "digits"),
    ],
)
def test_what_can_not_be_sent_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'"\\ud83d\\ude00"\n{line}\n')
    with pytest.raises(ConfigError, match=rf"tasks\.jsonl, line 2: cannot be used: .*{said}"):
        read_tasks("rollouts.tasks", path)
