"""What a hostile server cannot do: take the gateway's memory or its time, or lead an agent to another host."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_wire import INITIALIZE, call
from fakes.odd import Connection, Script, odd, request, send
from fakes.process import Gateway
from fakes.raw import chunk, connect, events_head, get, head, post
from fakes.tape import Tape
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.tools import response_rewriter, sessions
from penstock.gateway.tools.response_rewriter import McpStreamReader
from penstock.gateway.tools.sessions import McpSession, SessionTable

MEGABYTE = 1 << 20
PATH = "/rollout/r1/mcp/tools"
CLOSED = ("Connection", "close")
MUCH = 96
"""Megabytes that are said to the gateway in one breath; it may take half of them, whatever it does with them."""


def resident(gateway: Gateway) -> int:
    """Most bytes of memory that the process has had."""
    status = Path(f"/proc/{gateway.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@asynccontextmanager
async def behind(start: StartGateway, *scripts: Script) -> AsyncGenerator[Gateway]:
    """A gateway before a server that plays these scripts. Of an answer a megabyte is kept."""
    async with odd(*scripts) as upstream:
        yield await start(f'[limits]\nrecorded_bytes = {MEGABYTE}\n[mcp.servers.tools]\nurl = "{upstream.url}/mcp"\n')


def flood(piece: bytes, count: int, end: bytes = b"") -> Callable[[Connection], Awaitable[None]]:
    """A step that says the same thing again and again, as fast as it is read."""

    async def step(connection: Connection) -> None:
        transport = connection.transport
        for _ in range(count):
            transport.write(piece)
            while transport.get_write_buffer_size() > 4 * MEGABYTE:  # noqa: ASYNC110 asyncio tells nobody else
                await asyncio.sleep(0)
        transport.write(end)

    return step


async def drained(gateway: Gateway, sent: bytes, at_least: int) -> None:
    """Asks, and takes what comes without keeping it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent)
    taken = 0
    async with asyncio.timeout(60):
        while taken < at_least and (data := await reader.read(MEGABYTE)):
            taken += len(data)
    writer.close()
    assert taken >= at_least


async def test_endless_answers_are_passed_and_not_held(start_gateway: StartGateway) -> None:
    """An event without an end, a stream of comments, a document where metadata could be, without a length."""
    piece = chunk(b"x" * MEGABYTE)
    document = head("HTTP/1.1 200 OK", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked"), CLOSED])
    message = json.dumps(call("echo")).encode()
    asked = [
        (post(PATH, message, host="localhost"), events_head([CLOSED]) + chunk(b"data: ")),
        (get(PATH, host="localhost"), events_head([CLOSED]) + chunk(b"data: ")),
        (get(PATH, host="localhost"), events_head([CLOSED]) + chunk(b"event: endpoint\ndata: /")),
        (get(PATH, host="localhost"), document),
    ]
    scripts = [[request(), send(begun), flood(piece, MUCH, chunk(b""))] for _, begun in asked]
    async with behind(start_gateway, *scripts) as gateway:
        before = resident(gateway)
        for sent, _ in asked:
            await drained(gateway, sent, MUCH * MEGABYTE)
        grown = resident(gateway) - before
    assert grown < (MUCH // 2 + 32) * MEGABYTE, f"{grown >> 20} MB for an answer of {MUCH} MB"


def packed_zeros(megabytes: int) -> bytes:
    """An event of so many megabytes, with gzip. Packed as a whole it would take seconds."""

    def deflated(data: bytes, how: int) -> bytes:
        packer = zlib.compressobj(9, wbits=-15)
        return packer.compress(data) + packer.flush(how)

    begin, block, end, checked, size = b"data: ", b"0" * MEGABYTE, b"\n\n", 0, 8 + megabytes * MEGABYTE
    for piece in (begin, *[block] * megabytes, end):
        checked = zlib.crc32(piece, checked)
    middle = deflated(block, zlib.Z_FULL_FLUSH) * megabytes
    body = deflated(begin, zlib.Z_FULL_FLUSH) + middle + deflated(end, zlib.Z_FINISH)
    return gzip.compress(b"")[:10] + body + struct.pack("<II", checked, size % 2**32)


async def test_a_bomb_is_passed_packed(start_gateway: StartGateway, http: aiohttp.ClientSession) -> None:
    bomb = packed_zeros(400)
    packed = events_head([("Content-Encoding", "gzip")])
    unknown = events_head([("Content-Encoding", "x-unknown"), CLOSED]) + chunk(b"data: x\n\n") + chunk(b"")
    scripts = [[request(), send(unknown)], [request(), send(packed + chunk(bomb) + chunk(b""))]]
    async with behind(start_gateway, *scripts) as gateway:
        # Of one that cannot be read nobody says that it ended early.
        await drained(gateway, post(PATH, json.dumps(call("echo")).encode(), host="localhost"), 100)
        assert (await Tape(gateway.url, http).spans("r1", 1))[0].error is None
        before = resident(gateway)
        await drained(gateway, post(PATH, json.dumps(call("echo")).encode(), host="localhost"), len(bomb))
        (_, span) = await Tape(gateway.url, http).spans("r1", 2)
        grown = resident(gateway) - before
    assert span.response_bytes == len(bomb)
    # The thread that records it unpacks 64 MB of it, and copies them.
    assert grown < 256 * MEGABYTE, f"{grown >> 20} MB for an answer that unpacks to 400 MB"


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_of_a_bomb_little_is_unpacked(encoding: bytes) -> None:
    reader = McpStreamReader(encoding)
    packer = zlib.compressobj(9, wbits=31 if encoding == b"gzip" else 15)
    event = b'data: {"id":1,"result":{}}\n\n'
    whole = packer.compress(event) + packer.flush(zlib.Z_FULL_FLUSH)
    assert [one.id for one in reader.feed([whole])] == [b"1"]
    bomb = packer.compress(b"data: " + b"0" * (4 * response_rewriter.UNPACKED)) + packer.flush()
    assert list(reader.feed([bomb])) == []
    assert reader.unread


def test_an_event_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_rewriter, "LONGEST", 1000)
    reader = McpStreamReader(None)
    for _ in range(100):
        assert list(reader.feed([b": still here\n\n", b"data: {}"])) or True
        assert not reader.unread, "of comments, and of events that end, a stream may have any number"
        assert list(reader.feed([b"\n\n"]))
    for _ in range(60):
        assert list(reader.feed([b"data: 0123456789\n"])) == []
    assert reader.unread
    assert list(reader.feed([b'\n\ndata: {"id":1,"result":{}}\n\n'])) == []


def test_what_a_resumed_stream_says_again_is_no_second_message() -> None:
    session = McpSession("r1")
    asking = b'id: 7\ndata: {"id":"s","method":"roots/list"}\n\n'
    other = b'id: 8\ndata: {"id":"s","method":"roots/list"}\n\n'
    answered = b'id: 9\ndata: {"id":1,"result":{}}\n\n'
    kinds = [one.kind for one in McpStreamReader(None, session).feed([asking, answered])]
    assert kinds == ["request", "answer"]
    again = [one.kind for one in McpStreamReader(None, session, resumes=True).feed([asking, other, answered])]
    assert again == ["request", "answer"], "that of another number is another; answers are known by their ids"
    assert len(list(McpStreamReader(None, session).feed([asking]))) == 1, "a new stream may number as it likes"


class Owed:
    """A request that is kept."""

    def __init__(self, weight: int = 1) -> None:
        self.weight = weight
        self.given = 0
        self.answers: list[bytes] = []

    def answered(self, answer: bytes, now: float) -> None:
        self.answers.append(answer)

    def given_up(self) -> None:
        self.given += 1


def test_what_a_session_owes_is_bounded() -> None:
    session = McpSession("r1")
    many = [Owed() for _ in range(sessions.OWED + 10)]
    for number, one in enumerate(many):
        session.keep_server_request(b"%d" % number, one)
    assert [one.given for one in many] == [1] * 10 + [0] * sessions.OWED
    heavy = [Owed(sessions.OWED_BYTES // 2) for _ in range(4)]
    for number, one in enumerate(heavy):
        session.keep_client_request(b"%d" % number, one)
    assert [one.given for one in heavy] == [1, 1, 0, 0]
    for number in range(2 * sessions.UNWANTED):
        session.cancel(b"%d" % number)
    assert (session.is_cancelled([b"0"]), session.is_cancelled([b"1", b"%d" % (sessions.UNWANTED + 1)])) == (
        False,
        True,
    )


def test_an_answer_may_come_before_the_end_of_the_exchange_that_asked() -> None:
    session = McpSession("r1")
    for number in range(2 * sessions.EARLY):
        session.keep_early_answer(b"%d" % number, b"early")
    forgotten, first, second, large = (Owed() for _ in range(4))
    last = b"%d" % (2 * sessions.EARLY - 1)
    for id, one in ((b"0", forgotten), (last, first), (last, second)):
        session.keep_client_request(id, one)
    assert [one.answers for one in (forgotten, first, second)] == [[], [b"early"], []]
    assert session.settle_client_request(last, b"late")
    assert second.answers == [b"late"]
    session.keep_early_answer(b"x", b"x" * (sessions.EARLY_BYTES + 1))
    session.keep_client_request(b"x", large)
    assert large.answers == [], "what is too large is not kept"


def test_ids_of_any_length_cost_little() -> None:
    known = SessionTable()
    long = b"a" * 100_000
    session = known.open("tools", long, "r1")
    assert known.find("tools", long) is session
    assert known.find("tools", long + b"a") is None
    assert not any(len(id) > 128 for _, id in known._open)
    known.end("tools", long)
    assert known.find("tools", long) is None


@given(st.lists(st.tuples(st.sampled_from(["1", "2", ""]), st.sampled_from([b"a", b"b"])), max_size=20))
def test_what_is_said_again_is_known_by_number_and_words(said: list[tuple[str, bytes]]) -> None:
    session = McpSession("r1")
    for place, (event, raw) in enumerate(said):
        assert session.is_repeated(event, raw) == ((event, raw) in said[:place])


ENDPOINTS = [
    "http://evil.test/messages",
    "//evil.test/messages",
    "https://127.0.0.1/messages",
    "http://[::1",
    "http://user@{}/messages",
    "http://{}@evil.test/messages",
    "javascript:alert(1)",
]


def named(words: str) -> Callable[[Connection], Awaitable[None]]:
    """A step that says something with its own host and port in it."""

    async def step(connection: Connection) -> None:
        connection.send(words.format(connection.upstream.url.partition("://")[2]).encode())

    return step


async def test_no_stream_leads_to_another_host(start_gateway: StartGateway) -> None:
    """What a server says of another host stays as it is: clients refuse it, and the gateway never goes there."""
    begun = head("HTTP/1.1 200 OK", [("Content-Type", "text/event-stream"), CLOSED]).decode()
    scripts = [[request(), named(f"{begun}event: endpoint\ndata: {endpoint}\n\n")] for endpoint in ENDPOINTS]
    scripts.append([request(), named(f"{begun}event: endpoint\ndata: /messages?name=€ x\n\n")])
    scripts.append([request(), send(head("HTTP/1.1 202 Accepted", [("Content-Length", "0")]))])
    async with behind(start_gateway, *scripts) as gateway:
        for endpoint in ENDPOINTS:
            async with connect(gateway.url) as client:
                client.send(get(PATH, host="localhost"))
                told = (await client.until(b"data: ") + await client.until(b"\n\n")).decode()
                start, _, rest = endpoint.partition("{}")
                assert f"data: {start}" in told, endpoint
                assert told.rstrip("\n").endswith(rest), endpoint
                assert "/@/" not in told, endpoint
        async with connect(gateway.url) as client, connect(gateway.url) as other:
            client.send(get(PATH, host="localhost"))
            _ = await client.until(b"data: ")
            place = (await client.until(b"\n\n")).strip().decode()
            assert place == f"{PATH}/@/messages?name=%E2%82%AC%20x"
            other.send(post(place, json.dumps(INITIALIZE).encode(), host="localhost"))
            assert (await other.message()).startswith(b"HTTP/1.1 202 ")


async def test_a_challenge_that_is_no_url_of_the_server_passes(
    start_gateway: StartGateway, http: aiohttp.ClientSession
) -> None:
    challenges = ['Bearer resource_metadata="http://[::1"', 'Bearer resource_metadata="http://{}//evil.test/x"']
    scripts = [
        [
            request(),
            named(head("HTTP/1.1 401 No", [("WWW-Authenticate", one), ("Content-Length", "0"), CLOSED]).decode()),
        ]
        for one in challenges
    ]
    async with behind(start_gateway, *scripts) as gateway:
        for challenge in challenges:
            async with http.post(gateway.url + PATH, json=call("echo")) as reply:
                told = reply.headers["WWW-Authenticate"]
                assert (reply.status, told.partition(":")[0]) == (401, challenge.partition(":")[0])
                assert told.endswith(challenge.rpartition("}")[2])
                assert "None" not in told
