"""Attempts that nobody has claimed, by the time at which they are to be looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.queue.unclaimed import STEP_NS, Unclaimed, spread

IDS = st.from_regex(r"\A[A-Za-z0-9._-]{1,128}\Z")
NAMES = st.lists(st.tuples(IDS, IDS), max_size=4)
TIMES = st.integers(0, 50 * STEP_NS)


@given(st.lists(st.tuples(TIMES, NAMES, st.booleans()), max_size=6), TIMES)
def test_each_is_taken_once_when_it_is_due_and_not_before(
    batches: list[tuple[int, list[tuple[str, str]], bool]], until: int
) -> None:
    unclaimed, others, added = Unclaimed(), Unclaimed(), list[tuple[str, str, int]]()
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
    found = spread(pieces, 10 * STEP_NS, 3 * STEP_NS)
    for at, piece in enumerate(pieces):
        due = (10 + 3 * at) * STEP_NS
        assert list(found.take(due)) == [(*name, due) for name in piece]
