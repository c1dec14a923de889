"""A session on a WebSocket: one conversation that the server keeps, and in which it may answer unasked.

Messages pass as in `connection`. Each answer is a call (`SessionCall`); its dialect tells which answer a message is of.

    a response that was asked for        the oldest request that waits; the request itself was held until it may pass
    one that nobody asked for            the server has heard the end of what its user says
    a transcription                      of what a user said, by another model

What belongs to no answer is collected: the client's messages, and what the server says between answers. The answer that
begins next takes it along, so every message is in exactly one call, in its order. Where nothing takes it, it becomes a
call of its own: when it has grown to `PART_BYTES`, or is `PART_SECONDS` old when a message comes, and at the end. So a
session of hours holds little in memory, and a crash loses little.

A session that cannot be divided is that rest alone: one call after the other, each of which is on the tape as open
while it runs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

import orjson

from penstock.gateway.model.facts import SOCKET_SESSION, UNRELEASED
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.traffic.budgets.operations import BudgetShortfall
from penstock.gateway.traffic.budgets.service import Budgets, Settlement
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_lifecycle import CallState
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.websocket.connection import DATA, MOST_OPEN, WebSocketConnection
from penstock.gateway.traffic.proxy.websocket.websocket_call import WebSocketCall, WebSocketContext, as_event
from penstock.gateway.wire.dialects.loose_json import RequestFields
from penstock.gateway.wire.dialects.websocket_messages import (
    ClientMessageFacts,
    ServerMessageFacts,
    ServerMessageKind,
)
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import Refusal
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.http.websocket import CLOSE, FAILED, WebSocketMessage

PART_BYTES: Final = 1 << 20
"""Bytes of collected messages at which they become a call."""
PART_SECONDS: Final = 60.0
_REMEMBERED: Final = 256
"""Number of a session's newest answers to which late messages are not added."""
_ANSWERS: Final = (ServerMessageKind.BEGIN, ServerMessageKind.PART, ServerMessageKind.END)
_GOOD_ENDS: Final = frozenset({0, 1000, 1001, 1005})
"""Codes with which a WebSocket ends as it should; 0 for none."""
Settle = Callable[[Transaction, SpanEntry], None]


class SessionCall(WebSocketCall):
    """One answer of a session, or a part of its rest."""

    __slots__ = ("_session", "begun", "blamed", "event", "part")

    def __init__(
        self,
        on: SessionConnection,
        shared: ProxyContext,
        admitted: CallRequest,
        event: str | None = None,
        since: float | None = None,
    ) -> None:
        """`event`: the client's own id of its request. `since`: when its first message came, monotonic seconds; None
        for now."""
        super().__init__(on, shared, admitted)
        if since is not None:
            self.request.started_ns -= int((self.request.started - since) * 1e9)
            self.request.started = since
        self._session, self.event = on, event
        self.begun = self.part = False
        self.blamed: int | None = None
        """Status of an error that may be about its request."""
        # The session, not what is said in it, has decided the rollout.
        self._remembered = True
        self.record.note(on.attributes)

    def show(self, sent: bytes) -> None:
        """Take the client's messages so far as the request."""
        self._admitted.body = self.record.body = sent

    def set_model(self, model: str | None) -> None:
        """Take the model that the session has by now."""
        self._admitted.set_model(model)

    def set_input(self, sent: bytes, came: list[tuple[bytes, float]]) -> None:
        """Take what was collected: the client's messages, and the server's before the answer, with their times."""
        self.show(sent)
        for event, at in came:
            self.record.add_earlier(event, at)

    def adopt(self) -> None:
        """Count an answer that nobody asked for. It has begun, so a budget without room for it can only end the
        session."""
        self.begun = True
        self._shared.begin(self)
        self._acquire_slot(self._on.context.pool.concurrency_limit)
        self._move(CallState.SENT)
        self.reserve(self._on_room)

    def reserve(self, then: Callable[[Budgets], None]) -> None:
        """Reserve what an answer may use; end the session if there is no room. `then`: called once there is."""
        budgets = self._shared.budgets
        if budgets is None:
            return
        try:
            reserving = budgets.reserve(self._admitted, self.record)
        except Refusal as refusal:
            _ = asyncio.get_running_loop().call_soon(self._refuse, refusal)
            return
        if reserving is None:
            then(budgets)
        else:
            reserving.add_done_callback(lambda done: self._on_reply(budgets, done, then))

    def _on_reply(
        self, budgets: Budgets, done: asyncio.Future[list[BudgetShortfall]], then: Callable[[Budgets], None]
    ) -> None:
        short = [] if done.exception() is not None else done.result()
        if short:
            self._refuse(budgets.refusal(short, self._admitted, self.record))
        else:
            then(budgets)

    def _on_room(self, budgets: Budgets) -> None:
        if self.state >= CallState.ENDING:
            # A short answer is over before budgets reply, so what they say is of no use: is there room for another one?
            self._session.check_room()

    def release(self, budgets: Budgets) -> None:
        """Give back what was reserved for a call that is none."""
        budgets.recorded(self.record, False)

    def reserve_part(self) -> None:
        """Reserve what a part of a session that cannot be divided may use, as its opening did for the first one: end
        the session if there is no room."""
        self.reserve(lambda _: None)
        if isinstance(settle := self.record.settle, Settlement):
            settle.opened = True

    def _refuse(self, refusal: Refusal) -> None:
        if self.part and self.state < CallState.ENDING:
            self._session.release_part(self)
        if CallState.SENT <= self.state < CallState.ENDING:
            self._fail(refusal)
        else:
            self._on.refuse(refusal, self._on.refusal(refusal, self), True)

    def begin_part(self) -> None:
        """Begin as a part of the rest."""
        self.begun = self.part = True
        self._shared.begin(self)
        self._move(CallState.SENT)

    def check(self, now: float, announce: float) -> None:
        """Announce or end the call as any other; the rest of a session is never late."""
        if not self.part:
            super().check(now, announce)
            return
        self._session.check_part(now)
        if self.state < CallState.ENDING and not self._announced:
            self.show(self._session.collected)
            self._announce_late(announce)

    def end_part(self, status: str, error: str | None) -> None:
        """End a part of the rest."""
        self._end(status, error)

    def put_now(self) -> None:
        """Hand the call to the recorder; nothing waits for it."""
        self._shared.recorder.put(self.record, self._recorded)

    def cut_off(self, status: str, error: str) -> None:
        """End the call: the connection ends before its answer does. A part has all that came."""
        if self.part:
            self._session.release_part(self)
        super().cut_off(status, error)


class _Rest:
    """The messages that belong to no answer so far."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.came: list[tuple[bytes, float]] = []
        self.size = 0
        self.since = 0.0

    def add(self, event: bytes, now: float, sent: bool) -> None:
        if not self.size:
            self.since = now
        if sent:
            self.sent.append(event)
        else:
            self.came.append((event, now))
        self.size += len(event)

    def is_due(self, now: float) -> bool:
        """True if they should become a call."""
        return self.size >= PART_BYTES or (self.size > 0 and now - self.since > PART_SECONDS)


class SessionConnection(WebSocketConnection):
    """One WebSocket and the calls of its session."""

    def __init__(
        self,
        shared: ProxyContext,
        client: ClientConnection,
        upstream: UpstreamConnection,
        way: WebSocketContext,
        settle: Settle | None,
    ) -> None:
        """`settle`: what a budget has reserved for the first part of a session that cannot be divided."""
        super().__init__(shared, client, upstream, way)
        self._id = secrets.token_hex(8)
        self._model, self._transcriber = way.admitted.model, None
        self._asked: deque[SessionCall] = deque()
        """Requests that were sent and whose answer has not begun. A client may send any number: none is looked through
        for each message."""
        self._blames = False
        """True if one of them may be blamed for an error."""
        self._responses: dict[str | None, SessionCall] = {}
        self._transcriptions: dict[str | None, SessionCall] = {}
        """Answers under way, by the ids that messages name."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Ids of the newest answers that have ended."""
        self._rest = _Rest()
        self._settle = settle
        self._counted = way.dialect.undivided
        """True until the first part has begun, for which the opening has reserved."""
        self._open: SessionCall | None = self._begin_part(monotonic()) if way.dialect.undivided else None
        """The part that is under way; None where parts are made when they end."""
        self._ends: tuple[str, str | None] = ("ok", None)
        """Status and error of the last part."""

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of a call that begins."""
        return {SOCKET_SESSION: self._id, **({} if self._shared.pins.catalog.empty else {UNRELEASED: True})}

    @property
    def busy(self) -> bool:
        return bool(self._asked or self._responses or self._transcriptions or self._open)

    # From the client ------------------------------------------------------------------------------------------------

    def _note_sent(self, message: WebSocketMessage, said: ClientMessageFacts) -> None:
        if message.kind in DATA:
            self._model = said.model or self._model
            self._collect(as_event(message.body, message.kind), True)

    def _ask(self, message: WebSocketMessage, said: ClientMessageFacts) -> None:
        call = SessionCall(self, self._shared, self._admit(message.body, self._model, said.most), said.event)
        self._waiting = call, message, said
        self._asking = True
        call.start()
        self._asking = False

    def send(self) -> None:
        assert self._waiting is not None
        (call, message, _), self._waiting = self._waiting, None
        assert isinstance(call, SessionCall)
        self._rest.add(as_event(message.body, message.kind), monotonic(), True)
        self._end_blamed(call)
        self._asked.append(call)
        self.fill(call)
        self._out.forward(message)
        self._look_further()

    def _has_room(self) -> bool:
        # The next request ends those that were blamed.
        return self._blames or len(self._asked) + len(self._responses) < MOST_OPEN

    def _end_blamed(self, after: SessionCall) -> None:
        """End the requests that have met an error without an id and have not begun: their client asks again. If such a
        one begins all the same, it is taken for the request after it."""
        if not self._blames:
            return
        self._blames = False
        for call in [call for call in self._asked if call.blamed is not None]:
            self._asked.remove(call)
            call.complete(call.blamed or 500)
            call.put_now()
            after.mark_unattributed()

    def _admit(self, body: bytes, model: str | None, most: Any = None) -> CallRequest:
        opening = self.context.admitted
        admitted = self._shared.admission.admit_message(
            opening, self.context.dialect, body, self.client.hints, of=opening
        )
        # What it may use follows from its own message: the sound before it is no text.
        admitted.peeked = RequestFields(model=model, n=1, max_output_tokens=most)
        return admitted

    def refusal(self, refusal: Refusal, call: object) -> bytes:
        said: dict[str, Any] = orjson.loads(super().refusal(refusal, call))
        if isinstance(said.get("error"), dict) and isinstance(call, SessionCall):
            said["error"]["event_id"] = call.event
        return orjson.dumps({"event_id": f"event_{secrets.token_hex(8)}", **said})

    def refuse(self, refusal: Refusal, said: bytes, sent: bool) -> None:
        if self.context.dialect.error_events:
            super().refuse(refusal, said, sent)
        else:
            self.close(FAILED, self._shared.redactor.own.text(refusal.message))

    def _listen(self) -> None:
        """Also read nothing while the tape is behind."""
        if self._unkept and not self.client.closing:
            self.client.transport.pause_reading()
        else:
            super()._listen()

    def on_recorded(self, passes: bool) -> None:
        super().on_recorded(passes)
        self._listen()

    # From the upstream ----------------------------------------------------------------------------------------------

    def _hear(self, message: WebSocketMessage, now: float) -> list[WebSocketCall]:
        if message.kind == CLOSE:
            self._note_end(message.body, now)
        if message.kind not in DATA:
            return super()._hear(message, now)
        facts = self.context.dialect.read_server_message(message.body)
        self._model, self._transcriber = self._model or facts.model, facts.transcriber or self._transcriber
        call, ends = self._find(facts)
        if call is None or call.state >= CallState.ENDING:
            self._collect(as_event(message.body, message.kind), False)
            return []
        if ends or call.begun:
            call.record_message(message.body, now, message.kind)
        else:
            call.record.add_earlier(as_event(message.body, message.kind), now)
        if not ends:
            return []
        call.complete(facts.status)
        return [call]

    def _find(self, facts: ServerMessageFacts) -> tuple[SessionCall | None, bool]:
        """The call that a message belongs to, and whether the message ends it."""
        if facts.kind is ServerMessageKind.ERROR:
            return self._failed(facts)
        if facts.kind not in _ANSWERS:
            return next(iter((*self._asked, *self._responses.values())), None), False
        running = self._transcriptions if facts.transcribes else self._responses
        id, ends = facts.response, facts.kind is ServerMessageKind.END
        if id is None and len(running) == 1:
            id = next(iter(running))
        call = running.get(id)
        if call is None:
            if id in self._ended:
                return None, False
            call = running[id] = self._begin(facts)
        if ends:
            del running[id]
            if id is not None:
                self._ended[id] = None
                if len(self._ended) > _REMEMBERED:
                    _ = self._ended.popitem(last=False)
        return call, ends

    def _begin(self, facts: ServerMessageFacts) -> SessionCall:
        """The call of an answer that begins."""
        if self._asked and not facts.transcribes:
            call = self._asked.popleft()
            call.begun = True
            return call
        model = self._transcriber if facts.transcribes else self._model
        call = SessionCall(self, self._shared, self._admit(b"", model), since=self.touched)
        call.adopt()
        self.fill(call)
        return call

    def check_room(self) -> None:
        """End the session if budgets have no room for another answer."""
        if not self._over:
            call = SessionCall(self, self._shared, self._admit(b"", self._model))
            call.reserve(call.release)

    def _failed(self, facts: ServerMessageFacts) -> tuple[SessionCall | None, bool]:
        """The call that an error is about, and whether the error ends it. Without the id of a message it may be about
        any message, so at once it ends nothing but a request that came into conflict with another response."""
        if facts.event is None:
            found = self._asked[0] if self._asked and facts.conflict else None
        else:
            found = next((call for call in self._asked if call.event == facts.event), None)
        if found is not None:
            self._asked.remove(found)
            return found, True
        if facts.conflict:
            # The server had begun a response by itself, which was taken for the answer to that request.
            for call in self._responses.values():
                if facts.event in (None, call.event):
                    call.mark_unattributed()
        elif facts.event is None and self._asked:
            self._asked[0].mark_unattributed()
            self._asked[0].blamed, self._blames = facts.status, True
            return self._asked[0], False
        return None, False

    # What belongs to no answer --------------------------------------------------------------------------------------

    @property
    def collected(self) -> bytes:
        """The client's messages that no call has yet."""
        return b"".join(self._rest.sent)

    def _collect(self, event: bytes, sent: bool) -> None:
        now = monotonic()
        if self._open is None and self.context.dialect.undivided:
            self._open = self._begin_part(now)
        self._rest.add(event, now, sent)
        self.check_part(now)

    def check_part(self, now: float) -> None:
        """Make a call of what was collected, if that is due."""
        if self._rest.is_due(now):
            self._end_part("ok", None)

    def release_part(self, call: SessionCall) -> None:
        """Give a part that ends what was collected, and the model, which a message may have named."""
        self.fill(call)
        call.set_model(self._model)
        self._open = None

    def fill(self, call: SessionCall) -> None:
        """Give a call what was collected."""
        rest, self._rest = self._rest, _Rest()
        call.set_input(b"".join(rest.sent), rest.came)

    def _begin_part(self, since: float) -> SessionCall:
        call = SessionCall(self, self._shared, self._admit(b"", self._model), since=since)
        call.record.settle, self._settle = self._settle, None
        call.begin_part()
        if self.context.dialect.undivided and not self._counted:
            call.reserve_part()
        self._counted = False
        return call

    def _end_part(self, status: str, error: str | None, last: bool = False) -> None:
        if not self._rest.size and self._open is None:
            return
        call = self._open or self._begin_part(self._rest.since)
        self.release_part(call)
        call.end_part(status, error)
        if call.waits and not last:
            self._unkept += 1
            self.hold()
            self._listen()
            call.put()
        else:
            call.put_now()

    # Ends -----------------------------------------------------------------------------------------------------------

    def _note_end(self, body: bytes, now: float) -> None:
        """Note a bad end: its code and reason tell what nothing else does."""
        code = int.from_bytes(body[:2], "big")
        if code not in _GOOD_ENDS:
            self._ends = "error", f"closed_{code}"
            said = orjson.dumps({"code": code, "reason": body[2:].decode("utf-8", "replace")})
            self._rest.add(b"event: close\ndata: %b\n\n" % said, now, False)

    def _end_all(self, status: str, error: str) -> None:
        waiting, self._waiting = self._waiting, None
        for call in [*self._calls(), *([] if waiting is None else [waiting[0]])]:
            call.cut_off(status, error)
        self._asked.clear()
        self._responses.clear()
        self._transcriptions.clear()
        if self._open is not None and self._leaves is None and self._ends[0] == "ok":
            self._ends = status, error
        self._end_part(*self._ends, last=True)

    def _calls(self) -> Iterator[SessionCall]:
        yield from self._asked
        yield from self._responses.values()
        yield from self._transcriptions.values()
