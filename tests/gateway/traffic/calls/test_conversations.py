"""Following the conversations of clients that say nothing."""

from __future__ import annotations

import json
import weakref
from base64 import b64decode, b64encode
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import Raw

from penstock.gateway.traffic.calls.call_request import RETRY_COUNT, CallAddress, CallRequest, check_id
from penstock.gateway.traffic.calls.conversation_matcher import ConversationMatcher
from penstock.gateway.traffic.calls.conversations import (
    EMPTY,
    LONGEST,
    ConversationFingerprint,
    ConversationIndex,
    ConversationMatch,
    FingerprintCache,
    ParsedConversation,
    RepeatableRequest,
    UnreadAnswer,
    new_rollout,
)
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.chat import ChatDialect
from penstock.gateway.wire.dialects.request_body import LARGE, ConversationItems
from penstock.gateway.wire.dialects.responses import ResponsesDialect
from penstock.gateway.wire.http.client_connection import ConnectionHints

OPENING = [b"system", b"hello"]
CALLS = 4


@dataclass(slots=True)
class Asked:
    """A call on its way."""

    story: ConversationFingerprint
    found: ConversationMatch
    hints: ConnectionHints
    rollout: str


def told(messages: list[bytes]) -> bytes:
    """A request."""
    return b"\n".join(map(b64encode, messages))


class Plain:
    """A dialect of lines that are their own fingerprint sources, but for tildes."""

    name = "plain"

    def items(self, request: bytes) -> ConversationItems:
        return ConversationItems(None, [Raw(b64decode(it)) for it in request.split(b"\n")] if request else [])

    def item_fingerprint(self, item: bytes) -> bytes:
        return item.strip(b"~")


@dataclass(slots=True)
class Dispatcher:
    """What admission does, without requests."""

    conversations: ConversationIndex = field(default_factory=ConversationIndex)
    fingerprints: FingerprintCache = field(default_factory=FingerprintCache)
    read: list[bytes] = field(default_factory=list[bytes])
    """The answers that had to be read."""
    opened: int = 0

    def look(self, messages: list[bytes], hints: ConnectionHints) -> tuple[ConversationFingerprint, ConversationMatch]:
        story = self.fingerprints.read(Plain(), told(messages)).story
        found = self.conversations.find(story, hints)
        while found.unread:
            for ended in found.unread:
                ended.settle()
            found = self.conversations.find(story, hints)
        return story, found

    def find(self, messages: list[bytes], hints: ConnectionHints | None = None) -> str | None:
        """The rollout that these continue; nobody is told."""
        return self.look(messages, hints or ConnectionHints())[1].rollout

    def ask(self, messages: list[bytes], hints: ConnectionHints | None = None, rollout: str | None = None) -> Asked:
        """A call comes in; `rollout` names a new one."""
        hints = hints or ConnectionHints()
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

        made = UnreadAnswer(lambda: b"".join(reply), False, weight, read)
        for ended in self.conversations.remember(asked.story.key, asked.found, asked.hints, asked.rollout, made):
            ended.settle()

    def told(self, messages: list[bytes], reply: bytes, rollout: str, hints: ConnectionHints | None = None) -> None:
        """A whole call of a new rollout."""
        self.answer(self.ask(messages, hints, rollout), reply)


def test_a_continuation_belongs_where_it_began() -> None:
    """Also with an edited answer; an opening that is none of it is new."""
    dispatcher = Dispatcher()
    dispatcher.told(OPENING, b"hi", "one")
    for messages in ([], OPENING, [b"system", b"other", b"hi"], [b"hello", b"system", b"x"]):
        assert dispatcher.find(messages) is None
    assert dispatcher.find([*OPENING, b"hi, trimmed", b"x"]) == "one"
    second = dispatcher.ask([*OPENING, b"hi", b"and now?"])
    assert second.rollout == "one"
    dispatcher.answer(second, b"this")
    assert dispatcher.find([*OPENING, b"hi", b"and now?", b"this", b"thanks"]) == "one"
    assert dispatcher.read == [], "one conversation needs no answer to be told from others"


def test_equal_openings_are_told_apart_by_the_answer() -> None:
    dispatcher = Dispatcher()
    dispatcher.told(OPENING, b"hi", "one")
    dispatcher.told(OPENING, b"good day", "two")
    assert sorted(dispatcher.read) == [b"good day", b"hi"]
    for answer, rollout in ((b"hi", "one"), (b"good day", "two")):
        found = dispatcher.look([*OPENING, answer, b"x"], ConnectionHints())[1]
        assert (found.rollout, found.ambiguous) == (rollout, False)


def test_of_equal_openings_with_an_edited_answer_the_connection_tells() -> None:
    dispatcher, mine, yours = Dispatcher(), ConnectionHints(), ConnectionHints()
    dispatcher.told(OPENING, b"hi", "one", mine)
    dispatcher.told(OPENING, b"good day", "two", yours)
    edited = [*OPENING, b"an answer that was never given", b"x"]
    assert dispatcher.find(edited, mine) == "one"
    assert dispatcher.find(edited, yours) == "two"
    found = dispatcher.look(edited, ConnectionHints())[1]
    assert (found.rollout, found.ambiguous) == (None, True), "it may be either, or a conversation that began elsewhere"


def test_an_answer_of_several_items_is_one_answer() -> None:
    dispatcher = Dispatcher()
    dispatcher.answer(dispatcher.ask(OPENING, rollout="one"), b"look up", b"look down")
    dispatcher.answer(dispatcher.ask(OPENING, rollout="two"), b"look up")
    assert dispatcher.find([*OPENING, b"look up", b"look down", b"x"]) == "one", "the one that explains more"
    assert dispatcher.find([*OPENING, b"look up", b"x"]) == "two"


def test_the_longest_untouched_are_forgotten_first() -> None:
    dispatcher = Dispatcher(ConversationIndex(remembered=2))
    for name in ("one", "two", "three"):
        dispatcher.told([name.encode()], b"hi", name)
        dispatcher.conversations.remember_response(f"resp-{name}", name)
    assert dispatcher.find([b"one", b"hi"]) is None
    assert dispatcher.find([b"two", b"hi"]) == "two"
    assert dispatcher.conversations.find_response("resp-one") is None
    assert dispatcher.conversations.find_response("resp-three") == "three"


def test_equal_openings_and_conversations_that_continue_one_do_not_pile_up() -> None:
    dispatcher = Dispatcher()
    for number in range(1000):
        dispatcher.told([b"hello"], b"%d" % number, f"r{number}")
    assert dispatcher.find([b"hello", b"999", b"x"]) == "r999"
    assert dispatcher.find([b"hello", b"0", b"x"]) is None
    dispatcher.told(OPENING, b"hi", "one")
    *others, last = [dispatcher.ask([*OPENING, b"hi", b"%d" % number]) for number in range(1000)]
    assert {it.rollout for it in (*others, last)} == {"one"}
    assert last.found.after is not None
    assert len(last.found.after.continued) <= 64
    assert last.story.key in last.found.after.continued


@pytest.mark.parametrize("opening", ["another one", "the same"])
def test_no_answer_is_kept_that_nobody_can_continue(opening: str) -> None:
    """Neither of conversations that were forgotten, nor of a request that its client repeats."""
    conversations, chat, hints = ConversationIndex(remembered=64), Plain(), ConnectionHints()
    bodies = list[weakref.ref[Body]]()
    for number in range(1000):
        messages = [b"%d" % number if opening == "another one" else b"hello"]
        body = Body()
        bodies.append(weakref.ref(body))
        story = FingerprintCache().read(chat, told(messages)).story
        answer = UnreadAnswer(body, False, 100, lambda _body, _stream: list[bytes]())
        conversations.remember(story.key, ConversationMatch(), hints, "r1", answer)
        del body, answer
    assert [body() is not None for body in bodies].count(True) == 64


class Body:
    """Of an answer."""

    def __call__(self) -> bytes:
        return b"hi"


def test_what_does_not_count_may_come_and_go() -> None:
    dispatcher = Dispatcher()

    def look(messages: list[bytes]) -> ConversationFingerprint:
        return dispatcher.fingerprints.read(Plain(), told(messages)).story

    assert look([b"a", b"~", b"b~"]) == look([b"a", b"b", b"~~"])
    assert look([b"a", b"b"]) != look([b"b", b"a"])
    long = [b"%d" % at for at in range(20)]
    assert look([*long, b"~", b"x"]) == look([*long, b"x", b"~"]) != look([*long, b"y"])


def test_answers_that_nobody_had_to_read_are_let_go_and_then_count_as_unknown() -> None:
    dispatcher = Dispatcher(ConversationIndex(unread_bytes=1000))
    dispatcher.answer(dispatcher.ask(OPENING, rollout="one"), b"hi", weight=600)
    for number in range(2):
        dispatcher.answer(dispatcher.ask([b"other %d" % number]), b"hi", weight=600)
    dispatcher.answer(dispatcher.ask(OPENING, rollout="two"), b"good day")
    found = dispatcher.look([*OPENING, b"good day", b"x"], ConnectionHints())[1]
    assert (found.rollout, found.ambiguous) == ("two", True), "nobody knows any more what the first one was answered"
    assert dispatcher.find([*OPENING, b"hi", b"x"]) == "one"


def test_a_call_that_came_to_nothing_has_continued_nothing() -> None:
    dispatcher, mine, yours = Dispatcher(), ConnectionHints(), ConnectionHints()
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
        dispatcher.told(OPENING, b"hi", name, ConnectionHints(peer=name))
    for name in ("two", "one"):
        asked = dispatcher.ask([*OPENING, b"hi", b"x"], ConnectionHints(peer=name))
        assert (asked.rollout, asked.found.ambiguous) == (name, False)


def test_a_connection_on_which_conversations_take_turns_is_no_evidence() -> None:
    dispatcher, pool, other = Dispatcher(), ConnectionHints(), ConnectionHints()
    dispatcher.told([b"first"], b"a", "first", pool)
    dispatcher.told([b"second"], b"b", "second", pool)
    dispatcher.answer(dispatcher.ask([b"first", b"a", b"x"], pool), b"c")
    assert pool.mixed
    dispatcher.told(OPENING, b"hi", "one", pool)
    dispatcher.told(OPENING, b"hi", "two", other)
    asked = dispatcher.ask([*OPENING, b"hi", b"x"], pool)
    assert (asked.rollout, asked.found.ambiguous) == ("one", True)


def test_one_agent_after_the_other_on_a_connection_is_no_pool() -> None:
    dispatcher, hints = Dispatcher(), ConnectionHints()
    for name in ("one", "two"):
        dispatcher.told([name.encode()], b"a", name, hints)
        dispatcher.answer(dispatcher.ask([name.encode(), b"a", b"x"], hints), b"b")
    assert not hints.mixed


# -- agents that do exactly the same ----------------------------------------------------------------------------------


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

    def step(self, dispatcher: Dispatcher, hints: ConnectionHints) -> None:
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


def played(schedule: list[int], answers: list[list[bytes]], ways: list[list[ConnectionHints]]) -> list[Agent]:
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


OTHERS = [[b"%d: %d" % (agent, at) for at in range(CALLS)] for agent in range(6)]


@given(schedules(), st.booleans())
def test_agents_on_their_own_connections_or_with_different_answers_are_kept_apart(
    schedule: list[int], equal: bool
) -> None:
    ways = (
        [[ConnectionHints(peer="10.0.0.1")] * CALLS for _ in range(6)] if equal else [[ConnectionHints()] * CALLS] * 6
    )
    agents = played(schedule, [SAME] * 6 if equal else OTHERS, ways)
    assert len(rollouts(agents)) == len(agents)
    assert all(len({call.rollout for call in agent.calls}) == 1 for agent in agents)
    assert not any(call.found.ambiguous for agent in agents for call in agent.calls)


@given(schedules())
def test_equal_agents_on_one_connection_lose_no_call_and_what_may_be_mixed_says_so(schedule: list[int]) -> None:
    agents = played(schedule, [SAME] * 6, [[ConnectionHints()] * CALLS] * 6)
    found = rollouts(agents)
    assert len(found) == len(agents)
    calls = [call for agent in agents for call in agent.calls]
    assert len(calls) == len(agents) * CALLS
    said = {call.rollout for call in calls if call.found.ambiguous}
    assert {rollout for rollout, whose in found.items() if len(whose) > 1} <= said


@given(schedules(), st.data())
def test_equal_agents_in_a_pool_get_as_many_calls_each(schedule: list[int], data: st.DataObject) -> None:
    pool = [ConnectionHints() for _ in range(3)]
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
def test_an_item_is_known_by_its_bytes(size: int) -> None:
    """Its borders count."""
    dispatcher = Dispatcher()
    dispatcher.told([b"ab", b"c"], b"hi", "one")
    assert dispatcher.find([b"a", b"bc", b"hi"]) is None
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


# -- beginnings that were here before are not read again, and that changes nothing -------------------------------------


NAMES = ("chat", "messages", "responses", "gemini")
LISTED = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents"}
INSTRUCTED = {"messages": "system", "responses": "instructions"}
COMPACT, SPACED, ODD = (",", ":"), (", ", ": "), (" ,", ": ")


@dataclass
class Watched:
    """A dialect, and how many bytes it has been given to cut."""

    dialect: Dialect
    name: str = ""
    given: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.name = self.dialect.name

    def items(self, request: bytes) -> ConversationItems:
        self.given.append(len(request))
        return self.dialect.items(request)

    def item_fingerprint(self, item: bytes) -> bytes:
        return self.dialect.item_fingerprint(item)


def said(name: str, number: int, size: int = 1200) -> dict[str, Any]:
    """An item."""
    text = f"item {number} " + "x" * size
    role = "user" if number % 2 == 0 else "model" if name == "gemini" else "assistant"
    return {"role": role, "parts": [{"text": text}]} if name == "gemini" else {"role": role, "content": text}


def body(name: str, numbers: list[int], how: tuple[str, str] = COMPACT, size: int = 1200, **around: Any) -> bytes:
    """A request; `before` and `after` stand around its items."""
    items = [said(name, number, size) for number in numbers]
    told = {INSTRUCTED[name]: "Be brief."} if name in INSTRUCTED else {}
    whole = {**around.get("before", {}), LISTED[name]: items, "model": "m", **told, **around.get("after", {})}
    return json.dumps(whole, separators=how).encode()


def taken(prints: FingerprintCache, dialect: Watched, request: bytes) -> ParsedConversation:
    """As admission reads."""
    read = prints.follow(dialect, request)
    if read is None:
        read = prints.read(dialect, request)
        prints.add_stem(dialect, request, read)
    return read


def check(prints: FingerprintCache, dialect: Watched, request: bytes) -> int:
    """What was followed is what would have been read; returns how many bytes the dialect had to cut for it."""
    dialect.given.clear()
    found = taken(prints, dialect, request)
    given, whole = sum(dialect.given), prints.read(dialect, request)
    assert found.story == whole.story
    assert found.items.asked == whole.items.asked
    assert found.items.previous == whole.items.previous
    return given


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", [COMPACT, SPACED])
def test_of_a_conversation_that_grows_only_the_end_is_read(name: str, how: tuple[str, str]) -> None:
    prints, dialect = FingerprintCache(), Watched(by_name(name))
    first, *others = [check(prints, dialect, body(name, list(range(length)), how)) for length in range(20, 60, 2)]
    assert first > 20_000
    assert others == [0] * len(others), "what stands after the items is the same: nothing but new items is cut"


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_after_the_items_is_read_when_it_changes(name: str) -> None:
    prints, dialect = FingerprintCache(), Watched(by_name(name))
    requests = [body(name, list(range(length)), after={"user": f"turn {length}"}) for length in range(20, 60, 2)]
    _, *others = [check(prints, dialect, request) for request in requests]
    assert 0 < min(others) <= max(others) < 16_000
    other = body(name, list(range(60)), after={"user": "turn 58", "model": "n", "n": 3})
    assert prints.follow(dialect, other) is not None
    check(prints, dialect, other)


def test_what_was_followed_is_compared_with_what_was_read_of_any_other_way_of_writing() -> None:
    prints, dialect = FingerprintCache(), Watched(by_name("chat"))
    for how in (COMPACT, SPACED, ODD):
        for length in range(20, 30):
            check(prints, dialect, body("chat", list(range(length)), how))


@pytest.mark.parametrize("name", NAMES)
def test_items_that_change_at_the_end_cost_no_second_reading(name: str) -> None:
    """Clients move cache markers from turn to turn."""
    prints, dialect = FingerprintCache(), Watched(by_name(name))
    given: list[int] = []
    for length in range(20, 40, 2):
        request = body(name, list(range(length)))
        marked = request.replace(b'"item %d ' % (length - 2), b'"item %d (marked) ' % (length - 2))
        given.append(check(prints, dialect, marked))
    assert given[1:] == [0] * 9


AROUND: list[dict[str, Any]] = [
    {},
    {"before": {"tools": [{"type": "function", "function": {"name": "f"}}], "n": 2}},
    {"after": {"previous_response_id": "resp_1", "stream": True}},
    {"before": {"copy": "HERE"}},
    {"after": {"copy": "HERE"}},
    {"after": {"copy": ["HERE", "HERE"], "model": "k"}},
]


@given(
    st.sampled_from(NAMES),
    st.sampled_from(AROUND),
    st.sampled_from([COMPACT, SPACED]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 24), st.lists(st.integers(0, 3), max_size=14)), max_size=8),
)
def test_whatever_conversations_do_following_is_reading(
    name: str, around: dict[str, Any], how: tuple[str, str], moves: list[tuple[int, int, list[int]]]
) -> None:
    """They grow, branch, repeat themselves and each other, are cut, and their items stand elsewhere in the request."""
    prints, dialect = FingerprintCache(stems_bytes=100_000), Watched(by_name(name))
    told: list[list[int]] = [list(range(18)), [0] * 18, [9] * 3 + list(range(18)), list(range(6))]
    for which, kept, more in moves:
        told[which] = told[which][: 12 + kept] + more
        request = body(name, told[which], how, **around)
        items = json.dumps([said(name, it) for it in told[which]], separators=how).encode()
        check(prints, dialect, request.replace(b'"HERE"', items))


def test_a_request_that_breaks_off_or_says_something_else_is_not_followed() -> None:
    prints, dialect = FingerprintCache(), Watched(by_name("chat"))
    request = body("chat", list(range(20)))
    taken(prints, dialect, request)
    assert prints.follow(dialect, request) is not None
    assert prints.follow(dialect, request[:-40]) is None
    assert prints.follow(dialect, body("chat", [0, 7, *range(2, 20)])) is None
    assert prints.follow(Watched(by_name("messages")), request) is None, "other APIs read the same otherwise"
    cut = request.index(b'{"role":"assistant","content":"item 17')
    assert prints.follow(dialect, request[:cut] + b"]}") is None, "a comma too many is no JSON"
    assert prints.follow(dialect, request[: cut - 1] + b'],"model":"n"}') is not None, "fewer items are a beginning"
    rest = request[request.rindex(b"]") :]
    for odd in (b"}", b",", b",,{}", b'],"more":[0', b" 1"):
        assert prints.follow(dialect, request[: -len(rest)] + odd + rest) is None, odd
    overlap = request[: -len(rest)].rindex(b"}")
    assert prints.follow(dialect, request[:overlap] + rest) is None


def test_large_requests_are_followed_where_little_of_them_is_new() -> None:
    prints, dialect = FingerprintCache(), Watched(by_name("chat"))
    request = body("chat", list(range(40)), size=LARGE // 20)
    assert LARGE < len(request) < LONGEST
    prints.add_stem(dialect, request, prints.read(dialect, request))
    assert prints.follow(dialect, request) is not None
    more = request.replace(b'],"model"', b',{"role":"user","content":"%b"}],"model"' % (b"y" * LARGE))
    assert prints.follow(dialect, more) is None, "reading so much would hold others up"


def test_what_stems_hold_is_bounded() -> None:
    prints, dialect = FingerprintCache(stems_bytes=100_000), Watched(by_name("chat"))
    first = body("chat", list(range(20)))
    taken(prints, dialect, first)
    for number in range(10):
        taken(prints, dialect, body("chat", list(range(number, number + 20))))
    assert prints.follow(dialect, first) is None
    assert prints.follow(dialect, body("chat", list(range(9, 29)))) is not None


# -- conversations that another worker keeps ---------------------------------------------------------------------------


class Elsewhere:
    """The worker that keeps them, which only hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int | None]] = []

    async def find(
        self,
        story: ConversationFingerprint,
        previous: str | None,
        answers: bool,
        hints: ConnectionHints,
        repeats: RepeatableRequest | None,
    ) -> ConversationMatch:
        raise AssertionError("nobody asks")

    def remember(
        self,
        found: ConversationMatch,
        key: int | None,
        hints: ConnectionHints,
        rollout: str,
        answer: UnreadAnswer,
        names: list[str],
    ) -> None:
        self.heard.append((rollout, key))

    def undo(self, found: ConversationMatch, key: int | None) -> None:
        self.heard.append(("undone", key))

    def remember_failed(self, request: RepeatableRequest, hints: ConnectionHints, rollout: str) -> None:
        self.heard.append((f"failed {rollout}", request.tries))


def admitted(dialect: Dialect, path: str, said: str) -> CallRequest:
    body = b'{"model": "m", %b}' % said.encode()
    call = CallRequest(CallAddress("r1", origin="implicit"), dialect, path, body)
    call.set_conversation(FingerprintCache().read(dialect, body))
    return call


async def test_who_keeps_them_hears_of_the_end_of_a_call_before_its_client_does() -> None:
    """The last bytes are written after this: the client may go on in that worker while this one does not run."""
    keeper, chat = Elsewhere(), ChatDialect()
    joining = ConversationMatcher(keeper)
    call = admitted(chat, "/v1/chat/completions", '"messages": [{"role": "user", "content": "hello"}]')
    assert call.conversation is not None
    joining.remember_soon(call, ConnectionHints(), UnreadAnswer(lambda: b"{}", False, 2, chat.reply_fingerprints))
    call.anonymous, call.headers = True, [(RETRY_COUNT, RETRY_COUNT, b"1")]
    joining.remember_soon(call, ConnectionHints(), None, failed=True)
    assert keeper.heard == [("r1", call.conversation.key), ("failed r1", 1), ("undone", call.conversation.key)]


@pytest.mark.parametrize("answer", [None, b"{}"])
async def test_who_keeps_them_hears_of_the_end_of_a_call_that_nobody_can_continue(answer: bytes | None) -> None:
    """It has noted that the call is under way, and would note it for ever."""
    keeper, responses = Elsewhere(), ResponsesDialect()
    joining = ConversationMatcher(keeper)
    call = admitted(responses, "/v1/responses", '"previous_response_id": "resp_1", "input": "go on"')
    call.conversation, call.match = EMPTY, ConversationMatch("r1", number=7)
    said = None if answer is None else UnreadAnswer(lambda: answer, False, 2, responses.reply_fingerprints)
    joining.remember(call, ConnectionHints(), said)
    assert keeper.heard == [("undone", None)]
