"""The typed client against a real server: pages that turn themselves, errors in one line, a feed that resumes."""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from fakes.memory_tape import MemoryTape, Serving, call, chat_exchange, serving
from fakes.ports import steady_ports
from fakes.waiting import PATIENCE_S
from fakes.web_site import everywhere, site
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.gateway.api import pagination
from penstock.gateway.client import client as client_module
from penstock.gateway.client import connection, environment
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import NotAllowed, NotFound, Refused, Unreachable
from penstock.gateway.client.exchanges import RECORDS, CallBytes, Unpacker, pack
from penstock.gateway.model.answers import Change
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.model.times import Backoff
from penstock.gateway.model.turn import Exchange
from penstock.gateway.reading.turns import plain_bodies


def tape_of(rollouts: int, calls: int) -> MemoryTape:
    tape = MemoryTape()
    for r in range(1, rollouts + 1):
        for sequence in range(1, calls + 1):
            tape.add(
                call(sequence, rollout=f"r{r}"), chat_exchange([{"role": "user", "content": "hi"}], {"content": "ho"})
            )
    return tape


@pytest.fixture
async def served() -> AsyncGenerator[Serving]:
    async with serving(tape_of(3, 4)) as running:
        yield running


@pytest.fixture
async def client(served: Serving) -> AsyncGenerator[Client]:
    async with Client(served.url) as connected:
        yield connected


@pytest.mark.parametrize("page", [1, 2, 3, 1000])
async def test_lists_turn_their_pages(client: Client, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(connection, "PAGE", page)
    assert [r.id async for r in client.rollouts()] == ["r3", "r2", "r1"]
    assert [s.sequence async for s in client.spans("r2")] == [1, 2, 3, 4]
    assert [s.sequence async for s in client.spans("r2", "a1", filter="-rollout:r1", limit=3)] == [1, 2, 3]
    assert [s.rollout async for s in client.recent_spans(limit=5)] == ["r3"] * 4 + ["r2"]
    assert [r.id async for r in client.rollouts("rollout:r1,r3", limit=1)] == ["r3"]
    assert [r async for r in client.rollouts(limit=0)] == []


async def test_empty_pages_are_not_the_end(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagination, "SLICE", 2)
    monkeypatch.setattr("penstock.gateway.api.rollouts.SCAN", 2)
    assert [(s.rollout, s.sequence) async for s in client.recent_spans("rollout:r1 -status:error")] == [
        ("r1", n) for n in (4, 3, 2, 1)
    ]


async def test_single_things(served: Serving, client: Client) -> None:
    assert (await client.rollout("r1")).totals.calls == 4
    assert [attempt.id for attempt in await client.attempts("r1")] == ["a1"]
    detail = await client.span("r1", "a1", 2)
    assert detail.turn is not None
    assert detail.turn.choices[0].message.parts[0].text == "ho"
    exchange = served.tape.exchange(detail.span)
    assert exchange is not None
    assert await client.request_body("r1", "a1", 2) == exchange.request_body
    assert await client.response_body("r1", "a1", 2) == exchange.response_body
    assert (await client.stats(5)).counted_spans == 5
    assert (await client.change_page(since=13, limit=1)).next == 14
    token = await client.make_token("r7", expires_s=5)
    assert token.expires_ns is not None
    assert served.auth.rollout_of(token.token, now=token.expires_ns / 1e9 - 1) == "r7"


async def test_the_bytes_of_a_rollout_come_at_once(served: Serving, client: Client) -> None:
    calls = [one async for one in client.exchanges("r1")]
    spans = [span for span in served.tape.spans("r1") if span.kind == "llm"]
    assert [(one.attempt, one.sequence) for one in calls] == [(span.attempt, span.sequence) for span in spans]
    for recorded, span in zip(calls, spans, strict=True):
        exchange = served.tape.exchange(span)
        assert exchange is not None
        assert (recorded.request, recorded.response) == (exchange.request_body, exchange.response_body)
    with pytest.raises(ClientError, match="there is no rollout 'r99'"):
        _ = [one async for one in client.exchanges("r99")]
    served.tape.add(call(5, kind="tool"), chat_exchange([], {}))
    assert [one.sequence async for one in client.exchanges("r1", "tools")] == [5]
    assert len([one async for one in client.exchanges("r1")]) == len(calls)
    with pytest.raises(ClientError, match="of: 'x' is not 'models' or 'tools'"):
        _ = [one async for one in client.exchanges("r1", "x")]


async def test_the_key_is_sent() -> None:
    async with serving(tape_of(1, 1), admin_key="k e y") as served:
        async with Client(served.url + "/", "k e y") as client:
            assert (await client.rollout("r1")).id == "r1"
        async with Client(served.url, "wrong") as client:
            with pytest.raises(NotAllowed, match="this is not the gateway's admin key") as raised:
                await client.rollout("r1")
            assert raised.value.status == 401


async def test_refusals_come_in_the_words_of_the_gateway(client: Client) -> None:
    with pytest.raises(NotFound, match="there is no rollout 'none'; `penstock rollouts` lists them") as raised:
        await client.rollout("none")
    assert (raised.value.status, raised.value.temporary) == (404, False)
    with pytest.raises(Refused, match="did you mean 'status'"):
        await anext(aiter(client.recent_spans("statsu:ok")))
    with pytest.raises(ClientError, match="rollout: 'a b' is not an id"):
        await client.make_token("a b")
    with pytest.raises(ClientError, match=r"rollout: '.*' is not an id"):
        await client.rollout("../api/tokens?x=")


async def test_an_unreachable_gateway_is_one_line(unused_port: int) -> None:
    async with Client(f"http://127.0.0.1:{unused_port}") as client:
        with pytest.raises(Unreachable, match="nothing answers there; is `penstock serve` running\\?") as raised:
            await client.stats()
        assert (raised.value.status, raised.value.temporary) == (None, True)


@pytest.mark.parametrize(("status", "body"), [(200, '{"some": "thing"}'), (200, "hello"), (502, "<html>bad gateway")])
async def test_another_server_is_told_apart(status: int, body: str) -> None:
    async def other(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    async with site(everywhere(other)) as url, Client(url) as client:
        with pytest.raises(ClientError, match=r"did not answer as a Penstock|answered 502 Bad Gateway") as raised:
            await client.rollout("r1")
        assert isinstance(raised.value, Unreachable) == (status == 502)


async def test_address_and_key_are_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PENSTOCK_GATEWAY", "PENSTOCK_ADMIN_KEY", "PENSTOCK_READ_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert penstock.Client().url == "http://127.0.0.1:4747"
    (tmp_path / "penstock.toml").write_text("port = 5151\n")
    assert penstock.Client().url == "http://127.0.0.1:5151"
    (tmp_path / "penstock.toml").write_text("port = 'x'\n")
    with pytest.raises(ClientError, match="port: 'x' is not a whole number"):
        penstock.Client()
    async with serving(tape_of(1, 1), admin_key="k") as served:
        monkeypatch.setenv("PENSTOCK_GATEWAY", served.url)
        monkeypatch.setenv("PENSTOCK_READ_KEY", "wrong")
        monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "k")
        async with penstock.Client() as client, penstock.Client(key="") as without:
            assert (await client.rollout("r1")).id == "r1"
            with pytest.raises(penstock.NotAllowed):
                await without.rollout("r1")
    token = environment.CURRENT_GATEWAY.set(("http://127.0.0.1:1", None))
    assert (penstock.Client().url, penstock.Client("http://127.0.0.1:2").url) == (
        "http://127.0.0.1:1",
        "http://127.0.0.1:2",
    )
    environment.CURRENT_GATEWAY.reset(token)


def test_a_url_must_be_one() -> None:
    with pytest.raises(ClientError, match="must start with http"):
        Client("localhost:4747")


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nX: y", "\0"])
def test_a_key_that_cannot_be_sent_is_not_told(key: str) -> None:
    with pytest.raises(ClientError, match=r"^the gateway's key has a character that no header may have$"):
        Client("http://localhost:4747", key)


@pytest.fixture
def unused_port() -> int:
    return steady_ports(1)[0]


# --- the change feed ---


async def take(client: Client, since: int, count: int) -> list[Change]:
    found: list[Change] = []
    async with asyncio.timeout(PATIENCE_S):
        async for change in client.changes(since):
            found.append(change)
            if len(found) == count:
                return found
    raise AssertionError("the feed ended")


async def test_changes_begin_after_a_cursor_and_go_on(served: Serving, client: Client) -> None:
    assert [change.cursor for change in await take(client, 12, 3)] == [13, 14, 15]
    following = asyncio.ensure_future(take(client, 15, 1))
    served.tape.add(call(5, rollout="r3", status="cancelled"))
    await served.tape.tell()
    (change,) = await following
    assert change.span is not None
    assert change.span.status == SpanStatus.CANCELLED


@asynccontextmanager
async def cut_after(port: int, sizes: Sequence[int]) -> AsyncGenerator[tuple[int, Callable[[], int]]]:
    """A wire that breaks: connection number n carries `sizes[n]` bytes of the answer, later ones carry all."""
    left, used = list(sizes), 0
    links: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal used
        links.add(asyncio.current_task())  # pyright: ignore[reportArgumentType]
        used += 1
        budget = left.pop(0) if left else 1 << 30
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            up_writer.write(await reader.readuntil(b"\r\n\r\n"))
            while budget and (data := await up_reader.read(min(budget, 4096))):
                writer.write(data)
                await writer.drain()
                budget -= len(data)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            up_writer.transport.abort()
            writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], lambda: used
    finally:
        server.close()
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)


async def test_a_broken_feed_goes_on_exactly_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PAUSES", Backoff(0.001, 0.002))
    cuts = [0, 10, 700, 1300, 2222, 1000, 1, 1800, 3000]
    async with (
        serving(tape_of(5, 4)) as served,
        cut_after(served.port, cuts) as (port, used),
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        changes = await take(client, 0, 25)
        assert [change.cursor for change in changes] == list(range(1, 26))
        assert changes == served.tape.changes(0, 100)[0]
        assert used() > 5


async def test_a_refused_feed_is_an_error(client: Client) -> None:
    with pytest.raises(ClientError, match="since must be a cursor of this feed, which ends at 15"):
        await take(client, 999, 1)


@pytest.mark.slow
def test_the_client_loads_none_of_the_gateway() -> None:
    program = """
import sys, penstock.gateway.client.client
loaded = {name for name in sys.modules if name.startswith(("penstock", "aiohttp.web", "lmdb"))}
print(*sorted(loaded))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if not name.startswith("penstock")} == set()
    packages = {name.split(".")[2] for name in loaded if name.count(".") >= 2}
    assert packages == {"client", "model"}


async def test_a_gateway_that_is_not_ready_says_why(served: Serving, client: Client) -> None:
    assert await client.readiness() is None
    served.state.not_ready = "the disk is full"
    assert await client.readiness() == "the disk is full"
    await served.runner.cleanup()
    with pytest.raises(ClientError, match="cannot reach the gateway"):
        await client.readiness()


async def newer(request: web.Request) -> web.Response:
    """A gateway of a later version: it says more than this client knows, everywhere."""
    if request.path == "/api/workers":
        worker = {"id": "w1", "last_seen_ns": 1, "figures": {"cpu_percent": 7, "later": [1]}, "later": {"a": 1}}
        return web.json_response({"workers": [worker], "later": "x"})
    event = b'event: digest\ndata: {"cursor": 8, "rollouts": ["r1"], "later": 1}\n\n'
    return web.Response(body=event if request.query["since"] == "7" else b'data: {"cursor": "later"}\n\n')


async def test_what_a_newer_gateway_says_besides_is_passed_over() -> None:
    async with site(everywhere(newer)) as url, Client(url) as client:
        (worker,) = await client.workers()
        lost: list[ClientError] = []
        feed = client.digests(7, lost=lost.append)
        digest = await anext(feed)
        waiting = asyncio.ensure_future(anext(feed))
        while not lost:
            await asyncio.wait([waiting], timeout=0.01)
            assert not waiting.done()
        waiting.cancel()
    assert (worker.id, worker.figures.cpu_percent) == ("w1", 7)
    assert digest.rollouts == ["r1"]
    assert "gateway of this version does: cursor" in str(lost[0])


# -- many calls in one answer --

CALLS = st.builds(
    CallBytes, st.text(max_size=8), st.integers(1, 2**32 - 1), st.binary(max_size=300), st.binary(max_size=300)
)


@given(st.lists(CALLS, max_size=6), st.lists(st.integers(0, 2000), max_size=12))
def test_records_are_found_wherever_they_are_cut(made: list[CallBytes], cuts: list[int]) -> None:
    data = b"".join(map(pack, made))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    unpacker = Unpacker(RECORDS)
    found = [call for start, end in pairwise(edges) for call in unpacker.feed(data[start:end])]
    assert found == made


def test_a_record_that_is_cut_off_is_not_given() -> None:
    data = pack(CallBytes("a1", 1, b"request", b"response"))
    assert list(Unpacker(RECORDS).feed(data[:-1])) == []


def test_content_encodings_are_undone() -> None:
    exchange = Exchange(
        url="",
        request_headers=[("Content-Encoding", "gzip")],
        request_body=gzip.compress(b"asked"),
        response_headers=[("content-encoding", "compress")],
        response_body=b"unknown encodings stay",
    )
    assert plain_bodies(exchange) == (b"asked", b"unknown encodings stay")
