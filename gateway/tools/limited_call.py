"""A call within the limits of its server: concurrency, timeouts, and a circuit breaker.

It tells the limits how it ends; everything else about a call of a server is in `call`.
"""

from __future__ import annotations

from abc import abstractmethod
from time import monotonic
from typing import Final

from penstock.gateway.tools.limits import Permit
from penstock.gateway.tools.servers import ServerPool
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.state import CallState
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import HttpRequest
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

WHOLE_S: Final = 3600.0
"""Seconds until an answer must be whole, which is as long as any tool may take. Streams that only listen may last."""


class LimitedCall(HttpCall):
    """One exchange with a server that has limits."""

    __slots__ = ("_listens", "_server", "_since", "_visit")

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, request: HttpRequest, admitted: CallRequest
    ) -> None:
        super().__init__(shared, client, request, admitted)
        self._server: ServerPool
        self._listens = False
        """True if its answer is an endless stream."""
        self._visit: Permit | None = None
        """Its passage through the limits; None before it has reached them."""
        self._since = request.started
        """Monotonic seconds since which the server has had time to answer."""

    @abstractmethod
    def _counts(self) -> bool:
        """True if it needs a slot, and its outcome counts for the breaker."""

    def _reach(self, pool: ConnectionPool, fresh: bool = False) -> None:
        """Connects as soon as the limits allow it."""
        limits = self._server.limits
        visit = self._visit = self._visit or Permit(limits, self._counts())
        if visit.acquired:
            super()._reach(pool, fresh)
        elif visit.must_wait():
            self._wait_for_slot(limits, self.on_open)
        else:
            self._enter(visit, pool)

    def _enter(self, visit: Permit, pool: ConnectionPool) -> None:
        visit.acquire()
        super()._reach(pool)

    def on_open(self) -> None:
        """Called when it has a slot. The time that it has waited for the slot does not count against the server."""
        visit, pool = self._visit, self.record.pool
        if visit is None or visit.acquired:
            super().on_open()
        elif self._resumes() and pool is not None:
            self._since = monotonic()
            self._do("sent", lambda: self._enter(visit, pool))

    def _check_queue(self, waited_s: float) -> None:
        """Refuses the call if it has waited for its slot for too long."""
        if self._visit is None or self._visit.acquired:
            super()._check_queue(waited_s)
        elif waited_s > self._server.server.first_byte_timeout:
            self.cancel_upstream()
            self._fail(self._server.limits.wait_timeout_refusal())

    def _late(self, now: float) -> str | None:
        if self._listens:
            return None
        begun = self.state is CallState.STREAMING
        limit = WHOLE_S if begun else self._server.server.first_byte_timeout
        if now - self._since <= limit:
            return None
        if begun:
            return f"has not ended its answer within {limit:g} s"
        return f"has not begun its answer within {limit:g} s (mcp.servers.{self._server.name}.first_byte_timeout)"

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Tells the breaker that an answer has begun."""
        if self._visit is not None:
            self._visit.observe_status(connection.status)
        super().on_answer(connection, head, raw)

    def _end(self, status: str, error: str | None) -> None:
        super()._end(status, error)
        if self._visit is not None:
            self._visit.release(status, error)
