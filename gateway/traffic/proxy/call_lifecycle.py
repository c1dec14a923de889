"""The state, the record and the end of a call, whichever transport carries its bytes (HTTP or a WebSocket).

Every end is one `_end`, which completes the record, and one `recorder.put`. In a strict gateway the call waits for the
recorder twice: before it is sent upstream, and before the last byte of its answer goes to the client.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Protocol

from penstock.gateway.model.facts import QUEUE_MS
from penstock.gateway.traffic.budgets.operations import BudgetShortfall
from penstock.gateway.traffic.calls.call_record import CallRecord, decoded_body
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.calls.conversations import UnreadAnswer
from penstock.gateway.traffic.proxy.call_filter import CallFilter
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.state import MOVES, CallState
from penstock.gateway.traffic.upstreams.concurrency_limit import ConcurrencyLimit
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.errors import Refusal, internal_fault
from penstock.gateway.wire.http.request import HttpRequest

_log = logging.getLogger("penstock.proxy")
_BOOKS = 1024
"""Bytes of memory for a remembered answer, besides its body."""
_BLANK = (b"\n\n", b"\r\n\r\n")
_PLACED = (CallState.CONNECTING, CallState.SENT, CallState.STREAMING)
SLOTS = ("_admitted", "_announced", "_event_from", "_last_mark", "_leave", "_overhead", "_parts", "_place",
         "_queued_at", "_remembered", "_shared", "_waits_since", "durable", "record", "state")  # fmt: skip
"""Slots of `CallLifecycle`; a subclass declares them besides its own."""


class SlotQueue(Protocol):
    """What gives places to waiting calls, in their order."""

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
        self._parts: list[CallFilter] = []
        self._leave: Callable[[], object] | None = None
        """Gives up the current wait; None if the awaited result comes in any case."""
        self._place: ConcurrencyLimit | None = None
        """The upstream's places while the call has one of them: from connecting until it goes elsewhere or ends."""
        self._queued_at: float | None = None
        """When it began to wait for a place; monotonic seconds. None if it waits for none."""
        self._announced = False
        self._last_mark: bytes | None = None
        """Bytes that mark the last event of its answer, after which its conversation may go on; None if nothing is
        looked for."""
        self._event_from: int | None = None
        """Index of the piece with that mark, or with the beginning of an event that is not complete yet."""
        self._remembered = False
        """True once the last event has come, so that its conversation may go on."""
        self.durable = shared.strict
        """True if the end of its answer waits until its span is on disk."""
        self._waits_since = 0.0
        self._overhead = 0.0
        """Seconds that the gateway itself has spent on it."""

    @property
    def rollout(self) -> str:
        """Rollout id."""
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
            self.record.attributes, self._queued_at = {**self.record.attributes, QUEUE_MS: round(waited_ms, 3)}, None
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
        """Announce the call if it began before `announce`; monotonic seconds."""
        if not self._announced and not self._admitted.waits and self.request.started <= announce:
            self._announced = True
            self._shared.recorder.announce(self.record)

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
            metrics.first_byte_seconds.observe(record.first_byte_ns / 1e9)
            metrics.overhead_seconds.observe(self._overhead + now - self.touched)
        for part in self._parts:
            part.on_end(record, status)
        if self._admitted.address.origin == "implicit" and not self._remembered:
            self._remember(self.started and record.http_status is not None and record.http_status < 400)

    def _remember(self, good: bool) -> None:
        joining, hints = self._shared.admission.matcher, self.client.hints
        joining.remember_soon(self._admitted, hints, self._answered() if good else None)

    def _mark_of_last_event(self) -> bytes | None:
        """The bytes that mark the last event of a stream without an address. None if the answer is compressed or
        changed on its way: only the complete answer would tell, so its end counts."""
        if self._admitted.address.origin != "implicit" or (self.record.http_status or 0) >= 400:
            return None
        if self.record.encoding is not None or any(part.client_body() is not None for part in self._parts):
            return None
        return self._admitted.dialect.end_marker

    def _look_for_last_event(self, mark: bytes) -> None:
        """Called after a read that is not the end of the answer."""
        pieces, whole = self.record.pieces, self.record.pieces[-1].endswith(_BLANK)
        if self._event_from is None and (not whole or mark in pieces[-1]):
            self._event_from = len(pieces) - 1
        if self._event_from is not None and whole:
            events, self._event_from = b"".join(pieces[self._event_from :]), None
            if mark in events and self._admitted.dialect.is_complete(events):
                self._last_mark, self._remembered = None, True
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
            self._shared.notify_batch_results()
        record, seconds = self.record, ((self.record.end_ns or 0) - self.request.started_ns) / 1e9
        metrics = self._shared.metrics
        metrics.call_ended(self._admitted.dialect.name, record.status, seconds)
        if record.arm is not None:
            metrics.arm_call_ended(record.arm, record.status, seconds)


def client_body(parts: list[CallFilter], pieces: list[bytes], encoding: bytes | None) -> bytes:
    """The answer's body as the client got it, plus the fields that the gateway asked for itself."""
    told = next((said for part in parts if (said := part.client_body()) is not None), None)
    return decoded_body(pieces, encoding) if told is None else told
