"""Following the conversations of clients that say nothing."""

from __future__ import annotations

import weakref
from base64 import b64decode, b64encode
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import Raw

from penstock.gateway.calls.address import check_id
from penstock.gateway.calls.conversations import Answer, Conversations, Found, new_rollout
from penstock.gateway.calls.fingerprints import Fingerprints, Story
from penstock.gateway.dialects.items import Items
from penstock.gateway.http.client_connection import Hints

OPENING = [b"system", b"hello"]
CALLS = 4


@dataclass(slots=True)
class Asked:
    """A call on its way."""

    story: Story
    found: Found
    hints: Hints
    rollout: str


def told(messages: list[bytes]) -> bytes:
    """A request."""
    return b"\n".join(map(b64encode, messages))


class Plain:
    """A dialect of lines that are their own fingerprint sources, but for tildes."""

    name = "plain"

    def items(self, request: bytes) -> Items:
        return Items(None, [Raw(b64decode(it)) for it in request.split(b"\n")] if request else [])

    def source(self, item: bytes) -> bytes:
        return item.strip(b"~")


@dataclass(slots=True)
class Dispatcher:
    """What admission does, without requests."""

    conversations: Conversations = field(default_factory=Conversations)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    read: list[bytes] = field(default_factory=list[bytes])
    """The answers that had to be read."""
    opened: int = 0

    def look(self, messages: list[bytes], hints: Hints) -> tuple[Story, Found]:
        story = self.fingerprints.read(Plain(), told(messages)).story
        found = self.conversations.find(story, hints)
        while found.unread:
            for ended in found.unread:
                ended.settle()
            found = self.conversations.find(story, hints)
        return story, found

    def find(self, messages: list[bytes], hints: Hints | None = None) -> str | None:
        """The rollout that these continue; nobody is told."""
        return self.look(messages, hints or Hints())[1].rollout

    def ask(self, messages: list[bytes], hints: Hints | None = None, rollout: str | None = None) -> Asked:
        """A call comes in; `rollout` names a new one."""
        hints = hints or Hints()
        story, found = self.look(messages, hints)
        self.opened += found.rollout is None
        given = found.rollout or rollout or f"r{self.opened}"
        self.conversations.follow(found, story, hints, given)
        return Asked(story, found, hints, given)

    def answer(self, asked: Asked, *reply: bytes, weight: int = 100) -> None:
        """It is answered."""

        def read(body: bytes, stream: bool) -> list[bytes]:
            self.read.append(body)
            return list(reply)

        made = Answer(lambda: b"".join(reply), False, weight, read)
        for ended in self.conversations.remember(asked.story.key, asked.found, asked.hints, asked.rollout, made):
            ended.settle()

    def told(self, messages: list[bytes], reply: bytes, rollout: str, hints: Hints | None = None) -> None:
        """A whole call of a new rollout."""
        self.answer(self.ask(messages, hints, rollout), reply)


def test_a_continuation_belongs_where_it_began() -> None:
    dispatcher = Dispatcher()
    dispatcher.told(OPENING, b"hi", "one")
    second = dispatcher.ask([*OPENING, b"hi", b"and now?"])
    assert second.rollout == "one"
    dispatcher.answer(second, b"this")
    assert dispatcher.find([*OPENING, b"hi", b"and now?", b"this", b"thanks"]) == "one"
    assert dispatcher.read == [], "one conversation needs no answer to be told from others"


def test_a_new_opening_is_new() -> None:
    dispatcher = Dispatcher()
    dispatcher.told(OPENING, b"hi", "one")
    for messages in ([], OPENING, [b"system", b"other", b"hi"], [b"hello", b"system", b"x"]):
        assert dispatcher.find(messages) is None


def test_equal_openings_are_told_apart_by_the_answer() -> None:
    dispatcher = Dispatcher()
    dispatcher.told(OPENING, b"hi", "one")
    dispatcher.told(OPENING, b"good day", "two")
    assert sorted(dispatcher.read) == [b"good day", b"hi"]
    for answer, rollout in ((b"hi", "one"), (b"good day", "two")):
        found = dispatcher.look([*OPENING, answer, b"x"], Hints())[1]
        assert (found.rollout, found.ambiguous) == (rollout, False)


def test_of_equal_openings_with_an_edited_answer_the_connection_tells() -> None:
    dispatcher, mine, yours = Dispatcher(), Hints(), Hints()
    dispatcher.told(OPENING, b"hi", "one", mine)
    dispatcher.told(OPENING, b"good day", "two", yours)
    edited = [*OPENING, b"an answer that was never given", b"x"]
    assert dispatcher.find(edited, mine) == "one"
    assert dispatcher.find(edited, yours) == "two"
    found = dispatcher.look(edited, Hints())[1]
    assert (found.rollout, found.ambiguous) == (None, True), "it may be either, or a conversation that began elsewhere"


def test_an_edited_answer_still_continues_the_only_candidate() -> None:
    dispatcher = Dispatcher()
    dispatcher.told(OPENING, b"hi", "one")
    assert dispatcher.find([*OPENING, b"hi, trimmed", b"x"]) == "one"


def test_an_answer_of_several_items_is_one_answer() -> None:
    dispatcher = Dispatcher()
    dispatcher.answer(dispatcher.ask(OPENING, rollout="one"), b"look up", b"look down")
    dispatcher.answer(dispatcher.ask(OPENING, rollout="two"), b"look up")
    assert dispatcher.find([*OPENING, b"look up", b"look down", b"x"]) == "one", "the one that explains more"
    assert dispatcher.find([*OPENING, b"look up", b"x"]) == "two"


def test_message_borders_count() -> None:
    dispatcher = Dispatcher()
    dispatcher.told([b"ab", b"c"], b"hi", "one")
    assert dispatcher.find([b"a", b"bc", b"hi"]) is None


def test_the_longest_untouched_are_forgotten_first() -> None:
    dispatcher = Dispatcher(Conversations(remembered=2))
    for name in ("one", "two", "three"):
        dispatcher.told([name.encode()], b"hi", name)
        dispatcher.conversations.remember_response(f"resp-{name}", name)
    assert dispatcher.find([b"one", b"hi"]) is None
    assert dispatcher.find([b"two", b"hi"]) == "two"
    assert dispatcher.conversations.find_response("resp-one") is None
    assert dispatcher.conversations.find_response("resp-three") == "three"


def test_equal_openings_do_not_pile_up() -> None:
    dispatcher = Dispatcher()
    for number in range(1000):
        dispatcher.told([b"hello"], b"%d" % number, f"r{number}")
    assert dispatcher.find([b"hello", b"999", b"x"]) == "r999"
    assert dispatcher.find([b"hello", b"0", b"x"]) is None


def test_nor_do_conversations_that_continue_one() -> None:
    dispatcher = Dispatcher()
    dispatcher.told(OPENING, b"hi", "one")
    asked = [dispatcher.ask([*OPENING, b"hi", b"%d" % number]) for number in range(1000)]
    assert {it.rollout for it in asked} == {"one"}
    last = asked[-1]
    assert last.found.after is not None
    assert len(last.found.after.continued) <= 64
    assert last.story.key in last.found.after.continued


@pytest.mark.parametrize("opening", ["another one", "the same"])
def test_no_answer_is_kept_that_nobody_can_continue(opening: str) -> None:
    """Neither of conversations that were forgotten, nor of a request that its client repeats."""
    conversations, chat, hints = Conversations(remembered=64), Plain(), Hints()
    bodies = list[weakref.ref[Body]]()
    for number in range(1000):
        messages = [b"%d" % number if opening == "another one" else b"hello"]
        body = Body()
        bodies.append(weakref.ref(body))
        story = Fingerprints().read(chat, told(messages)).story
        conversations.remember(
            story.key, Found(), hints, "r1", Answer(body, False, 100, lambda _body, _stream: list[bytes]())
        )
        del body
    assert [body() is not None for body in bodies].count(True) == 64


class Body:
    """Of an answer."""

    def __call__(self) -> bytes:
        return b"hi"


def test_what_does_not_count_may_come_and_go() -> None:
    dispatcher = Dispatcher()

    def look(messages: list[bytes]) -> Story:
        return dispatcher.fingerprints.read(Plain(), told(messages)).story

    assert look([b"a", b"~", b"b~"]) == look([b"a", b"b", b"~~"])
    assert look([b"a", b"b"]) != look([b"b", b"a"])
    long = [b"%d" % at for at in range(20)]
    assert look([*long, b"~", b"x"]) == look([*long, b"x", b"~"]) != look([*long, b"y"])


def test_answers_that_nobody_had_to_read_are_let_go_and_then_count_as_unknown() -> None:
    dispatcher = Dispatcher(Conversations(unread_bytes=1000))
    dispatcher.answer(dispatcher.ask(OPENING, rollout="one"), b"hi", weight=600)
    for number in range(2):
        dispatcher.answer(dispatcher.ask([b"other %d" % number]), b"hi", weight=600)
    dispatcher.answer(dispatcher.ask(OPENING, rollout="two"), b"good day")
    found = dispatcher.look([*OPENING, b"good day", b"x"], Hints())[1]
    assert (found.rollout, found.ambiguous) == ("two", True), "nobody knows any more what the first one was answered"
    assert dispatcher.find([*OPENING, b"hi", b"x"]) == "one"


def test_a_call_that_came_to_nothing_has_continued_nothing() -> None:
    dispatcher, mine, yours = Dispatcher(), Hints(), Hints()
    for hints, name in ((mine, "one"), (yours, "two")):
        dispatcher.told(OPENING, b"hi", name, hints)
    again = [*OPENING, b"hi", b"x"]
    failed = dispatcher.ask(again, mine)
    assert failed.rollout == "one"
    dispatcher.conversations.undo(failed.found, failed.story.key)
    retried = dispatcher.ask(again, mine)
    assert (retried.rollout, retried.found.ambiguous) == ("one", False)


def test_the_address_tells_where_connections_do_not() -> None:
    dispatcher = Dispatcher()
    for name in ("one", "two"):
        dispatcher.told(OPENING, b"hi", name, Hints(peer=name))
    for name in ("two", "one"):
        asked = dispatcher.ask([*OPENING, b"hi", b"x"], Hints(peer=name))
        assert (asked.rollout, asked.found.ambiguous) == (name, False)


def test_a_connection_on_which_conversations_take_turns_is_no_evidence() -> None:
    dispatcher, pool, other = Dispatcher(), Hints(), Hints()
    dispatcher.told([b"first"], b"a", "first", pool)
    dispatcher.told([b"second"], b"b", "second", pool)
    dispatcher.answer(dispatcher.ask([b"first", b"a", b"x"], pool), b"c")
    assert pool.mixed
    dispatcher.told(OPENING, b"hi", "one", pool)
    dispatcher.told(OPENING, b"hi", "two", other)
    asked = dispatcher.ask([*OPENING, b"hi", b"x"], pool)
    assert (asked.rollout, asked.found.ambiguous) == ("one", True)


def test_one_agent_after_the_other_on_a_connection_is_no_pool() -> None:
    dispatcher, hints = Dispatcher(), Hints()
    for name in ("one", "two"):
        dispatcher.told([name.encode()], b"a", name, hints)
        dispatcher.answer(dispatcher.ask([name.encode(), b"a", b"x"], hints), b"b")
    assert not hints.mixed


# -- agents that do exactly the same -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Agent:
    """Plays the script: says the same as all others, and is answered as its `answers` say."""

    number: int
    answers: list[bytes]
    asked: Asked | None = None
    calls: list[Asked] = field(default_factory=list[Asked])

    @property
    def messages(self) -> list[bytes]:
        """Those of its next call."""
        turns = [it for at, answer in enumerate(self.answers[: len(self.calls)]) for it in (answer, b"then %d" % at)]
        return [*OPENING, *turns]

    def step(self, dispatcher: Dispatcher, hints: Hints) -> None:
        """It asks, or is answered what it has asked."""
        if self.asked is None:
            self.asked = dispatcher.ask(self.messages, hints)
        else:
            dispatcher.answer(self.asked, self.answers[len(self.calls)])
            self.calls.append(self.asked)
            self.asked = None


@st.composite
def schedules(draw: st.DrawFn) -> list[int]:
    """Two to six agents, each as often as it has steps, in any order."""
    agents = draw(st.integers(2, 6))
    return draw(st.permutations([agent for agent in range(agents) for _ in range(2 * CALLS)]))


def played(schedule: list[int], answers: list[list[bytes]], ways: list[list[Hints]]) -> list[Agent]:
    """All agents after their last call. `ways`: of each call of each agent."""
    dispatcher, agents = Dispatcher(), [Agent(number, answers[number]) for number in range(max(schedule) + 1)]
    for number in schedule:
        agent = agents[number]
        agent.step(dispatcher, ways[number][len(agent.calls)])
    return agents


def rollouts(agents: list[Agent]) -> dict[str, set[int]]:
    """Whose calls each rollout has."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for agent in agents:
        for call in agent.calls:
            found[call.rollout].add(agent.number)
    return found


SAME = [b"answer %d" % at for at in range(CALLS)]


@given(schedules())
def test_equal_agents_on_their_own_connections_are_kept_apart(schedule: list[int]) -> None:
    ways = [[Hints(peer="10.0.0.1")] * CALLS for _ in range(6)]
    agents = played(schedule, [SAME] * 6, ways)
    assert len(rollouts(agents)) == len(agents)
    assert all(len({call.rollout for call in agent.calls}) == 1 for agent in agents)
    assert not any(call.found.ambiguous for agent in agents for call in agent.calls)


@given(schedules())
def test_agents_with_different_answers_are_kept_apart_on_any_connection(schedule: list[int]) -> None:
    answers = [[b"%d: %d" % (agent, at) for at in range(CALLS)] for agent in range(6)]
    agents = played(schedule, answers, [[Hints()] * CALLS] * 6)
    assert len(rollouts(agents)) == len(agents)
    assert all(len({call.rollout for call in agent.calls}) == 1 for agent in agents)
    assert not any(call.found.ambiguous for agent in agents for call in agent.calls)


@given(schedules())
def test_equal_agents_on_one_connection_lose_no_call_and_what_may_be_mixed_says_so(schedule: list[int]) -> None:
    agents = played(schedule, [SAME] * 6, [[Hints()] * CALLS] * 6)
    found = rollouts(agents)
    assert len(found) == len(agents)
    calls = [call for agent in agents for call in agent.calls]
    assert len(calls) == len(agents) * CALLS
    said = {call.rollout for call in calls if call.found.ambiguous}
    assert {rollout for rollout, whose in found.items() if len(whose) > 1} <= said


@given(schedules(), st.data())
def test_equal_agents_in_a_pool_get_as_many_calls_each(schedule: list[int], data: st.DataObject) -> None:
    pool = [Hints() for _ in range(3)]
    ways = [[data.draw(st.sampled_from(pool)) for _ in range(CALLS)] for _ in range(max(schedule) + 1)]
    agents = played(schedule, [SAME] * 6, ways)
    calls = [call.rollout for agent in agents for call in agent.calls]
    assert {calls.count(rollout) for rollout in calls} == {CALLS}


@given(st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=12), st.binary(min_size=1, max_size=8),
       st.lists(st.binary(min_size=1, max_size=8)))  # fmt: skip
def test_any_conversation_goes_on(messages: list[bytes], reply: bytes, more: list[bytes]) -> None:
    # Something must be said in it.
    assume(any(message.strip(b"~") for message in messages))
    dispatcher = Dispatcher()
    dispatcher.told(messages, reply, "one")
    assert dispatcher.find([*messages, reply, *more]) == "one"


@pytest.mark.parametrize("size", [10, 300 << 10])
def test_a_large_item_is_known_by_its_bytes(size: int) -> None:
    dispatcher = Dispatcher()
    large = b"x" * size
    dispatcher.told([b"system", large], b"hi", "one")
    assert dispatcher.find([b"system", large, b"hi", b"y"]) == "one"
    assert dispatcher.find([b"system", large[:-1] + b"y", b"hi", b"y"]) is None


def test_new_rollouts_have_valid_names_in_order_of_time() -> None:
    made = [new_rollout() for _ in range(50)]
    assert len(set(made)) == 50
    assert all(check_id("rollout", name) for name in made)
    assert [name[:13] for name in made] == sorted(name[:13] for name in made)


@pytest.mark.parametrize("more", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("before", [1, 2, 30])
def test_however_much_is_new_the_longest_known_beginning_counts(before: int, more: int) -> None:
    dispatcher = Dispatcher()
    opening = [b"%d" % at for at in range(before)]
    dispatcher.told(opening, b"hi", "one")
    if before > 1:
        dispatcher.told(opening[: before // 2], b"hi", "shorter")
    assert dispatcher.find([*opening, *[b"new"] * more]) == "one"
    assert dispatcher.find([b"other", *opening, *[b"new"] * more]) is None
