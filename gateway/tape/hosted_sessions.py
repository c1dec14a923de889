"""Sessions of hosted agents become spans, as operations inside a write transaction.

Calls about a session tell its events, in any order, and each of them maybe often: a page is read again, a stream is
resumed, several clients read the same session. `record_events` takes each event once. When both ends of a model turn
are known, the turn becomes a span, and so does a run of a tool when its result is known. What a turn got and made is
decided by the order of the session: input belongs to the turn whose start follows it, output to the turn whose end
follows it. An event that comes only after its turn was written becomes a span of its own, as do changes of the
session's state. All of these belong to the session's home: the rollout of the first call that named the session.

    hosted      nothing                                     when old sessions were looked for (u64)
                "s" session                                 its `SessionRecord`
                "h" rollout NUL session                     nothing: the home of the session is this rollout
                "e" session NUL digest of an event's id     nothing: it was taken
                "o" session NUL digest of an id             a `SessionEvent` that waits for its other half
                "p" session NUL place NUL position          a `SessionEvent` that waits for its turn
                "t" session NUL turn                        the trace of a turn, as OTLP JSON, that waits to be read
                "b" session NUL place NUL lane position     a bound of turns: "o" of one that is not whole, else "c"

A position is a time (u64) and a number (u32), by which events of the same time stay in the order in which they were
told. A place is a thread (empty for the session's own), or "turn " and the id of a turn that its events name. A lane is
"s" for starts and "e" for ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from penstock.gateway.model.facts import HOSTED_EVENT, HOSTED_SESSION, TOOL
from penstock.gateway.model.span import HOSTED_TURN, Usage
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.wire.dialects import hosted
from penstock.gateway.wire.dialects.hosted import SessionEvent, SessionFacts
from penstock.gateway.wire.dialects.loose_json import dumps, label, obj

DATABASE: Final = "hosted"
KNOWN_NS: Final = 90 * 24 * 3600 * 10**9
"""Nanoseconds without a call after which a session is forgotten; its spans stay."""
_SWEEP_NS: Final = 3600 * 10**9
_SWEPT: Final = 4096
"""Most records of an old session that are deleted at once."""
_LOOKED: Final = b"\0"
"""The key of the time of the last sweep (u64)."""
_OPEN, _CLOSED = b"o", b"c"
_LAST: Final = b"\xff" * 12
"""The last position."""
ResultCounter: TypeAlias = Callable[[Transaction, str, Sequence[SpanEntry]], None]
"""Called with new model turns and the name of their session, to count their use."""


class SessionAgentRecord(msgspec.Struct):
    """An agent of a session, as far as calls have told of it."""

    name: str | None = None
    model: str | None = None
    parent: str = ""


class SessionRecord(msgspec.Struct):
    """The record of a session."""

    seen_ns: int
    home: tuple[str, str]
    """The rollout and the attempt of its spans."""
    number: int = 0
    """Number of events that were taken."""
    main: str = ""
    """The id of its own thread."""
    agents: dict[str, SessionAgentRecord] = {}
    """Its agents, by thread; the main one by the empty name."""
    models: dict[str, str] = {}
    """Models of the agents that it may call, by the agent's name."""
    cost: float = 0.0
    """US dollars that the provider has told, as far as they were counted."""
    cost_ns: int = 0
    """The time up to which turns are in `cost`."""
    is_finer: bool = False
    """True if a turn was recorded whose model is known: turns then tell the cost."""


_record = msgspec.json.Decoder(SessionRecord).decode
_event = msgspec.json.Decoder(SessionEvent).decode
_written = msgspec.json.Encoder().encode


def record_events(
    tape: Transaction, entry: SpanEntry, told: SessionFacts, home: tuple[str, str], count: ResultCounter | None
) -> None:
    """Take what a call tells about a session. `home`: rollout and attempt of its spans if the session is new; `count`:
    called with new model turns."""
    stored = tape.get(DATABASE, b"s" + told.session.encode())
    known = SessionRecord(entry.start_ns, home) if stored is None else _record(stored)
    if stored is None:
        tape.put(DATABASE, b"h" + keys.rollout_key(home[0]) + told.session.encode(), b"")
    fold = _SessionFold(tape, entry, told, known)
    fold.learn(told)
    for event in told.events:
        fold.take(event)
    fold.settle()
    for trace in told.traces:
        body = dumps(trace.otlp).encode()
        if _take(tape, told.session, f"trace {trace.turn} {_digest(dumps(trace.otlp)).hex()}"):
            tape.put(DATABASE, b"t" + told.session.encode() + b"\0" + trace.turn.encode(), body)
    known.seen_ns = max(known.seen_ns, entry.start_ns)
    tape.put(DATABASE, b"s" + told.session.encode(), _written(known))
    if count is not None and fold.turns:
        # A turn has no first byte, but it was answered.
        count(tape, told.session, [replace(one, first_byte_ns=0) for one in fold.turns])
    _sweep(tape, entry.start_ns)


def session_home(view: TapeView, session: str) -> tuple[str, str] | None:
    """The rollout and the attempt of a session; None if it is not known."""
    stored = view.get(DATABASE, b"s" + session.encode())
    return None if stored is None else _record(stored).home


class TurnTrace(NamedTuple):
    """A trace of a hosted agent's turn that calls have read, and whose spans are not on the tape yet."""

    session: str
    turn: str
    otlp: bytes


def waiting_traces(view: TapeView) -> list[TurnTrace]:
    """The traces of sessions that wait to be read."""
    found = ((key[1:].decode().partition("\0"), body) for key, body in view.scan(DATABASE, b"t"))
    return [TurnTrace(session, turn, body) for (session, _, turn), body in found]


def take_trace(tape: Transaction, trace: TurnTrace, spans: Iterable[SpanEntry]) -> list[SpanEntry]:
    """End the wait of a trace. Returns those of its spans that were not taken before, in the home of the session; none
    if the session was forgotten."""
    tape.delete(DATABASE, b"t" + trace.session.encode() + b"\0" + trace.turn.encode())
    stored = tape.get(DATABASE, b"s" + trace.session.encode())
    if stored is None:
        return []
    new = [one for one in spans if _take(tape, trace.session, f"span {one.trace_id} {one.span_id}")]
    for one in new:
        one.rollout, one.attempt = _record(stored).home
        one.attributes = {**(one.attributes or {}), HOSTED_SESSION: trace.session, HOSTED_TURN: trace.turn}
    return new


def _take(tape: Transaction, session: str, name: str) -> bool:
    """Note that what has this name is taken; False if it was."""
    key = b"e" + session.encode() + b"\0" + _digest(name)
    if tape.get(DATABASE, key) is not None:
        return False
    tape.put(DATABASE, key, b"")
    return True


def forget_rollout(tape: Transaction, rollout: str) -> None:
    """Forget the sessions whose home is this rollout, with the events that wait."""
    prefix = b"h" + keys.rollout_key(rollout)
    for session in [key[len(prefix) :].decode() for key, _ in tape.scan(DATABASE, prefix)]:
        forget_session(tape, session)


def forget_session(tape: Transaction, session: str, most: int | None = None) -> bool:
    """Forget a session, or at most so many of its events. Returns True if nothing of it is left."""
    name = session.encode()
    gone = [key for kind in (b"e", b"o", b"p", b"b", b"t") for key, _ in tape.scan(DATABASE, kind + name + b"\0")]
    for key in gone[:most]:
        tape.delete(DATABASE, key)
    if most is not None and len(gone) > most:
        return False
    stored = tape.get(DATABASE, b"s" + name)
    if stored is not None:
        tape.delete(DATABASE, b"h" + keys.rollout_key(_record(stored).home[0]) + name)
        tape.delete(DATABASE, b"s" + name)
    tape.delete("guesses", name)
    return True


def _sweep(tape: Transaction, now: int) -> None:
    """Every hour, forget sessions that no call has named for long."""
    looked = tape.get(DATABASE, _LOOKED)
    if looked is not None and now - keys.to_number(looked) < _SWEEP_NS:
        return
    tape.put(DATABASE, _LOOKED, keys.number(now))
    old = (key[1:] for key, stored in tape.scan(DATABASE, b"s") if now - _record(stored).seen_ns > KNOWN_NS)
    for name in [*islice(old, _SWEPT)]:
        forget_session(tape, name.decode(), _SWEPT)


def _digest(*names: str) -> bytes:
    return blake2b("\0".join(names).encode(), digest_size=16, person=b"penstock.hosted").digest()


def _span_id(session: str, name: str) -> str:
    """The span id of an event, a thread, or a turn: the same whoever tells of it."""
    return _digest(session, name)[:8].hex()


class _Lane(NamedTuple):
    """The bounds of turns in one lane of a place."""

    positions: list[bytes]
    """In order."""
    states: dict[bytes, bytes]


class _SessionFold:
    """The events of one answer on their way into a session."""

    def __init__(self, tape: Transaction, entry: SpanEntry, told: SessionFacts, known: SessionRecord) -> None:
        self._tape, self._by, self._session, self._known = tape, entry, told.session, known
        self._name, self._formats = told.session.encode() + b"\0", told.formats
        self._places = dict[str, None]()
        """The threads, and the turns that have ids, with new events."""
        self._lanes = dict[bytes, _Lane]()
        self.turns: list[SpanEntry] = []

    def learn(self, told: SessionFacts) -> None:
        """Take what is told about agents; what is not told stays."""
        known = self._known
        known.models.update(told.models)
        for one in told.agents:
            if one.is_main and one.thread:
                known.main = one.thread
            record = known.agents.setdefault("" if one.is_main else one.thread, SessionAgentRecord())
            record.name, record.model = one.name or record.name, one.model or record.model
            record.parent = one.parent or record.parent

    def take(self, event: SessionEvent) -> None:
        """Take an event, unless it was taken before."""
        if not _take(self._tape, self._session, event.id):
            return
        self._known.number += 1
        if event.thread == self._known.main:
            event.thread = ""
        place = f"turn {event.turn}" if event.turn else event.thread
        self._places[place] = None
        position = keys.number(event.at_ns) + keys.u32(self._known.number)
        match event.kind:
            case "start":
                self._bound(place, b"s", position, _OPEN)
            case "end":
                self._bound(place, b"e", position, _OPEN)
            case "state":
                self._bound(place, b"s", position, _CLOSED)
                self._bound(place, b"e", position, _CLOSED)
            case _:
                pass
        if event.kind in ("input", "output", "call", "result", "ran"):
            self._tape.put(DATABASE, b"p" + self._place(place) + position, _written(event))
        if event.of:
            self._join(event, position)
        elif event.kind == "turn":
            self._whole_turn(event, place)
        elif event.kind == "ran":
            self._write(self._run(event, event))
        elif event.kind in ("state", "note"):
            self._write(self._own(event))

    def _place(self, place: str) -> bytes:
        return self._name + place.encode() + b"\0"

    def _lane(self, place: str, lane: bytes) -> _Lane:
        """A lane of a place; read once."""
        prefix = b"b" + self._place(place) + lane
        if prefix not in self._lanes:
            states = {key[len(prefix) :]: state for key, state in self._tape.scan(DATABASE, prefix)}
            self._lanes[prefix] = _Lane([*states], states)
        return self._lanes[prefix]

    def _bound(self, place: str, lane: bytes, position: bytes, state: bytes) -> None:
        known = self._lane(place, lane)
        if position not in known.states:
            insort(known.positions, position)
        known.states[position] = state
        self._tape.put(DATABASE, b"b" + self._place(place) + lane + position, state)

    def _join(self, event: SessionEvent, position: bytes) -> None:
        """Make a span of an event and its other half, or let it wait for that."""
        key = b"o" + self._name + _digest(event.of, "" if event.kind in ("call", "result") else "turn")
        stored = self._tape.get(DATABASE, key)
        if stored is None:
            self._tape.put(DATABASE, key, position + _written(event))
            return
        other, at = _event(stored[12:]), stored[:12]
        if (event.kind in ("call", "start", "grading")) == (other.kind in ("call", "start", "grading")):
            return  # the same half twice, under different ids
        self._tape.delete(DATABASE, key)
        first, last, begin, end = (other, event, at, position)
        if event.kind in ("call", "start", "grading"):
            first, last, begin, end = event, other, position, at
        if first.kind == "call":
            self._write(self._run(first, last))
        else:
            self._turn(first, last, begin, end)

    def _turn(self, start: SessionEvent, end: SessionEvent, begin: bytes, stop: bytes) -> None:
        before, made = list[SessionEvent](), list[SessionEvent]()
        if start.kind == "start":
            self._bound(start.thread, b"s", begin, _CLOSED)
            self._bound(end.thread, b"e", stop, _CLOSED)
            inputs, outputs = self._before(start.thread, b"s", begin), self._before(start.thread, b"e", stop)
            place = b"p" + self._place(start.thread)
            for key, stored in [*self._tape.scan(DATABASE, place)]:
                at, event = key[len(place) :], _event(stored)
                own = inputs < at <= begin if event.kind in ("input", "result") else outputs < at <= stop
                if own:
                    (before if at <= begin else made).append(event)
                    self._tape.delete(DATABASE, key)
        self._write_turn(start, end, before, made)

    def _whole_turn(self, turn: SessionEvent, place: str) -> None:
        """Make a span of a turn that is told at once, and of its items. Those that come later are late."""
        for lane in (b"s", b"e"):
            self._bound(place, lane, _LAST, _CLOSED)
        prefix = b"p" + self._place(place)
        waiting = [*self._tape.scan(DATABASE, prefix)]
        events = [_event(stored) for _, stored in waiting]
        for key, _ in waiting:
            self._tape.delete(DATABASE, key)
        first = next((at for at, one in enumerate(events) if one.kind not in ("input", "result")), len(events))
        self._write_turn(turn, turn, events[:first], events[first:])

    def _write_turn(
        self, start: SessionEvent, end: SessionEvent, before: Sequence[SessionEvent], made: Sequence[SessionEvent]
    ) -> None:
        entry = self._entry(start.thread, start, end)
        agent, told = self._agent(start.thread), end.at_ns <= self._known.cost_ns
        entry.kind, entry.dialect = "llm", self._formats.turn
        # The cost of an earlier turn is in what the provider has told.
        entry.model = entry.model_served = None if told else agent.model
        self._known.is_finer |= entry.model is not None
        entry.usage, entry.response_id, entry.http_status = hosted.turn_usage(end.data), start.id, 200
        entry.tool_calls = sum(one.kind in ("call", "ran") for one in made)
        entry.choices = int(bool(made) or end.kind == "graded")
        entry.finish = label(end.data.get("result"))
        if hosted.turn_failed(end.data):
            entry.status, entry.error = "error", "error_body"
        elif end.data.get("status") == "cancelled":
            entry.status = "cancelled"
        self._give_bodies(entry, *hosted.turn_bodies(agent.model, before, made, end))
        self._write(entry)
        self.turns.append(entry)

    def _before(self, place: str, lane: bytes, position: bytes) -> bytes:
        """The position of the last bound of a lane before a position; empty for none."""
        positions = self._lane(place, lane).positions
        at = bisect_left(positions, position)
        return positions[at - 1] if at else b""

    def _run(self, call: SessionEvent, result: SessionEvent) -> SpanEntry:
        entry = self._entry(call.thread, call, result)
        entry.kind, entry.dialect = "tool", self._formats.tool
        entry.start_ns -= hosted.run_ns(result.data)
        entry.upstream = label(call.data.get("mcp_server_name")) or label(call.data.get("server_label"))
        assert entry.attributes is not None
        entry.attributes[TOOL] = entry.name = hosted.tool_name(call.data)
        if result.data.get("is_error") or result.data.get("error"):
            entry.status, entry.error = "error", "tool_error"
        self._give_bodies(entry, dumps(call.data).encode(), dumps(result.data).encode())
        return entry

    def _own(self, event: SessionEvent) -> SpanEntry:
        """An event as a span of its own."""
        entry = self._entry(event.thread, event, event)
        entry.kind, entry.name, entry.method, entry.path, entry.upstream = "event", event.type, "", "", None
        if why := label(obj(event.data.get("error")).get("type")):
            entry.status, entry.error = "error", why
        attributes: dict[str, Any] = entry.attributes or {}
        if event.opens:
            entry.agent = self._agent(event.opens).name
            entry.span_id = _span_id(self._session, f"thread {event.opens}")
        if said := hosted.event_text(event):
            attributes["text"] = said
        if event.type == hosted.USAGE_TOLD and (cost := hosted.list_cost(event)) is not None:
            attributes["penstock.hosted.list_cost"] = cost
            self._count_cost(event, cost)
        entry.attributes = attributes
        return entry

    def _count_cost(self, event: SessionEvent, cost: float) -> None:
        """Count the cost that the provider tells, where turns do not tell it."""
        known = self._known
        if known.is_finer or event.at_ns <= known.cost_ns:
            return
        entry = self._entry("", event, event)
        entry.kind, entry.dialect, entry.name, entry.http_status = "llm", self._formats.turn, event.type, 200
        entry.usage = Usage(input_tokens=0, output_tokens=0, billed={"cost": max(0.0, cost - known.cost)})
        known.cost, known.cost_ns = max(known.cost, cost), event.at_ns
        self._give_bodies(entry, *hosted.turn_bodies(None, (), (), event))
        self._write(entry)
        self.turns.append(entry)

    def _agent(self, thread: str) -> SessionAgentRecord:
        known = self._known
        agent = known.agents.get(thread, SessionAgentRecord())
        return SessionAgentRecord(agent.name, agent.model or known.models.get(agent.name or ""), agent.parent)

    def _entry(self, thread: str, first: SessionEvent, last: SessionEvent) -> SpanEntry:
        by, (rollout, attempt) = self._by, self._known.home
        entry = SpanEntry(rollout, attempt, by.origin, by.mode, status="ok")
        entry.start_ns, entry.end_ns = first.at_ns, max(first.at_ns, last.end_ns or last.at_ns)
        entry.path = self._formats.path + self._session.partition("/")[2]
        entry.upstream, entry.agent = by.upstream, self._agent(thread).name
        entry.span_id = _span_id(self._session, first.id)
        entry.parent_id = _span_id(self._session, f"thread {thread}") if thread else None
        entry.attributes = {HOSTED_SESSION: self._session, HOSTED_EVENT: first.id}
        return entry

    def _give_bodies(self, entry: SpanEntry, request: bytes, response: bytes) -> None:
        entry.request_bytes, entry.response_bytes = len(request), len(response)
        marks = [((entry.end_ns or 0) - entry.start_ns) // 1000, len(response)]
        entry.body = StoredBody("", b"", request, b"", response, b"", marks)

    def _write(self, entry: SpanEntry) -> None:
        self._tape.record(entry, 0)

    def settle(self) -> None:
        """Write the events whose turn was written before they came."""
        for named in self._places:
            place = b"p" + self._place(named)
            waiting = [*self._tape.scan(DATABASE, place)]
            if not waiting:
                continue
            for key, stored in waiting:
                event = _event(stored)
                lane = self._lane(named, b"s" if event.kind in ("input", "result") else b"e")
                at = bisect_left(lane.positions, key[len(place) :])
                bound = lane.states[lane.positions[at]] if at < len(lane.positions) else _OPEN
                if bound == _CLOSED:
                    self._tape.delete(DATABASE, key)
                    if event.kind not in ("call", "result", "ran"):  # these have a span of their own
                        self._write(self._own(event))
