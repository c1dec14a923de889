"""The parser against the standard's examples, and against itself under any chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.dialects.sse import Event, Parser, events, first, last

ENDS = (b"\n", b"\r", b"\r\n")
FIELDS = (
    b"data: a|data:b|data:  c|data|data: \xc3\xa9|: comment|event: e|event|id: 7|id: \0|retry: 10|retry: x|other: 1"
)
LINES = st.sampled_from([*(FIELDS + b"|||data: \xff|\xef\xbb\xbfdata: bom|data: x:y| data: z").split(b"|")])
STREAMS = st.lists(st.tuples(LINES, st.sampled_from(ENDS)), max_size=30).map(lambda it: b"".join(a + b for a, b in it))


def data(body: bytes) -> list[str]:
    return [event.data for event in events(body)]


@pytest.mark.parametrize("end", ENDS)
def test_the_standards_examples(end: bytes) -> None:
    def told(text: str) -> list[Event]:
        return list(events(text.encode().replace(b"\n", end)))

    assert told("data: YHOO\ndata: +2\ndata: 10\n\n") == [Event("message", "YHOO\n+2\n10", "")]
    assert told(": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n") == [
        Event("message", "first event", "1"),
        Event("message", "second event", ""),
        Event("message", " third event", ""),
    ]
    assert told("data\n\ndata\ndata\n\ndata:") == [Event("message", "", ""), Event("message", "\n", "")]
    assert told("data:test\n\ndata: test\n\n") == [Event("message", "test", "")] * 2
    assert told("event: add\ndata: 73857293\n\nevent: remove\n\ndata: 1\n\n") == [
        Event("add", "73857293", ""),
        Event("message", "1", ""),
    ]


def test_an_event_is_given_as_soon_as_its_blank_line_is_there() -> None:
    parser = Parser()
    assert parser.feed(b"data: a\r\n\r") == [Event("message", "a", "")]
    assert parser.feed(b"\ndata: b\r\n") == []
    assert parser.feed(b"") == []
    assert parser.feed(b"\r\n") == [Event("message", "b", "")]


def test_characters_may_be_split_and_the_byte_order_mark_is_dropped_once() -> None:
    body = "\ufeffdata: \u00e9\U0001f600\n\n\ufeffdata: lost\n\n".encode()
    parser = Parser()
    assert [event for at in range(len(body)) for event in parser.feed(body[at : at + 1])] == [
        Event("message", "\u00e9\U0001f600", "")
    ]


def test_an_id_lasts_and_one_with_a_null_is_ignored() -> None:
    body = b"id: 1\ndata: a\n\ndata: b\n\nid: 2\0\ndata: c\n\nid: 3\n\ndata: d\n\n"
    assert [event.id for event in events(body)] == list("1113")
    # What is for reconnecting makes no event.
    assert data(b"id: 1\ndata: a\n\nretry: 250\n\nid\ndata: b\nretry: 1s\n\n") == ["a", "b"]


def test_a_line_without_an_end_costs_its_own_size() -> None:
    parser = Parser()
    parser.feed(b"data: ")
    for _ in range(2000):
        parser.feed(b"x" * 1000)
    assert len(parser.feed(b"\n\n")[0].data) == 2_000_000


@given(STREAMS | st.binary(max_size=200), st.lists(st.integers(0, 400), max_size=12))
def test_any_chunking_gives_the_same_events(body: bytes, cuts: list[int]) -> None:
    parser = Parser()
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    chunked = [event for a, b in pairwise(places) for event in parser.feed(body[a:b])]
    assert chunked == list(events(body))


@given(STREAMS | st.binary(max_size=200), st.integers(0, 6))
@example(b"data: a\n\n\n\ndata: b\r\n\r\ndata: c\r\rdata: d\n\n", 3)
@example(b"data: a\r\n\r\n\r\ndata: b\r\n\r\n", 1)
@example(b"data: a\n\n" * 5 + b"data: cut", 2)
def test_first_and_last_give_what_the_parser_gives(body: bytes, count: int) -> None:
    whole = data(body)
    assert [it.decode("utf-8", "replace") for it in first(body, count)] == whole[:count]
    assert [it.decode("utf-8", "replace") for it in last(body, count)] == (whole[-count:] if count else [])
