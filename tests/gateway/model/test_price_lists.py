"""Lists of prices from elsewhere, and what they change."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model import price_lists
from penstock.gateway.model.prices import BUILTIN, Price, PriceFile, Prices, Special, Tokens
from penstock.gateway.model.toml import ConfigError

DAY = date(2026, 11, 29)
BOTH = {"input_cost_per_token": 2e-6, "output_cost_per_token": "1e-5", "litellm_provider": "openai", "mode": "chat"}

LONG = Special(tier="priority", above=200_000, input=4.0)
RANGES = [(0, 1e-6), (32e3, 3e-6)]


def listed(path: Path, **models: Any) -> PriceFile:
    path.write_text(json.dumps({"sample_spec": {"input_cost_per_token": 0, "mode": "one of: chat"}} | models))
    return price_lists.load(path, DAY)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cache_read_input_token_cost": 1e-7}, {"cached": 0.1}),
        ({"cache_creation_input_token_cost_above_1hr": 5e-6}, {"cache_write_long": 5.0}),
        ({"input_cost_per_token_priority_above_200k_tokens": 4e-6}, {"rates": [LONG]}),
        ({"input_cost_per_token_above_200k_tokens_priority": 4e-6}, {"rates": [LONG]}),
        (
            {"cache_creation_input_token_cost_above_12hr_above_272k_tokens_batches": 5e-6},
            {"rates": [Special(tier="batch", above=272_000, cache_write_long=5.0)]},
        ),
        (
            {"output_cost_per_token_above_128k_tokens": 2e-5, "litellm_provider": "xai"},
            {"rates": [Special(above=127_999, output=20.0)]},
        ),
        ({"output_cost_per_reasoning_token": 1e-5}, {"reasoning": None}),
        ({"output_cost_per_reasoning_token": 3e-6}, {"reasoning": 3.0}),
        (
            {"input_cost_per_audio_token": 4e-5, "output_cost_per_image_token": 3e-5},
            {"input_audio": 40.0, "output_image": 30.0},
        ),
        ({"search_context_cost_per_query": {"search_context_size_medium": 0.01}}, {"tools": {"web_search": 10.0}}),
        (
            {"search_context_cost_per_query": {"search_context_size_low": 0.035}, "litellm_provider": "gemini"},
            {"tools": {"grounding": 35.0}},
        ),
        ({"provider_specific_entry": {"us": 1.1, "fast": 2, "other": "x"}}, {"factors": {"us": 1.1, "fast": 2.0}}),
        (
            {"tiered_pricing": [{"range": [start, 1e6], "input_cost_per_token": cost} for start, cost in RANGES]},
            {"input": 1.0, "rates": [Special(above=32_000, input=3.0, cached=3.0, cache_write=3.0)]},
        ),
        (
            {
                "cache_creation_input_token_cost": 5e-6, "cache_creation_input_token_cost_above_1hr": 8e-6,
                "cache_creation_input_token_cost_batches": 2.5e-6,
            },
            {"rates": [Special(tier="batch", cache_write=2.5, cache_write_long=4.0)]},
        ),
        ({"input_cost_per_second": 1e-4, "cache_read_input_token_cost": None}, {"rates": [], "tools": {}}),
    ],
)  # fmt: skip
def test_litellms_keys(tmp_path: Path, fields: dict[str, Any], said: dict[str, Any]) -> None:
    (price,) = listed(tmp_path / "list.json", m=BOTH | fields).price
    assert (price.model, price.output) == ("m", 10.0)
    assert {name: getattr(price, name) for name in said} == said


def test_tools_of_a_provider_have_prices_that_litellms_list_does_not_have(tmp_path: Path) -> None:
    (price,) = listed(tmp_path / "list.json", **{"xai/grok-9": BOTH | {"litellm_provider": "xai"}}).price
    assert price.tools == next(one.tools for one in Prices().file.price if one.model == "grok-4.7")


def test_what_is_no_row_of_its_own(tmp_path: Path) -> None:
    found = listed(
        tmp_path / "list.json",
        **{
            "gpt-9": BOTH, "gpt-9-2026-01-01": BOTH, "openai/gpt-9": BOTH, "gpt-9-mini": BOTH, "xai/grok-9": BOTH,
            "bedrock/*/gpt-9": BOTH, "pictures": {"mode": "image_generation", "output_cost_per_image": 0.1},
            "embed": {"input_cost_per_token": 1e-7, "mode": "embedding"}, "newest": {"alias_of": "gpt-9"},
        },
    )  # fmt: skip
    assert sorted(one.model for one in found.price) == ["embed", "gpt-9", "gpt-9-mini", "grok-9", "newest"]


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
    file, differences = price_lists.updated(own, new)
    assert [(one.model, one.what) for one in differences] == [("a-2026-02-02", "kept"), ("b", "changed"), ("d", "new")]
    path = tmp_path / "prices.toml"
    path.write_text(price_lists.written(file))
    prices, tokens = Prices(path), Tokens(0, 1_000_000)
    before, after = 1_767_225_600 * 10**9, 1_796_000_000 * 10**9
    costs = {name: [prices.cost(name, None, at, tokens) for at in (before, after)] for name in "abcd"}
    assert costs == {"a": [9.0, 9.0], "b": [2.0, 4.0], "c": [3.0, 3.0], "d": [5.0, 5.0]}
    assert price_lists.updated(file, new).file == file


def test_a_row_of_ones_own_stands_beside_the_one_that_it_goes_before(tmp_path: Path) -> None:
    file = PriceFile(as_of=date(2026, 1, 1), price=[price("b", 2.0), price("b", 7.0, None)])
    file, differences = price_lists.updated(file, PriceFile(as_of=DAY, price=[price("b", 4.0)]))
    assert [one.what for one in differences] == ["kept"]
    (tmp_path / "prices.toml").write_text(price_lists.written(file))
    assert Prices(tmp_path / "prices.toml").cost("b-2026-02-02", None, 1, Tokens(0, 1_000_000)) == 7.0
    with pytest.raises(ValueError, match="two prices of 'B'"):
        PriceFile(as_of=DAY, price=[price("b", 2.0, None), price("B", 7.0, None)])


def test_the_list_that_comes_with_penstock_is_written_as_it_is() -> None:
    file = Prices().file
    head = BUILTIN.read_text().partition("as_of")[0]
    assert price_lists.written(file, head) == BUILTIN.read_text()


RATES = st.fixed_dictionaries({}, optional={name: st.floats(0, 1e4) for name in ("input", "cached", "output_audio")})
TOOLS = st.dictionaries(st.text(max_size=5), st.floats(0, 1e5), max_size=2)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    rates = [{"tier": "x\"'"} | one for one in draw(st.lists(RATES, max_size=2))]
    own: dict[str, Any] = {"input": 1.0, "output": 2.0} | draw(RATES)
    name = draw(st.text(min_size=1, max_size=9))
    return Price.model_validate(own | {"model": name, "rates": rates, "tools": draw(TOOLS)})


@given(st.lists(prices(), min_size=1, max_size=4, unique_by=lambda one: one.model.lower()))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Price]) -> None:
    path = tmp_path_factory.mktemp("lists") / "prices.toml"
    file = PriceFile(as_of=DAY, price=rows)
    path.write_text(price_lists.written(file), encoding="utf-8")
    assert price_lists.load(path) == file
