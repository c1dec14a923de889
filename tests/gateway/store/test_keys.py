"""Order of keys is order of names and numbers: that is what a range scan of the tape relies on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.store import keys

ids = st.from_regex(ID_PATTERN, fullmatch=True)
u32s = st.integers(0, 0xFFFFFFFF)
u64s = st.integers(0, 0xFFFFFFFFFFFFFFFF)
places = st.tuples(ids, ids, u32s)


@given(places, places)
def test_head_keys_sort_as_their_tuples(a: tuple[str, str, int], b: tuple[str, str, int]) -> None:
    assert (keys.summary_key(*a) < keys.summary_key(*b)) == (a < b)


@given(u64s, ids, u64s, ids)
def test_places_sort_by_number_and_come_back(a: int, first: str, b: int, second: str) -> None:
    one, other = keys.place_key(a, first), keys.place_key(b, second)
    assert (one < other) == ((a, first) < (b, second))
    assert (keys.to_number(one), keys.attempt_of_place(one)) == (a, first)


@given(u64s, u64s)
def test_numbers_sort(a: int, b: int) -> None:
    assert (keys.number(a) < keys.number(b)) == (a < b)


@given(places, st.binary(max_size=40))
def test_head_keys_come_back_whatever_follows(place: tuple[str, str, int], rest: bytes) -> None:
    key = keys.summary_key(*place)
    assert keys.split_head_key(key + rest) == place
    assert keys.summary_key_length(key + rest) == len(key)
    assert key == keys.attempt_key(*place[:2]) + keys.u32(place[2])


@given(ids, ids)
def test_attempt_keys_come_back(rollout: str, attempt: str) -> None:
    assert keys.split_attempt_key(keys.attempt_key(rollout, attempt)) == (rollout, attempt)


@given(ids, ids, places)
def test_a_prefix_holds_only_its_own(rollout: str, attempt: str, place: tuple[str, str, int]) -> None:
    assert keys.summary_key(*place).startswith(keys.rollout_key(rollout)) == (place[0] == rollout)
    assert keys.summary_key(*place).startswith(keys.attempt_key(rollout, attempt)) == (place[:2] == (rollout, attempt))


@given(st.lists(u64s))
def test_numbers_in_a_row_come_back(numbers: list[int]) -> None:
    row = keys.numbers(numbers)
    assert keys.to_numbers(row) == numbers
    assert all(keys.to_number(row[8 * at :]) == value for at, value in enumerate(numbers))
