"""Following the conversations of clients that say nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.address import check_id
from gateway.implicit import Conversations, new_rollout

OPENING = [b"system", b"hello"]


def test_a_continuation_belongs_where_it_began() -> None:
    conversations = Conversations()
    conversations.remember(OPENING, b"hi", "one")
    assert conversations.find([*OPENING, b"hi", b"and now?"]) == "one"
    conversations.remember([*OPENING, b"hi", b"and now?"], b"this", "one")
    assert conversations.find([*OPENING, b"hi", b"and now?", b"this", b"thanks"]) == "one"


def test_a_new_opening_is_new() -> None:
    conversations = Conversations()
    conversations.remember(OPENING, b"hi", "one")
    for messages in ([], OPENING, [b"system", b"other", b"hi"], [b"hello", b"system", b"x"]):
        assert conversations.find(messages) is None


def test_equal_openings_are_told_apart_by_the_answer() -> None:
    conversations = Conversations()
    conversations.remember(OPENING, b"hi", "one")
    conversations.remember(OPENING, b"good day", "two")
    assert conversations.find([*OPENING, b"hi", b"x"]) == "one"
    assert conversations.find([*OPENING, b"good day", b"x"]) == "two"
    assert conversations.find([*OPENING, b"an answer that was never given", b"x"]) is None


def test_an_edited_answer_still_continues_the_only_candidate() -> None:
    conversations = Conversations()
    conversations.remember(OPENING, b"hi", "one")
    assert conversations.find([*OPENING, b"hi, trimmed", b"x"]) == "one"


def test_message_borders_count() -> None:
    conversations = Conversations()
    conversations.remember([b"ab", b"c"], b"hi", "one")
    assert conversations.find([b"a", b"bc", b"hi"]) is None


def test_the_longest_untouched_are_forgotten_first() -> None:
    conversations = Conversations(remembered=2)
    for name in ("one", "two", "three"):
        conversations.remember([name.encode()], b"hi", name)
        conversations.remember_response(f"resp-{name}", name)
    assert conversations.find([b"one", b"hi"]) is None
    assert conversations.find([b"two", b"hi"]) == "two"
    assert conversations.find_response("resp-one") is None
    assert conversations.find_response("resp-three") == "three"


def test_equal_openings_do_not_pile_up() -> None:
    conversations = Conversations()
    for number in range(1000):
        conversations.remember([b"hello"], b"%d" % number, f"r{number}")
    assert conversations.find([b"hello", b"999", b"x"]) == "r999"
    assert conversations.find([b"hello", b"0", b"x"]) is None


def test_a_call_without_a_conversation_is_not_remembered() -> None:
    conversations = Conversations()
    conversations.remember([], b"hi", "one")
    assert conversations.find([b"hi"]) is None


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=5), st.binary(max_size=8), st.lists(st.binary(max_size=8)))
def test_any_conversation_goes_on(messages: list[bytes], reply: bytes, more: list[bytes]) -> None:
    conversations = Conversations()
    conversations.remember(messages, reply, "one")
    assert conversations.find([*messages, reply, *more]) == "one"


def test_new_rollouts_have_valid_names_in_order_of_time() -> None:
    made = [new_rollout() for _ in range(50)]
    assert len(set(made)) == 50
    assert all(check_id("rollout", name) for name in made)
    assert [name[:13] for name in made] == sorted(name[:13] for name in made)
