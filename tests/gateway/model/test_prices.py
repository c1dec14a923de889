"""What calls cost."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.model_names import Pattern, names
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
        assert prices.price(one.model, at("2026-11-29")) == one
        assert one.input is not None
        assert one.output is not None
        assert one.source
        assert prices.cost(one.model, None, at("2026-11-29"), Tokens(1000, 1000)) == pytest.approx(
            (one.input + one.output + one.tools.get("call", 0.0)) / 1e3
        )
        assert one.cached is None or one.cached <= one.input


K = 100_000
PARTS = [
    [None, 3 * K, 0, None, None, None],
    ["claude-haiku-4-5", K, K, None, None, None],
    [None, K, 0, None, None, None],
]


@pytest.mark.parametrize(
    ("model", "tokens", "cost"),
    [
        ("claude-sonnet-4-5-20250929", Tokens(K, 0, None, K), 0.375),
        ("claude-sonnet-4-5-20250929", Tokens(K, 0, None, K, None, {"cache_write_long": K}), 0.6),
        ("claude-opus-4-5-20251101", Tokens(K, K), 3.0),
        ("claude-opus-5-5", Tokens(K, K, None, None, None, {"geo": "us"}), 2.64),
        ("claude-opus-5-5", Tokens(K, K, None, None, None, {"speed": "fast"}), 4.8),
        ("claude-opus-5-5", Tokens(K, K, K, None, None, {"tier": "batch"}), 1.01),
        ("claude-opus-5-5", Tokens(K, 0, None, K, None, {"tier": "batch", "cache_write_long": K}), 0.4),
        ("claude-sonnet-4-20250514", Tokens(2 * K, 1000), 0.615),
        ("claude-sonnet-4-20250514", Tokens(3 * K, 1000), 1.8225),
        ("claude-sonnet-4-5", Tokens(1000, 0, None, None, None, {"calls": {"web_search": 10, "web_fetch": 3}}), 0.103),
        ("claude-sonnet-4", Tokens(5 * K, K, None, None, None, {"parts": PARTS}), 1.8 + 0.1 + 0.5 + 0.3),
        ("gpt-5-2025-08-07", Tokens(K, K, None, None, None, {"tier": "flex"}), 0.5625),
        ("gpt-5-2025-08-07", Tokens(K, K, None, None, K, {"tier": "priority"}), 2.25),
        ("gpt-5-pro-2025-10-06", Tokens(K, K), 13.5),
        ("gpt-6.1-sol", Tokens(3 * K, K), 2.7),
        ("gpt-6.1-sol", Tokens(3 * K, K, None, None, None, {"tier": "ultrafast"}), 16.2),
        ("gpt-6.1-sol", Tokens(K, 0, None, K, None, {"cache_write_long": K}), 0.5),
        ("gpt-4o-audio-preview", Tokens(K, K, None, None, None, {"input_audio": K, "output_audio": K // 2}), 4.0 + 4.5),
        ("gemini-2.5-flash", Tokens(K, 0, K // 2, None, None, {"input_audio": K, "cached_audio": K // 2}), 0.055),
        ("gemini-2.5-pro", Tokens(3 * K, K), 2.25),
        ("gemini-2.5-flash", Tokens(0, 0, None, None, None, {"calls": {"grounding": 1, "web_search": 3}}), 0.035),
        ("gemini-3.8-flash", Tokens(0, 0, None, None, None, {"calls": {"grounding": 1, "web_search": 3}}), 0.042),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", Tokens(K, K), 1.98),
        ("us-gov.anthropic.claude-opus-5-5-v1:0", Tokens(K, K), 2.88),
        ("us-gov.anthropic.claude-haiku-4-5-20251001-v1:0", Tokens(K, K), 0.72),
        ("us.openai.gpt-6.1-sol-v1:0", Tokens(K, K), 1.32),
        ("global.openai.gpt-6.1-sol-v1:0", Tokens(K, K), 1.2),
        ("grok-4.7", Tokens(0, 0, None, None, None, {"calls": {"web_search": 4, "live_search": 2}}), 0.07),
        ("anthropic/claude-sonnet-4.5", Tokens(K, K), 1.8),
        ("anthropic/claude-sonnet-4.5", Tokens(K, K, None, None, None, {"cost": 0.315}), 0.315),
        ("nobody-knows", Tokens(K, K, None, None, None, {"cost": 0.0}), 0.0),
        ("nobody-knows", Tokens(K, K), None),
        ("claude-sonnet-4", Tokens(K, K, None, None, None, {"parts": [["nobody-knows", 1, 1, 0, 0, 0]]}), None),
    ],
)
def test_bills(model: str, tokens: Tokens, cost: float | None) -> None:
    found = Prices().cost(model, None, at("2026-11-29"), tokens)
    assert found == (None if cost is None else pytest.approx(cost))


SAME = [
    "gpt-5", "openai/gpt-5", "GPT-5-2025-08-07", "azure/gpt-5", "models/gpt-5", "openrouter/openai/gpt-5",
    "gpt-5@20250807",
]  # fmt: skip
OTHERS = [
    "gpt-5.1", "gpt-5-1", "gpt-5-pro", "gpt-5-mini", "gpt-5.5", "gpt-55", "gpt-5-codex", "gpt-5-2-2025-12-11",
    "gpt-5:free", "gpt-5x",
]  # fmt: skip


@pytest.mark.parametrize("listed", ["gpt-5", "gpt-5*", "GPT-5*"])
def test_a_price_ends_at_the_version(tmp_path: Path, listed: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(f'as_of = 2026-01-01\n[[price]]\nmodel = "{listed}"\ninput = 1.0\noutput = 2.0\n')
    prices = Prices(path)
    assert [name for name in SAME if prices.price(name, 1) is None] == []
    assert [name for name in OTHERS if prices.price(name, 1) is not None] == []
    # What answered is another version of what was asked for, or something else under that name.
    assert prices.cost("gpt-5.9", "gpt-5", 1, MILLION) is None
    assert prices.cost("somebody/else", "gpt-5", 1, MILLION) == 3.0


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("claude-opus-4*", "claude-opus-4-20250514", True),
        ("claude-opus-4*", "claude-opus-4-5", False),
        ("claude-opus-4*", "claude-opus-4-5-20251101", False),
        ("claude-opus-4*", "us.anthropic.claude-opus-4-20250514-v1:0", True),
        ("claude-opus-4-*", "claude-opus-4-5", False),
        ("claude-opus-4-*", "claude-opus-4-20250514", True),
        ("claude-opus-*", "claude-opus-9", True),
        ("claude-3-5-sonnet*", "claude-3.5-sonnet-20241022", True),
        ("llama-3-*", "llama-3-70b-instruct", True),
        ("llama-3-*", "llama-3-1-70b", False),
        ("qwen/*", "qwen/qwen3-8b", True),
        ("*", "anything-4", True),
        ("my-?-model", "my-x-model", True),
        ("a[b]*", "a[b]c", True),
    ],
)
def test_where_a_pattern_ends(pattern: str, name: str, matches: bool) -> None:
    assert any(map(Pattern(pattern).matches, names(name))) is matches


def test_ones_own_row_goes_before_a_listed_one_and_a_model_without_a_price_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "prices.toml"
    row = '[[price]]\nmodel = "{}"\ninput = {}\noutput = 0.0\n'
    path.write_text("as_of = 2026-01-01\n" + row.format("m-1", 5) + 'source = "s"\n' + row.format("m-*", 7))
    prices = Prices(path)
    caplog.set_level("INFO", "penstock.prices")
    assert prices.cost("m-1", None, 1, MILLION) == 7.0
    assert [prices.cost(name, None, 1, MILLION) for name in ("x", "x", "y")] == [None] * 3
    assert [message.split("'")[1] for message in caplog.messages] == ["x", "y"]


BILLED = st.fixed_dictionaries(
    {},
    optional={
        "tier": st.sampled_from(["batch", "flex", "priority", "ultrafast", "x"]),
        "geo": st.just("us"), "speed": st.just("fast"), "cache_write_long": st.integers(0, 10**6),
        "input_audio": st.integers(0, 10**6), "output_audio": st.integers(0, 10**6),
    },
)  # fmt: skip
EVERYTHING = b'"service_tier" "ttl" audio'


@given(
    st.sampled_from(sorted({one.model for one in Prices().file.price})),
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), BILLED,
)  # fmt: skip
def test_no_call_costs_more_than_is_reserved_for_it(
    model: str, read: int, made: int, cached: int, written: int, billed: dict[str, Any]
) -> None:
    price = Prices().price(model, at("2026-11-29"))
    cached = min(cached, read)
    tokens = Tokens(read, made, cached, min(written, read - cached), min(made, 100), billed)
    assert price is not None
    assert 0 <= price.cost(tokens) <= price.most(read, made, EVERYTHING) * (1 + 1e-9)
    plain = tokens._replace(billed=None)
    assert price.cost(plain) <= price.most(read, made, b"{}") * (1 + 1e-9) <= price.most(read, made, EVERYTHING) * 1.1


@given(st.text(max_size=20), st.integers(0, 2**62), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_no_cost_is_below_zero(model: str, start: int, read: int, made: int, cached: int) -> None:
    cost = Prices().cost(model, "gpt-4o", start, Tokens(read, made, cached, cached))
    assert cost is None or cost >= 0
