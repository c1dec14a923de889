"""Which upstream serves a model, and under which name? The first matching route says; without one, the API's own
upstream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from penstock.gateway.config import Family, Route
from penstock.gateway.upstreams.pool import Pool


class Routes:
    """The configured routes."""

    def __init__(self, routes: Iterable[Route], pools: Mapping[str, Pool]) -> None:
        """`pools` by name, in the order of the configuration."""
        self._routes = tuple(routes)
        self._pools = pools
        self._silent = {
            family: next(pool for pool in pools.values() if pool.config.dialect == family)
            for family in get_args(Family)
        }

    def __bool__(self) -> bool:
        """False when the model makes no difference."""
        return bool(self._routes)

    def find(self, model: str | None) -> Route | None:
        """The route of a model."""
        for route in self._routes:
            if model is not None and route.matches(model):
                return route
        return None

    def of(self, model: str | None, family: str) -> tuple[list[Pool], str | None]:
        """(upstreams to try in turn, model name to send instead). `family`: the API that is spoken."""
        return self.along(self.find(model), family)

    def along(self, route: Route | None, family: str) -> tuple[list[Pool], str | None]:
        """The same, of a route that was found."""
        if route is None:
            return [self._silent[family]], None
        return [self._pools[name] for name in route.upstream], route.alias
