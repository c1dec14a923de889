"""Lengths of time have one notation, in filters and in every option."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.client import console
from penstock.gateway.client.console import Failure
from penstock.gateway.model.times import NOTATION, UNITS, nanoseconds, seconds
from penstock.sidecar import settings


@given(st.integers(0, 10**9 - 1), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_a_number_and_a_unit(whole: int, thousandths: int, unit: str) -> None:
    assert nanoseconds(f"{whole}{unit}") == pytest.approx(whole * UNITS[unit])
    assert nanoseconds(f"{whole}.{thousandths:03}{unit}") == pytest.approx((whole + thousandths / 1000) * UNITS[unit])


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1,5h", "1 s", "1S", "1w", ".5s", "1.s", "1m30s", "1e3s", "²s"])
def test_anything_else_is_none(text: str) -> None:
    assert nanoseconds(text) is None


@given(st.text(max_size=8) | st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,2})?(us|ms|s|m|h|d)", fullmatch=True))
def test_every_option_takes_the_same(text: str) -> None:
    """`enqueue --timeout` and `run --timeout`, in particular."""
    told = {read(text) for read in (by_enqueue, by_run)}
    assert len(told) == 1
    assert told == {(nanoseconds(text) or 0) / 10**9 or f"--timeout: {text!r} is not a time: {NOTATION}"}


def by_enqueue(text: str) -> float | str:
    try:
        return console.seconds("--timeout", text)
    except Failure as e:
        return str(e)


def by_run(text: str) -> float | str:
    try:
        return settings.seconds("--timeout", text)
    except settings.UsageError as e:
        return str(e)


def test_a_wrong_one_names_option_value_and_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"^--lease: '0s' is not a time: a number above 0 and us, ms, s, m, h or d, such"
    ):
        seconds("--lease", "0s")
