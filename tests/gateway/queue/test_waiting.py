"""The queue in memory."""

from __future__ import annotations

from heapq import heapify

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.queue import waiting
from penstock.gateway.queue.waiting import Waiting


def key(mode: int, number: int) -> bytes:
    return bytes([mode]) + number.to_bytes(8)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 30))))
def test_the_most_urgent_comes_next_whatever_was_removed(steps: list[tuple[bool, int, int]]) -> None:
    queue, model = Waiting(), set[bytes]()
    for adds, mode, number in steps:
        if adds:
            queue.add(key(mode, number), f"r{number}")
            model.add(key(mode, number))
        else:
            queue.remove(key(mode, number))
            model.discard(key(mode, number))
        found = queue.next([0, 1, 2])
        assert found is None if not model else found is not None and found[0][1:] == min(it[1:] for it in model)


def test_it_stays_small_where_nobody_takes_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several workers only the first hands out work; the others follow what it does."""
    rebuilt: list[int] = []

    def counting(heap: list[bytes]) -> None:
        rebuilt.append(len(heap))
        heapify(heap)

    monkeypatch.setattr(waiting, "heapify", counting)
    queue = Waiting()
    for number in range(10_000):
        queue.add(key(1, number), f"r{number}")
        if number >= 10:
            queue.remove(key(1, number - 10))
    assert 100 < len(rebuilt) < 1000
    assert max(rebuilt) <= 10
    assert queue.next([1]) == (key(1, 9_990), "r9990")
