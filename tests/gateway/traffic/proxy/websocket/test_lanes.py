"""Whose an event on a WebSocket is, whatever the order in which lanes, steering, errors and closes come."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.gateway.traffic.proxy.websocket.lanes import TABLE, LaneAction, LaneState, LaneTable
from penstock.gateway.wire.dialects.websocket_messages import ServerMessageFacts, ServerMessageKind

LANES = (None, "a", "b")


@dataclass(eq=False)
class Call:
    """What is recorded of one."""

    name: str
    heard: list[bytes] = field(default_factory=list[bytes])
    begun: int = 0
    ended: int = 0
    doubtful: bool = False
    used: list[Call] = field(default_factory=list["Call"])
    """Steering input that it has taken along."""
    dropped: bool = False


@dataclass(eq=False)
class Answer:
    """A response at the server."""

    call: Call
    lane: str | None
    id: str = ""
    previous: str | None = None
    steers: list[Call] = field(default_factory=list[Call])
    """What will be its successor's request."""


class Reader:
    """Does what lanes say."""

    def __init__(self) -> None:
        self.adopted: list[Call] = []
        self.lanes: LaneTable[Call] = LaneTable(self._adopt)

    def _adopt(self) -> Call:
        self.adopted.append(Call(f"adopted {len(self.adopted)}"))
        return self.adopted[-1]

    def hear(self, event: ServerMessageFacts, text: bytes = b"") -> None:
        for step in self.lanes.receive(event, (text, 0.0)):
            call = step.call
            if step.verb == "begin":
                call.begun += 1
            elif step.verb == "note":
                assert not call.ended
                assert step.message is not None
                call.heard.append(step.message[0])
            elif step.verb == "end":
                call.ended += 1
            elif step.verb == "doubt":
                call.doubtful = True
            elif step.verb == "used":
                assert step.by is not None
                step.by.used.append(call)
            else:
                call.dropped = True


class Server(RuleBasedStateMachine):
    """One that keeps to the rules of the API. What it says names the call that it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.numbers = Reader(), itertools.count(1)
        self.queues: dict[str | None, list[Answer]] = {lane: [] for lane in LANES}
        self.running: dict[str | None, Answer | None] = dict.fromkeys(LANES)
        self.over: list[Answer] = []
        self.open_error: set[str | None] = set()
        """Lanes in which an error came that was not the running one's, and nothing else yet."""
        self.truth: dict[Call, list[bytes]] = {}

    def say(self, kind: ServerMessageKind, answer: Answer, **more: object) -> None:
        text = f"{next(self.numbers)} of {answer.call.name}".encode()
        self.truth.setdefault(answer.call, []).append(text)
        named = (
            {"response": answer.id, "previous": answer.previous}
            if kind in (ServerMessageKind.BEGIN, ServerMessageKind.END)
            else {}
        )
        self.reader.hear(ServerMessageFacts(kind, answer.lane, **(named | more)), text)  # type: ignore[arg-type]
        if kind is not ServerMessageKind.ERROR:
            self.open_error.discard(answer.lane)

    @rule(lane=st.sampled_from(LANES), goes_on=st.booleans())
    def create(self, lane: str | None, goes_on: bool) -> None:
        answer = Answer(Call(f"create {next(self.numbers)}"), lane)
        answer.previous = self.over[-1].id if goes_on and self.over and not self.over[-1].steers else None
        self.reader.lanes.add_request(answer.call, lane, answer.previous)
        self.queues[lane].append(answer)

    @rule(lane=st.sampled_from(LANES))
    def begin(self, lane: str | None) -> None:
        if self.running[lane] is None and self.queues[lane]:
            answer = self.running[lane] = self.queues[lane].pop(0)
            answer.id = f"resp_{next(self.numbers)}"
            self.say(ServerMessageKind.BEGIN, answer)

    @rule(
        lane=st.sampled_from(LANES),
        kind=st.sampled_from([ServerMessageKind.PART, ServerMessageKind.BEGIN, ServerMessageKind.OTHER]),
    )
    def go_on(self, lane: str | None, kind: ServerMessageKind) -> None:
        answer = self.running[lane]
        if answer is not None and not (kind is ServerMessageKind.OTHER and lane in self.open_error):
            self.say(kind, answer)
            if kind is ServerMessageKind.OTHER:
                self.open_error.discard(lane)

    @rule(lane=st.sampled_from(LANES), waits=st.booleans())
    def end(self, lane: str | None, waits: bool) -> None:
        """`waits`: for results of tools, where it is steered."""
        answer = self.running[lane]
        if answer is None:
            return
        self.say(ServerMessageKind.END, answer)
        self.running[lane] = None
        self.over.append(answer)
        if answer.steers and waits and not self.queues[lane]:
            self.reader.hear(ServerMessageFacts(ServerMessageKind.PENDING, lane, answer.id))
            goes_on = Answer(Call(f"create {next(self.numbers)}"), lane, previous=answer.id, steers=[])
            self.reader.lanes.add_request(goes_on.call, lane, answer.id)
            self.queues[lane].append(goes_on)
            self.begin(lane)
            assert goes_on.call.used == answer.steers
        elif answer.steers:
            successor = Answer(answer.steers[0], lane, f"resp_{next(self.numbers)}", answer.id)
            self.running[lane] = successor
            self.say(ServerMessageKind.BEGIN, successor)
            assert successor.call.used == answer.steers

    @rule(lane=st.sampled_from(LANES))
    def fail(self, lane: str | None) -> None:
        """The running one, or the first that waits."""
        answer = self.running[lane] or (self.queues[lane] or [None])[0]
        if answer is None or lane in self.open_error or (self.running[lane] is not None and answer.steers):
            return
        self.say(ServerMessageKind.ERROR, answer, status=500)
        if self.running[lane] is not None:
            self.running[lane] = None
            # Only what comes next tells.
            self.begin(lane)
            self.open_error.add(lane)
        else:
            self.queues[lane].remove(answer)

    @rule(lane=st.sampled_from(LANES))
    def reject(self, lane: str | None) -> None:
        """A server that does not wait for its turn to do so."""
        if self.running[lane] is not None and self.queues[lane] and lane not in self.open_error:
            answer = self.queues[lane].pop(0)
            self.say(ServerMessageKind.ERROR, answer, status=400)
            self.go_on(lane, ServerMessageKind.PART)

    @rule(
        lane=st.sampled_from(LANES),
        ends=st.sampled_from([ServerMessageKind.ACCEPTED, ServerMessageKind.FAILED, ServerMessageKind.ERROR]),
    )
    def steer(self, lane: str | None, ends: ServerMessageKind) -> None:
        answer = self.running[lane]
        if answer is None or lane in self.open_error:
            return
        call = Call(f"steer {next(self.numbers)}")
        self.reader.lanes.add_steering(call, answer.id)
        if ends is ServerMessageKind.ERROR:
            # One that knows nothing of steering.
            self.reader.hear(ServerMessageFacts(ends, lane, status=400), b"what?")
            self.go_on(lane, ServerMessageKind.PART)
            assert call.dropped
            return
        text = f"{next(self.numbers)} about {call.name}".encode()
        self.reader.hear(ServerMessageFacts(ends, lane, answer.id, steer=call.name), text)
        self.truth[answer.call].append(text)
        self.open_error.discard(lane)
        assert call.dropped == (ends is ServerMessageKind.FAILED)
        if ends is ServerMessageKind.ACCEPTED:
            answer.steers.append(call)

    @invariant()
    def everybody_has_what_is_theirs(self) -> None:
        assert not self.reader.adopted
        for call, said in self.truth.items():
            unsure = call.heard == said[:-1] and self.open_error
            assert call.heard == said or unsure, (call.name, call.heard, said)
            assert not call.doubtful
            assert call.begun <= 1
            assert call.ended <= 1
        for answer in filter(None, self.running.values()):
            assert answer.call.begun == 1
            assert not answer.call.ended

    def teardown(self) -> None:
        running = {answer.call for answer in self.running.values() if answer is not None}
        under_way, _ = self.reader.lanes.close()
        assert running <= set(under_way)


Server.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestServer = Server.TestCase


@pytest.mark.parametrize("steers", [1, 2])
@pytest.mark.parametrize("waits", [True, False], ids=["pending", "successor"])
@pytest.mark.parametrize("other", [None, "a"], ids=["alone", "another lane waits"])
def test_steered(steers: int, waits: bool, other: str | None) -> None:
    server = Server()
    server.create(lane=None, goes_on=False)
    server.begin(lane=None)
    if other is not None:
        server.create(lane=other, goes_on=False)
    for _ in range(steers):
        server.steer(lane=None, ends=ServerMessageKind.ACCEPTED)
    server.end(lane=None, waits=waits)
    server.everybody_has_what_is_theirs()


EVENTS = st.builds(
    ServerMessageFacts,
    st.sampled_from(ServerMessageKind),
    st.sampled_from([None, "a", "b", "nobody's"]),
    st.sampled_from([None, "r1", "r2", "r3"]),
    st.sampled_from([None, "r1", "r2"]),
)
SAYS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(LANES)), st.tuples(st.just("steer"), st.sampled_from(["r1", "r2", "x"])),
    EVENTS,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(SAYS, max_size=25))
def test_whatever_a_server_says_nothing_is_in_two_answers_or_another_lanes(
    story: list[tuple[str, str | None] | ServerMessageFacts],
) -> None:
    reader, lane_of, texts = Reader(), dict[Call, str | None](), dict[bytes, ServerMessageFacts]()
    for number, said in enumerate(story):
        if isinstance(said, ServerMessageFacts):
            texts[b"%d" % number] = said
            reader.hear(said, b"%d" % number)
        elif said[0] == "ask":
            call = Call(f"{number}")
            lane_of[call] = said[1]
            reader.lanes.add_request(call, said[1], None)
        else:
            reader.lanes.add_steering(Call(f"{number}"), said[1] or "")
    everybody = [*lane_of, *reader.adopted]
    heard = [text for call in everybody for text in call.heard]
    assert len(heard) == len(set(heard))
    for call, lane in lane_of.items():
        assert {texts[text].lane for text in call.heard} <= {lane, None}
        assert call.begun <= 1
        assert call.ended <= 1
    under_way, _ = reader.lanes.close()
    assert all(not call.ended for call in under_way)


def test_every_event_means_something_everywhere() -> None:
    assert set(TABLE) == {
        (event, lane)
        for event in (
            ServerMessageKind.BEGIN,
            ServerMessageKind.PART,
            ServerMessageKind.END,
            ServerMessageKind.ERROR,
            ServerMessageKind.OTHER,
        )
        for lane in LaneState
    }
    assert set(TABLE.values()) == set(LaneAction)


@pytest.mark.parametrize("echoes", [True, False])
def test_a_server_without_lanes_is_followed_where_that_is_no_guess(echoes: bool) -> None:
    reader, one, two = Reader(), Call("one"), Call("two")
    reader.lanes.add_request(one, "a", None)
    reader.hear(ServerMessageFacts(ServerMessageKind.BEGIN, "a" if echoes else None, "r1"), b"1")
    assert one.heard == [b"1"]
    reader.lanes.add_request(two, "b", None)
    # Where it names no lanes, two may be meant; where it does, only one has not begun.
    reader.hear(ServerMessageFacts(ServerMessageKind.PART, None), b"2")
    assert (one.heard, two.heard, len(reader.adopted)) == (([b"1"], [b"2"], 0) if echoes else ([b"1"], [], 1))


def test_the_end_of_another_response_than_the_first_makes_both_doubtful() -> None:
    reader, one, two = Reader(), Call("one"), Call("two")
    for call, id in ((one, "r1"), (two, "r2")):
        reader.lanes.add_request(call, "a", None)
        reader.hear(ServerMessageFacts(ServerMessageKind.BEGIN, "a", id), b"")
    reader.hear(ServerMessageFacts(ServerMessageKind.END, "a", "r2"), b"end")
    assert (one.doubtful, two.doubtful, one.ended, two.ended, two.heard[-1]) == (True, True, 0, 1, b"end")
