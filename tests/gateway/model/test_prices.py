"""What calls cost."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.prices import BUILTIN, Prices, Tokens
from penstock.gateway.model.toml import ConfigError

LIST = """
as_of = 2026-01-01
[[price]]
model = "m*"
since = 2025-01-01
input = 1.0
output = 2.0
[[price]]
model = "m*"
since = 2025-06-01
input = 10.0
output = 20.0
[[price]]
model = "M-mini*"
since = 2025-01-01
input = 0.5
output = 4.0
cached = 0.1
cache_write = 0.6
"""
MILLION = Tokens(1_000_000, 1_000_000)


def at(day: str) -> int:
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 10**9


@pytest.fixture
def prices(tmp_path: Path) -> Prices:
    path = tmp_path / "prices.toml"
    path.write_text(LIST)
    return Prices(path)


@pytest.mark.parametrize(
    ("served", "asked", "day", "cost"),
    [
        ("m-1", None, "2025-03-01", 3.0),
        ("m-1", None, "2025-06-01", 30.0),
        ("m-1", None, "2024-12-31T23:59:59", None),
        ("m-mini-2", None, "2025-07-01", 4.5),
        ("M-MINI", "m-1", "2025-07-01", 4.5),
        ("other", "m-1", "2025-03-01", 3.0),
        (None, "m-1", "2025-03-01", 3.0),
        ("other", None, "2025-03-01", None),
        (None, None, "2025-03-01", None),
        ("", "", "2025-03-01", None),
    ],
)
def test_the_longest_pattern_counts_and_its_price_of_that_day(
    prices: Prices, served: str | None, asked: str | None, day: str, cost: float | None
) -> None:
    assert prices.cost(served, asked, at(day), MILLION) == cost
    assert prices.cost(served, asked, at(day), MILLION) == cost  # by what it remembers


@pytest.mark.parametrize(
    ("tokens", "cost"),
    [
        (Tokens(1_000_000, 0), 0.5),
        (Tokens(1_000_000, 0, 400_000), 0.6 * 0.5 + 0.4 * 0.1),
        (Tokens(1_000_000, 0, 400_000, 100_000), 0.5 * 0.5 + 0.4 * 0.1 + 0.1 * 0.6),
        (Tokens(100, 0, 400_000), 0.4 * 0.1),
        (Tokens(None, 1_000_000), 4.0),
        (Tokens(1_000_000, None), 0.5),
        (Tokens(None, None), None),
    ],
)
def test_cached_tokens_have_prices_of_their_own(prices: Prices, tokens: Tokens, cost: float | None) -> None:
    found = prices.cost("m-mini", None, at("2025-07-01"), tokens)
    assert found == (None if cost is None else pytest.approx(cost))


def test_another_list_has_another_digest(tmp_path: Path, prices: Prices) -> None:
    path = tmp_path / "other.toml"
    path.write_text(LIST.replace("input = 1.0", "input = 1.5"))
    assert Prices(path).digest != prices.digest
    path.write_text("# a comment\n" + LIST)
    assert Prices(path).digest == prices.digest


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("input = 1.0", "input = -1.0", "price 1: input"),
        ("input = 1.0", "inputs = 1.0", "inputs: unknown key"),
        ("since = 2025-06-01", "since = 2025-01-01", "there are two prices of 'm\\*' since 2025-01-01"),
        ("as_of = 2026-01-01", "", "as_of"),
        ("[[price]]", "[[price", "cannot be read as TOML"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(LIST.replace(old, new, 1) if old != "since = 2025-06-01" else LIST.replace(old, new))
    with pytest.raises(ConfigError, match=said):
        Prices(path)
    with pytest.raises(ConfigError, match="does not exist"):
        Prices(tmp_path / "none.toml")


def test_the_list_that_comes_with_penstock_can_be_read_and_prices_what_it_names() -> None:
    prices = Prices()
    assert prices.path == BUILTIN
    for one in prices.file.price:
        cost = prices.cost(one.model.replace("*", ""), None, at("2026-11-01"), MILLION)
        assert cost == pytest.approx(one.input + one.output), one.model
        assert one.output >= 0 <= one.input
        assert one.cached is None or one.cached < one.input


@given(st.text(max_size=20), st.integers(0, 2**62), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_no_cost_is_below_zero(model: str, start: int, read: int, made: int, cached: int) -> None:
    cost = Prices().cost(model, "gpt-4o", start, Tokens(read, made, cached, cached))
    assert cost is None or cost >= 0
