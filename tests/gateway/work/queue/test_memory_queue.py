"""The queue in memory, and attempts that nobody has claimed by the time at which they are to be looked at."""

from __future__ import annotations

from heapq import heapify

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.work import queue as work_queue
from penstock.gateway.work.dispatcher import STEP_NS, UnclaimedAttempts, stagger_checks
from penstock.gateway.work.queue import MemoryQueue

IDS = st.from_regex(r"\A[A-Za-z0-9._-]{1,128}\Z")
NAMES = st.lists(st.tuples(IDS, IDS), max_size=4)
TIMES = st.integers(0, 50 * STEP_NS)


def key(mode: int, number: int) -> bytes:
    return bytes([mode]) + number.to_bytes(8)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 30))))
def test_the_most_urgent_comes_next_whatever_was_removed(steps: list[tuple[bool, int, int]]) -> None:
    queue, model = MemoryQueue(), set[bytes]()
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

    monkeypatch.setattr(work_queue, "heapify", counting)
    queue = MemoryQueue()
    for number in range(10_000):
        queue.add(key(1, number), f"r{number}")
        if number >= 10:
            queue.remove(key(1, number - 10))
    assert 100 < len(rebuilt) < 1000
    assert max(rebuilt) <= 10
    assert queue.next([1]) == (key(1, 9_990), "r9990")


@given(st.lists(st.tuples(TIMES, NAMES, st.booleans()), max_size=6), TIMES)
def test_each_is_taken_once_when_it_is_due_and_not_before(
    batches: list[tuple[int, list[tuple[str, str]], bool]], until: int
) -> None:
    unclaimed, others, added = UnclaimedAttempts(), UnclaimedAttempts(), list[tuple[str, str, int]]()
    for due, names, elsewhere in batches:
        (others if elsewhere else unclaimed).add(names, due)
        added += [(*name, due) for name in names]
    unclaimed.join(others)
    early, late = list(unclaimed.take(until)), list(unclaimed.take(51 * STEP_NS))
    assert [due for _, _, due in early + late] == sorted(due for _, _, due in early + late)
    assert all(due <= until for _, _, due in early)
    assert all(due > until for _, _, due in late)
    # None is lost, none comes before its time, and none comes a step late.
    for (*name, found), (*said, due) in zip(sorted(early + late), sorted(added), strict=True):
        assert name == said
        assert due <= found < due + STEP_NS
    assert list(unclaimed.take(1 << 62)) == []


@given(st.lists(NAMES, max_size=6))
def test_pieces_come_one_after_the_other(pieces: list[list[tuple[str, str]]]) -> None:
    found = stagger_checks(pieces, 10 * STEP_NS, 3 * STEP_NS)
    for at, piece in enumerate(pieces):
        due = (10 + 3 * at) * STEP_NS
        assert list(found.take(due)) == [(*name, due) for name in piece]
