"""Upstreams for the hosts that agents behind a sidecar call directly: these get all that the agent has sent, every
header of it.

Known are the public endpoints of the APIs and every `[[upstream]]`. The key that is configured for an upstream of that
host (`key_env`) replaces the agent's, so that the agent needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.upstream_settings import UpstreamSettings


class DirectPool(ConnectionPool):
    """The connections to a host that calls have named themselves."""

    def __init__(self, config: UpstreamSettings, own_keys: Sequence[str]) -> None:
        super().__init__(config, own_keys)
        self.heads.verbatim = True

    def target(self, path: str) -> str:
        return path


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
