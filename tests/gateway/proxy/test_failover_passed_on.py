"""What a client gets, and the tape, where an answer was held or came of another upstream: nothing lost, and an end."""

from __future__ import annotations

import gzip
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time
from types import MappingProxyType

import aiohttp
from fakes.odd import Odd, Script, close, gone, request, send, wait
from fakes.raw import Wire, body_of, chunk, events_head, reply
from fakes.rig import Inside, inside, odd_on
from fakes.waiting import until

from penstock.gateway.model.attributes import TRIES
from penstock.gateway.proxy.call import Call
from penstock.gateway.proxy.failover import Beginning

OK = reply(200, b'{"fine":1}')
ENDS_BY_CLOSING = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nConnection: close\r\n\r\n"
ROLE = chunk(b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n')
EVENT = chunk(b"data: 1\n\n")
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(slots=True)
class Pair:
    """A gateway before two upstreams, and a client of it."""

    rig: Inside
    up: Odd
    spare: Odd
    client: Wire


@asynccontextmanager
async def pair(
    home: Path,
    http: aiohttp.ClientSession,
    first: Script,
    second: Script,
    up: Mapping[str, object] = NOTHING,
    spare: Mapping[str, object] = NOTHING,
    route: Mapping[str, object] = NOTHING,
) -> AsyncGenerator[Pair]:
    """`first`, `second`: what the upstreams do; `up`, `spare`, `route`: more settings."""
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        spares = [{"name": "spare", "base_url": f"http://127.0.0.1:{listener.getsockname()[1]}/v1", **spare}]
        routes = [{"model": "m", "upstream": ["up", "spare"], "alias": {"spare": "m-of-spare"}, **route}]
        rig = await stack.enter_async_context(inside(home, http, spares, up, route=routes))
        one = await stack.enter_async_context(rig.upstream(first))
        other = await stack.enter_async_context(odd_on(listener, second))
        yield Pair(rig, one, other, await stack.enter_async_context(rig.client()))


TOO_LONG = reply(400, b'{"error":{"code":"context_length_exceeded","message":"too long"}}')


def running(made: Pair) -> Call:
    (call,) = made.rig.gateway.proxy.running
    assert isinstance(call, Call)
    return call


async def test_a_refusal_that_ended_by_closing_ends_at_its_client(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    refused = ENDS_BY_CLOSING % (b"429 Too Many Requests", b"application/json") + b'{"a":1}'
    async with pair(tmp_path, http, [request(), send(refused), close()], [close()]) as made:
        made.client.send(made.rig.call())
        assert await made.client.rest() == refused


async def test_an_answer_that_was_held_and_ended_by_closing_ends_at_its_client(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    head = ENDS_BY_CLOSING % (b"200 OK", b"text/event-stream")
    first = [request(), send(head + b"data: 1\n\n"), send(b"data: [DONE]\n\n"), close()]
    async with pair(tmp_path, http, first, [request()], route={"stream": "whole"}) as made:
        made.client.send(made.rig.call(b'{"model":"m","stream":true}'))
        assert await made.client.rest() == head + b"data: 1\n\ndata: [DONE]\n\n"


async def test_a_request_with_a_content_encoding_goes_on_under_the_name_of_the_next(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    packed = gzip.compress(b'{"model":"m","x":1}')
    async with pair(tmp_path, http, [request(), close()], [request(), send(OK)]) as made:
        made.client.send(made.rig.call(packed, [("Content-Encoding", "gzip")]))
        assert await made.client.message() == OK
        assert body_of(made.up.connections[0].requests[0]) == packed
        (asked,) = made.spare.connections[0].requests
        assert body_of(asked) == b'{"model":"m-of-spare","x":1}'
        assert b"content-encoding" not in asked.lower()


def test_a_beginning_that_comes_in_many_reads_is_looked_at_once() -> None:
    began, beginning = process_time(), Beginning(b"text/event-stream")
    for _ in range(50):
        for _ in range(4000):
            assert beginning.says([b" 12345678 "]) == "nothing"
        assert beginning.says([b"\n"]) == "nothing"
    assert beginning.says([b"da", b"ta: 1", b"\r"]) == "something"
    assert process_time() - began < 5.0, "2 MB in 200,000 reads"


async def test_a_role_that_comes_at_once_is_not_what_is_waited_for(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    second = [request(), send(events_head() + ROLE), wait("thought"), send(EVENT + LAST)]
    async with pair(tmp_path, http, [request(), close()], second) as made:
        made.client.send(made.rig.call(b'{"model":"m","stream":true}'))
        assert await made.client.until(ROLE) == events_head() + ROLE
        heard, call = monotonic(), running(made)
        made.spare.go("thought")
        assert await made.client.until(LAST) == EVENT + LAST
        (took,) = made.rig.gateway.proxy.patience._took["m"]
        assert took >= heard - call._sent_at


async def test_the_end_of_an_answer_that_had_to_be_whole_is_not_what_is_waited_for(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    first = [request(), send(events_head() + EVENT), wait("made"), send(LAST)]
    async with pair(tmp_path, http, first, [request()], route={"stream": "whole"}) as made:
        made.client.send(made.rig.call(b'{"model":"m","stream":true}'))

        async def spoken() -> bool:
            return any(isinstance(one, Call) and one._spoke_at is not None for one in made.rig.gateway.proxy.running)

        await until(spoken)
        call = running(made)
        spoke = monotonic()
        made.up.go("made")
        assert await made.client.until(LAST) == events_head() + EVENT + LAST
        (took,) = made.rig.gateway.proxy.patience._took["m"]
        assert took <= spoke - call._sent_at


async def test_that_a_prompt_is_too_long_tells_more_than_that_the_next_one_breaks_off(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    first = [request(), send(TOO_LONG), request(), send(OK)]
    async with pair(tmp_path, http, first, [request(), close()], {"context": 10}, {"context": 11}) as made:
        # It is given one call, to see how it is, and it answers that.
        health = made.rig.gateway.proxy.pools["up"].health
        health.failed("timeout", -10.0)
        made.client.send(made.rig.call())
        assert await made.client.message() == TOO_LONG
        assert health.state(0.0) == "good"
        span = await made.rig.span()
        assert (span.upstream, span.http_status, span.error) == ("up", 400, "http_400")
        assert await made.rig.tape.raw(span, "request") == b'{"model":"m"}'


async def test_a_client_that_leaves_lets_another_call_show_how_an_upstream_is(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with pair(tmp_path, http, [request(), gone()], [request()]) as made:
        health = made.rig.gateway.proxy.pools["up"].health
        health.failed("timeout", monotonic() - 10.0)
        made.client.send(made.rig.call())
        up = await made.up.connection(0)
        assert health.passed_over(monotonic())
        made.client.close()
        await up.gone()
        assert (await made.rig.span()).status == "cancelled"
        assert not health.passed_over(monotonic())


async def test_a_call_that_has_waited_for_a_place_in_vain_goes_elsewhere(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    up = {"max_concurrent": 1, "first_byte_timeout": 0.1}
    async with pair(tmp_path, http, [request()], [request(), send(OK)], up) as made:
        pools = made.rig.gateway.proxy.pools
        pools["up"].places.running += 1
        pools["spare"].health.failed("timeout", monotonic(), 300.0)
        # It was to show how that one is, and has not come to it.
        pools["up"].health.failed("timeout", monotonic() - 10.0)
        made.client.send(made.rig.call())
        assert await made.client.message() == OK
        assert ((await made.rig.span()).attributes or {})[TRIES][0]["why"] == "busy"
        assert pools["up"].places.waiting == 0
        assert not pools["up"].health.passed_over(monotonic())
