"""Which upstream serves a model, and under which name? The first matching route says; without one, the API's own
upstream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from penstock.gateway.dialects.family import Family
from penstock.gateway.http.errors import ClientFault, GatewayFault
from penstock.gateway.http.headers import CREDENTIALS
from penstock.gateway.http.redact import url as redact_url
from penstock.gateway.http.request import Headers
from penstock.gateway.upstream_settings import Route
from penstock.gateway.upstreams.pool import Pool


def alias_at(route: Route, upstream: str) -> str | None:
    """Model name to send to an upstream of a route instead; None for the one that was asked for."""
    return route.alias.get(upstream) if isinstance(route.alias, dict) else route.alias


class Routes:
    """The configured routes."""

    def __init__(self, routes: Iterable[Route], pools: Mapping[str, Pool], configured: Set[str]) -> None:
        """`pools` by name, in the order of the configuration. `configured`: the names of those that are no public
        endpoint which is there by itself."""
        self._routes = tuple(routes)
        self._pools = pools
        self._first: dict[str, Pool] = {}
        """By family."""
        self._hosts: dict[bytes, Pool] = {}
        """By what a Host header says of them."""
        self._own: dict[str, Pool] = {}
        """The first of each family that is configured."""
        for pool in pools.values():
            self._first.setdefault(pool.config.dialect, pool)
            self._hosts.setdefault(pool.origin.partition("://")[2].lower().encode(), pool)
            if pool.name in configured:
                self._own.setdefault(pool.config.dialect, pool)

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
        """(upstreams to try in turn, model name to send to the first instead). `family`: the API that is spoken. Raises
        `GatewayFault` where nobody speaks it."""
        return self.along(self.find(model), family)

    def along(self, route: Route | None, family: Family) -> tuple[list[Pool], str | None]:
        """The same, of a route that was found."""
        if route is not None:
            return [self._pools[name] for name in route.upstream], alias_at(route, route.upstream[0])
        pool = self._first.get(family.name)
        if pool is None:
            message = f'no upstream speaks {family.name}: add an [[upstream]] with dialect = "{family.name}"'
            raise GatewayFault(503, "upstream", message)
        return [pool], None

    def unknown(self, usual: Family, path: str, headers: Headers) -> Pool:
        """Who gets a call whose path and headers do not tell whose API it is: the host that it names, else an upstream
        that was configured, if only one API's are or one of the `usual` API is. Else the public endpoint of that, but
        never with a key, which may be another provider's. Raises `ClientFault`."""
        sent = {low: value for low, _, value in headers}
        pool = self._hosts.get(sent.get(b"host", b"").lower())
        if pool is None:
            only = next(iter(self._own.values())) if len(self._own) == 1 else None
            pool = only or self._own.get(usual.name)
        if pool is None:
            keys = [value for name in CREDENTIALS if (value := sent.get(name)) and b"pst_" not in value]
            pool = None if keys else self._first.get(usual.name)
        if pool is None:
            message = (
                f"nothing tells whose API the path {redact_url(path[:80])!r} belongs to, and a key is sent to nobody "
                "but its own provider: add the [[upstream]] that this call is for"
            )
            raise ClientFault(404, "path", message, "path")
        return pool
