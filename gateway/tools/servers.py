"""The MCP servers by their addresses.

    /mcp/NAME                the server's endpoint, `[mcp.servers.NAME] url`, or the bridge before the processes of its
                             `command` (`tools.hosted`)
    /mcp/NAME/@/rest?query   a path that the server itself has named: for the messages of a stream that it opened (HTTP
                             with SSE), or as the place of its metadata (OAuth)
    /.well-known/oauth-protected-resource/mcp/NAME   the metadata of its endpoint

A path that the server has not named is refused: an agent reaches the server's tools, not its host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from string import punctuation
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

from penstock.gateway.config import GatewayConfig, UpstreamSettings
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.settings import McpServer
from penstock.gateway.tools.hosted.bridge import NAMED, OWNER, Bridge
from penstock.gateway.tools.limits import BreakerState, ServerLimits
from penstock.gateway.traffic.calls.address import CallAddress
from penstock.gateway.traffic.upstreams.pool import ConnectionPool, connect_inside
from penstock.gateway.wire.dialects.mcp import MCP, PREFIX
from penstock.gateway.wire.http.request import ClientFault, Headers
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

OWN: Final = "/@"
"""Precedes a path that the server has named."""
WELL_KNOWN: Final = "/.well-known/oauth-protected-resource"
"""Precedes the path of a resource whose metadata are requested (RFC 9728, section 3.1)."""
_OF_THE_BRIDGE: Final = frozenset({OWNER.lower().encode(), NAMED.lower().encode()})
_NAMED: Final = 10_000
"""Most paths of one server that are remembered: each is one of its open streams."""
_LONGEST: Final = 8192
"""Most characters of a path that is remembered."""


class ServerPool(ConnectionPool):
    """The connections to one server."""

    attributes: Mapping[str, Any] = {}
    """Attributes of the spans of its calls."""

    def __init__(self, name: str, config: McpServer, own_keys: Sequence[str]) -> None:
        upstream = UpstreamSettings.model_construct(
            name=name,
            base_url=config.url or f"pipe://{name}",
            dialect=MCP.name,
            key_env=config.key_env,
        )
        super().__init__(upstream, own_keys)
        self.server = config
        self.limits = ServerLimits(name, config)
        self._paths: OrderedDict[str, None] = OrderedDict()
        self.heads.vary = True  # with the paths that the server has named lately

    def target(self, path: str) -> str:
        """The path to request from the server. Raises `ClientFault` for a path that the server has not named."""
        if path.startswith(WELL_KNOWN):
            return WELL_KNOWN + (self.path.rstrip("/") if path != WELL_KNOWN else "")
        below, mark, query = self._below(path).partition("?")
        if below in ("", "/"):
            return (self.path or "/") + mark + query
        own = below.removeprefix(OWN)
        if own != below and own + mark + query in self._paths:
            return own + mark + query
        message = f"server {self.name!r} has not named the path {below!r}: use {PREFIX}{self.name}, which is its url"
        raise ClientFault(404, "path", message, "path")

    def url(self, path: str) -> str:
        """The URL of a call; the server's own URL for a path that it has not named, or not lately."""
        try:
            return super().url(path)
        except ClientFault:
            return super().url(PREFIX + self.name)

    def check(self, headers: Mapping[bytes, bytes], token: bool) -> None:
        """Raises `ClientFault` for a call that may not use this server. `token`: True if it has an agent token, or a
        key for calls."""

    def headers(self, headers: Headers, address: CallAddress) -> Headers:
        """The headers that are sent: the client's own."""
        return headers

    def own_path(self, path: str) -> str:
        """The server's path for a path below a rollout's address; empty for the endpoint itself."""
        below = self._below(path)
        return below.removeprefix(OWN) if path.startswith(PREFIX) and below.startswith(OWN) else ""

    def _below(self, path: str) -> str:
        """The path behind the server's name. If a client's URL ends with a slash, one precedes a named path, too."""
        below = path[len(PREFIX) + len(self.name) :]
        return below[1:] if below.startswith("/" + OWN) else below

    def register_path(self, endpoint: str) -> str | None:
        """Remembers a path that the server names for the messages of a stream, and returns the path that stands for it
        below the server's address; None if it is on another host, to which no agent may be sent."""
        try:
            whole = urlsplit(urljoin(self.origin + self.path, endpoint))
        except ValueError:
            return None
        if f"{whole.scheme}://{whole.netloc}" != self.origin or len(endpoint) > _LONGEST:
            return None
        # Quoted as a client will write it in its request.
        path = quote(whole.path + (f"?{whole.query}" if whole.query else ""), safe=punctuation)
        self._paths[path] = None
        self._paths.move_to_end(path)
        if len(self._paths) > _NAMED:
            self._paths.popitem(last=False)
        return f"{PREFIX}{self.name}{OWN}{path}"


class DirectServerPool(ServerPool):
    """A server that agents behind a sidecar call by its own URL. Its URLs pass unchanged."""

    def __init__(self, pool: ServerPool, own_keys: Sequence[str]) -> None:
        """`pool`: the same server below its address here, with which this one shares its limits."""
        super().__init__(pool.name, pool.server, own_keys)
        self.heads.verbatim = True
        self.limits = pool.limits

    def has(self, path: str) -> bool:
        """True if a path of the host is one of the server: its endpoint, or one that it has named."""
        return path.partition("?")[0] == (self.path or "/") or path in self._paths

    def target(self, path: str) -> str:
        """The path unchanged: it is the server's own."""
        return path

    def own_path(self, path: str) -> str:
        """The path itself; empty for the endpoint."""
        return path if path in self._paths else ""

    def register_path(self, endpoint: str) -> str | None:
        """Remembers a path that the server names, and returns it; None if it is on another host."""
        ours = super().register_path(endpoint)
        return None if ours is None else ours[len(PREFIX) + len(self.name) + len(OWN) :]


class HostedServerPool(ServerPool):
    """The connections to the bridge in front of a hosted server's processes."""

    attributes: Mapping[str, Any] = {"network.transport": "pipe"}

    def __init__(self, name: str, config: McpServer, bridge: Bridge, own_keys: Sequence[str]) -> None:
        super().__init__(name, config, own_keys)
        self._bridge = bridge

    async def open(self, connection: UpstreamConnection) -> None:
        """Connects by a socket pair."""
        await connect_inside(self._bridge.protocol, connection)

    def headers(self, headers: Headers, address: CallAddress) -> Headers:
        """The client's headers, with the rollout and attempt of the call."""
        kept = [header for header in headers if header[0] not in _OF_THE_BRIDGE]
        kept.append((b"penstock-owner", OWNER.encode(), f"{address.rollout}/{address.attempt}".encode()))
        if address.origin != "implicit":
            kept.append((b"penstock-named", NAMED.encode(), b"1"))
        return kept


class ServerRegistry:
    """All configured MCP servers, by name."""

    def __init__(self, config: GatewayConfig, own_keys: Sequence[str], bridge: Bridge) -> None:
        configured = config.mcp.servers.items()
        self.local_only = config.loopback
        """True if only this machine can connect, so that no key is needed."""
        self.names = config.local_names()
        self.scheme = "http" if config.tls.certificate is None else "https"
        """The scheme that clients call, unless a proxy in front reports another."""
        self.pools = {
            name: ServerPool(name, one, own_keys)
            if one.command is None
            else HostedServerPool(name, one, bridge, own_keys)
            for name, one in configured
        }
        self._wanted = [DirectServerPool(pool, own_keys) for pool in self.pools.values() if pool.server.url is not None]
        self._bridge = bridge

    def expire(self, now: float) -> None:
        """Closes connections that have been idle for too long."""
        for pool in (*self.pools.values(), *self._wanted):
            pool.expire(now)
        self._bridge.expire()

    def measure(self, metrics: Metrics) -> None:
        """Sets the gauges of all servers."""
        for name, pool in self.pools.items():
            limits = pool.limits
            metrics.mcp_waiting[(name,)] = limits.waiting
            metrics.mcp_breaker[(name,)] = BreakerState.CLOSED if limits.breaker is None else limits.breaker.state
            for why, count in limits.refused.items():
                metrics.mcp_refused[(name, why)] = count

    @property
    def hosts(self) -> list[UpstreamSettings]:
        """The hosts of servers, for calls of agents behind a sidecar; a request for another path of such a host gets no
        key of the server."""
        return [UpstreamSettings.model_construct(name=pool.name, base_url=pool.origin) for pool in self._wanted]

    def find_direct(self, host: tuple[str, int], path: str) -> DirectServerPool | None:
        """The server that an agent behind a sidecar has called; None if the path belongs to no server."""
        return next((one for one in self._wanted if one.address == host and one.has(path)), None)

    def find(self, path: str) -> ServerPool:
        """The server of a path below a rollout's address; raises `ClientFault` if there is none."""
        name = path.removeprefix(WELL_KNOWN).partition("?")[0][len(PREFIX) :].partition("/")[0]
        found = self.pools.get(name)
        if found is None:
            known, name = ", ".join(self.pools) or "none", name[:64]
            way = f"add [mcp.servers.{name}] with its url or its command"
            message = f"there is no MCP server {name!r}: {way} (there are: {known})"
            raise ClientFault(404, "mcp_server", message, "path")
        return found
