"""Checks before the gateway starts that budgets in money can be counted with the list of prices."""

from __future__ import annotations

from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.toml import ConfigError


def prices_of(config: GatewayConfig) -> Prices:
    """The list of prices. Raises `ConfigError` if it cannot be read, or has another currency than budgets in money."""
    try:
        prices = Prices(config.prices)
    except ConfigError as error:
        raise ConfigError(f"prices: {error}") from None
    money = [budget for budget in config.budget if budget.unit == "usd"]
    if money and (currency := prices.file.currency).upper() != "USD":
        raise ConfigError(
            f"budget {money[0].name!r} has unit = 'usd', and the prices in {prices.path} are in {currency}: name a "
            "file of prices in USD, or count tokens"
        )
    return prices
