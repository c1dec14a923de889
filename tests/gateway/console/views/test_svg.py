"""Charts: ticks stand where they say, a single value is seen, and the pointer shows the values of the chart."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.console.views.svg import DAY, SECOND, Chart, LineSeries, Tick, svg, ticks

ENDS = st.floats(-1e15, 1e15) | st.floats(-2, 2)
T0 = 1_790_000_000 * SECOND
"""2026-09-21 14:13:20 UTC."""


def check(found: list[Tick], low: float, high: float) -> None:
    assert len({label for _, label in found}) == len(found)
    assert all(low <= value <= high for value, _ in found)
    gaps = [other.value - one.value for one, other in pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-9, abs=1e-15 * max(abs(low), abs(high))) for gap in gaps)


@given(ENDS, ENDS)
@example(0, 2)
@example(0.1, 0.30000000000000004)
@example(1e9, 3e9)
@example(0, 1e-9)
def test_ticks_are_evenly_spaced_and_stand_where_they_say(one: float, other: float) -> None:
    low, high = sorted((one, other))
    if high - low <= 1e-13 * max(abs(low), abs(high)):
        return
    found = ticks(low, high)
    check(found, low, high)
    assert 2 <= len(found) <= 7
    assert all(float(label.replace(",", "")) == value for value, label in found)
    whole = ticks(low, high, "whole")
    check(whole, low, high)
    assert all(value.is_integer() and float(label.replace(",", "")) == value for value, label in whole)


def test_three_steps_have_three_ticks() -> None:
    """They were once labelled 1, 2, 2, 2 and 3."""
    assert [label for _, label in ticks(1, 3, "whole")] == ["1", "2", "3"]
    assert [label for _, label in ticks(11.5, 12.5, "whole")] == ["12"]


@given(st.integers(0, 10**4 * DAY), st.integers(2 * SECOND, 4000 * DAY))
@example(T0, 1 * DAY)
def test_ticks_of_time_stand_where_they_say(low: int, span: int) -> None:
    found = ticks(low, low + span, "time", 4)
    check(found, low, low + span)
    for value, label in found:
        whole = datetime.fromtimestamp(value / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S")
        rest = whole.partition(label)[2]
        assert label in whole
        assert re.fullmatch(r"( 00:00:00|:00)?", rest), "what is not said is nought"


def test_one_value_is_a_mark_with_its_interval() -> None:
    line = LineSeries("test", [(200.0, 0.74)], intervals={200.0: (0.62, 0.83)})
    made = svg(Chart("Test", "", [line], "step"), "c")
    assert re.search(r'<path class="line s0 mark only" d="M251\.0 \S+h0\.1"/>', made), "in the middle"
    assert re.search(r'class="value"[^>]*>0\.74 \(0\.62 to 0\.83\)</text>', made)
    assert re.search(r'class="line s0 only" d="M247\.0 \S+h8m-4 0V\S+m-4 0h8"', made), "the ends of its interval"


def test_a_series_without_a_value_has_an_empty_chart() -> None:
    made = svg(Chart("kl", "", [LineSeries("a", [])], "step"), "c")
    assert "line" not in made
    assert 'class="at"' not in made


def test_the_values_under_the_pointer_are_those_of_the_chart() -> None:
    lines = [LineSeries("a", [(float(x), x / 10) for x in range(100)], 1), LineSeries("b" * 40, [(99.0, 5.0)], 2)]
    made = svg(Chart("Reward", "", lines, "step"), "c")
    columns = [re.findall(r">([^<>]+)</text>", column) for column in made.split('<g class="at">')[1:]]
    assert len(columns) <= 50
    assert columns[0] == ["step 0", "a: 0"]
    assert columns[-1] == ["step 99", "a: 9.9", f"{'b' * 23}…: 5"]
    places = [
        tuple(map(float, found)) for found in re.findall(r'"at"><rect x="([\d.]+)" y="12" width="([\d.]+)"', made)
    ]
    assert all(left + wide == pytest.approx(right, abs=0.2) for (left, wide), (right, _) in pairwise(places))
