"""Finds the call that a server's event belongs to: the responses under way on a WebSocket, as a table. Sans-I/O.

Responses of one lane run one after the other; lanes run in parallel. An event names its lane, but only the first and
last event of a response name the response; those between belong to the first response in the lane. A lane is

    idle        nothing is under way
    waiting     requests were sent, none has begun
    running     the first has begun, nothing was sent after it
    followed    the first has begun, requests or steering input were sent after it
    doubtful    followed, and an error has come: for the first, or for a later one. The next event tells

and `TABLE` says what an event does in each. Steering input (`response.steer`) has no lane. It waits until the response
that it names has ended and a successor begins, which is a call of its own, or until a request that continues that
response takes it along. No event is ever given to a response that it may not belong to: a response that no request
asked for becomes a call of its own (`ADOPT`), and an event that contradicts the order makes the calls that it may
concern doubtful (`doubt`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from penstock.gateway.wire.dialects.websocket_messages import STEERING, ServerMessageFacts, ServerMessageKind

R = TypeVar("R")
"""The carrier's type of a call."""
TimedMessage = tuple[bytes, float]
"""A message, and when it came in monotonic seconds."""
_REMEMBERED: Final = 256
"""Number of a connection's newest responses that steering input may name."""


class LaneState(Enum):
    """The states of a lane."""

    IDLE = auto()
    WAITING = auto()
    RUNNING = auto()
    FOLLOWED = auto()
    DOUBTFUL = auto()


class LaneAction(Enum):
    """The effect of an event."""

    ADOPT = "it begins a response that nobody has asked for"
    BIND = "the next request that waits begins"
    NOTE = "it is of the first"
    FINISH = "the first, or the one that it names, has ended"
    FAIL = "the first has ended with an error"
    DOUBT = "somebody has ended with an error, and the next event tells who"
    CLEAR = "the first goes on, so what was sent after it has failed; then as where it is followed"
    BLAME = "the first has ended, with the error; then as where that is so"
    PASS = "it is of no call"


_B, _P, _E, _X, _O = (
    ServerMessageKind.BEGIN,
    ServerMessageKind.PART,
    ServerMessageKind.END,
    ServerMessageKind.ERROR,
    ServerMessageKind.OTHER,
)
TABLE: Final[dict[tuple[ServerMessageKind, LaneState], LaneAction]] = {
    (_B, LaneState.IDLE): LaneAction.ADOPT, (_B, LaneState.WAITING): LaneAction.BIND,
    (_B, LaneState.RUNNING): LaneAction.ADOPT, (_B, LaneState.FOLLOWED): LaneAction.BIND,
    (_B, LaneState.DOUBTFUL): LaneAction.BLAME,
    (_P, LaneState.IDLE): LaneAction.ADOPT, (_P, LaneState.WAITING): LaneAction.NOTE,
    (_P, LaneState.RUNNING): LaneAction.NOTE, (_P, LaneState.FOLLOWED): LaneAction.NOTE,
    (_P, LaneState.DOUBTFUL): LaneAction.CLEAR,
    (_E, LaneState.IDLE): LaneAction.ADOPT, (_E, LaneState.WAITING): LaneAction.FINISH,
    (_E, LaneState.RUNNING): LaneAction.FINISH, (_E, LaneState.FOLLOWED): LaneAction.FINISH,
    (_E, LaneState.DOUBTFUL): LaneAction.CLEAR,
    (_X, LaneState.IDLE): LaneAction.ADOPT, (_X, LaneState.WAITING): LaneAction.FAIL,
    (_X, LaneState.RUNNING): LaneAction.FAIL, (_X, LaneState.FOLLOWED): LaneAction.DOUBT,
    (_X, LaneState.DOUBTFUL): LaneAction.DOUBT,
    (_O, LaneState.IDLE): LaneAction.PASS, (_O, LaneState.WAITING): LaneAction.NOTE,
    (_O, LaneState.RUNNING): LaneAction.NOTE, (_O, LaneState.FOLLOWED): LaneAction.NOTE,
    (_O, LaneState.DOUBTFUL): LaneAction.NOTE,
}  # fmt: skip
"""The action for each event in each state of its lane. `BEGIN` here belongs to a response that is not under way yet."""


@dataclass(slots=True, eq=False)
class SteeringInput(Generic[R]):
    """Steering input that was sent."""

    call: R
    target: str
    status: Literal["sent", "accepted", "pending"] = "sent"
    id: str | None = None


@dataclass(slots=True, eq=False)
class LaneEntry(Generic[R]):
    """A response under way, or a request that waits for one."""

    call: R
    lane: str | None
    previous: str | None = None
    """Id of the response that its request continues."""
    id: str | None = None
    begun: bool = False


class CallInstruction(NamedTuple, Generic[R]):
    """An instruction for the carrier of a call."""

    verb: Literal["begin", "note", "end", "doubt", "used", "failed"]
    """`begin`: its response has begun; `note`: the event belongs to it; `end`: that was its last event; `doubt`: an
    event may or may not belong to it. For steering input, `used`: the call `by` takes it; `failed`: no call takes it,
    as the event says."""
    call: R
    message: TimedMessage | None = None
    status: int = 101
    by: R | None = None


@dataclass(slots=True)
class _LaneQueue(Generic[R]):
    places: list[LaneEntry[R]] = field(default_factory=list[LaneEntry[R]])
    errors: list[tuple[TimedMessage, int]] = field(default_factory=list[tuple[TimedMessage, int]])
    """Errors of the first response or of a later request, not assigned yet; each with its status."""

    def named(self, event: ServerMessageFacts) -> LaneEntry[R] | None:
        """The place of the response that an event names. A response without an id yet may get it late."""
        if event.kind not in (ServerMessageKind.BEGIN, ServerMessageKind.END):
            return None
        found = next((it for it in self.places if it.id is not None and it.id == event.response), None)
        first = self.places[0] if self.places else None
        return found or (first if first is not None and first.begun and first.id is None else None)


class LaneTable(Generic[R]):
    """The responses of one connection."""

    def __init__(self, adopt: Callable[[], R]) -> None:
        """`adopt`: makes a call for a response that no request asked for."""
        self._make = adopt
        self._adopted: R | None = None
        """The newest call that was made so."""
        self._lines: dict[str | None, _LaneQueue[R]] = {}
        self._steers: list[SteeringInput[R]] = []
        self._lane_of: OrderedDict[str, str | None] = OrderedDict()
        """Lane by response id, for the newest responses."""
        self._named = set[str | None]()
        """Lanes that the server has named; empty for a server without lanes."""

    # From the client ------------------------------------------------------------------------------------------------

    def add_request(self, call: R, lane: str | None, previous: str | None) -> None:
        """Add a request that was sent."""
        self._line(lane).places.append(LaneEntry(call, lane, previous))

    def add_steering(self, call: R, target: str) -> None:
        """Add steering input that was sent."""
        self._steers.append(SteeringInput(call, target))

    def lane(self, response: str) -> str | None:
        """The lane of a response; None for the default lane, and for an unknown response."""
        return self._lane_of.get(response)

    def running(self, response: str) -> R | None:
        """The call of a response that has not ended; None if there is none."""
        return next((it.call for it in self.under_way if it.id == response), None)

    # From the server ------------------------------------------------------------------------------------------------

    def receive(self, event: ServerMessageFacts, heard: TimedMessage) -> Iterator[CallInstruction[R]]:
        """Yield the steps that follow from an event, in order."""
        if event.kind is ServerMessageKind.UNREADABLE:
            yield from (CallInstruction("doubt", place.call) for place in self.under_way)
        elif event.kind in STEERING:
            yield from self._steered(event, heard)
        else:
            lane = self._lane(event)
            line = self._line(lane)
            yield from self._act(event, lane, line, heard)
            if not line.places and not line.errors:
                del self._lines[lane]

    def _act(
        self, event: ServerMessageFacts, lane: str | None, line: _LaneQueue[R], heard: TimedMessage
    ) -> Iterator[CallInstruction[R]]:
        named = line.named(event)
        kind = ServerMessageKind.PART if event.kind is ServerMessageKind.BEGIN and named is not None else event.kind
        action = TABLE[kind, self._state(lane, line)]
        if action in (LaneAction.BLAME, LaneAction.CLEAR):
            yield from self._settle(lane, line, first=action is LaneAction.BLAME)
            action = TABLE[kind, self._state(lane, line)]
        if kind is ServerMessageKind.BEGIN and (steers := self._succeeding(event, lane, line)):
            yield from self._succeed(event, lane, line, steers)
            yield CallInstruction("note", steers[0].call, heard)
        elif action is LaneAction.DOUBT:
            line.errors.append((heard, event.status))
        elif (
            action is LaneAction.ADOPT
            and kind is ServerMessageKind.ERROR
            and (steer := self._unanswered(lane)) is not None
        ):
            yield self._drop(steer, heard)
        elif action is not LaneAction.PASS and not (action is LaneAction.ADOPT and self._is_over(event, lane)):
            yield from self._give(event, line, self._place(action, event, lane, line, named), heard)

    def _place(
        self,
        action: LaneAction,
        event: ServerMessageFacts,
        lane: str | None,
        line: _LaneQueue[R],
        named: LaneEntry[R] | None,
    ) -> LaneEntry[R]:
        """The place of the response that an event belongs to."""
        waiting = next((it for it in line.places if not it.begun), None)
        place = waiting if action is LaneAction.BIND else line.places[0] if line.places else None
        if action is LaneAction.FINISH and event.response is not None:
            place = waiting
        place = named or place
        if action is LaneAction.ADOPT or place is None:
            self._adopted = self._make()
            place = LaneEntry(self._adopted, lane)
            line.places.append(place)
        return place

    def _give(
        self, event: ServerMessageFacts, line: _LaneQueue[R], place: LaneEntry[R], heard: TimedMessage
    ) -> Iterator[CallInstruction[R]]:
        first, ends = line.places[0], event.kind in (ServerMessageKind.END, ServerMessageKind.ERROR)
        if place is not first and first.begun and (ends or place.call is self._adopted):
            # It breaks the order, so earlier events of the first response may belong to this one.
            yield from (CallInstruction("doubt", it.call) for it in (first, place))
        if not place.begun and event.kind in (ServerMessageKind.BEGIN, ServerMessageKind.PART, ServerMessageKind.END):
            yield from self._begin(place, event)
        elif event.kind is ServerMessageKind.BEGIN and place.id is None:
            self._name(place, event.response)
        yield CallInstruction("note", place.call, heard)
        if ends:
            line.places.remove(place)
            yield CallInstruction("end", place.call, status=event.status)

    def _is_over(self, event: ServerMessageFacts, lane: str | None) -> bool:
        """True if an event is of a response that has ended: some servers send more after the end."""
        if event.kind is ServerMessageKind.PART:
            return lane in self._lane_of.values()
        return event.response is not None and event.response in self._lane_of

    def _state(self, lane: str | None, line: _LaneQueue[R]) -> LaneState:
        if line.errors:
            return LaneState.DOUBTFUL
        if not line.places:
            return LaneState.IDLE
        if not line.places[0].begun:
            return LaneState.WAITING
        follows = self._unanswered(lane) is not None or any(not it.begun for it in line.places)
        return LaneState.FOLLOWED if follows else LaneState.RUNNING

    def _begin(self, place: LaneEntry[R], event: ServerMessageFacts) -> Iterator[CallInstruction[R]]:
        place.begun = True
        self._name(place, event.response)
        taken = [it for it in self._steers if it.target == place.previous and it.status != "sent"]
        for steer in taken:
            self._steers.remove(steer)
            yield CallInstruction("used", steer.call, by=place.call)
        yield CallInstruction("begin", place.call)

    def _name(self, place: LaneEntry[R], response: str | None) -> None:
        if response is None:
            return
        place.id = response
        self._lane_of.pop(response, None)
        self._lane_of[response] = place.lane
        if len(self._lane_of) > _REMEMBERED:
            self._lane_of.popitem(last=False)

    def _settle(self, lane: str | None, line: _LaneQueue[R], first: bool) -> Iterator[CallInstruction[R]]:
        """Assign the held errors to requests and input that were sent after the first response, in order. `first`: the
        first error is the first response's."""
        errors, line.errors = line.errors, []
        for at, (heard, status) in enumerate(errors):
            steer = None if first and at == 0 else self._unanswered(lane)
            waiting = next((it for it in line.places if not it.begun), None)
            place = line.places[0] if first and at == 0 and line.places else waiting
            if steer is not None:
                yield self._drop(steer, heard)
            elif place is not None:
                line.places.remove(place)
                yield CallInstruction("note", place.call, heard)
                yield CallInstruction("end", place.call, status=status)

    # Steering -------------------------------------------------------------------------------------------------------

    def _steered(self, event: ServerMessageFacts, heard: TimedMessage) -> Iterator[CallInstruction[R]]:
        """Update steering input after an event about it; the event is noted for the response that it names, if that
        runs."""
        line = self._lines.get(self._lane_of.get(event.response or ""))
        for place in line.places if line is not None else ():
            if place.id is not None and place.id == event.response and event.lane in (None, place.lane):
                yield CallInstruction("note", place.call, heard)
        steers = [it for it in self._steers if event.response in (None, it.target)]
        known = [it for it in steers if it.id is not None and it.id == event.steer]
        steer = next(iter(known or [it for it in steers if it.status == "sent"] or steers), None)
        if steer is None:
            return
        if event.kind is ServerMessageKind.FAILED:
            yield self._drop(steer, heard)
            return
        steer.status, steer.id = "accepted", event.steer or steer.id
        if event.kind is ServerMessageKind.PENDING:
            # The response waits for results of tools, and so does all input that the server has accepted for it.
            for it in steers:
                if it.target == steer.target and it.status == "accepted":
                    it.status = "pending"

    def _drop(self, steer: SteeringInput[R], heard: TimedMessage) -> CallInstruction[R]:
        self._steers.remove(steer)
        return CallInstruction("failed", steer.call, heard)

    def _unanswered(self, lane: str | None) -> SteeringInput[R] | None:
        """The oldest steering input for a response of this lane that the server has not answered."""
        known = self._lane_of
        return next((it for it in self._steers if it.status == "sent" and known.get(it.target, lane) == lane), None)

    def _succeeding(self, event: ServerMessageFacts, lane: str | None, line: _LaneQueue[R]) -> list[SteeringInput[R]]:
        """The steering input that has caused a response which no request asked for."""
        waits = any(not it.begun for it in line.places)
        fates = ("accepted",) if waits else ("accepted", "sent")
        running = {it.id for it in line.places}
        return [
            it
            for it in self._steers
            if it.status in fates
            and (it.target == event.previous if event.previous else it.target not in running)
            and self._lane_of.get(it.target, lane) == lane
        ]

    def _succeed(
        self, event: ServerMessageFacts, lane: str | None, line: _LaneQueue[R], steers: list[SteeringInput[R]]
    ) -> Iterator[CallInstruction[R]]:
        begun = [it for it in line.places if it.begun]
        place = LaneEntry(steers[0].call, lane)
        line.places.insert(len(begun), place)
        for steer in steers:
            self._steers.remove(steer)
        yield from (CallInstruction("used", it.call, by=place.call) for it in steers)
        yield from self._begin(place, event)

    # ----------------------------------------------------------------------------------------------------------------

    def _lane(self, event: ServerMessageFacts) -> str | None:
        """The lane of an event. If the server names none, the successor of a steered response is in that one's lane. If
        also no request waits in the default lane, it is the lane of the only request whose lane the server has never
        named: not every server has lanes."""
        if event.lane is not None:
            self._named.add(event.lane)
            return event.lane
        if event.kind is ServerMessageKind.BEGIN and any(
            it.target == event.previous and it.status == "accepted" for it in self._steers
        ):
            return self._lane_of.get(event.previous or "")
        if event.kind is ServerMessageKind.OTHER or (None in self._lines and self._lines[None].places):
            return None
        named = {it.lane for it in self.under_way if it.id is not None and it.id == event.response}
        found = named or {it.lane for it in self.under_way if it.lane not in self._named}
        return next(iter(found)) if len(found) == 1 else None

    def _line(self, lane: str | None) -> _LaneQueue[R]:
        return self._lines.setdefault(lane, _LaneQueue())

    @property
    def under_way(self) -> list[LaneEntry[R]]:
        """Responses that have not ended."""
        return [place for line in self._lines.values() for place in line.places]

    @property
    def count(self) -> int:
        """Number of requests and of steering input that the server has to end or to use; it is the client that input
        which is pending waits for."""
        return sum(len(line.places) for line in self._lines.values()) + sum(
            it.status != "pending" for it in self._steers
        )

    @property
    def busy(self) -> bool:
        """True if another event may still come."""
        return any(line.places for line in self._lines.values()) or any(it.status != "pending" for it in self._steers)

    def close(self) -> tuple[list[R], list[R]]:
        """End the connection: return the calls under way, and the steering input that was not used."""
        ended = [place.call for place in self.under_way], [steer.call for steer in self._steers]
        self._lines.clear()
        self._steers.clear()
        return ended
