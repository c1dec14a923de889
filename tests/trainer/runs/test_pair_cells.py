"""The four cells: means over tasks, their intervals, and differences on the same tasks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from penstock.trainer.runs.prompt_rounds import CELLS, Cell, cell_lines, cell_metrics, task_difference, task_mean


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    draw, hits = random.Random(1), 0
    for _ in range(2000):
        found = task_mean([draw.gauss(0.5, 0.2) for _ in range(6)])
        hits += found.low <= 0.5 <= found.high
    assert 0.935 <= hits / 2000 <= 0.965


def test_a_task_counts_once_however_many_rollouts_it_has() -> None:
    found = task_difference({"a": [1.0, 1.0, 1.0], "b": [0.0]}, {"a": [0.0], "b": [0.0], "c": [1.0]})
    assert found is not None
    assert (found.value, found.tasks) == (0.5, 2)
    assert (found.high - 0.5, 0.5 - found.low) == (pytest.approx(12.7062 * 0.5, rel=1e-3),) * 2
    assert task_difference({"a": [1.0]}, {"b": [1.0]}) is None


def test_the_table_compares_each_cell_with_both_old() -> None:
    cells: Mapping[Cell, Mapping[str, Sequence[float]]] = {
        cell: {"a": [0.1 * at, 0.1 * at], "b": [0.1 * at + 0.2]} for at, cell in enumerate(CELLS)
    }
    lines = cell_lines(cells)
    assert lines[0] == "old prompt, old weights: 0.100 [-1.171, 1.371]"
    assert lines[3].startswith("new prompt, new weights: 0.400 ")
    assert lines[3].endswith(", +0.300 [+0.300, +0.300] against both old")
    assert cell_metrics(cells)["cells/new_old"] == pytest.approx(0.2)


def test_cells_without_rewards_are_left_out() -> None:
    cells: Mapping[Cell, Mapping[str, Sequence[float]]] = {CELLS[0]: {"a": [1.0]}, CELLS[2]: {"a": []}}
    assert cell_lines(cells) == ["old prompt, old weights: 1.000 [1.000, 1.000]"]
    assert set(cell_metrics(cells)) == {"cells/old_old", "cells/old_old_low", "cells/old_old_high"}
