"""What a gateway warns of when it starts."""

from __future__ import annotations

import logging
import tomllib

import pytest

from penstock.gateway.config import Config
from penstock.gateway.model.prices import Prices
from penstock.gateway.server.cautions import warn

TWO = """
[[upstream]]
name = "one"
base_url = "{one}"

[[upstream]]
name = "two"
base_url = "{two}"
{more}

[[route]]
model = "*"
upstream = ["one", "two"]

[[route]]
model = "gpt-4o"
upstream = ["one", "two"]
"""
OWN = "http://10.0.0.7:8000/v1"


def warnings(toml: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "penstock"):
        warn(Config.model_validate(tomllib.loads(toml)), Prices(None))
    return [said for said in caplog.messages if "list of prices" not in said]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("https://api.openai.com/v1", "https://openrouter.ai/api/v1"),
        (OWN, "https://api.openai.com/v1"),
        ("https://api.openai.com/v1", "https://8.8.8.8/v1"),
    ],
)
def test_an_upstream_that_gets_the_key_of_another_provider_is_named_once(
    one: str, two: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(TWO.format(one=one, two=two, more=""), caplog) == [
        "upstream 'two' has no key_env: it gets the key that an agent brings for 'one', which comes first for model "
        "'*'; give it a key of its own"
    ]


@pytest.mark.parametrize(
    ("one", "two", "more"),
    [
        ("https://api.openai.com/v1", "https://eu.api.openai.com/v1", ""),
        ("https://api.openai.com/v1", OWN, ""),
        (OWN, "http://localhost:8001/v1", ""),
        (OWN, "http://vllm-2:8001/v1", ""),
        (OWN, "http://vllm-2.models.svc.cluster.local/v1", ""),
        ("https://api.openai.com/v1", "https://openrouter.ai/api/v1", 'key_env = "OTHER_KEY"'),
    ],
)
def test_replicas_engines_of_ones_own_and_those_with_a_key_are_not(
    one: str, two: str, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(TWO.format(one=one, two=two, more=more), caplog) == []


BUDGET = """
[[budget]]
name = "day"
unit = "usd"
limit = 1.0
window = "1h"
{more}

[[route]]
model = "policy"
upstream = "openai"
{alias}
"""


@pytest.mark.parametrize(
    ("more", "alias", "count"),
    [
        ("", "", 1),
        ('model = "gpt-*"', "", 0),
        ('unpriced = "free"', "", 0),
        ("", 'alias = "gpt-4o"', 0),
    ],
)
def test_a_model_without_a_price_is_named_where_a_budget_counts_it(
    more: str, alias: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    said = warnings(BUDGET.format(more=more, alias=alias), caplog)
    assert len(said) == count
    assert all("budget 'day' refuses calls for model 'policy' of [[route]]" in one for one in said)
