"""What calls cost."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.model import price_lists
from penstock.gateway.model.price_lists import render_toml
from penstock.gateway.model.prices import (
    BUILTIN,
    ModelPattern,
    Price,
    PriceFile,
    Prices,
    SpecialRates,
    TokenCounts,
    lookup_names,
)
from penstock.gateway.model.span import UNITS, Span, Usage
from penstock.gateway.model.toml import ConfigError

ROW = '[[price]]\nmodel = "{}"\nsince = {}\ninput = {}\noutput = {}\n'
ROWS = [("m*", "2025-01-01", 1.0, 2.0), ("m*", "2025-06-01", 10.0, 20.0), ("M-mini*", "2025-01-01", 0.5, 4.0)]
LIST = "as_of = 2026-01-01\n" + "".join(ROW.format(*row) for row in ROWS) + "cached = 0.1\ncache_write = 0.6\n"
MILLION = TokenCounts(1_000_000, 1_000_000)
BUILT_IN = Prices()


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
        (TokenCounts(1_000_000, 0), 0.5),
        (TokenCounts(1_000_000, 0, 400_000), 0.6 * 0.5 + 0.4 * 0.1),
        (TokenCounts(1_000_000, 0, 400_000, 100_000), 0.5 * 0.5 + 0.4 * 0.1 + 0.1 * 0.6),
        (TokenCounts(100, 0, 400_000), 0.4 * 0.1),
        (TokenCounts(None, 1_000_000), 4.0),
        (TokenCounts(1_000_000, None), 0.5),
        (TokenCounts(None, None), None),
    ],
)
def test_cached_tokens_have_prices_of_their_own(prices: Prices, tokens: TokenCounts, cost: float | None) -> None:
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
    prices = BUILT_IN
    assert prices.path == BUILTIN
    for one in prices.file.price:
        assert prices.price(one.model, at("2026-11-29")) == one
        assert one.input is not None
        assert one.output is not None
        assert one.source
        assert prices.cost(one.model, None, at("2026-11-29"), TokenCounts(1000, 1000)) == pytest.approx(
            (one.input + one.output + one.tools.get("call", 0.0)) / 1e3
        )
        assert one.cached is None or one.cached <= one.input


K = 100_000
USED = [(None, 3 * K, 0), ("claude-haiku-4-5", K, K), (None, K, 0)]
PARTS = [[*used, None, None, None] for used in USED]


@pytest.mark.parametrize(
    ("model", "tokens", "cost"),
    [
        ("claude-sonnet-4-5-20250929", TokenCounts(K, 0, None, K), 0.375),
        ("claude-sonnet-4-5-20250929", TokenCounts(K, 0, None, K, None, {"cache_write_long": K}), 0.6),
        ("claude-opus-4-5-20251101", TokenCounts(K, K), 3.0),
        ("claude-opus-5-5", TokenCounts(K, K, None, None, None, {"geo": "us"}), 2.64),
        ("claude-opus-5-5", TokenCounts(K, K, None, None, None, {"speed": "fast"}), 4.8),
        ("claude-opus-5-5", TokenCounts(K, K, K, None, None, {"tier": "batch"}), 1.01),
        ("claude-opus-5-5", TokenCounts(K, 0, None, K, None, {"tier": "batch", "cache_write_long": K}), 0.4),
        ("claude-sonnet-4-20250514", TokenCounts(2 * K, 1000), 0.615),
        ("claude-sonnet-4-20250514", TokenCounts(3 * K, 1000), 1.8225),
        (
            "claude-sonnet-4-5",
            TokenCounts(1000, 0, None, None, None, {"calls": {"web_search": 10, "web_fetch": 3}}),
            0.103,
        ),
        ("claude-sonnet-4", TokenCounts(5 * K, K, None, None, None, {"parts": PARTS}), 1.8 + 0.1 + 0.5 + 0.3),
        ("gpt-5-2025-08-07", TokenCounts(K, K, None, None, None, {"tier": "flex"}), 0.5625),
        ("gpt-5-2025-08-07", TokenCounts(K, K, None, None, K, {"tier": "priority"}), 2.25),
        ("gpt-5-pro-2025-10-06", TokenCounts(K, K), 13.5),
        ("gpt-6.1-sol", TokenCounts(3 * K, K), 2.7),
        ("gpt-6.1-sol", TokenCounts(3 * K, K, None, None, None, {"tier": "ultrafast"}), 16.2),
        ("gpt-6.1-sol", TokenCounts(K, 0, None, K, None, {"cache_write_long": K}), 0.5),
        (
            "gpt-4o-audio-preview",
            TokenCounts(K, K, None, None, None, {"input_audio": K, "output_audio": K // 2}),
            4.0 + 4.5,
        ),
        ("gemini-2.5-flash", TokenCounts(K, 0, K // 2, None, None, {"input_audio": K, "cached_audio": K // 2}), 0.055),
        ("gemini-2.5-pro", TokenCounts(3 * K, K), 2.25),
        ("gemini-2.5-flash", TokenCounts(0, 0, None, None, None, {"calls": {"grounding": 1, "web_search": 3}}), 0.035),
        ("gemini-3.8-flash", TokenCounts(0, 0, None, None, None, {"calls": {"grounding": 1, "web_search": 3}}), 0.042),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", TokenCounts(K, K), 1.98),
        ("us-gov.anthropic.claude-opus-5-5-v1:0", TokenCounts(K, K), 2.88),
        ("us-gov.anthropic.claude-haiku-4-5-20251001-v1:0", TokenCounts(K, K), 0.72),
        ("us.openai.gpt-6.1-sol-v1:0", TokenCounts(K, K), 1.32),
        ("global.openai.gpt-6.1-sol-v1:0", TokenCounts(K, K), 1.2),
        ("grok-4.7", TokenCounts(0, 0, None, None, None, {"calls": {"web_search": 4, "live_search": 2}}), 0.07),
        ("anthropic/claude-sonnet-4.5", TokenCounts(K, K), 1.8),
        ("anthropic/claude-sonnet-4.5", TokenCounts(K, K, None, None, None, {"cost": 0.315}), 0.315),
        ("nobody-knows", TokenCounts(K, K, None, None, None, {"cost": 0.0}), 0.0),
        ("nobody-knows", TokenCounts(K, K), None),
        ("claude-sonnet-4", TokenCounts(K, K, None, None, None, {"parts": [["nobody-knows", 1, 1, 0, 0, 0]]}), None),
    ],
)
def test_bills(model: str, tokens: TokenCounts, cost: float | None) -> None:
    found = BUILT_IN.cost(model, None, at("2026-11-29"), tokens)
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
    assert any(map(ModelPattern(pattern).matches, lookup_names(name))) is matches


def test_ones_own_row_goes_before_a_listed_one_and_a_model_without_a_price_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "prices.toml"
    row = '[[price]]\nmodel = "{}"\ninput = {}\noutput = 0.0\n'
    path.write_text("as_of = 2026-01-01\n" + row.format("m-1", 5) + 'source = "s"\n' + row.format("m-*", 7))
    prices = Prices(path)
    caplog.set_level("DEBUG", "penstock.prices")
    assert prices.cost("m-1", None, 1, MILLION) == 7.0
    assert [prices.cost(name, None, 1, MILLION) for name in ("x", "x", "y")] == [None] * 3
    assert [message.split("'")[1] for message in caplog.messages] == ["x", "y"]


COUNT = st.integers(0, 10**6)
HEARD = {"cache_write_long": COUNT, "input_audio": COUNT, "output_audio": COUNT}
TIER = st.sampled_from(["batch", "flex", "priority", "ultrafast", "x"])
PLACE = {"geo": st.just("us"), "speed": st.just("fast"), "tier": TIER}
BILLED = st.fixed_dictionaries({}, optional=PLACE | HEARD)
EVERYTHING = b'"service_tier" "ttl" audio'


@example("claude-opus-4-6", 1, 0, 0, 0, {"geo": "us", "speed": "fast"})
@given(st.sampled_from(sorted({one.model for one in BUILT_IN.file.price})), COUNT, COUNT, COUNT, COUNT, BILLED)
def test_no_call_costs_more_than_is_reserved_for_it(
    model: str, read: int, made: int, cached: int, written: int, billed: dict[str, Any]
) -> None:
    price = BUILT_IN.price(model, at("2026-11-29"))
    cached = min(cached, read)
    tokens = TokenCounts(read, made, cached, min(written, read - cached), min(made, 100), billed)
    assert price is not None
    assert 0 <= price.cost(tokens) <= price.most(read, made, EVERYTHING) * (1 + 1e-9)
    plain = tokens._replace(billed=None)
    assert price.cost(plain) <= price.most(read, made, b"{}") * (1 + 1e-9) <= price.most(read, made, EVERYTHING) * 1.1


@given(st.text(max_size=20), st.integers(0, 2**62), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_no_cost_is_below_zero(model: str, start: int, read: int, made: int, cached: int) -> None:
    cost = BUILT_IN.cost(model, "gpt-4o", start, TokenCounts(read, made, cached, cached))
    assert cost is None or cost >= 0


# -- lists from elsewhere, and what they change ------------------------------------------------------------------------


DAY = date(2026, 11, 29)
BOTH = {"input_cost_per_token": 2e-6, "output_cost_per_token": "1e-5", "litellm_provider": "openai", "mode": "chat"}

LONG = SpecialRates(tier="priority", above=200_000, input=4.0)
XAI = {"litellm_provider": "xai"}
RANGES = [(0, 1e-6), (32e3, 3e-6)]


def listed(path: Path, **models: Any) -> PriceFile:
    path.write_text(json.dumps({"sample_spec": {"input_cost_per_token": 0, "mode": "one of: chat"}} | models))
    return price_lists.load(path, DAY)


TWELVE_HOURS = "cache_creation_input_token_cost_above_12hr_above_272k_tokens_batches"
BY_SIZE = {"search_context_size_low": 0.035}
TIERS = [{"range": [start, 1e6], "input_cost_per_token": cost} for start, cost in RANGES]
AUDIO = {"input_cost_per_audio_token": 4e-5, "output_cost_per_image_token": 3e-5}
WRITES = {"cache_creation_input_token_cost": 5e-6, "cache_creation_input_token_cost_above_1hr": 8e-6}
KEYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cache_read_input_token_cost": 1e-7}, {"cached": 0.1}),
    ({"cache_creation_input_token_cost_above_1hr": 5e-6}, {"cache_write_long": 5.0}),
    ({"input_cost_per_token_priority_above_200k_tokens": 4e-6}, {"rates": [LONG]}),
    ({"input_cost_per_token_above_200k_tokens_priority": 4e-6}, {"rates": [LONG]}),
    ({TWELVE_HOURS: 5e-6}, {"rates": [SpecialRates(tier="batch", above=272_000, cache_write_long=5.0)]}),
    ({"output_cost_per_token_above_128k_tokens": 2e-5} | XAI, {"rates": [SpecialRates(above=127_999, output=20.0)]}),
    ({"output_cost_per_reasoning_token": 1e-5}, {"reasoning": None}),
    ({"output_cost_per_reasoning_token": 3e-6}, {"reasoning": 3.0}),
    (AUDIO, {"input_audio": 40.0, "output_image": 30.0}),
    ({"search_context_cost_per_query": {"search_context_size_medium": 0.01}}, {"tools": {"web_search": 10.0}}),
    ({"search_context_cost_per_query": BY_SIZE, "litellm_provider": "gemini"}, {"tools": {"grounding": 35.0}}),
    ({"provider_specific_entry": {"us": 1.1, "fast": 2, "other": "x"}}, {"factors": {"us": 1.1, "fast": 2.0}}),
    (
        {"tiered_pricing": TIERS},
        {"input": 1.0, "rates": [SpecialRates(above=32_000, input=3.0, cached=3.0, cache_write=3.0)]},
    ),
    (
        WRITES | {"cache_creation_input_token_cost_batches": 2.5e-6},
        {"rates": [SpecialRates(tier="batch", cache_write=2.5, cache_write_long=4.0)]},
    ),
    ({"input_cost_per_second": 1e-4, "cache_read_input_token_cost": None}, {"rates": [], "tools": {}}),
]


@pytest.mark.parametrize(("fields", "said"), KEYS)
def test_litellms_keys(tmp_path: Path, fields: dict[str, Any], said: dict[str, Any]) -> None:
    (price,) = listed(tmp_path / "list.json", m=BOTH | fields).price
    assert (price.model, price.output) == ("m", 10.0)
    assert {name: getattr(price, name) for name in said} == said


def test_tools_of_a_provider_have_prices_that_litellms_list_does_not_have(tmp_path: Path) -> None:
    (price,) = listed(tmp_path / "list.json", **{"xai/grok-9": BOTH | XAI}).price
    assert price.tools == next(one.tools for one in BUILT_IN.file.price if one.model == "grok-4.7")


def test_what_is_no_row_of_its_own(tmp_path: Path) -> None:
    names = ("gpt-9", "gpt-9-2026-01-01", "openai/gpt-9", "gpt-9-mini", "xai/grok-9", "bedrock/*/gpt-9")
    others: dict[str, Any] = {
        "1024-x-1024/pictures": {"mode": "image_generation", "output_cost_per_image": 0.1},
        "pages": {"mode": "ocr", "ocr_cost_per_page": 0.1},
        "embed": {"input_cost_per_token": 1e-7, "mode": "embedding"},
        "newest": {"alias_of": "gpt-9"},
    }
    found = listed(tmp_path / "list.json", **dict.fromkeys(names, BOTH), **others)
    assert sorted(one.model for one in found.price) == ["embed", "gpt-9", "gpt-9-mini", "grok-9", "newest"]


UNIT_ENTRIES = [
    ({"mode": "audio_transcription", "input_cost_per_second": 1e-4, "output_cost_per_second": 1e-4}, {"second": 1e-4}),
    ({"mode": "audio_transcription", "input_cost_per_second": 3e-5, "output_cost_per_second": 0.0}, {"second": 3e-5}),
    ({"mode": "audio_speech", "input_cost_per_character": 1.5e-5}, {"character": 1.5e-5}),
    ({"mode": "image_generation", "output_cost_per_image": 0.04}, {"image": 0.04}),
    ({"mode": "video_generation", "output_cost_per_video_per_second": 0.1}, {"second": 0.1}),
]


@pytest.mark.parametrize(("entry", "units"), UNIT_ENTRIES)
def test_prices_by_the_second_the_character_and_the_image(
    tmp_path: Path, entry: dict[str, Any], units: dict[str, float]
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(render_toml(listed(tmp_path / "list.json", m=entry)))
    prices, (unit, price) = Prices(path), next(iter(units.items()))
    assert prices.file.price[0].units == units
    many = next(name for name, it in UNITS.items() if it == unit)
    used = TokenCounts(None, None, billed={many: 30.0, "tier": "batch"})
    assert prices.cost("m", None, at("2026-11-29"), used) == pytest.approx(30 * price)
    assert prices.file.price[0].most(10**6, 10**6, b"", {many: 30.0}) == pytest.approx(30 * price)
    other = next(name for name in UNITS if name != many)
    assert prices.cost("m", None, at("2026-11-29"), TokenCounts(None, None, billed={other: 30.0})) is None


def test_tokens_count_before_units() -> None:
    with_tokens = TokenCounts(1_000_000, 100_000, billed={"seconds": 60.0})
    assert BUILT_IN.cost("gpt-4o-transcribe", None, at("2026-11-29"), with_tokens) == pytest.approx(2.5 + 1.0)
    assert BUILT_IN.cost(
        "gpt-4o-transcribe", None, at("2026-11-29"), with_tokens._replace(input=None, output=None)
    ) == (pytest.approx(0.006))
    span = Span(rollout="r", attempt="a", sequence=1, model="nobody's", usage=Usage(billed={"characters": 3}))
    BUILT_IN.charge(span)
    assert (span.cost, span.unpriced) == (None, True)


@pytest.mark.parametrize("value", [-1e-6, "much", True, 5.0, [1], "nan", "inf", {"a": 1}])
def test_nonsense_is_refused_with_its_row_and_field(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="gpt-9: output_cost_per_token_flex"):
        listed(tmp_path / "list.json", **{"gpt-9": BOTH | {"output_cost_per_token_flex": value}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("{}", "no prices"),
        ('{"m": 1}', "m: 1"),
        ('{"m": {"mode": "chat"}}', "no prices"),
        ('{"m": {"alias_of": "n"}, "n": 5}', "n: 5"),
        ("as_of = 2026-01-01\n[[price]]\nmodel = 'm'\ninput = 1.0\n", "'m' has no price for output"),
        ("as_of = 2026-01-01\n[[price]]\nmodel = 'm'\ninput = 1.0\noutput = 1.0\ntools = {x = -1.0}\n", "'x'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match=said):
        price_lists.load(tmp_path / "list")


def price(model: str, output: float, source: str | None = "s", since: date | None = None) -> Price:
    return Price(model=model, input=1.0, output=output, source=source, since=since)


def test_ones_own_rows_stay_and_old_prices_price_older_calls(tmp_path: Path) -> None:
    own = PriceFile(as_of=date(2026, 1, 1), price=[price("a*", 9.0, None), price("b", 2.0), price("c", 3.0)])
    new = PriceFile(as_of=DAY, price=[price("a-2026-02-02", 1.0), price("b", 4.0), price("c", 3.0), price("d", 5.0)])
    file, differences = price_lists.merge_price_lists(own, new)
    assert [(one.model, one.what) for one in differences] == [("a-2026-02-02", "kept"), ("b", "changed"), ("d", "new")]
    path = tmp_path / "prices.toml"
    path.write_text(price_lists.render_toml(file))
    prices, tokens = Prices(path), TokenCounts(0, 1_000_000)
    before, after = 1_767_225_600 * 10**9, 1_796_000_000 * 10**9
    costs = {name: [prices.cost(name, None, at, tokens) for at in (before, after)] for name in "abcd"}
    assert costs == {"a": [9.0, 9.0], "b": [2.0, 4.0], "c": [3.0, 3.0], "d": [5.0, 5.0]}
    assert price_lists.merge_price_lists(file, new).file == file


def test_a_row_of_ones_own_stands_beside_the_one_that_it_goes_before(tmp_path: Path) -> None:
    file = PriceFile(as_of=date(2026, 1, 1), price=[price("b", 2.0), price("b", 7.0, None)])
    file, differences = price_lists.merge_price_lists(file, PriceFile(as_of=DAY, price=[price("b", 4.0)]))
    assert [one.what for one in differences] == ["kept"]
    (tmp_path / "prices.toml").write_text(price_lists.render_toml(file))
    assert Prices(tmp_path / "prices.toml").cost("b-2026-02-02", None, 1, TokenCounts(0, 1_000_000)) == 7.0
    with pytest.raises(ValueError, match="two prices of 'B'"):
        PriceFile(as_of=DAY, price=[price("b", 2.0, None), price("B", 7.0, None)])


def test_the_list_that_comes_with_penstock_is_written_as_it_is() -> None:
    file = BUILT_IN.file
    head = BUILTIN.read_text().partition("as_of")[0]
    assert price_lists.render_toml(file, head) == BUILTIN.read_text()


RATES = st.fixed_dictionaries({}, optional={name: st.floats(0, 1e4) for name in ("input", "cached", "output_audio")})
TOOLS = st.dictionaries(st.text(max_size=5), st.floats(0, 1e5), max_size=2)


@st.composite
def priced(draw: st.DrawFn) -> Price:
    rates = [{"tier": "x\"'"} | one for one in draw(st.lists(RATES, max_size=2))]
    own: dict[str, Any] = {"input": 1.0, "output": 2.0} | draw(RATES)
    name = draw(st.text(min_size=1, max_size=9))
    return Price.model_validate(own | {"model": name, "rates": rates, "tools": draw(TOOLS)})


@given(st.lists(priced(), min_size=1, max_size=4, unique_by=lambda one: one.model.lower()))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Price]) -> None:
    path = tmp_path_factory.mktemp("lists") / "prices.toml"
    file = PriceFile(as_of=DAY, price=rows)
    path.write_text(price_lists.render_toml(file), encoding="utf-8")
    assert price_lists.load(path) == file
