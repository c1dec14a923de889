"""A gateway between a raw client and an odd upstream, as transcripts: what goes in on one side leaves on the other."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from fakes.odd import Odd, Script, Step, abort, close, half_close, odd, request, send, wait
from fakes.process import Gateway, running, upstreams
from fakes.raw import Wire, body_of, chunk, connect, events_head, head, header_fields, post, reply
from fakes.tape import Tape

from penstock.gateway.model.span import Span, SpanStatus

pytestmark = pytest.mark.slow

PATH = "/rollout/wire/attempt/a1/v1/chat/completions"
ODD_JSON = b'{ "model":"m","x": 1e-05, "x": -0.0,\t"text":"\\u00e9\xc3\xa9\\/" }\r\n'
ODD_HEADERS = [("X-Vendor", "one"), ("x-vendor", "two"), ("X-EMPTY", ""), ("Retry-After", "7"), ("Server", "odd/0")]
STREAMED = post(PATH, b'{"model": "m", "stream": true}')
BROKEN_OFF: list[Step] = [close(), abort(), half_close()]


@dataclass(slots=True)
class Between:
    """A gateway, the odd upstream behind it, the raw client in front of it."""

    upstream: Odd
    gateway: Gateway
    client: Wire
    tape: Tape

    async def span(self) -> Span:
        """The only span of the rollout, finished."""
        return (await self.tape.spans("wire", 1))[0]


@asynccontextmanager
async def between(home: Path, *scripts: Script) -> AsyncGenerator[Between]:
    """All of them, connected."""
    async with (
        odd(*scripts) as upstream,
        running(home, upstreams(openai=upstream.url + "/v1", anthropic=upstream.url)) as gateway,
        aiohttp.ClientSession() as http,
        connect(gateway.url) as client,
    ):
        yield Between(upstream, gateway, client, Tape(gateway.url, http))


def as_sent(upstream: Odd, body: bytes, headers: list[tuple[str, str]]) -> bytes:
    """The request of `post(PATH, body, headers)` as the upstream must get it: only the path and the host differ."""
    return post("/v1/chat/completions", body, headers, host=upstream.url.removeprefix("http://"))


@pytest.mark.parametrize("status", [200, 201, 400, 404, 429, 500, 529])
async def test_every_byte_of_a_plain_call_passes_both_ways(tmp_path: Path, status: int) -> None:
    answer = head(f"HTTP/1.1 {status} Own Phrase", [*ODD_HEADERS, ("content-LENGTH", str(len(ODD_JSON)))]) + ODD_JSON
    asked = [("x-b", "2"), ("X-A", "1"), ("X-a", "one, two"), ("Accept-Encoding", "gzip;q=0.1"), ("x-b", "3")]
    async with between(tmp_path, [request(), send(answer)]) as all_:
        all_.client.send(post(PATH, ODD_JSON, asked))
        assert await all_.client.message() == answer
        connection = await all_.upstream.connection(0)
        assert connection.received == as_sent(all_.upstream, ODD_JSON, asked)
        span = await all_.span()
        assert await all_.tape.raw(span, "request") == await all_.tape.raw(span, "response") == ODD_JSON
        assert span.http_status == status


async def test_every_piece_of_a_stream_arrives_before_the_next_is_sent(tmp_path: Path) -> None:
    cut = [b"data: 1\n\n", b": comment\r\n\r\nda", b"ta: \xf0\x9f", b"\x99\x82\n\n", b"data: [DONE]\n\n"]
    pieces = [chunk(piece) for piece in cut]
    gated = [step for number, piece in enumerate(pieces) for step in (wait(str(number)), send(piece))]
    async with between(tmp_path, [request(), send(events_head()), *gated, wait("end"), send(chunk(b""))]) as all_:
        all_.client.send(STREAMED)
        assert await all_.client.until(b"\r\n\r\n") == events_head()
        for number, piece in enumerate(pieces):
            all_.upstream.go(str(number))
            assert await all_.client.exactly(len(piece)) == piece
        all_.upstream.go("end")
        assert await all_.client.exactly(5) == chunk(b"")
        span = await all_.span()
        assert (span.stream, span.status) == (True, SpanStatus.OK)
        assert await all_.tape.raw(span, "response") == body_of(events_head() + b"".join(pieces) + chunk(b""))


async def test_a_connection_serves_call_after_call(tmp_path: Path) -> None:
    answers = [reply(200, b'{"n": %d}' % number) for number in range(3)]
    async with between(tmp_path, [step for answer in answers for step in (request(), send(answer))]) as all_:
        for answer in answers:
            all_.client.send(post(PATH, b"{}"))
            assert await all_.client.message() == answer
        assert len(all_.upstream.connections) == 1
        assert [span.sequence for span in await all_.tape.spans("wire", 3)] == [1, 2, 3]


@pytest.mark.parametrize("how", BROKEN_OFF, ids=["closed", "reset", "half-closed"])
async def test_a_stream_that_is_cut_off_does_not_look_finished(tmp_path: Path, how: Step) -> None:
    async with between(tmp_path, [request(), send(events_head() + chunk(b"data: 1\n\n")), wait("cut"), how]) as all_:
        all_.client.send(STREAMED)
        await all_.client.until(chunk(b"data: 1\n\n"))
        all_.upstream.go("cut")
        assert await all_.client.rest() == b""
        span = await all_.span()
        assert (span.status, span.error) == (SpanStatus.ERROR, "upstream_closed")
        assert await all_.tape.raw(span, "response") == b"data: 1\n\n"


@pytest.mark.parametrize("how", BROKEN_OFF, ids=["closed", "reset", "half-closed"])
async def test_a_plain_answer_that_is_cut_off_does_not_look_finished(tmp_path: Path, how: Step) -> None:
    cut = reply(200, b'{"long": 1}')[:-4]
    async with between(tmp_path, [request(), send(cut), wait("cut"), how]) as all_:
        all_.client.send(post(PATH, b"{}"))
        await all_.client.exactly(len(cut))
        all_.upstream.go("cut")
        assert await all_.client.rest() == b""
        assert (await all_.span()).status == SpanStatus.ERROR


async def test_an_upstream_that_leaves_without_an_answer_is_a_clear_error(tmp_path: Path) -> None:
    async with between(tmp_path, [request(), close()]) as all_:
        all_.client.send(post(PATH, b"{}"))
        answer = await all_.client.message()
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert header_fields(answer.partition(b"\r\n\r\n")[0])["content-type"].startswith("application/json")
        assert (await all_.span()).status == SpanStatus.ERROR


@pytest.mark.parametrize("leave", [Wire.close, Wire.abort], ids=["closes", "resets"])
@pytest.mark.parametrize("begun", [b"", events_head(), events_head() + chunk(b"data: 1\n\n"), reply(200, b"{}")[:-1]])
async def test_a_client_that_leaves_ends_the_upstream_call(tmp_path: Path, begun: bytes, leave: object) -> None:
    assert callable(leave)
    async with between(tmp_path, [request(), send(begun)]) as all_:
        all_.client.send(STREAMED)
        await all_.client.exactly(len(begun))
        connection = await all_.upstream.connection(0)
        await connection.when(lambda: bool(connection.requests))
        leave(all_.client)
        await connection.gone()
        assert (await all_.span()).status == SpanStatus.CANCELLED


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
        ("/v1/responses", b'event: response.completed\ndata: {"type": "response.completed", "response": {}}\n\n'),
    ],
)
async def test_a_client_that_leaves_after_the_last_event_had_its_answer(tmp_path: Path, path: str, last: bytes) -> None:
    """The official SDKs close the connection at the last event and do not wait for the end of the body."""
    async with between(tmp_path, [request(), send(events_head() + chunk(last))]) as all_:
        all_.client.send(post(f"/rollout/wire/attempt/a1{path}", b'{"model": "m", "stream": true}'))
        await all_.client.until(chunk(last))
        all_.client.close()
        assert (await all_.span()).status == SpanStatus.OK


async def test_a_connection_that_is_to_be_closed_is_closed_after_the_answer(tmp_path: Path) -> None:
    answer = reply(200, b"{}")
    async with between(tmp_path, [request(), wait("answer"), send(answer)]) as all_:
        all_.client.send(post(PATH, b"{}", [("Connection", "close")]))
        await all_.upstream.connection(0)
        all_.upstream.go("answer")
        assert body_of(await all_.client.rest()) == b"{}"
        assert (await all_.span()).status == SpanStatus.OK


async def test_an_upstream_that_cannot_be_reached_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        async with (
            running(tmp_path, upstreams(openai=nowhere)) as gateway,
            aiohttp.ClientSession() as http,
            http.post(gateway.url + PATH, json={"model": "m"}) as response,
        ):
            assert response.status == 502
            assert "could not be reached" in (await response.json())["error"]["message"]
            assert (await Tape(gateway.url, http).spans("wire", 1))[0].error == "connect"


async def test_a_gateway_that_is_killed_knows_afterwards_what_was_running(tmp_path: Path) -> None:
    async with between(tmp_path, [request(), send(reply(200, b"{}"))], [request()]) as all_:
        all_.client.send(post(PATH, b"{}"))
        await all_.client.message()
        first = await all_.span()
        async with connect(all_.gateway.url) as other:
            other.send(STREAMED)
            await all_.tape.open_span("wire")
            await all_.gateway.kill()
            await all_.gateway.start()
            tape = Tape(all_.gateway.url, all_.tape.http)
            after = await tape.spans("wire", 2)
        assert after[0] == first
        assert after[1].status == SpanStatus.INTERRUPTED
        assert await tape.raw(after[0], "response") == b"{}"
