"""A model that two upstreams serve: when the second is asked, what its client sees, and what the tape says of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path

import aiohttp
import pytest
from fakes.odd import Connection, Odd, Script, close, gone, request, send, wait
from fakes.ports import steady_ports
from fakes.raw import PATIENCE, body_of, chunk, events_head, reply
from fakes.rig import Inside, Rig, inside, odd_on

from penstock.gateway.model.attributes import TRIES
from penstock.gateway.proxy import call, failover
from penstock.gateway.proxy.failover import Beginning
from penstock.gateway.upstreams import health, patience

OK = reply(200, b'{"fine":1}')
EVENT = chunk(b"data: 1\n\n")
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
ROUTE = {"model": "m", "upstream": ["up", "spare"], "alias": {"spare": "m-of-spare"}}


@pytest.fixture
def spares() -> Iterator[socket.socket]:
    """Where the second upstream listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def patience_s() -> float:
    """With the first one. Where that is to answer it is long: a machine may keep a process waiting."""
    return 600.0


@pytest.fixture
async def rig(
    tmp_path: Path, http: aiohttp.ClientSession, spares: socket.socket, patience_s: float
) -> AsyncGenerator[Inside]:
    """A gateway that has not seen either of them yet."""
    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{spares.getsockname()[1]}/v1"}
    first = {"max_concurrent": 9, "read_timeout": patience_s}
    async with inside(tmp_path, http, [spare], first, route=[ROUTE]) as made:
        yield made
        places = made.gateway.proxy.pools["up"].places
        assert (places.running, places.waiting) == (0, 0), "however a call ends, its place is free"


@asynccontextmanager
async def both(rig: Rig, spares: socket.socket, first: Script, second: Script) -> AsyncGenerator[tuple[Odd, Odd]]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(rig.upstream(first))
        yield one, await stack.enter_async_context(odd_on(spares, second))


async def tries(rig: Rig) -> list[tuple[str, str]]:
    """(upstream, why) of those that were asked before."""
    found = ((await rig.span()).attributes or {}).get(TRIES, [])
    assert all(one["after_ms"] >= 0 for one in found)
    return [(one["upstream"], one["why"]) for one in found]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_one_that_cannot_serve_it_now(rig: Rig, spares: socket.socket, status: int) -> None:
    refused = reply(status, b'{"error":{"message":"not now"}}', [("Retry-After", "7")])
    async with (
        both(rig, spares, [request(), send(refused)], [request(), send(OK)]) as (up, spare),
        rig.client() as client,
    ):
        client.send(rig.call(b'{"model":"m","x":1}'))
        assert await client.message() == OK
    assert body_of(up.connections[0].requests[0]) == b'{"model":"m","x":1}'
    assert body_of(spare.connections[0].requests[0]) == b'{"model":"m-of-spare","x":1}'
    span = await rig.span()
    assert (span.status, span.http_status, span.upstream, span.model) == ("ok", 200, "spare", "m")
    assert await tries(rig) == [("up", f"http_{status}")]
    async with rig.tape.http.get(f"{rig.base.url}/metrics") as answer:
        counted = f'penstock_upstream_retries_total{{upstream="up",why="http_{status}"}} 1.0'
        assert counted in (await answer.text()).splitlines()


async def test_the_last_answer_passes_as_it_came(rig: Rig, spares: socket.socket) -> None:
    one, other = (reply(429, b"{}", [("Retry-After", after)]) for after in ("7", "9"))
    async with both(rig, spares, [request(), send(one)], [request(), send(other)]), rig.client() as client:
        client.send(rig.call())
        assert await client.message() == other
    span = await rig.span()
    assert (span.status, span.error, span.upstream) == ("error", "http_429", "spare")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 501])
async def test_what_another_would_say_too_passes(rig: Rig, spares: socket.socket, status: int) -> None:
    refused = reply(status, b'{"error":{}}')
    async with both(rig, spares, [request(), send(refused)], [request()]) as (_, spare), rig.client() as client:
        client.send(rig.call())
        assert await client.message() == refused
    assert spare.connections == []
    assert await tries(rig) == []


async def test_what_makes_something_is_not_asked_for_twice(rig: Rig, spares: socket.socket) -> None:
    refused = reply(500, b"{}")
    async with both(rig, spares, [request(), send(refused)], [request()]) as (_, spare), rig.client() as client:
        client.send(rig.call(below="/v1/batches"))
        assert await client.message() == refused
    assert spare.connections == []


@pytest.mark.parametrize("said", [b"", OK[:20]])
async def test_what_makes_something_may_be_made_where_nobody_answers(
    rig: Rig, spares: socket.socket, said: bytes
) -> None:
    script = [request(), *([send(said)] if said else []), close()]
    async with both(rig, spares, script, [request(), send(OK)]) as (_, spare), rig.client() as client:
        client.send(rig.call(below="/v1/batches"))
        assert (await client.message()).startswith(b"HTTP/1.1 502 ")
    assert spare.connections == []
    assert ((await rig.span()).error, await tries(rig)) == ("upstream_closed", [])


BEGINS: dict[str, Script] = {
    "says nothing": [request()],
    "accepts it and says nothing": [request(), send(events_head())],
    "only keeps alive": [request(), send(events_head() + chunk(b": ping\n\n")), send(chunk(b": ping\n\n"))],
    "accepts it and leaves": [request(), send(events_head()), close()],
    "leaves": [request(), close()],
}


@pytest.mark.parametrize(
    ("begin", "patience_s"), [(begin, 600.0 if begin.endswith("leaves") else 0.5) for begin in BEGINS]
)
async def test_one_that_accepts_it_and_does_not_answer(rig: Rig, spares: socket.socket, begin: str) -> None:
    answer = events_head() + EVENT + LAST
    async with both(rig, spares, BEGINS[begin], [request(), send(answer)]), rig.client() as client:
        client.send(rig.call(b'{"model":"m","stream":true}'))
        assert await client.message() == answer
    (tried,) = await tries(rig)
    assert tried == ("up", "upstream_closed" if begin.endswith("leaves") else "timeout")
    assert (await rig.span()).stream


async def test_an_answer_that_has_begun_is_that_of_the_first(rig: Rig, spares: socket.socket) -> None:
    first = [request(), send(events_head()), wait("on"), send(EVENT), wait("end"), close()]
    async with both(rig, spares, first, [request()]) as (up, spare), rig.client() as client:
        client.send(rig.call(b'{"model":"m","stream":true}'))
        up.go("on")
        assert await client.until(EVENT) == events_head() + EVENT
        up.go("end")
        await client.gone()
    assert spare.connections == []
    assert (await rig.span()).status == "error"


async def test_a_client_that_leaves_before_it_is_clear_who_answers(rig: Rig, spares: socket.socket) -> None:
    async def sent(connection: Connection) -> None:
        connection.upstream.go("sent")

    first: Script = [request(), send(events_head()), sent, gone()]
    async with both(rig, spares, first, [request()]) as (up, spare):
        async with rig.client() as client:
            client.send(rig.call(b'{"model":"m","stream":true}'))
            async with asyncio.timeout(PATIENCE):
                await up.signal("sent").wait()
        await up.connections[0].gone()
    assert spare.connections == []
    assert (await rig.span()).status == "cancelled"


async def test_a_connection_that_closes_after_a_while_was_no_race(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "_RACE_S", 0.0)
    async with inside(tmp_path, http) as rig:
        script = [request(), send(OK), request(), close()]
        async with rig.upstream(script, [request(), send(OK)]) as upstream, rig.client() as client:
            client.send(rig.call())
            assert await client.message() == OK
            client.send(rig.call())
            assert (await client.message()).startswith(b"HTTP/1.1 502 ")
            assert len(upstream.connections) == 1


CHUNK = b'data: {"object":"chat.completion.chunk","choices":[%s]}\n\n'
ROLE = b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
FAILED = b'data: {"type":"response.failed","response":{"status":"failed","error":%s}}\n\n'
SSE = b"text/event-stream"


@pytest.mark.parametrize(
    ("payload", "type", "found"),
    [
        ([b'{"a"'], b"application/json", "something"), ([], b"application/json", "nothing"), ([b""], b"", "nothing"),
        ([b": ping\n\n"], SSE, "nothing"), ([b"event: x\n"], SSE, "nothing"), ([b"data: {}"], SSE, "nothing"),
        ([b"event: x\nda", b"ta: {}\n"], b"text/event-stream; charset=utf-8", "something"),
        ([b": data: no\n\n"], SSE, "nothing"), ([b": x\r\ndata:1\r\n"], SSE, "something"),
        ([b"data: [DONE]\n\n"], SSE, "something"), ([b"data: {broken\n\n"], SSE, "something"),
        ([CHUNK % ROLE], SSE, "nothing"), ([CHUNK % b""], SSE, "nothing"), ([CHUNK % b"1"], SSE, "something"),
        ([CHUNK % ROLE, CHUNK % b'{"delta":{"content":"a"}}'], SSE, "something"),
        ([CHUNK % b'{"delta":{"reasoning":"hm"}}'], SSE, "something"),
        ([CHUNK % b'{"delta":{},"finish_reason":"stop"}'], SSE, "something"),
        ([CHUNK % ROLE, b'data: {"error":{"message":"overloaded"}}\n\n'], SSE, "an error"),
        ([b'data: {"error":"no"}\n\n'], SSE, "an error"), ([b'data: {"error":null}\n\n'], SSE, "something"),
        ([b'data: {"error":{"type":"invalid_request_error"}}\n\n'], SSE, "something"),
        ([b'data: {"type":"error","code":"server_error","message":"no"}\n\n'], SSE, "an error"),
        ([b'data: {"type":"error","code":"invalid_prompt","message":"no"}\n\n'], SSE, "something"),
        ([FAILED % b'{"code":"rate_limit_exceeded","message":"no"}'], SSE, "an error"),
        ([FAILED % b'{"code":"invalid_prompt","message":"no"}'], SSE, "something"), ([FAILED % b"1"], SSE, "something"),
        ([b'data: {"type":"response.failed"}\n\n'], SSE, "something"),
        ([b'data: {"type":{}}\n\n'], SSE, "something"), ([b'data: {"type":["ping"]}\n\n'], SSE, "something"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], SSE, "something"),
        ([b'data: {"type":"message_start"}\n\ndata: {"type":"ping"}\n\n'], SSE, "nothing"),
        ([b'data: {"type":"message_start"}\n\ndata: {"type":"content_block_delta"}\n\n'], SSE, "something"),
        ([b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'], SSE, "an error"),
        ([b'data: {"type":"response.created","response":{"error":null}}\n\n'], SSE, "nothing"),
    ],
)  # fmt: skip
def test_what_an_answer_says(payload: list[bytes], type: bytes, found: str) -> None:
    assert Beginning(type).says(payload) == found


def test_an_answer_with_a_content_encoding_is_not_looked_into() -> None:
    assert Beginning(SSE, encoded=True).says([b"\x1f\x8b"]) == "something"


@pytest.mark.parametrize("patience_s", [0.5])
async def test_a_silent_one_costs_one_call_its_patience_and_no_other(
    rig: Inside, spares: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_S", health.LONGEST_S)
    answers = [step for _ in range(3) for step in (request(), send(OK))]
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(rig.upstream([request()], answers))
        _ = await stack.enter_async_context(odd_on(spares, answers))
        client = await stack.enter_async_context(rig.client())
        for _ in range(3):
            client.send(rig.call())
            assert await client.message() == OK
        assert len(up.connections) == 1
        shown = {one["name"]: one for one in (await rig.tape.get("/api/upstreams"))["upstreams"]}
        assert (shown["up"]["health"], shown["up"]["failing"]) == ("resting", "timeout")
        assert (shown["spare"]["health"], shown["spare"]["failing"]) == ("good", "")
        assert 0 < shown["up"]["rests_s"] <= health.LONGEST_S
        # Its rest is over: one call is given to it, and then all are.
        pool = rig.gateway.proxy.pools["up"]
        pool.config = pool.config.model_copy(update={"read_timeout": 600.0})
        pool.health._until = 0.0
        for _ in range(2):
            client.send(rig.call())
            assert await client.message() == OK
    spans = await rig.tape.spans(rig.rollout, 5)
    assert [span.upstream for span in spans] == ["spare"] * 3 + ["up"] * 2
    assert [TRIES in (span.attributes or {}) for span in spans] == [True] + [False] * 4


async def test_what_an_upstream_said_tells_more_than_that_the_next_cannot_be_reached(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{steady_ports(1)[0]}/v1"}
    refused = reply(429, b'{"error":{"message":"too many"}}', [("Retry-After", "7")])
    async with inside(tmp_path, http, [spare], route=[ROUTE]) as rig:
        async with rig.upstream([request(), send(refused)]), rig.client() as client:
            client.send(rig.call())
            assert await client.message() == refused
        span = await rig.span()
        assert (span.status, span.error, span.http_status, span.upstream) == ("error", "http_429", 429, "up")
        assert await tries(rig) == [("up", "http_429"), ("spare", "connect")]


@pytest.mark.parametrize(("status", "headers"), [(500, []), (503, []), (503, [("Retry-After", "0")])])
async def test_one_that_fails_for_a_moment_is_asked_once_more(
    rig: Rig, spares: socket.socket, status: int, headers: list[tuple[str, str]]
) -> None:
    first = [request(), send(reply(status, b"{}", headers)), request(), send(OK)]
    async with both(rig, spares, first, [request()]) as (up, spare), rig.client() as client:
        client.send(rig.call())
        assert await client.message() == OK
    one, again = up.connections[0].requests
    assert one == again
    assert spare.connections == []
    assert (await rig.span()).upstream == "up"
    assert await tries(rig) == [("up", f"http_{status}")]


async def test_a_client_that_leaves_while_an_upstream_is_waited_for(
    rig: Rig, spares: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "PATIENT_S", 600.0)

    async def sent(connection: Connection) -> None:
        connection.upstream.go("sent")

    first: Script = [request(), send(reply(429, b"{}", [("Retry-After", "600")])), sent]
    async with both(rig, spares, first, [request()]) as (up, spare):
        async with rig.client() as client:
            client.send(rig.call())
            async with asyncio.timeout(PATIENCE):
                await up.signal("sent").wait()
        assert (await rig.span()).status == "cancelled"
        assert [len(one.connections) for one in (up, spare)] == [1, 0]


@pytest.mark.parametrize("said", [b'{"error":{"message":"overloaded"}}', b'{"type":"error","error":{"type":"x"}}'])
async def test_a_stream_that_begins_with_an_error(rig: Rig, spares: socket.socket, said: bytes) -> None:
    answer = events_head() + EVENT + LAST
    first = [request(), send(events_head() + chunk(b"data: " + said + b"\n\n")), gone()]
    async with both(rig, spares, first, [request(), send(answer)]), rig.client() as client:
        client.send(rig.call(b'{"model":"m","stream":true}'))
        assert await client.message() == answer
    assert await tries(rig) == [("up", "error_event")]


TOO_LONG = reply(400, b'{"error":{"code":"context_length_exceeded","message":"too long"}}')


@pytest.mark.parametrize(
    ("contexts", "asked"), [((10, 11), True), ((10, 10), False), ((None, 11), False), ((10, None), False)]
)
async def test_a_prompt_that_is_too_long_goes_where_a_longer_one_fits(
    tmp_path: Path, http: aiohttp.ClientSession, spares: socket.socket, contexts: tuple[int | None, ...], asked: bool
) -> None:
    own, other = ({} if context is None else {"context": context} for context in contexts)
    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{spares.getsockname()[1]}/v1"} | other
    async with inside(tmp_path, http, [spare], own, route=[ROUTE]) as rig:
        async with both(rig, spares, [request(), send(TOO_LONG)], [request(), send(OK)]), rig.client() as client:
            client.send(rig.call())
            assert await client.message() == (OK if asked else TOO_LONG)
        assert await tries(rig) == ([("up", "too_long")] if asked else [])


async def test_another_refusal_of_a_request_passes_where_a_longer_one_fits(
    tmp_path: Path, http: aiohttp.ClientSession, spares: socket.socket
) -> None:
    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{spares.getsockname()[1]}/v1", "context": 11}
    refused = reply(400, b'{"error":{"message":"temperature is not a number"}}')
    async with inside(tmp_path, http, [spare], {"context": 10}, route=[ROUTE]) as rig:
        async with both(rig, spares, [request(), send(refused)], [request()]) as (_, other), rig.client() as client:
            client.send(rig.call())
            assert await client.message() == refused
        assert other.connections == []


@pytest.mark.parametrize(
    ("setting", "begin", "why"),
    [
        ("first_byte_timeout", [request()], "timeout"),
        ("first_content_timeout", [request(), send(events_head())], "no_content"),
    ],
)
async def test_how_long_is_waited_can_be_said(
    tmp_path: Path, http: aiohttp.ClientSession, spares: socket.socket, setting: str, begin: Script, why: str
) -> None:
    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{spares.getsockname()[1]}/v1"}
    async with inside(tmp_path, http, [spare], {"read_timeout": 600.0, setting: 0.3}, route=[ROUTE]) as rig:
        answer = events_head() + EVENT + LAST
        async with both(rig, spares, begin, [request(), send(answer)]), rig.client() as client:
            client.send(rig.call(b'{"model":"m","stream":true}'))
            assert await client.message() == answer
        assert await tries(rig) == [("up", why)]


async def test_a_model_that_begins_late_is_waited_for_from_the_second_time_on(
    tmp_path: Path, http: aiohttp.ClientSession, spares: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LEAST_S", 0.1)
    monkeypatch.setattr(patience, "TIMES", 1e6)

    async def asked(connection: Connection) -> None:
        connection.upstream.go("asked")

    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{spares.getsockname()[1]}/v1"}
    late = [request(), send(events_head()), asked, wait("thought"), send(EVENT + LAST)]
    async with (
        inside(tmp_path, http, [spare], {"read_timeout": 600.0}, route=[ROUTE]) as rig,
        both(rig, spares, late, late) as (_, other),
        rig.client() as client,
    ):
        client.send(rig.call(b'{"model":"m","stream":true}'))
        async with asyncio.timeout(PATIENCE):
            await other.signal("asked").wait()
        other.go("thought")
        assert await client.message() == events_head() + EVENT + LAST
        assert await tries(rig) == [("up", "no_content")]
        assert rig.gateway.proxy.patience.limit_s("m") > 1.0
        assert rig.gateway.proxy.patience.limit_s("another") == 0.1


class Hole:
    """A way to an upstream on which nothing ever comes back."""

    def __init__(self) -> None:
        self.asked = 0

    async def connect(self, connection: object, host: str, port: int) -> None:
        self.asked += 1
        await asyncio.Event().wait()


async def test_one_that_never_connects_keeps_one_call_waiting_and_no_other(
    tmp_path: Path, http: aiohttp.ClientSession, spares: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = {"name": "spare", "base_url": f"http://127.0.0.1:{spares.getsockname()[1]}/v1"}
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(inside(tmp_path, http, [spare], {"connect_timeout": 60.0}, route=[ROUTE]))
        _ = await stack.enter_async_context(odd_on(spares, [request(), send(OK)] * 5))
        hole = Hole()
        monkeypatch.setattr(rig.gateway.proxy.pools["up"], "reach", hole)
        clients = [await stack.enter_async_context(rig.client()) for _ in range(4)]
        for client in clients:
            client.send(rig.call())
        answers = [asyncio.ensure_future(client.message()) for client in clients]
        for answer in islice(asyncio.as_completed(answers), 3):
            assert await answer == OK
        next(answer for answer in answers if not answer.done()).cancel()
        late = await stack.enter_async_context(rig.client())
        late.send(rig.call())
        assert await late.message() == OK
        assert hole.asked == 4
        tried = [(span.attributes or {}).get(TRIES) for span in await rig.tape.spans(rig.rollout, 4)]
        assert sorted((one or [{"why": ""}])[0]["why"] for one in tried) == [
            "",
            "connecting",
            "connecting",
            "connecting",
        ]
