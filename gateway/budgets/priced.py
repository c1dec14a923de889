"""Whether the list of prices is one that budgets in money can be counted by: looked at before the gateway starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from penstock.gateway.config import Config
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.upstream_settings import Route

_log = logging.getLogger("penstock.budgets")


def prices_of(config: Config) -> Prices:
    """The list of prices. Raises `ConfigError` where budgets count another currency; says which calls they refuse."""
    prices = Prices(config.prices)
    money = [budget for budget in config.budget if budget.unit == "usd"]
    currency = prices.file.currency
    if money and currency.upper() != "USD":
        raise ConfigError(
            f"budget {money[0].name!r} has unit = 'usd', and the prices in {prices.path} are in {currency}: name a "
            "file of prices in USD, or count tokens"
        )
    unpriced = list(_unpriced(config.route, prices)) if money else []
    for budget in (budget for budget in money if budget.unpriced == "refuse"):
        for model in unpriced:
            _log.warning(
                "budget %r refuses calls for model %r of [[route]], which has no price: add one to the file that "
                '`prices` names, or set unpriced = "free"', budget.name, model,
            )  # fmt: skip
    return prices


def _unpriced(routes: list[Route], prices: Prices) -> Iterator[str]:
    """Models of routes that have no price under any of their names; patterns tell nothing."""
    for route in routes:
        aliases = route.alias.values() if isinstance(route.alias, dict) else [route.alias]
        names = [name for name in (route.model, *aliases) if name]
        if not any("*" in name or "?" in name or prices.price(name, time.time_ns()) for name in names):
            yield route.model
