"""A connection that ended before it was used: its caller is told once, and not where it has left meanwhile. And the
reading of answers, held against llhttp."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import httptools
import pytest
import uvloop
from fakes.odd import gone, odd
from fakes.raw import chunk, events_head, reply
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection


class Owner:
    name = "up"

    def __init__(self) -> None:
        self.connections = 0

    def put_back(self, connection: UpstreamConnection) -> None: ...

    def forget(self, connection: UpstreamConnection) -> None: ...


class Caller:
    head_only = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        self.told.append(reason)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_connection_that_ended_before_it_was_used(leaves: bool) -> None:
    caller = Caller()
    async with odd([gone()]) as upstream:
        port = int(upstream.url.rpartition(":")[2])
        make = asyncio.get_running_loop().create_connection
        transport, connection = await make(lambda: UpstreamConnection(Owner()), "127.0.0.1", port)
        transport.close()
        connection.send(cast(Any, caller), b"GET / HTTP/1.1\r\n\r\n", b"")
        # Until then it is its caller: whoever looks for calls that nothing moves on any more must not find it.
        assert connection.caller is caller
        if leaves:
            connection.cancel()
        await (await upstream.connection(0)).gone()
    assert caller.told == ([] if leaves else ["upstream_closed"])
    assert connection.caller is None


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_that_is_given_up_as_it_comes_about_is_not_counted(
    run: Callable[[Coroutine[Any, Any, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = UpstreamConnection.connection_made

    async def given_up() -> None:
        async with odd([gone()]) as upstream:
            pool = ConnectionPool(UpstreamSettings(name="up", base_url=upstream.url))

            def give_up(connection: UpstreamConnection, transport: asyncio.BaseTransport) -> None:
                made(connection, transport)
                task.cancel()

            monkeypatch.setattr(UpstreamConnection, "connection_made", give_up)
            task = pool.connect(cast(Any, Caller()))
            with pytest.raises(asyncio.CancelledError):
                await task
            await (await upstream.connection(0)).gone()
            assert pool.connections == 0

    run(given_up())


# -- how answers are read ----------------------------------------------------------------------------------------------


def whole(status: bytes, lines: list[bytes], framed: tuple[bytes, bytes], after: bytes = b"") -> bytes:
    """An answer. `framed`: a header and a body."""
    return b"\r\n".join([status, *lines, framed[0], b"", framed[1]]) + after


def chunked_body(chunks: list[bytes], extension: bytes, trailers: bytes) -> bytes:
    return b"".join(chunks) + b"0" + extension + b"\r\n" + trailers + b"\r\n"


STATUS_LINES = [
    *[b"HTTP/1.1 200 OK"] * 30, b"HTTP/1.0 200 OK", b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 ", b"HTTP/1.1 500",
    b"HTTP/1.1 200 F\xfcr\talles", b"HTTP/1.1 200 O\0K", b"HTTP/1.1 200 O\rK", b"HTTP/1.1  200 OK", b"HTTP/1.1 2000 OK",
    b"HTTP/1.1 20 OK", b"HTTP/1.1 099 Odd", b"HTTP/1.1 999 Odd", b"HTTP/1.1 200OK", b"HTTP/1.2 200 OK",
    b"HTTP/2.0 200 OK", b"http/1.1 200 OK", b"\r\nHTTP/1.1 200 OK", b" HTTP/1.1 200 OK",
]  # fmt: skip
CHUNKED = [*[b"Transfer-Encoding: chunked"] * 4, b"transfer-ENCODING:\tChunked \t", b"Transfer-Encoding: gzip, chunked"]
LENGTHS = [b"Content-Length: %d" % size for size in (0, 5, 5, 11)]
CODINGS = [b"gzip", b"chunked, gzip", b"chunked,chunked", b"xchunked", b"chunkedx", b"chunked;a=b", b"gzip chunked",
           b"gzip,\tchunked", b"chunked,", b",chunked", b"", b" ", b"identity", b'"chunked', b"chunked\t,"]  # fmt: skip
SIZES = [b"5 ", b"5\t", b"005", b"+5", b"-5", b"5, 5", b"5,5", b"0x5", b"5;", b"5 5", b"", b"0" * 19 + b"5", b"9" * 19]
OPTIONS = [b"close", b"Keep-Alive", b"x, CLOSE", b"close ,x", b"close,keep-alive", b"xclose", b"close x", b"x close",
           b"keep-alive x", b"upgrade, close", b'"close"', b",", b"keep-alive\t", b"close;x"]  # fmt: skip
ODD_LINES = [
    b"A : b", b" A: b", b"\tA: b", b"A", b"", b": b", b"A: b\r\n c", b"A: b\nC: d", b"A: b\rC: d", b"A: \0", b"A: \x7f",
    b"A: \x0b", b"A(: b", b"\xe9: b", b"Content-Length : 5", b"Content-Length\t: 5", b"X: y\nContent-Length: 5",
    b"Transfer-Encoding\0: chunked", b"A: \xff", b"A:", b"A: \t ", b"A: b \t", b"!#$%&'*+-.^_`|~0Z:b", b"A:b:c",
]  # fmt: skip
LINES = (
    st.sampled_from([*CHUNKED, *LENGTHS])
    | st.sampled_from([b"Server: x", b"Content-Type: text/event-stream", b"content-encoding: GZip"])
    | st.sampled_from(CODINGS).map(b"Transfer-Encoding: %b".__mod__)
    | st.sampled_from(SIZES).map(b"Content-Length: %b".__mod__)
    | st.tuples(st.sampled_from([b"Connection", b"Proxy-Connection", b"Upgrade"]), st.sampled_from(OPTIONS)).map(
        b"%b: %b".__mod__
    )
    | st.sampled_from(ODD_LINES)
    | st.binary(max_size=6).map(b"X-Drawn:%b".__mod__)
)
EXTENSIONS = [*[b""] * 30, b";a", b";a=b;c", b';a="\\";\xff"', b" ", b";", b"; a", b";a=b=c", b";a\n", b";a\0", b";a\r"]
CHUNK_SIZES = [*[b"%x"] * 30, b"%X", b"%08x", b"0x%x", b"+%x", b" %x", b"%x_", b"%x\n", b"1%016x"]
CHUNKS = st.tuples(st.binary(max_size=20), st.sampled_from(CHUNK_SIZES), st.sampled_from(EXTENSIONS)).map(
    lambda one: one[1] % len(one[0]) + one[2] + b"\r\n" + one[0] + b"\r\n"
)
TRAILERS = [
    *[b""] * 8,
    b"X-Sum: 1\r\nx-sum:2\r\n",
    b"Connection: close\r\n",
    b"Content-Length: 5\r\n",
    b"A : b\r\n",
    b"A\n",
]
CHUNKED_BODIES = st.builds(
    chunked_body,
    st.lists(CHUNKS, max_size=4),
    st.sampled_from(EXTENSIONS),
    st.sampled_from(TRAILERS),
)
BODIES = CHUNKED_BODIES | st.sampled_from([b"", b"hello", b"hello world", b"hello\r\n"]) | st.binary(max_size=20)
FRAMED = (
    st.tuples(st.sampled_from(CHUNKED), CHUNKED_BODIES)
    | st.binary(max_size=20).map(lambda body: (b"Content-Length: %d" % len(body), body))
    | st.tuples(LINES, BODIES)
)
AFTER = [*[b""] * 9, b"\r\n", b"\n", b"x", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 101 \r\nUpgrade: x\r\n\r\n"]
ANSWERS = st.builds(
    whole,
    st.sampled_from(STATUS_LINES),
    st.just([]) | st.lists(LINES, max_size=2),
    FRAMED,
    st.sampled_from(AFTER),
)
SOUND = st.builds(
    whole,
    st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 500"]),
    st.lists(st.sampled_from([b"Connection: close", b"connection: x, Keep-Alive", b"Server: x"]), max_size=1),
    st.tuples(st.just(CHUNKED[0]), st.lists(st.binary(min_size=1, max_size=300), max_size=9).map(
        lambda pieces: b"".join(map(chunk, [*pieces, b""]))
    )) | st.binary(max_size=300).map(lambda body: (b"Content-Length: %d" % len(body), body)),
)  # fmt: skip
SPOILT = [b"\r", b"\n", b"\0", b" ", b"\t", b":", b";", b",", b"0", b"\r\n", b"\r\n\r\n"]
STRICTER = {
    "no other version, nothing before it, no status without a class": rb"(?!HTTP/1\.[01] [1-9])",
    "no control characters in a reason": rb"HTTP/1\.[01] [0-9]{3} [^\r\n]*[\0-\x08\x0b\x0c\x0e-\x1f\x7f]",
    "no length beyond 19 digits": rb"(?is).*\r\ncontent-length:[ \t]*[0-9]{20}",
    "no empty coding, which some read as none": rb"(?is).*\r\ntransfer-encoding:[ \t]*(?:[^\r]*,)?[ \t]*[,\r]",
    "no tab about a coding, which makes it another one for some": rb"(?is).*\r\ntransfer-encoding:[ \t]*[^ \t][^\r]*\t",
}
"""What is refused although llhttp takes it."""


class Oracle:
    """What llhttp makes of an answer. It takes a second message for garbage."""

    def __init__(self, wire: bytes) -> None:
        self.status, self.headers, self.pieces = 0, list[tuple[bytes, bytes]](), list[bytes]()
        self.done = self.refused = self.keep_alive = False
        self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(wire)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.refused = True

    def on_message_begin(self) -> None:
        self.refused = self.done

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.refused:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self.status or self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if not self.refused:
            self.pieces.append(piece)

    def on_message_complete(self) -> None:
        if not self.refused:
            self.done, self.keep_alive = True, self._parser.should_keep_alive()


class Reader:
    """A call that reads an answer, cut at these places, to the end of its connection."""

    def __init__(self, wire: bytes, cuts: Iterable[int], head_only: bool = False) -> None:
        self.head_only = head_only
        self.passed, self.interim = b"", b""
        self.broken: str | None = None
        self.connection = UpstreamConnection(Owner())
        transport = SimpleNamespace(is_closing=bool, write=len, abort=bool)
        self.connection.connection_made(cast(Any, transport))
        self.connection.send(cast(Any, self), b"", b"")
        ends = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
        for start, end in pairwise(ends):
            self.connection.data_received(wire[start:end])
        self.complete = self.connection.done
        if not self.complete:
            self.connection.connection_lost(None)

    def on_interim(self, head: bytes) -> None:
        self.interim += head

    def on_switched(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bool:
        return False

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        self.passed += head + raw

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        self.passed += raw

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        self.broken = reason


CUTS = st.lists(st.integers(0, 200), max_size=8)


@given(SOUND, CUTS)
def test_an_answer_is_read_as_llhttp_reads_it(wire: bytes, cuts: list[int]) -> None:
    found, read = Oracle(wire), Reader(wire, cuts)
    connection = read.connection
    assert (read.broken is not None) == found.refused
    if not found.refused:
        assert (connection.status, [*connection.headers, *connection.trailers]) == (found.status, found.headers)
        assert b"".join(connection.pieces) == b"".join(found.pieces)
        assert (read.complete, connection.keep_alive, read.passed) == (found.done, found.keep_alive, wire)


def with_one_oddity() -> Iterator[bytes]:
    """Answers with a single odd thing in them."""
    body = b"5\r\nhello\r\n0\r\n\r\n"
    for line in STATUS_LINES:
        yield line + b"\r\nContent-Length: 5\r\n\r\nhello"
    for line in [*ODD_LINES, *LENGTHS, *map(b"Connection: %b".__mod__, OPTIONS)]:
        yield b"\r\n".join([STATUS_LINES[0], line, b"Content-Length: 5", b"", b"hello"])
        yield b"\r\n".join([STATUS_LINES[0], line, CHUNKED[0], b"", body])
    for line in [*CHUNKED, *map(b"Transfer-Encoding: %b".__mod__, CODINGS)]:
        yield b"\r\n".join([STATUS_LINES[0], line, b"", body])
        yield b"\r\n".join([STATUS_LINES[0], line, CHUNKED[0], b"", body])
    for size in SIZES:
        yield b"\r\n".join([STATUS_LINES[0], b"Content-Length: " + size, b"", b"hello"])
    start = b"\r\n".join([STATUS_LINES[0], CHUNKED[0], b"", b""])
    for size in CHUNK_SIZES:
        yield start + size % 5 + body[1:]
    for extension in EXTENSIONS:
        yield start + b"5" + extension + body[1:]
        yield start + b"0" + extension + b"\r\n\r\n"
    for trailer in TRAILERS:
        yield start + body[:-2] + trailer + b"\r\n"
    for after in [*AFTER, *SPOILT]:
        yield start + body + after
        yield reply(200, b"hello") + after


def agree(wire: bytes, cuts: Iterable[int]) -> None:
    """Asserts that what llhttp refuses is refused, and that anything else is read as llhttp reads it."""
    found, read = Oracle(wire), Reader(wire, cuts)
    connection, head = read.connection, wire.partition(b"\r\n\r\n")[0] + b"\r\n"
    if found.refused:
        assert read.broken in {"upstream_protocol", "upstream_closed"}
    elif read.broken == "upstream_protocol":
        assert any(re.match(pattern, head) for pattern in STRICTER.values())
    elif found.status:
        assert (connection.status, [*connection.headers, *connection.trailers]) == (found.status, found.headers)
        assert b"".join(connection.pieces) == b"".join(found.pieces)
        assert read.complete == found.done
        assert connection.keep_alive <= found.keep_alive or not read.complete
    else:
        assert read.broken == "upstream_closed"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_odd_answer_is_refused_if_llhttp_refuses_it(step: int) -> None:
    for wire in with_one_oddity():
        agree(wire, range(0, len(wire), step))


@given(ANSWERS, CUTS, st.none() | st.tuples(st.integers(0, 200), st.integers(0, 1), st.sampled_from(SPOILT)))
def test_any_answer_is_refused_if_llhttp_refuses_it(
    wire: bytes, cuts: list[int], spoilt: tuple[int, int, bytes] | None
) -> None:
    if spoilt is not None:
        at, gone, put = spoilt
        wire = wire[:at] + put + wire[at + gone :]
    assume(not wire.startswith((b"HTTP/1.0 1", b"HTTP/1.1 1")))
    agree(wire, cuts)


@pytest.mark.parametrize(
    ("wire", "stays"), [(reply(200, b"hello"), True), (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", False)]
)
@pytest.mark.parametrize("body", [b"", b"hello"])
def test_the_answer_to_head_has_no_body(wire: bytes, stays: bool, body: bytes) -> None:
    head = wire.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    read = Reader(head + body, [], head_only=True)
    assert (read.passed, read.complete, read.connection.keep_alive) == (head, True, stays and not body)
    assert read.connection.pieces == []


def test_line_ends_behind_an_answer_end_at_the_gateway() -> None:
    wire = reply(200, b"hello")
    read = Reader(wire + b"\r\n", [])
    assert (read.passed, read.complete, read.connection.keep_alive) == (wire, True, False)


@pytest.mark.parametrize("line", [b"A: b\nC: d", b"A: \0", b"A: b\r\n c", b"A : b"])
@pytest.mark.parametrize("status", [b"103 Early Hints", b"100 Continue", b"101 Switching Protocols"])
def test_an_interim_answer_must_be_sound(status: bytes, line: bytes) -> None:
    read = Reader(b"HTTP/1.1 " + status + b"\r\n" + line + b"\r\n\r\n" + reply(200, b"hello"), [])
    assert (read.broken, read.interim, read.passed) == ("upstream_protocol", b"", b"")


def test_framing_is_bounded_in_a_row_only() -> None:
    """A server that writes the size of a chunk by itself may send any number of chunks."""
    size = b"1;" + b"x" * 1000 + b"\r\n"
    wire = events_head() + (size + b"y\r\n") * 300 + chunk(b"")
    read = Reader(wire, (cut for at in range(300) for cut in (at * 1006 + len(events_head()) + len(size),)))
    assert (read.broken, len(read.connection.pieces)) == (None, 300)
    assert Reader(events_head() + b"1;" + b"x" * 300_000, range(0, 300_000, 1000)).broken == "upstream_protocol"
