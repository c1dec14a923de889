"""The life of one call, from its plan to its record. Read `HttpCall` from top to bottom, beside the moves in `state`.

No coroutine runs per call: callbacks move it on. `run` plans where it goes and writes it upstream; `on_answer` and
`on_data` pass on the answer in the same read that brought it; `_complete` hands the call to the recorder. A client that
leaves (`on_client_gone`), an upstream that cannot be reached, stays silent or breaks off (`on_unreachable`, `check`,
`on_broken`) each end the call once, with one span. A bug in any of these is logged and ends the call like a broken
upstream, so that no client waits for an answer that cannot come.

Work that only some calls need (translation, token ids, exact sessions, shadows) is in their `call_filter`, never here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Final

from penstock.gateway.model.release import Pin
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_filter import CallPlan
from penstock.gateway.traffic.proxy.call_lifecycle import CallState
from penstock.gateway.traffic.proxy.failover_policy import is_down
from penstock.gateway.traffic.proxy.plan import PinWait, plan, plan_pinned
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.upstream_failover import Failover
from penstock.gateway.traffic.upstreams.health import retry_after_s, take_next
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import frame_body
from penstock.gateway.wire.http.request import HttpRequest, Refusal, UpstreamFault, internal_fault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.model_name import replace_model
from penstock.gateway.wire.rewriting import Framing


class HttpCall(Failover):
    """One call. It is in `ProxyContext.running` from `run` until it is handed to the recorder."""

    __slots__ = ("_aliases", "_asked_again", "_came", "_given", "_sent")

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, request: HttpRequest, admitted: CallRequest
    ) -> None:
        super().__init__(shared, client, request, admitted)
        self._given: tuple[ResourceUse, Mapping[str, Pin]] | None = None
        """The released resources that it uses, and the versions that its rollout was given."""
        self._aliases: Mapping[str, str] = {}
        """Model name by upstream; empty if all upstreams use the same name."""
        self._came = request.headers
        """The request's headers before any change."""
        self._sent: tuple[bytes, bytes] = (b"", b"")
        self._asked_again = False

    def run(self, began: float) -> None:
        """Start the call, and end it if that fails. `began`: when its request was complete; monotonic seconds."""
        self._shared.begin(self)
        self._shared.metrics.inflight_calls += 1
        self._do("begun", self._begin)
        self._overhead = monotonic() - began

    # 1. Where does it go, and must something change? ----------------------------------------------------------------

    def _begin(self) -> None:
        if self._admitted.waits:
            self._wait()
            self._shared.admission.matcher.follow(self._admitted, self.client.hints, self._on_followed)
        else:
            self._start()

    def _on_followed(self) -> None:
        """Called when the call's conversation, and so its rollout, is known."""
        if self._resumes():
            self._do("begun", self._start)
        else:
            self._shared.admission.matcher.remember(self._admitted, self.client.hints, None)

    def _start(self) -> None:
        self._shared.metrics.ambiguous_calls += self._admitted.address.ambiguous
        self._carry_out(plan(self._shared, self._admitted, self.request))

    def _carry_out(self, decided: CallPlan | PinWait) -> None:
        if isinstance(decided, CallPlan):
            self._adopt(decided)
            self._reserve_first(self._forward, self._aliases)
        else:
            found = decided.found
            self._wait()
            decided.pinned.add_done_callback(lambda done: self._on_pinned(found, done))

    def _on_pinned(self, found: ResourceUse, done: asyncio.Future[list[Pin]]) -> None:
        """Called when the tape has recorded the rollout's versions, or has failed to."""
        if self._resumes():
            # If its release was rolled back at this very moment, the rollout is pinned once more.
            self._do("switched", lambda: self._plan_given(found, done.exception()))

    def _plan_given(self, found: ResourceUse, error: BaseException | None = None) -> None:
        # The request may have been changed for a version that the rollout does not get after all.
        self.request.headers = self._came
        self._carry_out(plan_pinned(self._shared, self._admitted, self.request, found, error))

    def _adopt(self, send: CallPlan) -> None:
        record = self.record
        self._pools, self._parts, self._given, self._aliases = send.pools, send.filters, send.given, send.aliases
        self._whole, self._streams = send.whole, send.streams
        self.request.headers = send.headers
        record.call, record.body, record.convert, record.captured = send.call, send.body, send.convert, send.captured
        record.versions, record.arm, record.texts = send.versions, send.arm, send.texts
        if send.versions:
            record.pin = self._shared.pins.pin_writer(send.call.address.rollout)
        if send.attributes:
            record.note(send.attributes)

    # 2. Forward -----------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Send the call to the next upstream that may serve it."""
        record, self._given_at = self.record, monotonic()
        record.pool = pool = take_next(self._pools, self._given_at)
        if self._aliases:
            record.body = replace_model(record.plain, self._aliases[pool.name], self._admitted.form)
        if self._admitted.encoded_body is not None:
            self._pack(self._admitted.encoded_body)
        length = len(record.body) if record.changed else None
        target, rollout = pool.target(record.call.path).encode("latin-1"), record.call.address.rollout
        head, record.sent, left = pool.heads.compose(self.request, target, length, rollout, self._admitted.families)
        if left:
            self._leave_out(pool, left)
        self._sent = head, frame_body(self.request, record.body)
        self._announce_first(lambda: self._reach(pool))

    def _pack(self, packed: bytes) -> None:
        """Forward a request with a content encoding as it came, or without the encoding if its body was changed."""
        if self.record.changed:
            self.request.headers = [header for header in self.request.headers if header[0] != b"content-encoding"]
        else:
            self.record.body = packed

    def _reach(self, pool: ConnectionPool, fresh: bool = False) -> None:
        """Connect as soon as the upstream's gate is open and it has a free place."""
        if pool.gate.must_wait:
            self._wait(partial(pool.gate.leave, self))
            pool.gate.wait(self)
        elif pool.concurrency_limit.full:
            self._wait_for_slot(pool.concurrency_limit, self.on_slot)
        else:
            self._connect(pool, fresh)

    def _connect(self, pool: ConnectionPool, fresh: bool) -> None:
        self._move(CallState.CONNECTING)
        self._acquire_slot(pool.concurrency_limit)
        for part in self._parts:
            self.connecting = part.connect(self, pool, fresh)
            if self.connecting is not None:
                return
        connection = None if fresh else pool.take()
        if connection is not None:
            self.on_connected(connection)
        else:
            self.connecting = pool.connect(self)

    def on_open(self) -> None:
        """Called when the upstream's gate opens."""
        pool = self.record.pool
        if self._resumes() and pool is not None and not self._rolled_back():
            if pool.concurrency_limit.full:
                self._wait_for_slot(pool.concurrency_limit, self.on_slot)
            else:
                self._connect(pool, fresh=False)

    def _rolled_back(self) -> bool:
        """Plan the call anew if the version that it has waited for was rolled back meanwhile; True if so."""
        given = self._given
        if given is None or not self._shared.pins.rolled_back(*given):
            return False
        self.record.pool = None
        self._do("switched", lambda: self._plan_given(given[0]))
        return True

    def on_refused(self, refusal: Refusal) -> None:
        """Try the next upstream, or refuse the call: the gate did not open in time, or a part cannot connect."""
        self._leave = None
        if self._pools:
            self._try_next(refusal.kind)
        else:
            self._fail(refusal)

    def on_connected(self, connection: UpstreamConnection) -> None:
        """Write the request to the upstream, and note the time."""
        self._move(CallState.SENT)
        self.send(connection, *self._sent)
        self._sent_at = self.touched

    def on_unreachable(self, reason: str, detail: str) -> None:
        """Try the next upstream, or answer with an error. A paused upstream may be restarting: wait for its gate
        again."""
        self.connecting, pool = None, self.record.pool
        if pool is not None and pool.gate.paused:
            self._move(CallState.PLANNING)
            self._reach(pool)
            return
        self._blame(reason)
        if self._pools:
            self._try_next(reason)
        else:
            status = 504 if reason == "connect_timeout" else 502
            self._fail(UpstreamFault(status, reason, f"{self._where()} could not be reached: {detail}"))

    # 3. Stream back as it arrives -----------------------------------------------------------------------------------

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Pass on the head of the answer with the body bytes of the same read, or hold it."""
        record = self.record
        if connection.status == 404 and not self._asked_again and self._shared.pins.has_adapter(record.versions):
            self._ask_again()
        elif self._must_hold(connection):
            self._hold(connection, head, raw)
        else:
            if is_down(connection.status):
                self._blame(f"http_{connection.status}", retry_after_s(connection.headers))
            elif self._may_choose:
                self._listen(connection)
            self._begin_response(connection, head, raw)

    def _begin_response(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        record = self.record
        record.http_status = connection.status
        if record.pool is not None and not is_down(connection.status):
            record.pool.health.answered(monotonic())
        record.response_headers = connection.headers[: connection.head_fields]
        record.stream = connection.content_type.startswith(record.call.dialect.streaming_content_type)
        record.encoding = connection.encoding
        out = self.begin_answer(connection, head, raw)
        self._last_mark = self._mark_of_last_event() if record.stream else None
        self._move(CallState.STREAMING)
        self._pass_on(connection, out)

    def framing(self, connection: UpstreamConnection) -> Framing | None:
        """The framing of the first part that changes the answer, or else the relay's own."""
        for part in self._parts:
            if (made := part.framing(connection, self.request.http10)) is not None:
                return made
        return super().framing(connection)

    def _ask_again(self) -> None:
        """Ask the same server again after a repair: it was restarted and has lost its adapters, or it has not loaded
        this one yet. The agent waits for the repair."""
        self.cancel_upstream()
        self._note_try("http_404")
        self._asked_again, pool, self.record.pool = True, self.record.pool, None
        self._move(CallState.PLANNING)
        self._wait()
        self._shared.pins.repair().add_done_callback(lambda _: self._on_repaired(pool))

    def _on_repaired(self, pool: ConnectionPool | None) -> None:
        if self._resumes() and pool is not None:
            self.record.pool = pool
            if not self._rolled_back():
                self._reach(pool, fresh=True)

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        if not self._holds(connection, raw):
            self._pass_on(connection, self.continue_answer(connection, raw))

    def _pass_on(self, connection: UpstreamConnection, out: bytes) -> None:
        self.touched = now = monotonic()
        if connection.pieces:
            if self._beginning is not None:
                self._hear(connection)
            self.record.add_pieces(connection.pieces, now)
            connection.pieces, self._heard = [], 0
            if self._last_mark is not None and not connection.done:
                self._look_for_last_event(self._last_mark)
        if connection.done:
            self._complete(connection, out)
        elif out:
            self.client.transport.write(out)

    # 4. Record ------------------------------------------------------------------------------------------------------

    def _complete(self, connection: UpstreamConnection, out: bytes) -> None:
        """End the call: its answer is complete."""
        status = connection.status
        self.record.trailers = connection.headers[connection.head_fields :]
        self.release_upstream()
        problem = self._problem()
        error = problem or (None if status < 400 else f"http_{status}")
        self._end("ok" if error is None else "error", error)
        if status < 400:
            self._learn_from_it()
        self._write_last(out)
        self._hand_over()

    def _learn_from_it(self) -> None:
        """Called after a complete, successful response."""
        self._learn_patience()
        for part in self._parts:
            part.on_complete(self.record, self.token_ids)

    def _problem(self) -> str | None:
        """The reason why a complete answer counts as an error; None if it does not."""
        return next(filter(None, [part.problem() for part in self._parts]), None)

    # Ends that are not completions ----------------------------------------------------------------------------------

    def on_client_gone(self) -> None:
        """Cancel the upstream: the client left. If it already had the last event, the call counts as complete."""
        if self.state < CallState.ENDING:
            self.cancel_upstream()
            if self.record.stream and self._admitted.dialect.is_complete(self.client_body()):
                self._end("ok", None)
                self._learn_from_it()
            else:
                self._end("cancelled", "client_gone")
            self._shared.recorder.put(self.record, self._recorded)

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        """Handle an upstream that broke off: retry before the answer has begun; after that the client gets what
        came."""
        self.connection, pool, self._held = None, self.record.pool, None
        if self.state >= CallState.ENDING:
            return
        if self.started:
            if connection.pieces:
                self.record.add_pieces(connection.pieces, monotonic())
            self._blame(reason)
            self._cut_off("error", reason)
            return
        if pool is not None and not connection.seen and self._repeats(connection, pool):
            # The request lost a race with the server's keep-alive timer, or the engine was stopped for new weights.
            self._note_try(reason)
            self._move(CallState.PLANNING)
            self._reach(pool, fresh=True)
            return
        self._blame(reason)
        if self._has_spare():
            self._try_next(reason)
        else:
            self._fail(UpstreamFault(502, reason, f"{self._where()} {_BROKEN[reason]}"))

    def _repeats(self, connection: UpstreamConnection, pool: ConnectionPool) -> bool:
        """True if a call whose connection closed before any byte is sent once more: the connection was idle before and
        closed at once (a server that closes an idle connection has not processed the request), or the upstream is
        paused."""
        return (connection.reused and monotonic() - self.touched < _RACE_S) or pool.gate.paused

    def check(self, now: float, announce: float) -> None:
        """Called every tick: announce the call if it is due, and end it if its upstream is silent for too long."""
        self._announce_late(announce)
        if self._queued_at is not None:
            self._check_queue(now - self._queued_at)
        elif self._stuck():
            self._give_up_on("internal", internal_fault())
        elif self.state is CallState.CONNECTING:
            self._check_connecting(now)
        elif self.state in (CallState.SENT, CallState.STREAMING) and not self.held:
            late = self._late(now)
            if late is not None:
                self._give_up_on("timeout", UpstreamFault(504, "timeout", f"{self._where()} {late}"))
            else:
                self._check_content(now)

    def _late(self, now: float) -> str | None:
        """The upstream's failure in words, with the setting of the time limit; None while it is in time."""
        assert self.record.pool is not None
        limit = self.record.pool.config.read_timeout
        return f"sent nothing for {limit:g} s (upstream.read_timeout)" if now - self.touched > limit else None

    def _stuck(self) -> bool:
        """True if no event can move the call on any more because one of its steps has failed."""
        if self.state is CallState.CONNECTING:
            return self.connecting is None or self.connecting.done()
        if self.state in (CallState.SENT, CallState.STREAMING):
            return self.connection is None or self.connection.caller is not self
        return self.state is CallState.PLANNING

    def _give_up_on(self, reason: str, refusal: Refusal) -> None:
        self.cancel_upstream()
        self._held = None
        self._blame(reason)
        if self.started:
            self._cut_off("error", reason)
        elif self._has_spare() and reason != "internal":
            self._do("asked elsewhere", lambda: self._try_next(reason))
        else:
            self._fail(refusal)


_RACE_S: Final = 1.0
"""Seconds after a request was sent within which a close counts as a race: the server closed the idle connection at the
same moment."""
_BROKEN: Final = {
    "upstream_closed": "closed the connection before it answered",
    "upstream_protocol": "answered with something that is not HTTP/1.1",
    "internal": "answered, and the gateway failed on it (its log says why)",
}
