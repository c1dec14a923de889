"""The life of one call, from its upstream to its record. Read `Call` from top to bottom.

No coroutine runs per call: what arrives moves it on. `run` finds out where it goes and writes it upstream; `on_answer`
and `on_data` pass on what comes back in the very read that brought it; `_complete` hands it to the recorder. A client
that leaves (`on_client_gone`), an upstream that cannot be reached, stays silent or breaks off (`on_unreachable`,
`check`, `on_broken`) each end the call once, with one span. A bug in any of these is logged and ends the call like a
broken upstream; no client waits for an answer that cannot come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic

from penstock.gateway.calls.admission import Admitted
from penstock.gateway.calls.capture.request import ask, identity
from penstock.gateway.calls.conversations import Answer
from penstock.gateway.calls.model_name import replace_model
from penstock.gateway.calls.record import Record, whole
from penstock.gateway.config import Route
from penstock.gateway.dialects import family
from penstock.gateway.http.client_connection import Front
from penstock.gateway.http.errors import GatewayFault, Refusal, UpstreamFault, internal_fault
from penstock.gateway.http.headers import PROMPT, framed, refusal_body, refusal_head
from penstock.gateway.http.request import Request
from penstock.gateway.http.upstream_connection import Link
from penstock.gateway.model.release import Pin
from penstock.gateway.model.release_calls import rehearsed
from penstock.gateway.proxy.exact.course import Course, speaks
from penstock.gateway.proxy.relay import Relay
from penstock.gateway.proxy.shared import Shared
from penstock.gateway.proxy.translation.checks import KIND as TRANSLATION
from penstock.gateway.proxy.translation.translator import DIALECTS as TRANSLATED
from penstock.gateway.proxy.translation.translator import unavailable
from penstock.gateway.releases.catalog import Found
from penstock.gateway.releases.rehearsal.tool_player import Played
from penstock.gateway.upstreams.gate import Gate
from penstock.gateway.upstreams.pool import Pool

_log = logging.getLogger("penstock.proxy")
_BOOKS = 512
"""Bytes that it takes to remember an answer beside it."""


class Call(Relay):
    """One call. It is in `Shared.running` from `run` until it is handed to the recorder."""

    __slots__ = (
        "_admitted",
        "_announced",
        "_announcing",
        "_asked_again",
        "_candidates",
        "_course",
        "_gate",
        "_overhead",
        "_playing",
        "_proxy",
        "_sent",
        "_switched",
        "_tail",
        "_waits_since",
        "record",
    )

    def __init__(self, proxy: Shared, front: Front, request: Request, admitted: Admitted) -> None:
        super().__init__(front, request)
        self.record = Record(admitted, request, proxy.redactor, proxy.config.limits.recorded_bytes)
        self.own = proxy.redactor.own
        self._proxy = proxy
        self._admitted = admitted
        self._candidates: list[Pool] = []
        self._course: Course | None = None
        """How it goes, where its conversation goes on from exact tokens."""
        self._gate: Gate | None = None
        """The gate it waits at."""
        self._sent: tuple[bytes, bytes] = (b"", b"")
        self._announced = self._announcing = self._asked_again = False
        self._switched: tuple[Found, Mapping[str, Pin]] | None = None
        """What it uses of the catalog, and what its rollout was given of it."""
        self._tail = b""
        """The end of the answer, while it waits for the tape."""
        self._playing: asyncio.Future[Played] | None = None
        """The answer to an agent in rehearsal."""
        self._waits_since = 0.0
        self._overhead = 0.0
        """Seconds that the gateway itself has taken."""

    def run(self, began: float) -> None:
        """Begins it, and ends it if that fails. `began`: when its request was whole."""
        self._proxy.running[self] = None
        self._proxy.metrics.inflight_calls += 1
        self._do("begun", self._begin)
        self._overhead = monotonic() - began

    def _do(self, what: str, step: Callable[[], None]) -> None:
        """A step on its way; what keeps it from being done ends the call."""
        try:
            step()
        except Refusal as refusal:
            self._fail(refusal)
        except Exception:
            _log.exception("a call of %s could not be %s", self._admitted.address.rollout, what)
            self._fail(internal_fault())

    # 1. Where does it go, and must something change? ----------------------------------------------------------------

    def _begin(self) -> None:
        if self._admitted.waits:
            self._proxy.admission.follow(self._admitted, self.front.way, self._on_followed)
        else:
            self._start()

    def _on_followed(self) -> None:
        """It is known whose it is."""
        if self.record.status == "open":
            self._do("begun", self._start)
        else:
            # Its client has left.
            self._proxy.admission.remember(self._admitted, self.front.way, None)

    def _start(self) -> None:
        proxy, call = self._proxy, self._admitted
        proxy.metrics.ambiguous_calls += call.address.ambiguous
        if proxy.recorder.failing is not None:
            self._check_gap()
        if proxy.switch.catalog.rehearses and rehearsed(call.address.rollout):
            self._rehearse()
            return
        found = None if proxy.switch.catalog.empty else proxy.switch.look(call, self._prompt())
        if found is None:
            self._route()
        else:
            self._give(found)

    def _route(self) -> None:
        """Nothing of it is a released resource."""
        self._candidates, alias, route = self._proxy.route(self._admitted, self.request)
        if alias is not None:
            self.record.body = replace_model(self._admitted.body, alias)
        self._prepare(route)
        self._forward()

    def _prompt(self) -> str | None:
        """The prompt that its path or its header names."""
        named = self._admitted.address.prompt
        return named or next((value.decode("latin-1") for low, _, value in self.request.headers if low == PROMPT), None)

    def _give(self, found: Found) -> None:
        """What its rollout is given of it."""
        pins = self._proxy.switch.pinned(self._admitted, found)
        if pins is not None:
            self._switch(found, pins)
        else:
            self._pinning(found)

    def _pinning(self, found: Found) -> None:
        """The first call of its rollout that uses a resource waits until the tape has what the rollout is given."""
        proxy = self._proxy
        now = proxy.epoch_ns + int(monotonic() * 1e9)
        proxy.switch.pin(self._admitted, found, now).add_done_callback(lambda done: self._on_pinned(found, done))

    def _on_pinned(self, found: Found, done: asyncio.Future[list[Pin]]) -> None:
        if self.record.status != "open":
            # Its client has left.
            return
        error = done.exception()
        if error is None:
            # Once more where its release was rolled back in this very moment.
            self._do("switched", lambda: self._give(found))
        else:
            self._do("switched", lambda: self._go_unpinned(found, error))

    def _go_unpinned(self, found: Found, error: BaseException) -> None:
        """The tape does not take what its rollout is given."""
        if self._refuses_gaps():
            raise GatewayFault(503, "tape", f"this rollout cannot be given its versions: {error}")
        self._switch(found, self._proxy.switch.unpinned(self._admitted, found, error))

    def _switch(self, found: Found, pins: Mapping[str, Pin]) -> None:
        """To what its rollout was given."""
        self._switched = found, pins
        made, record = self._proxy.switch.switched(self._admitted, found, pins), self.record
        record.body, record.versions, record.arm, record.texts = made.body, made.versions, made.arm, made.texts
        if made.upstream is None:
            self._candidates, alias, route = self._proxy.route(self._admitted, self.request)
            record.body = record.body if alias is None else replace_model(record.body, alias)
        else:
            self._candidates = [self._proxy.pool(made.upstream, found.model)]
            route = self._proxy.routed(found.model)
        self._prepare(route)
        self._forward()

    def _prepare(self, route: Route | None) -> None:
        """What its route asks of it: another format, and token ids."""
        if route is not None and route.translates and self._admitted.dialect.name in TRANSLATED:
            self._translate(route)
        if route is not None and route.train:
            self._capture()
        if route is not None and route.tokens == "exact" and speaks(self.record.call.dialect):
            self._course = Course(self._proxy.exact, self.record, self.request)

    def _translate(self, route: Route) -> None:
        """Its upstream speaks chat completions only, and from here on so does the call; its answer is told again."""
        translator = self._proxy.translator
        if translator is None:
            raise unavailable(route.model)
        self.record.call = self._admitted
        self.translation = translator.translate(self.record, self.request)

    def _capture(self) -> None:
        """Its model is trained: the engine is asked for token ids and log-probabilities."""
        asked = ask(self.record.call.dialect, self.record.body)
        if asked is not None:
            self.asked, self.record.body, self.record.captured = asked, asked.body, asked.added
            self.request.headers = identity(self.request.headers)

    # Of an agent in rehearsal: its tools are played before it gets an answer -----------------------------------------

    def _rehearse(self) -> None:
        rehearsals, call = self._proxy.rehearsals, self._admitted
        self.record.attributes = rehearsals.attributes(call.address.rollout)
        if not rehearsals.plays(call):
            self._route()
            return
        self._announce_first(self._play)

    def _play(self) -> None:
        answer = self._proxy.rehearsals.answer(self._admitted, self.request, self._prompt())
        self._playing = asyncio.ensure_future(answer)
        self._playing.add_done_callback(self._on_played)

    def _on_played(self, done: asyncio.Future[Played]) -> None:
        if self.record.status != "open":
            # Its client has left.
            return
        self.record.attributes = self._proxy.rehearsals.attributes(self._admitted.address.rollout)
        self._do("rehearsed", lambda: self._answer(done.result()))

    def _answer(self, played: Played) -> None:
        record, reply = self.record, played.reply
        if played.status >= 400:
            played = played.without(self.own)
            reply = played.reply
        record.stream, record.response_headers = reply.stream, played.headers
        record.encoding = reply.header(b"content-encoding").encode("latin-1") or None
        record.answered(played.status, reply.body)
        self._end("ok" if played.status < 400 else "error", None if played.status < 400 else f"http_{played.status}")
        self._write_last(played.head(self.request.keep_alive) + reply.body)

    def _refuses_gaps(self) -> bool:
        return self._proxy.config.tape.on_record_failure.get(self._admitted.address.mode, "pass") == "refuse"

    def _check_gap(self) -> None:
        """The tape cannot be written: refuses the call where its mode wants that."""
        if self._refuses_gaps():
            mode, failing = self._admitted.address.mode, self._proxy.recorder.failing
            message = f"this call cannot be recorded, and mode {mode!r} refuses calls that are not: {failing}"
            raise GatewayFault(503, "tape", message)

    # 2. Forward -----------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        """To the next upstream that may serve it."""
        record = self.record
        record.pool = pool = self._candidates.pop(0)
        if self._admitted.packed is not None:
            self._pack(self._admitted.packed)
        length = len(record.body) if record.changed else None
        head, record.sent = pool.heads.compose(self.request, pool.target(record.call.path).encode("latin-1"), length)
        self._sent = head, framed(self.request, record.body)
        self._announce_first(lambda: self._reach(pool))

    def _announce_first(self, then: Callable[[], None]) -> None:
        """Goes on; in a strict gateway when it is on disk that the call is under way, so that nothing is ever done
        upstream that the tape does not tell of."""
        if not self._proxy.strict or self._announced:
            then()
            return
        self._announced = self._announcing = True
        self._waits_since = monotonic()
        self._proxy.recorder.announce(self.record, lambda kept: self._on_announced(kept, then))

    def _on_announced(self, kept: bool, then: Callable[[], None]) -> None:
        self._announcing = False
        self._proxy.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        if self.record.status != "open":
            # Its client has left.
            return
        self._do("sent", then if kept else lambda: self._go_unannounced(then))

    def _go_unannounced(self, then: Callable[[], None]) -> None:
        """The tape does not take it."""
        self._check_gap()
        then()

    def _pack(self, packed: bytes) -> None:
        """A request that came with a content encoding goes as it came, and without one where it was changed."""
        if self.record.changed:
            self.request.headers = [header for header in self.request.headers if header[0] != b"content-encoding"]
        else:
            self.record.body = packed

    def _reach(self, pool: Pool, fresh: bool = False) -> None:
        """Connects, as soon as the upstream's gate is open."""
        if pool.gate.shut:
            self._gate = pool.gate
            pool.gate.wait(self)
        else:
            self._connect(pool, fresh)

    def _connect(self, pool: Pool, fresh: bool) -> None:
        if self._course is not None:
            self.connecting = self._course.connect(self, pool, fresh)
            return
        link = None if fresh else pool.take()
        if link is not None:
            self.on_connected(link)
        else:
            self.connecting = pool.connect(self)

    def on_open(self) -> None:
        """The gate that it has waited at is open."""
        self._gate, pool = None, self.record.pool
        if pool is not None and not self._taken_back():
            self._connect(pool, fresh=False)

    def _taken_back(self) -> bool:
        """Gives it another version where the one that it waits for may not be served any more."""
        switched = self._switched
        if switched is None or not self._proxy.switch.taken_back(*switched):
            return False
        # `check` waits while there is no pool.
        self.record.pool = None
        self._do("switched", lambda: self._give(switched[0]))
        return True

    def on_refused(self, refusal: Refusal) -> None:
        """The gate was not opened in time: the next upstream, or a clear answer."""
        self._gate = None
        if self._candidates:
            self._try_next()
        else:
            self._fail(refusal)

    def on_connected(self, link: Link) -> None:
        """A connection is there: write the request."""
        self.send(link, *self._sent)

    def on_unreachable(self, reason: str, detail: str) -> None:
        """No connection came about: the next upstream, or a clear answer. One that is held may be starting again."""
        self.connecting, pool = None, self.record.pool
        if pool is not None and pool.gate.held:
            self._reach(pool)
        elif self._candidates:
            self._try_next()
        else:
            status = 504 if reason == "connect_timeout" else 502
            self._fail(UpstreamFault(status, reason, f"{self._where()} could not be reached: {detail}"))

    def _try_next(self) -> None:
        self._proxy.metrics.upstream_retries += 1
        self._forward()

    def _where(self) -> str:
        pool = self.record.pool
        return "the upstream" if pool is None else f"upstream {pool.name!r} ({pool.origin})"

    # 3. Stream back as it arrives -----------------------------------------------------------------------------------

    def on_answer(self, link: Link, head: bytes, raw: bytes) -> None:
        """Passes on the head with what came in the same read."""
        record = self.record
        if link.status == 404 and not self._asked_again and self._proxy.switch.adapted(record.versions):
            self._ask_again()
            return
        record.http_status = link.status
        record.response_headers = link.headers[: link.head_fields]
        record.stream = link.content_type.startswith(record.call.dialect.streaming_content_type)
        record.encoding = link.encoding
        self._pass_on(link, self.begin_answer(link, head, raw))

    def _ask_again(self) -> None:
        """Its server has been restarted and has lost its adapters, or has not been given this one yet. The agent waits
        until servers have been looked after, and `check` while there is no pool."""
        self.cancel_link()
        self._asked_again, pool, self.record.pool = True, self.record.pool, None
        self._proxy.metrics.upstream_retries += 1
        self._proxy.switch.mended().add_done_callback(lambda _: self._on_mended(pool))

    def _on_mended(self, pool: Pool | None) -> None:
        self.record.pool = pool
        if self.record.status == "open" and pool is not None and not self._taken_back():
            self._reach(pool, fresh=True)

    def on_data(self, link: Link, raw: bytes) -> None:
        """Passes on a read."""
        self._pass_on(link, self.continue_answer(link, raw))

    def _pass_on(self, link: Link, out: bytes) -> None:
        self.touched = now = monotonic()
        if link.pieces:
            self.record.arrived(link.pieces, now)
            link.pieces = []
        if link.done:
            self._complete(link, out)
        elif out:
            self.front.transport.write(out)

    # 4. Record ------------------------------------------------------------------------------------------------------

    def _complete(self, link: Link, out: bytes) -> None:
        """The answer is here as a whole."""
        status, translation = link.status, self.translation
        self.record.trailers = link.headers[link.head_fields :]
        self.release_link()
        if translation is not None and translation.problem is not None:
            self._end("error", TRANSLATION)
        else:
            self._end("ok" if status < 400 else "error", None if status < 400 else f"http_{status}")
        if self.asked is not None and status < 400:
            self._proxy.metrics.captured_calls[("yes" if self.token_ids else "no",)] += 1
        if self._course is not None and status < 400:
            self._course.ended()
        self._write_last(out)
        if self._switched is not None and self._proxy.shadow.mirrors:
            self._proxy.shadow.offer(self.record, *self._switched)

    def _write_last(self, out: bytes) -> None:
        """Writes the end of the answer; all but one byte of it while the span must, or the queue makes it, wait."""
        recorder = self._proxy.recorder
        if self._proxy.strict or recorder.full or self._playing is not None:
            self._tail, self._waits_since = out[-1:], monotonic()
            if len(out) > 1:
                self.front.transport.write(out[:-1])
            recorder.put(self.record, self._let_go)
        else:
            if out:
                self.front.transport.write(out)
            recorder.put(self.record, self._recorded)
            self.end_answer()

    def _let_go(self, kept: bool) -> None:
        """The span is on disk, or lost: the last byte may go, unless the mode refuses unrecorded answers."""
        self._proxy.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        self._recorded(kept)
        if self.front.served is not self:
            return
        if not kept and self._refuses_gaps() and (self.started or self._playing is not None):
            # What the gateway itself has to say may pass: nobody learns from it.
            self.break_off()
            return
        if self._tail:
            self.front.transport.write(self._tail)
        self.end_answer()

    def _recorded(self, kept: bool) -> None:
        """It was read, which tells whether an answer that came whole is a good one; only now is it counted."""
        record, seconds = self.record, ((self.record.end_ns or 0) - self.request.started_ns) / 1e9
        self._proxy.metrics.call_ended(self._admitted.dialect.name, record.status, seconds)

    def _end(self, status: str, error: str | None) -> None:
        """The call is over, and its record is complete."""
        proxy, record, metrics = self._proxy, self.record, self._proxy.metrics
        now = monotonic()
        record.status, record.error = status, error
        record.end_ns = proxy.epoch_ns + int(now * 1e9)
        del proxy.running[self]
        metrics.inflight_calls -= 1
        metrics.request_bytes += len(record.body)
        metrics.response_bytes += record.response_bytes
        if record.first_byte_ns is not None:
            metrics.first_byte_seconds.observe(record.first_byte_ns / 1e9)
            metrics.overhead_seconds.observe(self._overhead + now - self.touched)
        if self.translation is not None:
            record.sides = [*record.sides, self.translation.side(status, record.response())]
        if self._admitted.address.origin == "implicit":
            good = self.started and record.http_status is not None and record.http_status < 400
            proxy.admission.remember_soon(self._admitted, self.front.way, self._answered() if good else None)

    def _answered(self) -> Answer:
        """Its answer for later, without what else the call holds."""
        record, translation = self.record, self.translation
        told = partial(whole, record.pieces, record.encoding) if translation is None else translation.response
        return Answer(told, record.stream, record.response_bytes + _BOOKS, self._admitted.dialect.replies)

    def _told(self) -> bytes:
        """The answer as its client got it, but for what was asked for in its name."""
        return self.record.response() if self.translation is None else self.translation.response()

    # Ends that are not completions ----------------------------------------------------------------------------------

    def on_client_gone(self) -> None:
        """Nobody waits any more: the upstream is told at once. A client that has had the last event has had it all."""
        if self.record.status == "open":
            self.cancel_link()
            if self.record.stream and self._admitted.dialect.over(self._told()):
                self._end("ok", None)
            else:
                self._end("cancelled", "client_gone")
            self._proxy.recorder.put(self.record, self._recorded)

    def on_broken(self, link: Link, reason: str) -> None:
        """The upstream broke off. Before its answer began it is asked again; after that the client gets what came."""
        self.link, pool = None, self.record.pool
        if self.record.status != "open":
            return
        if self.started:
            if link.pieces:
                self.record.arrived(link.pieces, monotonic())
            self._cut_off("error", reason)
        elif pool is not None and not link.seen and (link.reused or pool.gate.held):
            # It lost a race with the keep-alive timer, or its engine was stopped to be changed.
            self._proxy.metrics.upstream_retries += 1
            self._reach(pool, fresh=True)
        elif self._candidates:
            self._try_next()
        else:
            self._fail(UpstreamFault(502, reason, f"{self._where()} {_BROKEN[reason]}"))

    def check(self, now: float, announce: float) -> None:
        """Called every tick: must the call be announced, has the upstream been silent for too long?"""
        if not self._announced and not self._admitted.waits and self.request.started <= announce:
            self._announced = True
            self._proxy.recorder.announce(self.record)
        pool, link = self.record.pool, self.link
        if pool is None or self._announcing or self._gate is not None:
            return
        if self.connecting is not None and not self.connecting.done():
            return
        if link is None or link.caller is not self:
            self._give_up_on("internal", internal_fault())
        elif not self.held and now - self.touched > pool.config.read_timeout:
            message = f"{self._where()} sent nothing for {pool.config.read_timeout:g} s (upstream.read_timeout)"
            self._give_up_on("timeout", UpstreamFault(504, "timeout", message))

    def cancel_link(self) -> None:
        """Nobody wants the answer any more, also where it has not been asked for yet."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.leave(self)
        if self._playing is not None:
            self._playing.cancel()
        super().cancel_link()

    def _give_up_on(self, reason: str, refusal: Refusal) -> None:
        self.cancel_link()
        if self.started:
            self._cut_off("error", reason)
        else:
            self._fail(refusal)

    def give_up(self) -> None:
        """The gateway stops and cannot wait any longer."""
        self.cancel_link()
        self._cut_off("interrupted", "gateway_stopped")

    def _cut_off(self, status: str, reason: str) -> None:
        """Ends a call whose client has got a part of the answer, or nothing."""
        self._end(status, reason)
        self._proxy.recorder.put(self.record, self._recorded)
        self.break_off()

    def _fail(self, refusal: Refusal) -> None:
        """Ends a call whose answer has not begun with one of our own, in the shape of its API."""
        # What an engine answers may be in the message.
        body = self.own.hide(refusal_body(family(self._admitted.dialect, self.request.headers), refusal))
        head = refusal_head(refusal, len(body), self.request.keep_alive)
        body = b"" if self.head_only else body
        self.record.answered(refusal.status, body)
        self._end("error", refusal.kind)
        self._write_last(head + body)


_BROKEN = {
    "upstream_closed": "closed the connection before it answered",
    "upstream_protocol": "answered with something that is not HTTP/1.1",
    "internal": "answered, and the gateway failed on it (its log says why)",
}
