"""Beginnings that were here before are not read again, and that changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.fingerprints import LONGEST, Fingerprints, Read
from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.items import LARGE, Items

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

    def items(self, request: bytes) -> Items:
        self.given.append(len(request))
        return self.dialect.items(request)

    def source(self, item: bytes) -> bytes:
        return self.dialect.source(item)


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


def taken(prints: Fingerprints, dialect: Watched, request: bytes) -> Read:
    """As admission reads."""
    read = prints.follow(dialect, request)
    if read is None:
        read = prints.read(dialect, request)
        prints.keep(dialect, request, read)
    return read


def check(prints: Fingerprints, dialect: Watched, request: bytes) -> int:
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
    prints, dialect = Fingerprints(), Watched(by_name(name))
    first, *others = [check(prints, dialect, body(name, list(range(length)), how)) for length in range(20, 60, 2)]
    assert first > 20_000
    assert others == [0] * len(others), "what stands after the items is the same: nothing but new items is cut"


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_after_the_items_is_read_when_it_changes(name: str) -> None:
    prints, dialect = Fingerprints(), Watched(by_name(name))
    requests = [body(name, list(range(length)), after={"user": f"turn {length}"}) for length in range(20, 60, 2)]
    _, *others = [check(prints, dialect, request) for request in requests]
    assert 0 < min(others) <= max(others) < 16_000
    other = body(name, list(range(60)), after={"user": "turn 58", "model": "n", "n": 3})
    assert prints.follow(dialect, other) is not None
    check(prints, dialect, other)


def test_what_was_followed_is_compared_with_what_was_read_of_any_other_way_of_writing() -> None:
    prints, dialect = Fingerprints(), Watched(by_name("chat"))
    for how in (COMPACT, SPACED, ODD):
        for length in range(20, 30):
            check(prints, dialect, body("chat", list(range(length)), how))


@pytest.mark.parametrize("name", NAMES)
def test_items_that_change_at_the_end_cost_no_second_reading(name: str) -> None:
    """Clients move cache markers from turn to turn."""
    prints, dialect = Fingerprints(), Watched(by_name(name))
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
    prints, dialect = Fingerprints(stems_bytes=100_000), Watched(by_name(name))
    told: list[list[int]] = [list(range(18)), [0] * 18, [9] * 3 + list(range(18)), list(range(6))]
    for which, kept, more in moves:
        told[which] = told[which][: 12 + kept] + more
        request = body(name, told[which], how, **around)
        items = json.dumps([said(name, it) for it in told[which]], separators=how).encode()
        check(prints, dialect, request.replace(b'"HERE"', items))


def test_a_request_that_breaks_off_or_says_something_else_is_not_followed() -> None:
    prints, dialect = Fingerprints(), Watched(by_name("chat"))
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
    prints, dialect = Fingerprints(), Watched(by_name("chat"))
    request = body("chat", list(range(40)), size=LARGE // 20)
    assert LARGE < len(request) < LONGEST
    prints.keep(dialect, request, prints.read(dialect, request))
    assert prints.follow(dialect, request) is not None
    more = request.replace(b'],"model"', b',{"role":"user","content":"%b"}],"model"' % (b"y" * LARGE))
    assert prints.follow(dialect, more) is None, "reading so much would hold others up"


def test_what_stems_hold_is_bounded() -> None:
    prints, dialect = Fingerprints(stems_bytes=100_000), Watched(by_name("chat"))
    first = body("chat", list(range(20)))
    taken(prints, dialect, first)
    for number in range(10):
        taken(prints, dialect, body("chat", list(range(number, number + 20))))
    assert prints.follow(dialect, first) is None
    assert prints.follow(dialect, body("chat", list(range(9, 29)))) is not None
