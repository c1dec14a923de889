"""Warnings, when a gateway starts, about settings that are allowed and hardly ever intended."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.prices import Prices
from penstock.gateway.traffic.budgets.limits import Limit
from penstock.gateway.upstream_settings import RouteSettings, UpstreamSettings

_log = logging.getLogger("penstock.app")


def warn(config: GatewayConfig, prices: Prices) -> None:
    """Log a warning for each such setting."""
    old = prices.staleness_warning(time.time_ns())
    for problem in (*([old] if old else []), *_unpriced(config, prices), *_keys_of_others(config)):
        _log.warning("%s", problem)


def _unpriced(config: GatewayConfig, prices: Prices) -> Iterator[str]:
    """Yield models of routes that a budget in money refuses, because they have no price."""
    now = time.time_ns()
    money = [Limit(one) for one in config.budget if one.unit == "usd" and one.unpriced == "refuse"]
    # A pattern names no model.
    routes = [route for route in config.route if "*" not in route.model and "?" not in route.model]
    for route in routes if money else ():
        names = [route.model, *_aliases(route)]
        if not any(prices.price(name, now) for name in names):
            for limit in money:
                if limit.is_about(route.model):
                    yield (
                        f"budget {limit.budget.name!r} refuses calls for model {route.model!r} of [[route]], which has "
                        'no price: add one to the file that `prices` names, or set unpriced = "free"'
                    )


def _aliases(route: RouteSettings) -> list[str]:
    if route.alias is None:
        return []
    return list(route.alias.values()) if isinstance(route.alias, dict) else [route.alias]


def _keys_of_others(config: GatewayConfig) -> Iterator[str]:
    """Yield upstreams that would get an agent's key for another upstream of their route, at another owner's site."""
    known = {one.name: one for one in config.upstreams()}
    told = set[str]()
    for route in config.route:
        keyless = [known[name] for name in route.upstream if known[name].key_env is None]
        for other in keyless[1:]:
            if _site(other) not in (None, _site(keyless[0])) and other.name not in told:
                told.add(other.name)
                yield (
                    f"upstream {other.name!r} has no key_env: it gets the key that an agent brings for "
                    f"{keyless[0].name!r}, which comes first for model {route.model!r}; give it a key of its own"
                )


def _site(upstream: UpstreamSettings) -> str | None:
    """Return the last two names of a public host; None for a host of a private network."""
    host = urlsplit(upstream.base_url).hostname or ""
    try:
        return None if ipaddress.ip_address(host).is_private else host
    except ValueError:
        names = host.split(".")
        return None if len(names) == 1 or names[-1] in ("local", "internal", "test") else ".".join(names[-2:])
