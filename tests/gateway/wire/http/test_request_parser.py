"""The reader of requests, without sockets: however bytes are cut, the requests are the same, and nothing grows."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.raw import chunk, get, head, post
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.http.request import HttpRequest, KnownHeads, RequestReader

LIMIT = 1000
CHUNKED = head("POST /c HTTP/1.1", [("Host", "h"), ("Transfer-Encoding", "chunked"), ("Trailer", "X-T")])
H2C = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c")]
PIECES = [
    post("/a", b"abc"),
    post("/b", b""),
    get("/g", [("X-A", "1"), ("x-a", ""), ("Connection", "x-a, close-ish")]),
    CHUNKED + b"3;ext\r\nabc\r\n" + chunk(b"defg") + b"0\r\nX-T: 1\r\n\r\n",
    post("/up", b"body", H2C),
    post("/expect", b"x", [("Expect", "100-continue")]),
    post("/big", b"y" * 900),
    b"\r\n",
]
LAST = [
    b"",
    post("/close", b"z", [("Connection", "close")]),
    head("GET /old HTTP/1.0"),
    b"garbage\r\n\r\n",
    head("GET /ws HTTP/1.1", [("Connection", "Upgrade"), ("Upgrade", "websocket")]),
    post("/large", b"y" * 1001),
    get("/wide", [("X-A", "y" * 1000)]),
    b"GET /unfinished HTTP/1.1\r\nHost: h",
]


def reader(heads: KnownHeads | None = None) -> RequestReader:
    return RequestReader(LIMIT, 0, heads or KnownHeads(), LIMIT)


def seen(request: HttpRequest) -> tuple[Any, ...]:
    """Everything of a request that does not depend on the clock."""
    if request.refusal is not None:
        return request.refusal.status, request.refusal.field
    head = (request.method, request.target, request.headers, request.trailers, request.hops)
    return *head, request.http10, request.keep_alive, request.chunked, request.chunks, request.body()


@given(
    pieces=st.lists(st.sampled_from(PIECES)),
    last=st.sampled_from(LAST),
    cuts=st.lists(st.integers(min_value=1, max_value=400)),
)
def test_requests_are_the_same_however_their_bytes_are_cut(pieces: list[bytes], last: bytes, cuts: list[int]) -> None:
    wire = b"".join([*pieces, last])
    whole, cut = reader(), reader()
    whole.feed(wire)
    at = 0
    for size in [*cuts, len(wire)]:
        if at < len(wire) and not cut.over:
            cut.feed(wire[at : at + size])
        at += size
    assert [seen(request) for request in cut.requests] == [seen(request) for request in whole.requests]
    assert (cut.over, cut.unfinished, cut.expects) == (whole.over, whole.unfinished, whole.expects)


AGAIN = [
    *PIECES,
    post("/a", b"other words"),
    post("/a", b"abc", [("Traceparent", "00-1")]),
    post("/a", b"abc", [("traceparent", "00-22"), ("X-Stainless-Retry-Count", "1")]),
    post("/a", b"abc", [("X-Claude-Code-Prev-Tool-Durations", "Bash=5;mcp__a__b=70")]),
    post("/a", b"abc", [("x-claude-code-prev-tool-durations", "no times"), ("x-codex-turn-metadata", '{"a": 1}')]),
    head("POST /a HTTP/1.1", [("Host", "h"), ("Content-Length", "")]),
    head("POST /a HTTP/1.1", [("Host", "h"), ("Content-Length", "1x")]) + b"y",
    head("POST /a HTTP/1.1", [("Host", "h"), ("Content-Length", "3"), ("Content-Length", "3")]) + b"abc",
    head("POST /a HTTP/1.1", [("Host", "h"), ("Content-Length", "3"), ("Transfer-Encoding", "chunked")]) + b"abc",
    head("POST /a HTTP/1.1", [("Host", "h"), ("Content-Length", "0003 ")]) + b"abc",
    b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\n\nabc",
    b"POST /a HTTP/1.1\r\nHost: h\r\nX-A: 1\r\n Content-Length: 3\r\n\r\nabc",
    post("/large", b"y" * 1001),
    post("/a", b"abc", [("traceparent", "0" * 150)] * 6),
    post("/a", b"abc", [("x-request-id", "a1"), ("x-request-id", "b1")]),
    b"\r\n\r\nPOST /evil HTTP/1.1\r\n\r\n",
    b"\r\n\r\n" + get("/g"),
    b"\n" + post("/a", b"abc"),
    b"\r\r\n\r\n" + get("/g"),
]
"""Requests of which some have the same heads, or nearly."""


@given(
    pieces=st.lists(st.sampled_from(AGAIN) | st.sampled_from(LAST), max_size=12),
    cuts=st.lists(st.integers(min_value=1, max_value=400)),
)
def test_known_heads_are_read_as_new_ones_are(pieces: list[bytes], cuts: list[int]) -> None:
    """Connections one after the other, with what earlier ones have taught, and without."""
    heads = KnownHeads()
    for wire in [*pieces, *pieces, b"".join(pieces)]:
        known, new = reader(heads), reader()
        at = 0
        for size in [*cuts, len(wire)]:
            for made in (known, new):
                if at < len(wire) and not made.over:
                    made.feed(wire[at : at + size])
            at += size
        assert [seen(request) for request in known.requests] == [seen(request) for request in new.requests]
        assert (known.over, known.unfinished, known.expects) == (new.over, new.unfinished, new.expects)


def test_a_head_is_parsed_once() -> None:
    heads = KnownHeads()
    made = reader(heads)
    for body in (b"abc", b"", b"longer"):
        made.feed(post("/a", body, [("traceparent", f"00-{len(body)}1")]))
    first, *others = made.requests
    assert first.head is not None
    assert [other.head for other in others] == [first.head] * 2
    assert [request.body() for request in made.requests] == [b"abc", b"", b"longer"]
    assert others[1].headers[-1] == (b"traceparent", b"traceparent", b"00-61")


@given(st.lists(st.binary(max_size=40) | st.sampled_from([*PIECES, *LAST]), max_size=6))
def test_nothing_breaks_it(reads: list[bytes]) -> None:
    made = reader()
    for data in reads:
        if not made.over:
            made.feed(data)
    assert [request.refusal is not None for request in made.requests].count(True) == made.over


ENDLESS = {
    "target": (b"GET /", b"y" * 100),
    "header": (b"GET / HTTP/1.1\r\nX: ", b"y" * 100),
    "headers": (b"GET / HTTP/1.1\r\n", b"X: y\r\n" * 20),
    "header, behind another request": (get("/") + b"GET / HTTP/1.1\r\nX: ", b"y" * 100),
    "trailer": (CHUNKED + b"0\r\nX: ", b"y" * 100),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 20),
    "chunk extension": (CHUNKED + b"5;", b"y" * 100),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_refused(name: str) -> None:
    made = reader()
    start, more = ENDLESS[name]
    made.feed(start)
    for _ in range(20):
        if not made.over:
            made.feed(more)
    assert made.requests[-1].refusal is not None
    assert made.requests[-1].refusal.status == 431


def test_a_head_may_be_as_large_as_the_limit_wherever_it_begins() -> None:
    """The bytes of a request before it in the same read are not its own."""
    made = reader()
    wide = get("/", [("X-A", "y" * 900)])
    for data in (post("/", b"z" * 990) + wide[:500], wide[500:] + CHUNKED, chunk(b"a") + chunk(b"")):
        made.feed(data)
    assert [request.refusal for request in made.requests] == [None, None, None]


def test_absurdly_many_chunks_lose_their_boundaries_and_nothing_else() -> None:
    made = RequestReader(1_000_000, 0, KnownHeads(), LIMIT)
    made.feed(CHUNKED + chunk(b"x") * 100_000 + chunk(b""))
    (request,) = made.requests
    assert request.body() == b"x" * 100_000
    assert len(request.chunks) < 100_000


def test_what_waits_together_may_not_be_larger_than_one_may_be() -> None:
    made = reader()
    made.feed(post("/", b"x" * 600) * 3)
    assert [seen(request) for request in made.requests][1:] == [(413, "body")]
    made = reader()
    for _ in range(3):
        made.feed(post("/", b"x" * 600))
        assert made.requests.pop(0).refusal is None
