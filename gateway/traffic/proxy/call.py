"""The life of one call, from its plan to its record. Read `HttpCall` from top to bottom, beside
`call_lifecycle.MOVES`.

No coroutine runs per call: callbacks move it on. `run` plans where it goes and writes it upstream; `on_answer` and
`on_data` pass on the answer in the same read that brought it; `_complete` hands the call to the recorder. A client that
leaves (`on_client_gone`), an upstream that cannot be reached, stays silent or breaks off (`on_unreachable`, `check`,
`on_broken`) each end the call once, with one span. A bug in any of these is logged and ends the call like a broken
upstream, so that no client waits for an answer that cannot come.

Until the client has a byte of it, an answer can be dropped: for an answer of the next upstream if this one is down
(`failover_policy`), or of the same one, a moment later or with a request that a filter has changed.

Work that only some calls need (translation, token ids, exact sessions, shadows) is in their `CallFilter`, never here.
"""

from __future__ import annotations

import asyncio
from copy import copy
from functools import partial
from time import monotonic
from typing import Final

from penstock.gateway.model.facts import LEFT_OUT, TRIES
from penstock.gateway.model.release import Pin
from penstock.gateway.model.toml import pluralized
from penstock.gateway.traffic.calls.call_record import decoded_body
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_lifecycle import CallState, RecordedCall
from penstock.gateway.traffic.proxy.failover_policy import (
    LONGEST_REFUSAL,
    AnswerWatch,
    Tries,
    UpstreamRefusal,
    is_down,
    is_too_long,
    may_repeat,
    retry_delay_s,
)
from penstock.gateway.traffic.proxy.plan import PinWait, plan, plan_pinned
from penstock.gateway.traffic.proxy.proxy_context import CallPlan, ProxyContext
from penstock.gateway.traffic.upstreams.cloud_auth import UpstreamAuth
from penstock.gateway.traffic.upstreams.health import retry_after_s, take_next
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.family import ANTHROPIC
from penstock.gateway.wire.dialects.request_body import replace_model
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.headers import KnownUpstreamHead, frame_body, header_fields, with_fields
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, Refusal, UpstreamFault, internal_fault
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import Framing


class HttpCall(RecordedCall):
    """One call. It is in `ProxyContext.running` from `run` until it is handed to the recorder."""

    __slots__ = ("_plan", "_pools", "_prepared", "_sent", "_sent_at", "_tries", "_watch")

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, request: HttpRequest, admitted: CallRequest
    ) -> None:
        super().__init__(client, request)
        self._prepare(shared, request, admitted)
        self.own = shared.redactor.own
        self._plan: CallPlan | None = None
        """Its destination and its changes, once they are decided."""
        self._pools: list[ConnectionPool] = []
        """Upstreams that have not been tried."""
        self._tries: Tries | None = None
        """Its requests to upstreams that have not served it; None while there are none."""
        self._watch: AnswerWatch | None = None
        """The watch on the answer's beginning; None if nothing depends on it."""
        self._sent: tuple[bytes, bytes] = (b"", b"")
        self._prepared: str | None = None
        """What was prepared of the request's signature, if the gateway signs it."""
        self._sent_at = 0.0
        """When the request was written; monotonic seconds."""

    def run(self, began: float) -> None:
        """Start the call, and end it if that fails. `began`: when its request was complete; monotonic seconds."""
        self._shared.begin(self)
        self._do("begun", self._follow if self._admitted.waits else self._start)
        self._overhead = monotonic() - began

    # 1. Where does it go, and must something change? ----------------------------------------------------------------

    def _follow(self) -> None:
        self._wait()
        self._shared.admission.matcher.follow(self._admitted, self.client.hints, self._on_followed)

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
        if isinstance(decided, PinWait):
            found = decided.found
            self._wait()
            decided.pinned.add_done_callback(lambda done: self._on_pinned(found, done))
            return
        self._plan, self._pools, self._parts = decided, decided.pools, decided.filters
        self.filtered = self.filtered or bool(decided.filters)
        self.request.headers, record = decided.headers, self.record
        record.call, record.body, record.convert = decided.call, decided.body, decided.convert
        record.captured, record.versions, record.arm = decided.captured, decided.versions, decided.arm
        record.texts = decided.texts
        if decided.versions:
            record.pin = self._shared.pins.pin_writer(decided.call.address.rollout)
        if decided.attributes:
            record.note(decided.attributes)
        if self._shared.budgets is None:
            self._forward()
        else:
            self._reserve_first(self._forward, decided.aliases)

    def _on_pinned(self, found: ResourceUse, done: asyncio.Future[list[Pin]]) -> None:
        """Called when the tape has recorded the rollout's versions, or has failed to."""
        if self._resumes():
            # If its release was rolled back at this very moment, the rollout is pinned once more.
            self._do("switched", lambda: self._plan_given(found, done.exception()))

    def _plan_given(self, found: ResourceUse, error: BaseException | None = None) -> None:
        # The request may have been changed for a version that the rollout does not get after all.
        self.request.headers = self.record.came
        self._carry_out(plan_pinned(self._shared, self._admitted, self.request, found, error))

    # 2. Forward -----------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """Send the call to the next upstream that may serve it."""
        record, self._given_at, self._prepared = self.record, monotonic(), None
        record.pool = pool = take_next(self._pools, self._given_at)
        request, admitted = self.request, self._admitted
        if self._plan is not None and self._plan.aliases:
            alias = self._plan.aliases[pool.name]
            record.body = replace_model(record.plain, alias, admitted.form)
            renamed = record.call.dialect.renamed(record.call.path, alias)
            record.path = None if renamed == record.call.path else renamed
        if admitted.encoded_body is not None:
            self._pack(admitted.encoded_body)
        length = len(record.body) if record.body is not admitted.body and record.changed else None
        as_it_came = request.head is not None and request.headers is record.came and record.call is admitted
        as_it_came = as_it_came and record.path is None
        decided = admitted.decision if as_it_came else None
        known = None if decided is None else decided.upstream_heads.get(pool)
        if known is not None:
            head, left = known.compose(request.headers, length)
        else:
            target = pool.target(record.path or record.call.path).encode("latin-1")
            rollout = record.call.address.rollout
            head, left = pool.heads.compose(request, target, length, rollout, admitted.families)
            if decided is not None and not pool.heads.vary:
                decided.upstream_heads[pool] = KnownUpstreamHead(head, left, request)
        record.sent = head
        if left:
            self._leave_out(pool, left)
        self._sent = head, frame_body(request, record.body) if request.chunked else record.body
        if self.durable and not self._announced:
            self._announce_first(lambda: self._reach(pool))
        else:
            self._reach(pool)

    def _pack(self, packed: bytes) -> None:
        """Forward a request with a content encoding as it came, or without the encoding if its body was changed."""
        if self.record.changed:
            self.request.headers = [header for header in self.request.headers if header[0] != b"content-encoding"]
        else:
            self.record.body = packed

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

    def _reach(self, pool: ConnectionPool, fresh: bool = False) -> None:
        """Connect as soon as the upstream's gate is open, it has a free place, and its request can be signed."""
        limit = pool.concurrency_limit
        prepared = None if pool.auth is None or self._prepared is not None else pool.auth.prepare(self.record.body)
        if prepared is not None:
            self._wait(prepared.cancel)
            prepared.add_done_callback(partial(self._on_prepared, pool, fresh))
        elif pool.gate.must_wait:
            self._wait(partial(pool.gate.leave, self))
            pool.gate.wait(self)
        elif limit.maximum is not None and limit.full:
            self._wait_for_slot(limit, self.on_slot)
        else:
            self._connect(pool, fresh)

    def _on_prepared(self, pool: ConnectionPool, fresh: bool, done: asyncio.Future[str | None]) -> None:
        """Called when the request can be signed, or there are no credentials."""
        error = None if done.cancelled() else done.exception()
        if self.state is not CallState.WAITING:
            return
        if isinstance(error, Refusal):
            self._do("asked elsewhere", partial(self.on_refused, error))
        elif self._resumes():
            self._prepared = done.result()
            self._do("signed", lambda: self._reach(pool, fresh))

    def _connect(self, pool: ConnectionPool, fresh: bool) -> None:
        if pool.concurrency_limit.maximum is not None:
            self._acquire_slot(pool.concurrency_limit)
        for part in self._parts:
            self.connecting = part.connect(self, pool, fresh)
            if self.connecting is not None:
                self._move(CallState.CONNECTING)
                return
        connection = None if fresh else pool.take()
        if connection is not None:
            self.on_connected(connection)
        else:
            self._move(CallState.CONNECTING)
            self.connecting = pool.connect(self)

    def on_slot(self) -> None:
        """Called when the upstream has a free place."""
        pool = self.record.pool
        if self._resumes() and pool is not None and not self._rolled_back():
            if pool.gate.must_wait:
                self._reach(pool)
            else:
                self._connect(pool, fresh=False)

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
        given = None if self._plan is None else self._plan.given
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
        self.connecting, self.connection = None, connection
        self._sent_at = self.touched = monotonic()
        head, body = self._sent
        if (pool := self.record.pool) is not None and pool.auth is not None:
            head = self.record.sent = self._signed(pool.auth, head)
        connection.send(self, head, body)
        if self.held:
            connection.transport.pause_reading()

    def _signed(self, auth: UpstreamAuth, head: bytes) -> bytes:
        """The head with the gateway's own credentials, as of now."""
        method, target, _ = head.split(b" ", 2)
        own = auth.fields(
            method.decode(), target.decode("latin-1"), header_fields(head), self.record.body, self._prepared
        )
        return with_fields(head, own)

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
        status = connection.status
        if status == 404 and self._may_repair():
            self._ask_again()
        elif (self._pools or self._parts) and self._must_hold(connection):
            self._watch = AnswerWatch(connection, self._sent_at)
            self._watch.head = head
            self._watch.hold(raw)
            self._look(connection, self._watch)
        else:
            if status >= 400 and is_down(status):
                self._blame(f"http_{status}", retry_after_s(connection.headers))
            elif (self._pools or self._tries is not None) and not _is_whole_object(connection):
                # Several upstreams: what this one takes for its first content is learnt.
                self._watch = AnswerWatch(connection, self._sent_at)
            self._begin_response(connection, head, raw)

    def _begin_response(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        record = self.record
        record.http_status = connection.status
        if (pool := record.pool) is not None and pool.health.why and not is_down(connection.status):
            pool.health.answered(monotonic())
        record.response_head = connection.head
        record.stream = connection.content_type.startswith(record.call.dialect.streaming_content_type)
        record.encoding = connection.encoding
        if self._admitted.key is not None and connection.status < 300:
            head = self._with_standing(head)
        out = self.begin_answer(connection, head, raw)
        if record.stream and self._admitted.address.origin == "implicit":
            self._last_event = self._last_event_finder()
        self._move(CallState.STREAMING)
        self._pass_on(connection, out)

    def _with_standing(self, head: bytes) -> bytes:
        """The head of an answer with how full the budget of the call's key is, in place of the provider's limits, which
        are those of the gateway's own key."""
        budgets, admitted = self._shared.budgets, self._admitted
        if budgets is None or admitted.dialect.family is not ANTHROPIC or not (told := budgets.standing(self.record)):
            return head
        first, *lines = head[:-4].split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(b"anthropic-ratelimit-")]
        return b"\r\n".join([first, *kept, *(b"%b: %b" % header for header in told), b"", b""])

    def framing(self, connection: UpstreamConnection) -> Framing | None:
        """The framing of the first part that changes the answer, or else the relay's own."""
        for part in self._parts:
            if (made := part.framing(connection, self.request.http10)) is not None:
                return made
        return super().framing(connection)

    def _may_repair(self) -> bool:
        repaired = self._tries is not None and self._tries.repaired
        return not repaired and self._shared.pins.has_adapter(self.record.versions)

    def _ask_again(self) -> None:
        """Ask the same server again after a repair: it was restarted and has lost its adapters, or it has not loaded
        this one yet. The agent waits for the repair."""
        self.cancel_upstream()
        self._note_try("http_404").repaired = True
        pool, self.record.pool = self.record.pool, None
        self._move(CallState.PLANNING)
        self._wait()
        self._shared.pins.repair().add_done_callback(lambda _: self._on_repaired(pool))

    def _on_repaired(self, pool: ConnectionPool | None) -> None:
        if self._resumes() and pool is not None:
            self.record.pool = pool
            if not self._rolled_back():
                self._reach(pool, fresh=True)

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        if (watch := self._watch) is not None and watch.pieces is not None:
            self.touched = monotonic()
            watch.hold(raw)
            self._look(connection, watch)
        else:
            self._pass_on(connection, self.changed(connection, raw) if self.changes else raw)

    def _pass_on(self, connection: UpstreamConnection, out: bytes) -> None:
        self.touched = now = monotonic()
        if connection.pieces:
            if self._watch is not None:
                _ = self._watch.classify(connection.pieces, passed_on=True)
            self.record.add_pieces(connection.pieces, now)
            connection.pieces = []
            if self._last_event is not None and not connection.done:
                self._look_for_last_event(self._last_event)
        if connection.done:
            self._complete(connection, out)
        elif out:
            self.client.transport.write(out)

    # 4. Record ------------------------------------------------------------------------------------------------------

    def _complete(self, connection: UpstreamConnection, out: bytes) -> None:
        """End the call: its answer is complete."""
        status = connection.status
        self.record.trailers = connection.trailers
        self.release_upstream()
        error = (self._problem() if self.filtered else None) or (None if status < 400 else f"http_{status}")
        self._end("ok" if error is None else "error", error)
        if status < 400 and (self.filtered or self._watch is not None):
            self._learn_from_it()
        self._write_last(out)
        if self.filtered:
            self._hand_over()

    def _learn_from_it(self) -> None:
        """Called after a complete, successful response."""
        if (watch := self._watch) is not None and watch.spoke_at is not None and self.record.stream:
            timeouts, model = self._shared.first_content_timeouts, self._admitted.model or ""
            timeouts.observe(model, watch.spoke_at - watch.sent_at)
        for part in self._parts:
            part.on_complete(self.record, self.token_ids)

    def _problem(self) -> str | None:
        """The reason why a complete answer counts as an error; None if it does not."""
        return next(filter(None, [part.problem() for part in self._parts]), None)

    def _where(self) -> str:
        pool = self.record.pool
        return "the upstream" if pool is None else f"upstream {pool.name!r} ({pool.origin})"

    def _has_spare(self) -> bool:
        return bool(self._pools) and may_repeat(self.request.method, self.record.call.dialect)

    def _larger(self) -> list[ConnectionPool]:
        """Untried upstreams that take a longer prompt than the current one."""
        pool = self.record.pool
        if pool is None or pool.config.context is None or not self._has_spare():
            return []
        return [other for other in self._pools if (other.config.context or 0) > pool.config.context]

    # An answer that another one may replace, and the next try ------------------------------------------------------

    def _must_hold(self, connection: UpstreamConnection) -> bool:
        """True if the answer may still be replaced, or if only its first bytes tell whether it is a stream."""
        if connection.status < 300 and _is_whole_object(connection):
            return False
        streams = self._plan is not None and self._plan.streams
        unlabelled = streams and connection.status < 300 and not connection.events
        return self._has_spare() or unlabelled or (connection.status == 400 and bool(self._parts))

    def _look(self, connection: UpstreamConnection, watch: AnswerWatch) -> None:
        """Decide about the answer that is held, as far as it has come."""
        refused = connection.status in _REFUSED and (self._parts or self._larger())
        if refused or is_down(connection.status):
            # A refusal is held until it is complete.
            if connection.done or watch.size > LONGEST_REFUSAL:
                body = watch.release()
                if refused:
                    self._ask_otherwise(connection, watch.head, body)
                else:
                    self._pass_over(connection, watch.head, body)
            return
        plan = self._plan
        if watch.detector is not None and watch.classify(connection.pieces) == "an error" and self._has_spare():
            watch.pieces = None
            self._blame("error_event")
            self.cancel_upstream()
            self._try_next("error_event")
        elif connection.done or not watch.waits_for_more(self._has_spare(), plan is not None and plan.whole):
            body = watch.release()
            if plan is not None and plan.streams and begins_event_stream(b"".join(connection.pieces)):
                connection.content_type = EVENT_STREAM
            self._begin_response(connection, watch.head, body)

    def _pass_over(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Ask an upstream that is down once more a moment later, or ask the next one."""
        assert self.record.pool is not None
        pool, reason, asked_s = self.record.pool, f"http_{connection.status}", retry_after_s(connection.headers)
        was_good = pool.health.state(monotonic()) == "good"
        self._blame(reason, asked_s)
        self._put_aside(connection, head, raw)
        again = self._tries is not None and self._tries.again
        after_s = retry_delay_s(connection.status, asked_s) if was_good and not again else None
        if after_s is None:
            self._try_next(reason)
        else:
            self._note_try(reason).again = True
            self._move(CallState.PLANNING)
            self._wait(asyncio.get_running_loop().call_later(after_s, self._on_time, pool).cancel)

    def _put_aside(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        """Keep a refusal if it is complete, and leave its upstream."""
        record = self.record
        if connection.done and record.pool is not None:
            self._tries = self._tries or Tries()
            self._tries.refused = UpstreamRefusal(record.pool, record.body, record.sent, copy(connection), head, raw)
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

    def _note_try(self, reason: str) -> Tries:
        record, tries = self.record, self._tries or Tries()
        self._tries = tries
        name = "" if record.pool is None else record.pool.name
        after_ms = round((monotonic() - self.request.started) * 1e3)
        tries.said.append({"upstream": name, "after_ms": after_ms, "why": reason})
        record.note({TRIES: tries.said})
        self._shared.metrics.upstream_retries[name, reason] += 1
        return tries

    def _fail(self, refusal: Refusal) -> None:
        """Pass on the last refusal of an upstream, if one was kept: with its `Retry-After` it tells the client more
        than an error about the next upstream."""
        refused = None if self._tries is None else self._tries.refused
        if self._tries is None or refused is None or not isinstance(refusal, UpstreamFault):
            super()._fail(refusal)
            return
        self._tries.refused = None
        self._note_try(refusal.kind)
        if self.state is not CallState.PLANNING:
            self._move(CallState.PLANNING)
        self.record.pool, self.record.body, self.record.sent = refused.pool, refused.body, refused.sent
        self._begin_response(refused.connection, refused.head, refused.raw)

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
        self.connection, pool, self._watch = None, self.record.pool, None
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

    def _check_content(self, now: float) -> None:
        """Try elsewhere if a stream has begun and has brought no content for too long."""
        watch = self._watch
        if watch is None or watch.pieces is None or watch.detector is None or not self._has_spare():
            return
        if now - watch.sent_at > self._shared.first_content_timeouts.limit_s(self._admitted.model or ""):
            self._watch = None
            self.cancel_upstream()
            self._blame("no_content")
            self._do("asked elsewhere", lambda: self._try_next("no_content"))

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
        self._watch = None
        self._blame(reason)
        if self.started:
            self._cut_off("error", reason)
        elif self._has_spare() and reason != "internal":
            self._do("asked elsewhere", lambda: self._try_next(reason))
        else:
            self._fail(refusal)


def _is_whole_object(connection: UpstreamConnection) -> bool:
    """True if the answer is complete and begins as a JSON object: nothing of it is waited for, and it is no stream."""
    return connection.done and bool(connection.pieces) and connection.pieces[0][:1] == b"{"


_REFUSED: Final = (400, 413)
"""Statuses of refusals after which the request may be sent in another form or elsewhere."""
_RACE_S: Final = 1.0
"""Seconds after a request was sent within which a close counts as a race: the server closed the idle connection at the
same moment."""
_BROKEN: Final = {
    "upstream_closed": "closed the connection before it answered",
    "upstream_protocol": "answered with something that is not HTTP/1.1",
    "internal": "answered, and the gateway failed on it (its log says why)",
}
