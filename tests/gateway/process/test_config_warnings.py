"""What a gateway warns of when it starts."""

from __future__ import annotations

import logging
import tomllib

import pytest
from fakes.mistakes import tells

from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.prices import Prices
from penstock.gateway.process.services import warn

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
        warn(GatewayConfig.model_validate(tomllib.loads(toml)), Prices(None))
    return [said for said in caplog.messages if "list of prices" not in said]


@pytest.mark.parametrize(
    ("one", "two", "more", "named"),
    [
        ("https://api.openai.com/v1", "https://openrouter.ai/api/v1", "", True),
        (OWN, "https://api.openai.com/v1", "", True),
        ("https://api.openai.com/v1", "https://8.8.8.8/v1", "", True),
        ("https://api.openai.com/v1", "https://eu.api.openai.com/v1", "", False),
        ("https://api.openai.com/v1", OWN, "", False),
        (OWN, "http://localhost:8001/v1", "", False),
        (OWN, "http://vllm-2:8001/v1", "", False),
        (OWN, "http://vllm-2.models.svc.cluster.local/v1", "", False),
        ("https://api.openai.com/v1", "https://openrouter.ai/api/v1", 'key_env = "OTHER_KEY"', False),
    ],
)
def test_an_upstream_that_gets_the_key_of_another_provider_is_named_once(
    one: str, two: str, more: str, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not replicas, engines of one's own and those with a key."""
    said = warnings(TWO.format(one=one, two=two, more=more), caplog)
    assert len(said) == named
    assert all(tells(it, "upstream 'two'", "key_env", "'one'", "'*'") for it in said)


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
        ('unknown = "pass"', "", 0),
        ("", 'alias = "gpt-4o"', 0),
    ],
)
def test_a_model_without_a_price_is_named_where_a_budget_counts_it(
    more: str, alias: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    said = warnings(BUDGET.format(more=more, alias=alias), caplog)
    assert len(said) == count
    assert all(tells(it, "budget 'day'", "model 'policy' of [[route]]") for it in said)
