"""The choice of an upstream for a call, and of the model name to send. The first matching route decides; without one,
the upstream of the call's API is used. No upstream gets a call of an API that it does not serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple, NoReturn, Protocol, TypeVar

from penstock.gateway.config import RouteSettings, UpstreamSettings
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects import candidate_families
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.family import AZURE, GATEWAY, OPENAI, Family
from penstock.gateway.wire.http.headers import CREDENTIALS
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.request import ClientFault, Headers


def alias_at(route: RouteSettings, upstream: str) -> str | None:
    """Return the model name to send to an upstream of a route instead; None for the requested one."""
    return route.alias.get(upstream) if isinstance(route.alias, dict) else route.alias


def may_serve(
    pool: ConnectionPool, families: tuple[Family, ...], dialect: Dialect, route: RouteSettings | None
) -> bool:
    """True if an upstream that a route, or a release, names may be given a call: one of a family that it serves, or one
    whose format is read here and taken by engines and proxies of one's own, or translated."""
    if not families or not pool.serves.isdisjoint(families):
        return True
    own = (pool.keys is not None and pool.keys.shared) or (route is not None and route.translates)
    return own and not dialect.unknown and any(family.name in pool.config.family.also for family in families)


class RouteChoice(NamedTuple):
    """The destination of calls of a model."""

    pools: Sequence[ConnectionPool]
    """Upstreams to try in turn."""
    alias: str | None
    """Model name to send instead; None for the requested one."""
    route: RouteSettings | None
    """The route that says so; None if no route does."""
    families: tuple[Family, ...]
    """API families that the call may belong to."""


class RouteTable:
    """The configured routes, and the upstreams of calls without one."""

    def __init__(
        self, routes: Iterable[RouteSettings], pools: Mapping[str, ConnectionPool], configured: Set[str]
    ) -> None:
        """`pools` by name, in the order of the configuration. `configured`: the names of those that the configuration
        has; others are public endpoints that always exist."""
        self._routes = tuple(routes)
        self._pools = pools
        own = [pool for pool in pools.values() if pool.name in configured]
        self._shown = ", ".join(f"{pool.name} ({pool.config.dialect})" for pool in own) or "none"
        self._first, self._own = _firsts(pools.values()), _firsts(own)
        """First pools by family: of all, and of the configured ones."""
        self._only = own[0] if len({pool.config.dialect for pool in own}) == 1 else None
        """The first configured upstream, if all of them speak one API; else None."""
        self._hosts: dict[bytes, ConnectionPool] = {}
        """Upstreams by their Host header."""
        for pool in pools.values():
            self._hosts.setdefault(pool.origin.partition("://")[2].lower().encode(), pool)
        self._along: dict[tuple[str, str, tuple[Family, ...]], list[ConnectionPool]] = {}
        """Upstreams of a route that may be given calls of a dialect and of families."""

    def __bool__(self) -> bool:
        """False when no route depends on the model."""
        return bool(self._routes)

    def find(self, model: str | None) -> RouteSettings | None:
        """Return the route of a model; None when no route matches."""
        for route in self._routes:
            if model is not None and route.matches(model):
                return route
        return None

    def candidates(self, route: RouteSettings, families: tuple[Family, ...], dialect: Dialect) -> list[ConnectionPool]:
        """Return the upstreams of a route that may serve a call, in order; none where they all speak something else."""
        found = self._along.get((route.model, dialect.name, families))
        if found is None:
            named = [self._pools[name] for name in route.upstream]
            found = [pool for pool in named if may_serve(pool, families, dialect, route)]
            self._along[route.model, dialect.name, families] = found
        return found.copy()

    def choose(
        self, model: str | None, dialect: Dialect, path: str, headers: Headers, direct: ConnectionPool | None = None
    ) -> RouteChoice:
        """Return where a call goes; raises `ClientFault`. `direct`: the host that its agent has called."""
        route, of = self.find(model), candidate_families(dialect, path, headers)
        pools = [] if route is None else self.candidates(route, of, dialect)
        if route is None or (not pools and direct is not None):
            return RouteChoice([direct or self.owner(of, dialect, path, headers)], None, None, of)
        if not pools:
            self.refuse(of, path, route)
        return RouteChoice(pools, alias_at(route, pools[0].name), route, of)

    def first(
        self, model: str | None, dialect: Dialect, path: str, headers: Headers
    ) -> tuple[ConnectionPool, str | None]:
        """Return (the upstream of one of the gateway's own requests, the model name to send instead); raises
        `ClientFault`."""
        found = self.choose(model, dialect, path, headers)
        return found.pools[0], found.alias

    def owner(self, families: tuple[Family, ...], dialect: Dialect, path: str, headers: Headers) -> ConnectionPool:
        """Return the upstream of a call without a route: one of its family. If the call may be of several families, or
        of any, it is the one whose host the call names; else a configured one: of the first family that has one, or,
        for a call of any family, if all configured ones speak one API; else the public endpoint of the first family,
        but never with a key that may belong to another. Raises `ClientFault`."""
        if len(families) == 1:
            pool = self._first.get(families[0])
        else:
            sent = {low: value for low, _, value in headers}
            pool = self._hosts.get(sent.get(b"host", b"").lower())
            if pool is None or (families and pool.serves.isdisjoint(families)):
                pool = next((self._own[it] for it in families if it in self._own), None if families else self._only)
            if pool is None and (families or not self._own):
                keys = [value for name in CREDENTIALS if (value := sent.get(name)) and b"pst_" not in value]
                usual = next((self._first[it] for it in families or (OPENAI,) if it in self._first), None)
                pool = None if keys and (dialect.unknown or AZURE in families) else usual
        return pool or self.refuse(families, path)

    def refuse(self, families: tuple[Family, ...], path: str, route: RouteSettings | None = None) -> NoReturn:
        """Raise `ClientFault` for a call that no upstream serves. `route`: the one that leads to other APIs."""
        shown, names = redact_url(path[:80]), " or ".join(family.name for family in families)
        if GATEWAY in families:
            message = f"the path {shown!r} is the gateway's own and is sent to no provider; {_own_path(path)}"
        elif not families:
            message = (
                f"nothing tells whose API the path {shown!r} belongs to, and a call is sent to nobody but its own "
                f"provider: ask with a key or a header of that API, or name its host (upstreams: {self._shown})"
            )
        elif route is not None:
            message = (
                f"the path {shown!r} is of {names}, which no upstream of route {route.model!r} speaks "
                f"({', '.join(route.upstream)}): name one in it that does, or call the model by a path of theirs"
            )
        else:
            message = (
                f"no upstream speaks {names}, whose path {shown!r} is: add an [[upstream]] with dialect = "
                f'"{families[0].name}" (there are: {self._shown})'
            )
        raise ClientFault(404, "path" if not families or GATEWAY in families else "upstream", message, "path")


def _firsts(pools: Iterable[ConnectionPool]) -> dict[Family, ConnectionPool]:
    """Return the first upstream of each family: one that speaks it, before one that serves it besides."""
    found: dict[Family, ConnectionPool] = {}
    for pool in pools:
        found.setdefault(pool.config.family, pool)
    for pool in pools:
        for family in pool.serves:
            found.setdefault(family, pool)
    return found


_OWN: Final = {
    "rewards": "rewards", "events": "events", "wrapped": "wrapped", "logs": "v1/logs", "metrics": "v1/metrics",
}  # fmt: skip
"""Paths for an agent's reports about itself, by the end of the path that it was sent to."""


def _own_path(path: str) -> str:
    """Return advice for a path of the gateway's own."""
    if "/agl" in path:
        return "Agent Lightning's APIs are /v1/agl/... and /agl1/..., without an address of a rollout before them"
    name = path.partition("?")[0].strip("/").rpartition("/")[2]
    return f"POST it below a rollout's address: /rollout/ID/attempt/ID/{_OWN.get(name, 'v1/traces')}"


# The choice among several upstreams that share a model's calls, by rollout. Pure.
#
# A conversation is cheapest where its beginning is in the cache. So all calls of a rollout go to the same upstream,
# by weighted rendezvous hashing of its name (Thaler and Ravishankar 1998; the weights as in Schindelhauer and
# Schomaker 2005): whichever upstream comes or goes, only the rollouts that it serves move. An upstream that already
# has more than 1.25 times its share of the running calls is passed over for the next in the rollout's own order
# (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018), so that no upstream is overrun.

LOAD_BOUND: Final = 1.25
"""Multiple of its share that an upstream is given at most."""


_REMEMBERED: Final = 4096
"""Orders that are cached: a rollout has many calls."""


class WeightedUpstream(Protocol):
    """An upstream that shares calls with others."""

    name: str

    @property
    def running(self) -> int:
        """Number of calls under way at this upstream."""
        ...


T = TypeVar("T", bound=WeightedUpstream)


def rank_upstreams(upstreams: Sequence[T], weights: Mapping[str, float], rollout: str) -> list[T]:
    """Return upstreams in the order in which they are tried for a call of a rollout. Those without a weight are spares
    and come last, in their own order."""
    names = tuple([(one.name, weights.get(one.name)) for one in upstreams])
    order, total_weight = _order(rollout, names)
    running = [one.running for one in upstreams]
    after = 1 + sum([running[at] for at, weight in order if weight is not None])
    free, crowded, spares = list[T](), list[T](), list[T]()
    for at, weight in order:
        if weight is None:
            spares.append(upstreams[at])
        elif running[at] >= math.ceil(LOAD_BOUND * after * weight / total_weight):
            crowded.append(upstreams[at])
        else:
            free.append(upstreams[at])
    return free + crowded + spares


@lru_cache(_REMEMBERED)
def _order(
    rollout: str, names: tuple[tuple[str, float | None], ...]
) -> tuple[tuple[tuple[int, float | None], ...], float]:
    """Return (index and weight of each upstream, in the rollout's own order; the sum of the weights). `names`: names
    and weights."""
    sharing = [(at, weight) for at, (_, weight) in enumerate(names) if weight is not None]
    sharing.sort(key=lambda one: _score(rollout, names[one[0]][0], one[1]), reverse=True)
    spares = [(at, None) for at, (_, weight) in enumerate(names) if weight is None]
    return (*sharing, *spares), sum(weight for _, weight in sharing)


def _score(rollout: str, upstream: str, weight: float) -> float:
    drawn = int.from_bytes(blake2b(f"{rollout}\0{upstream}".encode(), digest_size=8).digest())
    return -weight / math.log((drawn + 1) / (2**64 + 1))


# Upstreams for the hosts that agents behind a sidecar call directly: these get all that the agent has sent, every
# header of it.
#
# Known are the public endpoints of the APIs and every `[[upstream]]`. The key that is configured for an upstream of
# that host (`key_env`) replaces the agent's, so that the agent needs none.


class DirectPool(ConnectionPool):
    """The connections to a host that calls have named themselves."""

    def __init__(self, config: UpstreamSettings, own_keys: Sequence[str]) -> None:
        super().__init__(config, own_keys)
        self.heads.verbatim = True

    def target(self, path: str) -> str:
        return path

    def speaks_for(self, family: Family) -> bool:
        return family in self.serves


class DirectHosts:
    """The known hosts with their pools."""

    def __init__(self, upstreams: Iterable[UpstreamSettings], own_keys: Sequence[str]) -> None:
        """`upstreams`: configured and public; of several on one host the first counts."""
        self.pools: dict[tuple[str, int], ConnectionPool] = {}
        for upstream in upstreams:
            pool = DirectPool(upstream, own_keys)
            self.pools.setdefault(pool.address, pool)

    @property
    def known(self) -> str:
        """The known hosts as a text for people."""
        return ", ".join(f"{host}:{port}" for host, port in self.pools)

    def find(self, address: tuple[str, int]) -> ConnectionPool | None:
        """Return the pool of a host and a port; None for an unknown one."""
        return self.pools.get(address)
