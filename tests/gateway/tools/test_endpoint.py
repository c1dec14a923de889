"""The first event of HTTP with SSE: its path becomes ours, whatever the chunks. Every other stream passes."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.tools.response_rewriter import EndpointFraming
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
FIRST = b"event: endpoint\ndata: /messages?sessionId=1\n\n"
REST = b"event: message\ndata: {}\n\n: ping\n\n"
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
OTHERS = [REST, b": ping\n\n" + FIRST, b"event: end", b"event: endpoint\nid: 1\ndata: /x\n\n", b"\n"]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def unchunked(wire: bytes) -> bytes:
    out = b""
    while wire:
        size, _, wire = wire.partition(b"\r\n")
        out, wire = out + wire[: int(size, 16)], wire[int(size, 16) + 2 :]
    return out


def passed(pieces: list[bytes], chunked: bool = True, plain: bool = False, ours: str | None = "/ours") -> bytes:
    """What the client gets, without the head and without framing."""
    framing = EndpointFraming(lambda endpoint: ours, plain)
    connection = SimpleNamespace(pieces=list[bytes](), chunked=chunked, done=False, trailers=())
    out = framing.begin(cast(UpstreamConnection, connection), HEAD, b"")
    for at, piece in enumerate(pieces):
        connection.pieces, connection.done = [piece], at == len(pieces) - 1
        raw = chunk(piece) if chunked else piece
        out += framing.go_on(
            cast(UpstreamConnection, connection), raw + (b"0\r\n\r\n" if chunked and connection.done else b"")
        )
    body = out.removeprefix(HEAD)
    return unchunked(body) if chunked and not plain else body


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(body) for place in places} - {0}), len(body)]
    return [body[a:b] for a, b in pairwise(edges)]


@given(
    st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans(), st.sampled_from([b"\n", b"\r\n", b"\r"])
)
def test_the_path_is_ours_whatever_the_chunks(places: list[int], chunked: bool, plain: bool, end: bytes) -> None:
    body = (FIRST + REST).replace(b"\n", end)
    expected = body.replace(b"/messages?sessionId=1", b"/ours")
    assert passed(cut(body, places), chunked, plain) == expected


@pytest.mark.parametrize(
    "body", [REST, b": ping\n\n" + FIRST, b"event: end", b"event: endpoint\nid: 1\ndata: /x\n\n", b"\n"]
)
@given(places=st.lists(st.integers(0, 200), max_size=8), plain=st.booleans())
def test_other_streams_pass(body: bytes, places: list[int], plain: bool) -> None:
    assert passed(cut(body, places), True, plain) == body


def test_a_path_on_another_host_is_left() -> None:
    assert passed([FIRST + REST], ours=None) == FIRST + REST


def test_nothing_waits_that_cannot_be_the_event() -> None:
    """A stream of streamable HTTP may say nothing for hours after its first comment."""
    framing = EndpointFraming(lambda endpoint: "/ours", False)
    connection = SimpleNamespace(pieces=[b": hi\n"], chunked=False, done=False)
    assert framing.begin(cast(UpstreamConnection, connection), HEAD, b": hi\n") == HEAD + b": hi\n"
