"""The state, the record and the end of a call, whichever transport carries its bytes (HTTP or a WebSocket).

Every end is one `_end`, which completes the record, and one `recorder.put`. In a strict gateway the call waits for the
recorder twice: before it is sent upstream, and before the last byte of its answer goes to the client.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Final, Protocol

from penstock.gateway.model.facts import QUEUE_MS
from penstock.gateway.model.known_secrets import NO_SECRETS
from penstock.gateway.traffic.budgets.operations import BudgetShortfall
from penstock.gateway.traffic.calls.answer_masking import masking_framing
from penstock.gateway.traffic.calls.call_record import CallRecord, decoded_body
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.calls.conversations import UnreadAnswer
from penstock.gateway.traffic.proxy.proxy_context import CallFilter, ProxyContext
from penstock.gateway.traffic.upstreams.pool import ConcurrencyLimit
from penstock.gateway.wire.dialects import family
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import HOP, client_head, refusal_body, refusal_head
from penstock.gateway.wire.http.request import HttpRequest, Refusal, UpstreamFault, internal_fault
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection
from penstock.gateway.wire.rewriting import Framing

# The way of an answer from an upstream connection to a client: the base of calls (`gateway.traffic.proxy.call`) and
# of control requests (`gateway.process.dispatch`).
#
# The callback that reads from the upstream writes to the client, byte for byte, with two exceptions. A client of
# HTTP/1.0 gets a chunked answer without its chunks. The gateway's own keys are taken out of errors
# (`gateway.traffic.calls.answer_masking`). A call has further reasons to change its answer (`framing`). While the
# client is slow, nothing more is read from the upstream.


class Relay(UpstreamCaller):
    """One request being served, and its answer."""

    __slots__ = (
        "_framing",
        "_unchunk",
        "_until_close",
        "changes",
        "client",
        "connecting",
        "connection",
        "filtered",
        "head_only",
        "held",
        "own",
        "request",
        "started",
        "touched",
    )  # fmt: skip

    def __init__(self, client: ClientConnection, request: HttpRequest) -> None:
        self.client = client
        self.request = request
        self.head_only = request.method == "HEAD"
        self.connecting: asyncio.Task[None] | None = None
        self.connection: UpstreamConnection | None = None
        self.held = client.paused
        """True while the client does not take what is written."""
        self.started = False
        """True once the answer's head was passed on."""
        self.touched = request.started
        """When the upstream last sent something or was written to; monotonic seconds."""
        self.own = NO_SECRETS
        """The gateway's keys, which no error answer may disclose."""
        self.changes = False
        """True if the client does not get the bytes of a read as they are."""
        self._unchunk = self._until_close = False
        self._framing: Framing | None = None
        self.filtered = False
        """True if an answer that is no error may change on its way."""

    @abstractmethod
    def on_client_gone(self) -> None:
        """Called when the client has left."""

    def on_interim(self, head: bytes) -> None:
        """Pass on a 1xx answer."""
        if not self.request.http10:
            self.client.transport.write(self.own.hide(head))

    @property
    def keep_alive(self) -> bool:
        """True if the client may send another request on this connection."""
        return self.request.keep_alive and not self.client.draining

    def begin_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the bytes for the client: the answer's head and the body bytes of the same read."""
        self.started = True
        self.changes = self._unchunk = self.request.http10 and connection.chunked
        ends_itself = connection.chunked or connection.length_known or (connection.done and not connection.cut)
        self._until_close = not ends_itself
        close = not self.request.keep_alive or self.client.draining or self._until_close
        if close or connection.hops or head[5:8] != b"1.1":
            drop = connection.hops or HOP
            head = client_head(head, drop | {b"transfer-encoding"} if self._unchunk else drop, close)
        if self.filtered or connection.status >= 300:
            self._framing = self.framing(connection)
            if self._framing is not None:
                self.changes = True
                return self._framing.begin(connection, head, raw)
        return head + (self.changed(connection, raw) if self.changes else raw)

    def framing(self, connection: UpstreamConnection) -> Framing | None:
        """The framing that changes the answer; None if the answer passes unchanged."""
        if connection.status >= 300 and self.own:
            return masking_framing(self.own, connection, connection.chunked and not self._unchunk)
        return None

    @property
    def token_ids(self) -> bool:
        """True if the answer had token ids that the gateway had asked for."""
        return self._framing is not None and self._framing.ids

    def changed(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return the bytes for the client of one read if `changes`."""
        return b"".join(connection.pieces) if self._framing is None else self._framing.go_on(connection, raw)

    def end_answer(self) -> None:
        """Finish the answer: everything was written, so the connection's next request may come."""
        self.client.finish(self.request.keep_alive and not self._until_close)

    def release_upstream(self) -> None:
        """Give the connection back to its pool: the answer is complete."""
        connection, self.connection = self.connection, None
        if connection is not None:
            if self.held:
                connection.transport.resume_reading()
            connection.release()

    def cancel_upstream(self) -> None:
        """Cancel the upstream at once: nobody waits for the answer."""
        connecting, self.connecting = self.connecting, None
        connection, self.connection = self.connection, None
        if connecting is not None:
            connecting.cancel()
        if connection is not None:
            connection.cancel()

    def break_off(self) -> None:
        """End an answer that cannot be completed, so that the client notices."""
        if self._framing is not None and (held := self._framing.broken()):
            self.client.transport.write(held)
        self.client.break_off(framed=not (self._until_close or self._unchunk))

    def hold(self) -> None:
        """Stop reading from the upstream: the client is slower."""
        self.held = True
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def go_on(self) -> None:
        """Read from the upstream again: the client has caught up."""
        self.held = False
        self.touched = monotonic()
        if self.connection is not None:
            self.connection.transport.resume_reading()


# The states of a call as a table of moves. Pure.
#
#     planning      its destination and its changes are being decided. Ends in the same turn of the loop
#     waiting       for something other than its upstream: the reading of its conversation, the tape, weights that
#                   change, an adapter that is loaded, the tools of a rehearsal, a free place at an upstream or server
#     connecting    to an upstream
#     sent          its request is written; nothing has come back
#     streaming     its answer is passed on as it comes
#     ending        its record is complete, and the recorder has it
#     ended         the recorder has reported whether it was recorded
#
# Until a byte of the answer has been passed on, a call can go back to planning: for the next upstream, or for the
# same one once more. If a wait ends after the client has left, the call is already ending, and nothing happens.


class CallState(IntEnum):
    """The states of a call. From `ENDING` on, nothing can change its record."""

    PLANNING = 0
    WAITING = 1
    CONNECTING = 2
    SENT = 3
    STREAMING = 4
    ENDING = 5
    ENDED = 6


MOVES: Final[dict[CallState, dict[CallState, str]]] = {
    CallState.PLANNING: {
        CallState.WAITING: "something is needed that is not there yet",
        CallState.CONNECTING: "an upstream was chosen",
        CallState.SENT: "an idle connection to it was taken",
        CallState.STREAMING: "no upstream is left: the refusal of one of them is passed on",
        CallState.ENDING: "refused, the client left, the gateway stops",
    },
    CallState.WAITING: {
        CallState.PLANNING: "it is there",
        CallState.ENDING: "answered by the gateway, refused, the client left, the gateway stops",
    },
    CallState.CONNECTING: {
        CallState.SENT: "connected",
        CallState.PLANNING: "unreachable: the next upstream, or this one when its weights have changed",
        CallState.ENDING: "unreachable, the client left, the gateway stops",
    },
    CallState.SENT: {
        CallState.STREAMING: "the head of the answer came",
        CallState.PLANNING: "broke off before it answered, silent, down, lacks an adapter: another one, or once more",
        CallState.ENDING: "broke off, silent for too long, the client left, the gateway stops",
    },
    CallState.STREAMING: {
        CallState.ENDING: "complete, broke off, silent for too long, the client left, the gateway stops"
    },
    CallState.ENDING: {CallState.ENDED: "recorded, or lost"},
    CallState.ENDED: {},
}
"""State -> next state -> cause. Every move of a call is one of these."""


_log = logging.getLogger("penstock.proxy")
_BOOKS = 1024
"""Bytes of memory for a remembered answer, besides its body."""
_BLANK = (b"\n\n", b"\r\n\r\n")
_PLACED = (CallState.CONNECTING, CallState.SENT, CallState.STREAMING)
SLOTS = ("_admitted", "_announced", "_given_at", "_last_event", "_leave", "_overhead", "_parts", "_place",
         "_queued_at", "_remembered", "_shared", "_waits_since", "durable", "record", "state")  # fmt: skip
"""Slots of `CallLifecycle`; a subclass declares them besides its own."""


class LastEventFinder:
    """Finds the last event of a stream of a call without an address, before the stream itself ends."""

    __slots__ = ("_dialect", "_from", "_mark")

    def __init__(self, mark: bytes, dialect: Dialect) -> None:
        """`mark`: bytes that the last event has."""
        self._mark, self._dialect = mark, dialect
        self._from: int | None = None
        """Index of the piece with the mark, or with the beginning of an event that is not complete yet."""

    def find(self, pieces: list[bytes]) -> bool:
        """True if the last piece completes the last event. Called with each new piece."""
        whole = pieces[-1].endswith(_BLANK)
        if self._from is None and (not whole or self._mark in pieces[-1]):
            self._from = len(pieces) - 1
        if self._from is None or not whole:
            return False
        events, self._from = b"".join(pieces[self._from :]), None
        return self._mark in events and self._dialect.is_complete(events)


class SlotQueue(Protocol):
    """Gives places to waiting calls, in the order in which they came; `leave` takes a call out of the queue."""

    def wait(self, go_on: Callable[[], None]) -> None: ...
    def leave(self, go_on: Callable[[], None]) -> None: ...


class CallLifecycle(ABC):
    """One call, without its transport."""

    __slots__ = ()

    client: ClientConnection
    request: HttpRequest
    started: bool
    """True once its answer has begun."""
    touched: float
    """When its upstream last sent something or was written to; monotonic seconds."""

    def _prepare(self, shared: ProxyContext, request: HttpRequest, admitted: CallRequest) -> None:
        self.state = CallState.PLANNING
        self.record = CallRecord(admitted, request, shared.redactor, shared.config.limits.recorded_bytes, shared.held)
        self._shared = shared
        self._admitted = admitted
        self._parts: Sequence[CallFilter] = ()
        self._given_at = 0.0
        """When its upstream was chosen; monotonic seconds."""
        self._leave: Callable[[], object] | None = None
        """Gives up the current wait; None if the awaited result comes in any case."""
        self._place: ConcurrencyLimit | None = None
        """The upstream's places while the call has one of them: from connecting until it goes elsewhere or ends."""
        self._queued_at: float | None = None
        """When it began to wait for a place; monotonic seconds. None if it waits for none."""
        self._announced = False
        self._last_event: LastEventFinder | None = None
        """Finds the last event of its answer, after which its conversation may go on; None if the end of the answer
        counts."""
        self._remembered = False
        """True once the last event has come, so that its conversation may go on."""
        self.durable = shared.strict
        """True if the end of its answer waits until its span is on disk."""
        self._waits_since = 0.0
        self._overhead = 0.0
        """Seconds that the gateway itself has spent on it."""

    @property
    def rollout(self) -> str:
        return self._admitted.address.rollout

    def _do(self, what: str, step: Callable[[], None]) -> None:
        """Run a step of the call; an exception ends the call. `what`: the step's name for the log."""
        try:
            step()
        except Refusal as refusal:
            self._fail(refusal)
        except Exception:
            _log.exception("a call of %s could not be %s", self._admitted.address.rollout, what)
            self._fail(internal_fault())

    # Its state ------------------------------------------------------------------------------------------------------

    def _move(self, to: CallState) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"a call cannot go from {self.state.name} to {to.name}")
        self.state = to
        if self._queued_at is not None:
            waited_ms = self.record.attributes.get(QUEUE_MS, 0.0) + (monotonic() - self._queued_at) * 1e3
            self.record.note({QUEUE_MS: round(waited_ms, 3)})
            self._queued_at = None
        if self._place is not None and to not in _PLACED:
            place, self._place = self._place, None
            place.release()

    def _acquire_slot(self, places: ConcurrencyLimit) -> None:
        """Take a place if the upstream limits concurrency."""
        if places.maximum is not None:
            self._place = places
            places.running += 1

    def _wait_for_slot(self, slots: SlotQueue, go_on: Callable[[], None]) -> None:
        """Wait for a place. `go_on`: called when there is one."""
        self._wait(partial(slots.leave, go_on))
        self._queued_at = monotonic()
        slots.wait(go_on)

    def _wait(self, leave: Callable[[], object] | None = None) -> None:
        """Wait for something other than the upstream; whoever ends the wait calls `_resumes`. `leave`: gives the wait
        up."""
        self._move(CallState.WAITING)
        self._leave = leave

    def _resumes(self) -> bool:
        """End the wait. False if the call has ended meanwhile, because its client left."""
        if self.state is not CallState.WAITING:
            return False
        self._leave = None
        self._move(CallState.PLANNING)
        return True

    @abstractmethod
    def check(self, now: float, announce: float) -> None:
        """Called every tick, as in `gateway.traffic.proxy.proxy_context`."""

    @abstractmethod
    def give_up(self) -> None:
        """End the call: the gateway stops and cannot wait any longer."""

    @abstractmethod
    def _fail(self, refusal: Refusal) -> None:
        """End the call with an error of the gateway's own; the upstream's answer has not begun."""

    # Its beginning, on the tape -------------------------------------------------------------------------------------

    def _reserve_first(self, then: Callable[[], None], names: Mapping[str, str] = MappingProxyType({})) -> None:
        """Call `then`, once budgets have reserved what the call may use if they count it. `names`: its model's names,
        by upstream."""
        budgets = self._shared.budgets
        reserving = None if budgets is None else budgets.reserve(self._admitted, self.record, names)
        if reserving is None:
            then()
        else:
            self._waits_since = monotonic()
            self._wait()
            reserving.add_done_callback(lambda done: self._on_reserved(done, then))

    def _on_reserved(self, done: asyncio.Future[list[BudgetShortfall]], then: Callable[[], None]) -> None:
        self._shared.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        error = done.exception()
        if self._resumes():
            self._do("sent", lambda: self._go_reserved([] if error else done.result(), error, then))

    def _go_reserved(self, short: list[BudgetShortfall], error: BaseException | None, then: Callable[[], None]) -> None:
        if short and self._shared.budgets is not None:
            raise self._shared.budgets.refusal(short, self._admitted, self.record)
        if error is None:
            then()
        else:
            self._go_unannounced(then)

    def _announce_first(self, then: Callable[[], None]) -> None:
        """Call `then`; in a strict gateway only when the tape has the open call, so that nothing is ever done upstream
        that the tape does not know."""
        if not self.durable or self._announced:
            then()
            return
        self._announced = True
        self._waits_since = monotonic()
        self._wait()
        self._shared.recorder.announce(self.record, lambda kept: self._on_announced(kept, then))

    def _on_announced(self, kept: bool, then: Callable[[], None]) -> None:
        self._shared.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        if self._resumes():
            self._do("sent", then if kept else lambda: self._go_unannounced(then))

    def _announce_late(self, announce: float) -> None:
        """Announce the call if it began before `announce`, monotonic seconds, and then what its stream brings."""
        if not self._announced:
            if not self._admitted.waits and self.request.started <= announce:
                self._announced = True
                self._shared.recorder.announce(self.record)
        elif (brought := self.record.session_stream) is not None and brought.is_due():
            self._shared.recorder.announce(brought, brought.on_recorded)

    def _go_unannounced(self, then: Callable[[], None]) -> None:
        """Go on although the tape could not record the call, unless its mode refuses that."""
        self._shared.check_gap(self._admitted)
        then()

    # Its end --------------------------------------------------------------------------------------------------------

    def _end(self, status: str, error: str | None) -> None:
        """Complete the record: the call is over."""
        shared, record, metrics = self._shared, self.record, self._shared.metrics
        now = monotonic()
        self._move(CallState.ENDING)
        record.status, record.error = status, error
        record.end_ns = shared.epoch_ns + int(now * 1e9)
        del shared.running[self]
        record.on_end()
        metrics.inflight_calls -= 1
        metrics.request_bytes += len(record.body)
        metrics.response_bytes += record.response_bytes
        if record.first_byte_ns is not None:
            metrics.call_answered(record.first_byte_ns / 1e9, self._overhead + now - self.touched)
        for part in self._parts:
            part.on_end(record, status)
        if record.pool is not None and record.pool.health.why:
            record.pool.health.call_left(self._given_at)
        if self._admitted.address.origin == "implicit" and not self._remembered:
            good = self.started and record.http_status is not None and record.http_status < 400
            self._remember(good, failed=not good or status != "ok")

    def _remember(self, good: bool, failed: bool = False) -> None:
        joining, hints = self._shared.admission.matcher, self.client.hints
        joining.remember_soon(self._admitted, hints, self._answered() if good else None, failed)

    def _last_event_finder(self) -> LastEventFinder | None:
        """None if the answer is compressed or changed on its way: only the complete answer would tell, so its end
        counts."""
        record, dialect = self.record, self._admitted.dialect
        if record.http_status is None or record.http_status >= 400 or record.encoding is not None:
            return None
        if any(part.client_body() is not None for part in self._parts):
            return None
        return None if dialect.end_marker is None else LastEventFinder(dialect.end_marker, dialect)

    def _look_for_last_event(self, finder: LastEventFinder) -> None:
        """Called after a read that is not the end of the answer."""
        if finder.find(self.record.pieces):
            self._last_event, self._remembered = None, True
            self._remember(True)

    def _answered(self) -> UnreadAnswer:
        """Its answer for the matching of later calls, without the call's other data."""
        record = self.record
        told = partial(client_body, self._parts, record.pieces, record.encoding)
        return UnreadAnswer(
            told, record.stream, record.response_bytes + _BOOKS, self._admitted.dialect.reply_fingerprints
        )

    def _recorded(self, kept: bool) -> None:
        """Count the ended call. The recorder has read its answer by now, which tells whether a complete answer is a
        good one."""
        self._move(CallState.ENDED)
        if self._shared.budgets is not None:
            self._shared.budgets.recorded(self.record, kept)
        if self.record.follows:
            self._shared.notify_fetched()
        record, seconds = self.record, ((self.record.end_ns or 0) - self.request.started_ns) / 1e9
        metrics = self._shared.metrics
        metrics.call_ended(self._admitted.dialect.name, record.status, seconds)
        if record.arm is not None:
            metrics.arm_call_ended(record.arm, record.status, seconds)


def client_body(parts: Sequence[CallFilter], pieces: list[bytes], encoding: bytes | None) -> bytes:
    """The answer's body as the client got it, plus the fields that the gateway asked for itself."""
    told = next((said for part in parts if (said := part.client_body()) is not None), None)
    return decoded_body(pieces, encoding) if told is None else told


# The record and the ends of a call over HTTP: the base of `gateway.traffic.proxy.call`.


class RecordedCall(Relay, CallLifecycle):
    """One call, without the steps that move it on."""

    __slots__ = SLOTS

    def _write_last(self, out: bytes) -> None:
        """Write the end of the answer; hold its last byte back while the span must wait for the tape or a full
        queue."""
        recorder = self._shared.recorder
        if self.durable or recorder.full:
            self._waits_since = monotonic()
            if len(out) > 1:
                self.client.transport.write(out[:-1])
            recorder.put(self.record, partial(self._let_go, out[-1:]))
        else:
            if out:
                self.client.transport.write(out)
            recorder.put(self.record, self._recorded)
            self.end_answer()

    def _let_go(self, tail: bytes, kept: bool) -> None:
        """Write the last byte of the answer: its span is on disk, or lost. A lost span breaks the answer off if the
        rollout's mode refuses unrecorded answers."""
        self._shared.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        self._recorded(kept)
        if self.client.served is not self:
            return
        if not kept and self.started and self._shared.refuses_gaps(self._admitted.address.mode):
            # An error of the gateway's own may pass: no trainer learns from it.
            self.break_off()
            return
        if tail:
            self.client.transport.write(tail)
        self.end_answer()

    def _cut_off(self, status: str, reason: str) -> None:
        """End a call whose client has a part of the answer, or nothing."""
        self._end(status, reason)
        self._shared.recorder.put(self.record, self._recorded)
        self.break_off()
        if status == "error":
            self._hand_over()

    def _fail(self, refusal: Refusal) -> None:
        """End a call with an error of the gateway's own, in the shape of its API; its answer has not begun."""
        # The message may quote an engine's answer.
        body = self.own.hide(self._refusal_body(refusal))
        head = refusal_head(refusal, len(body), self.keep_alive)
        body = b"" if self.head_only else body
        self.record.set_own_answer(refusal.status, body)
        self._end("error", refusal.kind)
        self._write_last(head + body)
        if isinstance(refusal, UpstreamFault):
            self._hand_over()

    def _hand_over(self) -> None:
        """Notify the parts: the upstream has answered or failed, and the recorder has the record."""
        for part in self._parts:
            part.on_recorded(self.record)

    def _refusal_body(self, refusal: Refusal) -> bytes:
        return refusal_body(family(self._admitted.dialect, self._admitted.path, self.request.headers), refusal)

    def cancel_upstream(self) -> None:
        """Cancel the upstream, or the wait before it."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        super().cancel_upstream()

    def give_up(self) -> None:
        """Cut the call off: the gateway stops and cannot wait any longer."""
        self.cancel_upstream()
        self._cut_off("interrupted", "gateway_stopped")

    def client_body(self) -> bytes:
        """The answer's body as the client got it, plus the fields that the gateway asked for itself."""
        return client_body(self._parts, self.record.pieces, self.record.encoding)
