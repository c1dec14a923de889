"""A gateway between a raw client and an odd upstream, as transcripts: what goes in on one side leaves on the other."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest
from fakes.odd import Step, abort, close, half_close, odd, request, send, wait
from fakes.process import running, upstreams
from fakes.raw import Wire, body_of, chunk, connect, events_head, head, header_fields, post, reply
from fakes.rig import CHAT, Rig
from fakes.tape import Tape

from penstock.gateway.model.span import SpanStatus

PATH = "/rollout/wire/attempt/a1/v1/chat/completions"
ODD_JSON = b'{ "model":"m","x": 1e-05, "x": -0.0,\t"text":"\\u00e9\xc3\xa9\\/" }\r\n'
ODD_HEADERS = [("X-Vendor", "one"), ("x-vendor", "two"), ("X-EMPTY", ""), ("Retry-After", "7"), ("Server", "odd/0")]
STREAMED = b'{"model": "m", "stream": true}'
BROKEN_OFF: list[Step] = [close(), abort(), half_close()]


@pytest.mark.parametrize("status", [200, 201, 400, 404, 429, 500, 529])
async def test_every_byte_of_a_plain_call_passes_both_ways(rig: Rig, status: int) -> None:
    answer = head(f"HTTP/1.1 {status} Own Phrase", [*ODD_HEADERS, ("content-LENGTH", str(len(ODD_JSON)))]) + ODD_JSON
    asked = [("x-b", "2"), ("X-A", "1"), ("X-a", "one, two"), ("Accept-Encoding", "gzip;q=0.1"), ("x-b", "3")]
    async with rig.upstream([request(), send(answer)]) as upstream, rig.client() as client:
        client.send(rig.call(ODD_JSON, asked))
        assert await client.message() == answer
        connection = await upstream.connection(0)
        assert connection.received == post(CHAT, ODD_JSON, asked, host=rig.host)
        span = await rig.span()
        assert await rig.tape.raw(span, "request") == await rig.tape.raw(span, "response") == ODD_JSON
        assert span.http_status == status


async def test_every_piece_of_a_stream_arrives_before_the_next_is_sent(rig: Rig) -> None:
    cut = [b"data: 1\n\n", b": comment\r\n\r\nda", b"ta: \xf0\x9f", b"\x99\x82\n\n", b"data: [DONE]\n\n"]
    pieces = [chunk(piece) for piece in cut]
    gated = [step for number, piece in enumerate(pieces) for step in (wait(str(number)), send(piece))]
    async with (
        rig.upstream([request(), send(events_head()), *gated, wait("end"), send(chunk(b""))]) as upstream,
        rig.client() as client,
    ):
        client.send(rig.call(STREAMED))
        assert await client.until(b"\r\n\r\n") == events_head()
        for number, piece in enumerate(pieces):
            upstream.go(str(number))
            assert await client.exactly(len(piece)) == piece
        upstream.go("end")
        assert await client.exactly(5) == chunk(b"")
        span = await rig.span()
        assert (span.stream, span.status) == (True, SpanStatus.OK)
        assert await rig.tape.raw(span, "response") == body_of(events_head() + b"".join(pieces) + chunk(b""))


async def test_a_connection_serves_call_after_call(rig: Rig) -> None:
    answers = [reply(200, b'{"n": %d}' % number) for number in range(3)]
    async with (
        rig.upstream([step for answer in answers for step in (request(), send(answer))]) as upstream,
        rig.client() as client,
    ):
        for answer in answers:
            client.send(rig.call(b"{}"))
            assert await client.message() == answer
        assert len(upstream.connections) == 1
        assert [span.sequence for span in await rig.tape.spans(rig.rollout, 3)] == [1, 2, 3]


@pytest.mark.parametrize("how", BROKEN_OFF, ids=["closed", "reset", "half-closed"])
async def test_a_stream_that_is_cut_off_does_not_look_finished(rig: Rig, how: Step) -> None:
    async with (
        rig.upstream([request(), send(events_head() + chunk(b"data: 1\n\n")), wait("cut"), how]) as upstream,
        rig.client() as client,
    ):
        client.send(rig.call(STREAMED))
        await client.until(chunk(b"data: 1\n\n"))
        upstream.go("cut")
        assert await client.rest() == b""
        span = await rig.span()
        assert (span.status, span.error) == (SpanStatus.ERROR, "upstream_closed")
        assert await rig.tape.raw(span, "response") == b"data: 1\n\n"


@pytest.mark.parametrize("how", BROKEN_OFF, ids=["closed", "reset", "half-closed"])
async def test_a_plain_answer_that_is_cut_off_does_not_look_finished(rig: Rig, how: Step) -> None:
    cut = reply(200, b'{"long": 1}')[:-4]
    async with rig.upstream([request(), send(cut), wait("cut"), how]) as upstream, rig.client() as client:
        client.send(rig.call(b"{}"))
        await client.exactly(len(cut))
        upstream.go("cut")
        assert await client.rest() == b""
        assert (await rig.span()).status == SpanStatus.ERROR


async def test_an_upstream_that_leaves_without_an_answer_is_a_clear_error(rig: Rig) -> None:
    async with rig.upstream([request(), close()]), rig.client() as client:
        client.send(rig.call(b"{}"))
        answer = await client.message()
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert header_fields(answer.partition(b"\r\n\r\n")[0])["content-type"].startswith("application/json")
        assert (await rig.span()).status == SpanStatus.ERROR


@pytest.mark.parametrize("leave", [Wire.close, Wire.abort], ids=["closes", "resets"])
@pytest.mark.parametrize("begun", [b"", events_head(), events_head() + chunk(b"data: 1\n\n"), reply(200, b"{}")[:-1]])
async def test_a_client_that_leaves_ends_the_upstream_call(rig: Rig, begun: bytes, leave: object) -> None:
    assert callable(leave)
    async with rig.upstream([request(), send(begun)]) as upstream, rig.client() as client:
        client.send(rig.call(STREAMED))
        await client.exactly(len(begun))
        connection = await upstream.connection(0)
        await connection.when(lambda: bool(connection.requests))
        leave(client)
        await connection.gone()
        assert (await rig.span()).status == SpanStatus.CANCELLED


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
        ("/v1/responses", b'event: response.completed\ndata: {"type": "response.completed", "response": {}}\n\n'),
    ],
)
async def test_a_client_that_leaves_after_the_last_event_had_its_answer(rig: Rig, path: str, last: bytes) -> None:
    """The official SDKs close the connection at the last event and do not wait for the end of the body."""
    async with rig.upstream([request(), send(events_head() + chunk(last))]), rig.client() as client:
        client.send(rig.call(STREAMED, below=path))
        await client.until(chunk(last))
        client.close()
        assert (await rig.span()).status == SpanStatus.OK


async def test_a_connection_that_is_to_be_closed_is_closed_after_the_answer(rig: Rig) -> None:
    answer = reply(200, b"{}")
    async with rig.upstream([request(), wait("answer"), send(answer)]) as upstream, rig.client() as client:
        client.send(rig.call(b"{}", [("Connection", "close")]))
        await upstream.connection(0)
        upstream.go("answer")
        assert body_of(await client.rest()) == b"{}"
        assert (await rig.span()).status == SpanStatus.OK


@pytest.mark.smoke
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


@pytest.mark.smoke
async def test_a_gateway_that_is_killed_knows_afterwards_what_was_running(tmp_path: Path) -> None:
    async with (
        odd([request(), send(reply(200, b"{}"))], [request()]) as upstream,
        running(tmp_path, upstreams(openai=upstream.url + "/v1")) as gateway,
        aiohttp.ClientSession() as http,
    ):
        tape = Tape(gateway.url, http)
        async with connect(gateway.url) as client, connect(gateway.url) as other:
            client.send(post(PATH, b"{}"))
            await client.message()
            (first,) = await tape.spans("wire", 1)
            other.send(post(PATH, STREAMED))
            await tape.open_span("wire")
            await gateway.kill()
        await gateway.start()
        tape = Tape(gateway.url, http)
        after = await tape.spans("wire", 2)
        assert after[0] == first
        assert after[1].status == SpanStatus.INTERRUPTED
        assert await tape.raw(after[0], "response") == b"{}"
