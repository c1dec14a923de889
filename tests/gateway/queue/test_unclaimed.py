"""Attempts that nobody has claimed, by the time at which they are to be looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.queue.unclaimed import Unclaimed

IDS = st.from_regex(r"\A[A-Za-z0-9._-]{1,128}\Z")
BATCHES = st.lists(st.tuples(st.integers(0, 50), st.lists(st.tuples(IDS, IDS), max_size=4)), max_size=6)


@given(BATCHES, st.integers(0, 400))
def test_each_is_taken_once_when_it_is_due_and_not_before(
    batches: list[tuple[int, list[tuple[str, str]]]], until: int
) -> None:
    unclaimed, due, early, late = Unclaimed(), 0, list[tuple[str, str, int]](), list[tuple[str, str, int]]()
    for later, names in batches:
        due += later
        unclaimed.add(names, due)
        (early if due <= until else late).extend((*name, due) for name in names)
    assert list(unclaimed.take(until)) == early
    assert list(unclaimed.take(until)) == []
    assert list(unclaimed.take(due)) == late
