"""Connections to model endpoints, pooled per upstream, without a cap.

If an idle link closes before it answers, the server's keep-alive timer was faster: the call is sent again on a fresh
link. Once a byte of an answer was seen, nothing is sent again from here; `proxy.failover_policy` decides on the next
upstream.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from penstock.gateway.traffic.upstreams.concurrency_limit import ConcurrencyLimit
from penstock.gateway.traffic.upstreams.gate import UpstreamGate
from penstock.gateway.traffic.upstreams.health import UpstreamHealth
from penstock.gateway.traffic.upstreams.transport import make_transport
from penstock.gateway.upstream_settings import UpstreamSettings
from penstock.gateway.wire.dialects import FAMILIES
from penstock.gateway.wire.dialects.credentials import KeyFilter, host_of
from penstock.gateway.wire.http.headers import RequestHeads
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection

CONNECT_S: Final = 10.0
"""Seconds until a connection (with TLS) must stand. A first packet that is lost is repeated after 1, 3 and 7 seconds;
from then on another upstream is the better bet."""
IDLE_S: Final = 55.0
"""Seconds after which an unused connection is closed: less than the minute of many servers and load balancers."""
SLOW_S: Final = 1.0
"""Seconds after which the server's machine repeats the first packet of a connection (RFC 6298, section 2.1)."""
_log = logging.getLogger("penstock.upstream")


class Connector(ABC):
    """Makes and keeps links to a server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self._tasks: dict[asyncio.Task[None], float] = {}
        """Connections that are being made, oldest first, with their begin in monotonic seconds."""

    @abstractmethod
    async def open(self, connection: UpstreamConnection) -> None:
        """Connect a link; raises `OSError` or `TimeoutError`, whose text goes to the client."""

    @abstractmethod
    def put_back(self, connection: UpstreamConnection) -> None:
        """Take back a link whose answer is complete."""

    @abstractmethod
    def forget(self, connection: UpstreamConnection) -> None:
        """Called when a connection is gone."""

    def connect(self, caller: UpstreamCaller) -> asyncio.Task[None]:
        """Make a connection and hand it to the caller; the task can be cancelled."""
        task = asyncio.get_running_loop().create_task(self._connect(caller))
        self._tasks[task] = monotonic()
        task.add_done_callback(self._connected)
        return task

    def keeps_waiting(self, now: float, task: asyncio.Task[None] | None = None) -> bool:
        """True if a connection other than `task` has been awaited for so long that the server may be down: a call that
        can go elsewhere need not wait as well."""
        oldest = next(iter(self._tasks.items()), None)
        return oldest is not None and oldest[0] is not task and now - oldest[1] > SLOW_S

    async def _connect(self, caller: UpstreamCaller) -> None:
        connection = UpstreamConnection(self)
        try:
            await self.open(connection)
        except TimeoutError as error:
            connection.give_up()
            caller.on_unreachable("connect_timeout", str(error))
        except (OSError, ValueError) as error:
            # ValueError: an invalid host name (UnicodeError), an address the transport does not take.
            caller.on_unreachable("connect", getattr(error, "strerror", None) or str(error))
        except asyncio.CancelledError:
            connection.give_up()
            raise
        else:
            caller.on_connected(connection)

    def _connected(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            # The call is left without a link and a task: the next sweep ends it.
            _log.error("a call could not be sent to upstream %r", self.name, exc_info=error)


class ConnectionPool(Connector):
    """The connections to one upstream."""

    def __init__(
        self, config: UpstreamSettings, own_keys: Sequence[str] = (), share: Callable[[int], int] = lambda most: most
    ) -> None:
        """`own_keys`: the gateway's own, never passed on. `config.key` is read here, so that a missing one stops the
        start and not the first call. `share`: returns this process's share of a number of places."""
        super().__init__(config.name)
        self.config = config
        parts = urlsplit(config.base_url)
        self.tls = parts.scheme == "https"
        self.address = (parts.hostname or "", parts.port or (443 if self.tls else 80))
        self.path = parts.path
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.credential = _credential(config)
        """The header with its key; None for none."""
        known = host_of(self.address[0])
        self.serves = frozenset({config.family, *(FAMILIES[it] for it in (known.serves if known else ()))})
        """The API families whose calls it gets."""
        self.keys = KeyFilter.of(config.family, self.address[0])
        self.heads = RequestHeads(
            parts.netloc.encode("ascii"),
            self.credential,
            own_keys,
            config.session_header,
            self.keys,
            self.serves,
        )
        self.gate = UpstreamGate(config.name)
        self.health = UpstreamHealth()
        most = None if config.max_concurrent is None else share(config.max_concurrent)
        self.concurrency_limit = ConcurrencyLimit(f"upstream {config.name!r}", most)
        self._idle: deque[UpstreamConnection] = deque()
        self.transport = make_transport(config)

    @property
    def running(self) -> int:
        """Number of connections with a call, and of those that are being made for one."""
        return self.connections - len(self._idle)

    @property
    def idle(self) -> int:
        """Number of connections that wait for a call."""
        return len(self._idle)

    def url(self, path: str) -> str:
        """Return the URL of a call to this path, for the record."""
        return self.origin + self.target(path)

    def target(self, path: str) -> str:
        """Return the path to request: base URL plus path, with a doubled `/v1` written once."""
        root = self.config.family.root
        if root and path.startswith(root):
            return path
        if path.startswith("/v1") and (self.config.family.versioned or self.path.endswith("/v1")):
            return self.path + path[3:] if path[3:4] in ("/", "?", "") else self.path + path
        return self.path + path

    def take(self) -> UpstreamConnection | None:
        """Return an idle connection; None when there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                connection.reused = True
                return connection
        return None

    async def open(self, connection: UpstreamConnection) -> None:
        """Connect within `CONNECT_S`."""
        try:
            async with asyncio.timeout(CONNECT_S):
                await self.transport.connect(connection, *self.address)
        except TimeoutError:
            raise TimeoutError(f"no connection within {CONNECT_S:g} s") from None

    def put_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next call."""
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def expire(self, now: float) -> None:
        """Close connections that have been idle for too long; the oldest are on the left."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.popleft().transport.abort()

    def close(self) -> None:
        """Close every idle connection; others end with their calls."""
        while self._idle:
            self._idle.popleft().transport.abort()


async def connect_inside(server: Callable[[], asyncio.Protocol], connection: UpstreamConnection) -> None:
    """Connect to a server in this process by a socket pair, which nobody else can reach. `server` makes its
    protocols."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    await loop.connect_accepted_socket(server, theirs)
    await loop.create_unix_connection(lambda: connection, sock=ours)


def _credential(config: UpstreamSettings) -> tuple[bytes, bytes] | None:
    key = config.key()
    return None if key is None else config.family.credential(key)
