"""Which upstream serves a model, and under which name? The first matching route says; without one, the API's own
upstream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.gateway.config import Route
from penstock.gateway.dialects.family import Family
from penstock.gateway.http.errors import GatewayFault
from penstock.gateway.upstreams.pool import Pool


class Routes:
    """The configured routes."""

    def __init__(self, routes: Iterable[Route], pools: Mapping[str, Pool]) -> None:
        """`pools` by name, in the order of the configuration."""
        self._routes = tuple(routes)
        self._pools = pools
        self._first: dict[str, Pool] = {}
        """By family."""
        for pool in pools.values():
            self._first.setdefault(pool.config.dialect, pool)

    def __bool__(self) -> bool:
        """False when the model makes no difference."""
        return bool(self._routes)

    def find(self, model: str | None) -> Route | None:
        """The route of a model."""
        for route in self._routes:
            if model is not None and route.matches(model):
                return route
        return None

    def of(self, model: str | None, family: Family) -> tuple[list[Pool], str | None]:
        """(upstreams to try in turn, model name to send instead). `family`: the API that is spoken. Raises
        `GatewayFault` where nobody speaks it."""
        return self.along(self.find(model), family)

    def along(self, route: Route | None, family: Family) -> tuple[list[Pool], str | None]:
        """The same, of a route that was found."""
        if route is not None:
            return [self._pools[name] for name in route.upstream], route.alias
        pool = self._first.get(family.name)
        if pool is None:
            message = f'no upstream speaks {family.name}: add an [[upstream]] with dialect = "{family.name}"'
            raise GatewayFault(503, "upstream", message)
        return [pool], None
