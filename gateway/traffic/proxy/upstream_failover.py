"""A call whose answer may still come from elsewhere: it holds an answer until it is accepted, and makes the next try.

Until the client has a byte of it, an answer can be dropped: for an answer of the next upstream if this one is down
(`failover_policy`), or of the same one, a moment later or with a request that a part of the call has changed. The base
of `gateway.traffic.proxy.call`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from copy import copy
from time import monotonic
from typing import Final, NamedTuple

from penstock.gateway.model.facts import LEFT_OUT, TRIES
from penstock.gateway.model.toml import pluralized
from penstock.gateway.traffic.calls.call_record import decoded_body
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_lifecycle import CallState, RecordedCall
from penstock.gateway.traffic.proxy.failover_policy import (
    ContentKind,
    FirstContentDetector,
    is_down,
    is_too_long,
    may_repeat,
    retry_delay_s,
)
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.upstreams.health import retry_after_s
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, Refusal, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

_REFUSAL: Final = 1 << 20
"""Most bytes of a refusal that are held."""
_ANSWER: Final = 64 << 20
"""Most bytes of an answer that are held."""
_REFUSED: Final = (400, 413)
"""Statuses of refusals after which the request may be sent in another form or elsewhere."""


class UpstreamRefusal(NamedTuple):
    """A complete refusal of an upstream, passed on if no upstream gives a better answer."""

    pool: ConnectionPool
    body: bytes
    sent: list[bytes]
    """Header lines as they were sent."""
    connection: UpstreamConnection
    """A copy, with the state of that moment."""
    head: bytes
    raw: bytes


class Failover(RecordedCall):
    """One call and the state of its tries at upstreams."""

    __slots__ = ("_again", "_beginning", "_given_at", "_heard", "_held", "_pools", "_refused",
                 "_sent_at", "_size", "_spoke_at", "_streams", "_tries", "_whole")  # fmt: skip

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, request: HttpRequest, admitted: CallRequest
    ) -> None:
        super().__init__(shared, client, request, admitted)
        self._pools: list[ConnectionPool] = []
        """Upstreams that have not been tried."""
        self._held: tuple[bytes, list[bytes]] | None = None
        """Head and body pieces of an answer that is not passed on yet."""
        self._size = 0
        """Bytes of the held body."""
        self._beginning: FirstContentDetector | None = None
        """The beginning of its answer until the first content; None if nothing depends on it."""
        self._heard = 0
        """Number of the connection's pieces that were looked at."""
        self._spoke_at: float | None = None
        """When the first content came; monotonic seconds."""
        self._streams = False
        """True if a part of the call changes a streamed answer."""
        self._whole = False
        """True if an answer is held until it is complete."""
        self._refused: UpstreamRefusal | None = None
        """The last refusal that was not passed on."""
        self._again = False
        """True once the same upstream was asked a second time; there is no third."""
        self._given_at = 0.0
        """When its upstream was chosen; monotonic seconds."""
        self._sent_at = 0.0
        """When the request was written; monotonic seconds."""
        self._tries: list[dict[str, str | int]] = []

    @abstractmethod
    def _forward(self) -> None:
        """Send the call to the next upstream that may serve it."""

    @abstractmethod
    def _reach(self, pool: ConnectionPool, fresh: bool = False) -> None:
        """Send the prepared request to this upstream once its gate is open and it has a free place."""

    @abstractmethod
    def _connect(self, pool: ConnectionPool, fresh: bool) -> None: ...

    @abstractmethod
    def _rolled_back(self) -> bool:
        """Plan the call anew if the version that it has waited for was rolled back meanwhile; True if so."""

    @abstractmethod
    def _begin_response(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Begin the client's answer with this upstream's."""

    def _where(self) -> str:
        pool = self.record.pool
        return "the upstream" if pool is None else f"upstream {pool.name!r} ({pool.origin})"

    def _leave_out(self, pool: ConnectionPool, names: list[bytes]) -> None:
        """Note that a client's key of another provider is not sent to this upstream. A call that the settings send here
        goes without the key; raises `ClientFault` for any other."""
        name = names[0].decode("latin-1")
        if not self._admitted.routed:
            message = (
                f"upstream {pool.name!r} ({pool.origin}, {pool.config.dialect}) is not sent the key in {name!r}: it is "
                "another provider's. Leave it out, use a key of this one (or give it a key_env), or add the "
                "[[upstream]] that the key is for"
            )
            raise ClientFault(403, "credential", message, name)
        record = self.record
        known = (record.attributes or {}).get(LEFT_OUT, ())
        record.note({LEFT_OUT: sorted({*known, *(one.decode("latin-1") for one in names)})})
        self._shared.metrics.credentials_left_out[pool.name,] += 1

    def _has_spare(self) -> bool:
        return bool(self._pools) and may_repeat(self.request.method, self.record.call.dialect)

    def _larger(self) -> list[ConnectionPool]:
        """Untried upstreams that take a longer prompt than the current one."""
        pool = self.record.pool
        if pool is None or pool.config.context is None or not self._has_spare():
            return []
        return [other for other in self._pools if (other.config.context or 0) > pool.config.context]

    # A place at an upstream -----------------------------------------------------------------------------------------

    def on_slot(self) -> None:
        """Called when the upstream has a free place."""
        pool = self.record.pool
        if self._resumes() and pool is not None and not self._rolled_back():
            if pool.gate.must_wait:
                self._reach(pool)
            else:
                self._connect(pool, fresh=False)

    def _check_queue(self, waited_s: float) -> None:
        """Try elsewhere, or fail, if the call has waited too long for a place."""
        pool = self.record.pool
        assert pool is not None
        limit_s = pool.config.read_timeout
        if waited_s > limit_s:
            limit = pool.concurrency_limit
            message = (
                f"{self._where()} has {pluralized(limit.running, 'call')} under way and is given no more "
                f"(upstream.max_concurrent = {limit.maximum}); this one has waited in vain for {limit_s:g} s"
            )
            self.cancel_upstream()
            if self._pools:
                self._do("asked elsewhere", lambda: self._try_next("busy"))
            else:
                self._fail(UpstreamFault(503, "busy", message))

    def _check_connecting(self, now: float) -> None:
        """Try elsewhere if another call has already waited too long for a connection to this upstream: one waiting call
        is enough."""
        pool = self.record.pool
        if pool is not None and self._pools and pool.keeps_waiting(now, self.connecting):
            self.cancel_upstream()
            self._do("asked elsewhere", lambda: self._try_next("connecting"))

    def _end(self, status: str, error: str | None) -> None:
        super()._end(status, error)
        if self.record.pool is not None:
            self.record.pool.health.call_left(self._given_at)

    # An answer that is held -----------------------------------------------------------------------------------------

    def _must_hold(self, connection: UpstreamConnection) -> bool:
        """True if the answer may still be replaced, or if only its first bytes tell whether it is a stream."""
        unlabelled = self._streams and connection.status < 300 and not connection.events
        return self._has_spare() or unlabelled or (connection.status == 400 and bool(self._parts))

    def _hold(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Hold the head of an answer back until the answer is accepted."""
        self._held, self._size = (head, [raw]), len(raw)
        self._listen(connection)
        self._look(connection)

    def _holds(self, connection: UpstreamConnection, raw: bytes) -> bool:
        """True if the read belongs to an answer that is held; adds it and looks at the answer again."""
        if self._held is None:
            return False
        self.touched = monotonic()
        self._held[1].append(raw)
        self._size += len(raw)
        self._look(connection)
        return True

    def _look(self, connection: UpstreamConnection) -> None:
        assert self._held is not None
        refused = connection.status in _REFUSED and (self._parts or self._larger())
        if refused or is_down(connection.status):
            # A refusal is held until it is complete.
            if connection.done or self._size > _REFUSAL:
                (head, pieces), self._held = self._held, None
                if refused:
                    self._ask_otherwise(connection, head, b"".join(pieces))
                else:
                    self._pass_over(connection, head, b"".join(pieces))
            return
        if self._beginning is not None and self._hear(connection) == "an error" and self._has_spare():
            self._held = None
            self._blame("error_event")
            self.cancel_upstream()
            self._try_next("error_event")
        elif connection.done or not self._waits_for_more():
            (head, pieces), self._held = self._held, None
            if self._streams and begins_event_stream(b"".join(connection.pieces)):
                connection.content_type = EVENT_STREAM
            self._begin_response(connection, head, b"".join(pieces))

    def _waits_for_more(self) -> bool:
        """True if the held answer may still be dropped."""
        if self._size >= _ANSWER:
            return False
        if self._has_spare():
            return self._beginning is not None or self._whole
        return self._beginning is not None and not self._beginning.format_known

    def _listen(self, connection: UpstreamConnection) -> None:
        """Watch the answer for its first content."""
        self._beginning = FirstContentDetector(connection.content_type, bool(connection.encoding))
        self._heard, self._spoke_at = 0, None

    def _hear(self, connection: UpstreamConnection) -> ContentKind:
        """Classify the pieces of the answer that were not looked at yet."""
        assert self._beginning is not None
        found = self._beginning.classify(connection.pieces[self._heard :])
        self._heard = len(connection.pieces)
        if found != "nothing":
            self._beginning = None
        if found == "something":
            self._spoke_at = monotonic()
        return found

    def _pass_over(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Ask an upstream that is down once more a moment later, or ask the next one."""
        assert self.record.pool is not None
        pool, reason, asked_s = self.record.pool, f"http_{connection.status}", retry_after_s(connection.headers)
        was_good = pool.health.state(monotonic()) == "good"
        self._blame(reason, asked_s)
        self._put_aside(connection, head, raw)
        after_s = retry_delay_s(connection.status, asked_s) if was_good and not self._again else None
        if after_s is None:
            self._try_next(reason)
        else:
            self._again = True
            self._note_try(reason)
            self._move(CallState.PLANNING)
            self._wait(asyncio.get_running_loop().call_later(after_s, self._on_time, pool).cancel)

    def _put_aside(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Keep a refusal if it is complete, and leave its upstream."""
        record = self.record
        if connection.done and record.pool is not None:
            self._refused = UpstreamRefusal(record.pool, record.body, record.sent, copy(connection), head, raw)
            self.release_upstream()
        else:
            self.cancel_upstream()

    def _on_time(self, pool: ConnectionPool) -> None:
        """Called when the delay before the second request to the same upstream is over."""
        if self._resumes():
            self._do("asked again", lambda: self._reach(pool))

    def _ask_otherwise(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Retry a refused request in a form that a part knows, or at an upstream with a longer context."""
        answer, pool = decoded_body(connection.pieces, connection.encoding), self.record.pool
        if pool is not None:
            pool.health.answered(monotonic())
        asked = self._parts if connection.status == 400 else ()
        body = next((made for part in asked if (made := part.retry_body(self.record, answer)) is not None), None)
        if body is not None and pool is not None:
            self.release_upstream()
            self._pools.insert(0, pool)
            self.record.body = body
            self._try_next("http_400")
        elif is_too_long(answer) and (larger := self._larger()):
            self._put_aside(connection, head, raw)
            self._pools = larger
            self._try_next("too_long")
        else:
            self._begin_response(connection, head, raw)

    # The next try ---------------------------------------------------------------------------------------------------

    def _blame(self, reason: str, asked_s: float | None = None) -> None:
        """Count a failure of the upstream."""
        if self.record.pool is not None and reason != "internal":
            self.record.pool.health.failed(reason, monotonic(), asked_s)

    def _try_next(self, reason: str) -> None:
        """Go to the next upstream. `reason`: why the current one does not serve the call."""
        if self.record.pool is not None:
            # If the call never reached it, another call may probe this upstream.
            self.record.pool.health.call_left(self._given_at)
        self._note_try(reason)
        self._move(CallState.PLANNING)
        self._forward()

    def _note_try(self, reason: str) -> None:
        record = self.record
        name = "" if record.pool is None else record.pool.name
        after_ms = round((monotonic() - self.request.started) * 1e3)
        self._tries.append({"upstream": name, "after_ms": after_ms, "why": reason})
        record.note({TRIES: self._tries})
        self._shared.metrics.upstream_retries[name, reason] += 1

    def _fail(self, refusal: Refusal) -> None:
        """Pass on the last refusal of an upstream, if one was kept: with its `Retry-After` it tells the client more
        than an error about the next upstream."""
        refused, self._refused = self._refused, None
        if refused is None or not isinstance(refusal, UpstreamFault):
            super()._fail(refusal)
            return
        self._note_try(refusal.kind)
        if self.state is not CallState.PLANNING:
            self._move(CallState.PLANNING)
        self.record.pool, self.record.body, self.record.sent = refused.pool, refused.body, refused.sent
        self._begin_response(refused.connection, refused.head, refused.raw)

    def _check_content(self, now: float) -> None:
        """Try elsewhere if a stream has begun and has brought no content for too long."""
        pool = self.record.pool
        if self._held is None or self._beginning is None or pool is None or not self._has_spare():
            return
        if now - self._sent_at > self._shared.first_content_timeouts.limit_s(self._admitted.model or ""):
            self._held = None
            self.cancel_upstream()
            self._blame("no_content")
            self._do("asked elsewhere", lambda: self._try_next("no_content"))

    def _learn_patience(self) -> None:
        """Learn from a complete stream how long its model takes until the first content."""
        if self.record.stream and self._spoke_at is not None:
            self._shared.first_content_timeouts.observe(self._admitted.model or "", self._spoke_at - self._sent_at)

    @property
    def _may_choose(self) -> bool:
        """True if its route has several upstreams."""
        return bool(self._pools or self._tries)
