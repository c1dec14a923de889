"""A call whose answer may still come from elsewhere: what is held of an answer until that is clear, and the next try.

Until the client has a byte of it, an answer can be dropped: for that of the next upstream where this one is down
(`failover`), or of the same one where a part of the call knows how to ask otherwise. The base of `gateway.proxy.call`.
"""

from __future__ import annotations

from abc import abstractmethod
from time import monotonic
from typing import Final

from penstock.gateway.calls.admission import Admitted
from penstock.gateway.calls.record import whole
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.http.request import Request
from penstock.gateway.http.upstream_connection import UpstreamConnection
from penstock.gateway.model.attributes import TRIES
from penstock.gateway.proxy.failover import is_down, may_repeat, says_something
from penstock.gateway.proxy.recorded_call import RecordedCall
from penstock.gateway.proxy.shared import Shared
from penstock.gateway.proxy.state import State
from penstock.gateway.upstreams.health import retry_after
from penstock.gateway.upstreams.pool import Pool

_REFUSAL: Final = 1 << 20
"""Bytes of a refusal that are held at most."""


class Choosing(RecordedCall):
    """One call, with what upstreams have made of it so far."""

    __slots__ = ("_held", "_pools", "_tries")

    def __init__(self, shared: Shared, client: ClientConnection, request: Request, admitted: Admitted) -> None:
        super().__init__(shared, client, request, admitted)
        self._pools: list[Pool] = []
        """Upstreams that have not been tried."""
        self._held: tuple[bytes, bytes] | None = None
        """Head and body, as far as it has come, of an answer that is not passed on yet."""
        self._tries: list[dict[str, str | int]] = []

    @abstractmethod
    def _forward(self) -> None:
        """To the next upstream that may serve it."""

    @abstractmethod
    def _tell(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Begins the client's answer with this one."""

    def _has_spare(self) -> bool:
        return bool(self._pools) and may_repeat(self.request.method, self.record.call.dialect)

    def _hold(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Does not pass on the head of an answer before it is clear that this is the one."""
        self._held = head, raw
        self._look(connection)

    def _holds(self, connection: UpstreamConnection, raw: bytes) -> bool:
        """Whether a read belongs to an answer that is held; looks at that once more."""
        if self._held is None:
            return False
        self._held = self._held[0], self._held[1] + raw
        self._look(connection)
        return True

    def _look(self, connection: UpstreamConnection) -> None:
        if connection.status == 400 and self._parts:
            self._consider(connection)
        else:
            self._choose(connection)

    def _choose(self, connection: UpstreamConnection) -> None:
        """Passes on an answer that another upstream could still give, once it is clear that this one gives it."""
        assert self._held is not None
        if is_down(connection.status):
            self._blame(f"http_{connection.status}", retry_after(connection.headers))
            self._held = None
            if connection.done:
                self.release_upstream()
            else:
                self.cancel_upstream()
            self._try_next(f"http_{connection.status}")
        elif connection.done or says_something(connection.pieces, connection.content_type):
            (head, raw), self._held = self._held, None
            self._tell(connection, head, raw)

    def _consider(self, connection: UpstreamConnection) -> None:
        """A refusal is held until it is whole: a part may know how to ask otherwise."""
        assert self._held is not None
        if not connection.done and len(self._held[1]) <= _REFUSAL:
            return
        (head, raw), self._held = self._held, None
        told = whole(connection.pieces, connection.encoding)
        body = next((made for part in self._parts if (made := part.instead(self.record, told)) is not None), None)
        if body is None or self.record.pool is None:
            self._tell(connection, head, raw)
            return
        self.release_upstream()
        self._pools.insert(0, self.record.pool)
        self.record.body = body
        self._try_next("http_400")

    def _blame(self, reason: str, asked_s: float | None = None) -> None:
        """Its upstream does not serve it."""
        if self.record.pool is not None and reason != "internal":
            self.record.pool.health.failed(reason, monotonic(), asked_s)

    def _try_next(self, reason: str) -> None:
        """The next upstream. `reason`: why this one does not serve it."""
        self._note_try(reason)
        self._move(State.PLANNING)
        self._forward()

    def _note_try(self, reason: str) -> None:
        record = self.record
        name = "" if record.pool is None else record.pool.name
        after_ms = round((monotonic() - self.request.started) * 1e3)
        self._tries.append({"upstream": name, "after_ms": after_ms, "why": reason})
        record.attributes = {**record.attributes, TRIES: self._tries}
        self._shared.metrics.upstream_retries[name, reason] += 1
