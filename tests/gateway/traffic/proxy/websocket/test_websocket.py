"""Responses on WebSockets through a gateway: messages pass as they are, and each answer is a call."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from agents import Agent, RunConfig, Runner
from agents.models.openai_responses import OpenAIResponsesWSModel
from conftest import StartGateway
from fakes.raw import frame
from fakes.responses_websocket import BIG, Host, websocket_host
from fakes.rig import Within
from fakes.tape import Tape
from fakes.waiting import PATIENCE_S, until
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock.gateway.model.facts import PREWARM, WEBSOCKET
from penstock.gateway.model.span import Span
from penstock.gateway.traffic.proxy.websocket.websocket_call import as_event
from penstock.gateway.wire.dialects.sse import events

Json = dict[str, Any]
KEY = {"Authorization": "Bearer sk-not-real", "OpenAI-Beta": "responses_websockets=2026-02-06"}
LAST = ("response.completed", "error")


@dataclass
class Rig:
    host: Host
    url: str
    tape: Tape

    @asynccontextmanager
    async def open(self, below: str = "/rollout/r1/attempt/a1", **more: Any) -> AsyncGenerator[ClientConnection]:
        url = self.url.replace("http", "ws") + below + "/v1/responses"
        async with connect(url, additional_headers=KEY, max_size=None, proxy=None, **more) as connection:
            yield connection

    async def hangs(self, connection: ClientConnection) -> None:
        """A call whose answer ends when it is let go."""
        await connection.send(request("hang"))
        await self.host.hangs.wait()

    async def spans(self, count: int = 1) -> list[Span]:
        return await self.tape.spans("r1", count)

    async def statuses(self) -> list[str]:
        """Of the spans that are on the tape now."""
        return [head["status"] for head in (await self.tape.get("/api/rollouts/r1/attempts/a1/spans"))["spans"]]

    async def release(self) -> None:
        """From here on bodies may have to change."""
        prompt = {"kind": "prompt", "content": {"text": "You are a helpful assistant."}}
        async with self.tape.http.post(f"{self.url}/api/resources/greeting", json=prompt) as made:
            assert made.status in (200, 201), await made.text()

    async def refused(self, path: str = "/v1/responses", **headers: str) -> str:
        """What is said to a client that asks for a WebSocket and is to use plain HTTP."""
        more = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x"}
        more |= {"Sec-WebSocket-Version": "13", **headers}
        async with self.tape.http.get(self.url + path, headers=KEY | more) as response:
            assert response.status == 426
            return (await response.json())["error"]["message"]


@pytest.fixture
async def host() -> AsyncGenerator[Host]:
    async with websocket_host() as made:
        yield made


@pytest.fixture
def upstream() -> Json:
    """More settings of the host; tests may say so."""
    return {}


@pytest.fixture
def settings() -> Json:
    """More settings of the gateway."""
    return {}


@pytest.fixture
async def rig(within: Within, host: Host, upstream: Json, settings: Json) -> AsyncGenerator[Rig]:
    known = {"name": "host", "base_url": f"{host.url}/v1", **upstream}
    async with within(upstream=[known], **settings) as made:
        yield Rig(host, made.base.url, made.tape)


@pytest.fixture
async def process(start_gateway: StartGateway, host: Host, http: aiohttp.ClientSession) -> tuple[Rig, Any]:
    """One whose gateway is a process of its own."""
    gateway = await start_gateway(f'[[upstream]]\nname = "host"\nbase_url = "{host.url}/v1"\n')
    return Rig(host, gateway.url, Tape(gateway.url, http)), gateway


def request(said: str, **more: Any) -> str:
    asked = [{"role": "user", "content": said}]
    return json.dumps({"type": "response.create", "model": "gpt-5", "input": asked, **more})


async def ask(connection: ClientConnection, said: str, **more: Any) -> list[str]:
    """The messages of the answer."""
    await connection.send(request(said, **more))
    return await answer(connection)


async def answer(connection: ClientConnection) -> list[str]:
    found: list[str] = []
    while not found or json.loads(found[-1])["type"] not in LAST:
        message = await connection.recv()
        assert isinstance(message, str)
        found.append(message)
    return found


def completed(messages: list[str]) -> bool:
    return json.loads(messages[-1])["type"] == "response.completed"


async def closed(connection: ClientConnection) -> tuple[int | None, str | None]:
    """Code and reason with which the gateway ends it, whatever comes before."""
    with suppress(ConnectionClosed):
        while True:
            _ = await connection.recv()
    return connection.close_code, connection.close_reason


@pytest.mark.parametrize("compression", ["deflate", None])
async def test_messages_pass_and_each_answer_is_a_call(rig: Rig, compression: str | None) -> None:
    async with rig.open(compression=compression) as connection:
        pong = await connection.ping()
        first = await ask(connection, "Hello", stream=True)
        second = await ask(connection, "limits, please " * 300, previous_response_id="resp_1")
        await asyncio.wait_for(pong, PATIENCE_S)
    assert [*first, *second] == rig.host.sent
    assert rig.host.asked[0] == json.loads(request("Hello", stream=True))
    ((path, headers),) = rig.host.opened
    assert path == "/v1/responses"
    assert (headers["authorization"], headers["openai-beta"]) == tuple(KEY.values())
    assert headers.get_all("upgrade") == ["websocket"]
    assert headers["host"] == rig.host.url.partition("://")[2]
    one, two = await rig.spans(2)
    for span, said in ((one, "said 1"), (two, "said 2")):
        assert (span.kind, span.dialect, span.model, span.upstream) == ("llm", "responses", "gpt-5", "host")
        assert (span.status, span.error, span.http_status, span.stream) == ("ok", None, 101, True)
        assert span.usage is not None
        assert span.usage.output_tokens
        assert (span.attributes or {}) == {WEBSOCKET: True}
        detail = await rig.tape.detail(span)
        assert detail.turn is not None
        assert detail.turn.choices[0].message.parts[0].text == said
        assert detail.turn.problems == []
    assert await rig.tape.raw(one, "request") == request("Hello", stream=True).encode()
    assert await rig.tape.raw(one, "response") == b"".join(b"data: %b\n\n" % it.encode() for it in first)
    assert two.sequence == 2
    assert "sk-not-real" not in json.dumps(await rig.tape.get("/api/rollouts/r1/attempts/a1/spans/1"))


async def test_a_request_that_only_prepares_is_marked(rig: Rig) -> None:
    async with rig.open() as connection:
        _ = await ask(connection, "Hello", generate=False)
        _ = await ask(connection, "Hello")
    one, two = await rig.spans(2)
    assert (one.attributes, two.attributes) == ({WEBSOCKET: True, PREWARM: True}, {WEBSOCKET: True})
    assert (one.choices, one.status) == (0, "ok")


@pytest.mark.parametrize("size", [1, 400_000])
async def test_a_conversation_without_an_address_is_one_rollout(rig: Rig, size: int) -> None:
    said = "long " * (size // 5)
    async with rig.open("") as connection:
        first = await ask(connection, "Hello " + said)
        _ = await ask(connection, "And now?", previous_response_id=json.loads(first[-1])["response"]["id"])
    async with rig.open("") as connection:
        _ = await ask(connection, "Something else " + said)
    await rig.tape.written()
    found = (await rig.tape.get("/api/rollouts"))["rollouts"]
    assert sorted(one["totals"]["calls"] for one in found) == [1, 2]


async def test_an_error_is_one(rig: Rig) -> None:
    async with rig.open() as connection:
        _ = await ask(connection, "an error")
        _ = await ask(connection, "Hello")
    one, two = await rig.spans(2)
    assert (one.status, one.error, one.http_status) == ("error", "http_429", 429)
    detail = await rig.tape.detail(one)
    assert detail.turn is not None
    assert detail.turn.error == "slow down"
    assert two.status == "ok"


async def test_a_client_that_leaves_has_cancelled_its_call(rig: Rig) -> None:
    async with rig.open() as connection:
        await rig.hangs(connection)
        assert (await rig.tape.open_span("r1")).model == "gpt-5"
    rig.host.let_go.set()
    assert await rig.host.left.get() == 1000
    (span,) = await rig.spans()
    assert (span.status, span.error) == ("cancelled", "client_gone")


async def test_an_upstream_that_leaves(rig: Rig) -> None:
    async with rig.open() as connection:
        await connection.send(request("leave"))
        assert await closed(connection) == (1011, "bye")
    (span,) = await rig.spans()
    assert (span.status, span.error) == ("error", "upstream_closed")
    assert span.response_bytes > 0


@pytest.mark.parametrize("status", [401, 426])
async def test_a_host_that_does_not_agree(rig: Rig, status: int) -> None:
    rig.host.status = status
    with pytest.raises(InvalidStatus) as caught:
        async with rig.open():
            pass
    assert caught.value.response.status_code == status
    (span,) = await rig.spans()
    assert (span.dialect, span.error, span.http_status) == ("responses", f"http_{status}", status)


@pytest.mark.parametrize("settings", [{"route": [{"model": "a*", "upstream": "host"}]}])
async def test_where_bodies_may_have_to_change_there_is_plain_http(rig: Rig) -> None:
    assert "use plain HTTP" in await rig.refused()
    assert rig.host.opened == []


async def test_paths_and_extensions_that_are_not_understood(rig: Rig) -> None:
    for path in ("/mcp/tools", "/api/changes"):
        assert "this path has no WebSockets here" in await rig.refused(path)
    said = await rig.refused(**{"Sec-WebSocket-Extensions": "permessage-deflate, mux"})
    assert "only permessage-deflate is understood" in said
    assert rig.host.opened == []


async def test_after_a_release_begins_clients_are_sent_to_plain_http(rig: Rig) -> None:
    async with rig.open() as connection:
        _ = await ask(connection, "Hello")
        await rig.release()
        (said,) = await ask(connection, "Hello")
        assert json.loads(said)["status"] == 426
        assert (await closed(connection))[0] == 1012
    assert len(rig.host.asked) == 1
    assert await rig.host.left.get() == 1012
    one, two = await rig.spans(2)
    assert one.status == "ok"
    assert (two.status, two.error, two.http_status, two.upstream) == ("error", "websocket", 426, None)
    assert "released here" in await rig.refused()


async def test_what_is_under_way_is_answered_before_clients_are_sent_to_plain_http(rig: Rig) -> None:
    async with rig.open() as connection:
        await rig.hangs(connection)
        await rig.release()
        *_, refused = await ask(connection, "Hello")
        assert json.loads(refused)["status"] == 426
        rig.host.let_go.set()
        assert completed(await answer(connection))
        assert (await closed(connection))[0] == 1012
    assert {span.status for span in await rig.spans(2)} == {"ok", "error"}


@pytest.mark.parametrize("settings", [{"tape": {"record": "strict"}}])
async def test_in_a_strict_gateway_the_tape_comes_first(rig: Rig) -> None:
    async with rig.open() as connection:
        await rig.hangs(connection)
        assert await rig.statuses() == ["open"], "it is on the tape before it was sent"
        rig.host.let_go.set()
        _ = await answer(connection)
        assert await rig.statuses() == ["ok"], "its end is there before the last message comes"
        assert len(await ask(connection, "Hello")) > 2


@pytest.mark.parametrize("upstream", [{"read_timeout": 0.2}])
async def test_an_upstream_that_is_silent(rig: Rig) -> None:
    async with rig.open() as connection:
        *_, last = await ask(connection, "hang")
        told = json.loads(last)
        assert told["status"] == 504
        assert "upstream.read_timeout" in told["error"]["message"]
    (span,) = await rig.spans()
    assert (span.status, span.error) == ("error", "timeout")


async def test_a_gateway_that_stops_lets_answers_end(process: tuple[Rig, Any]) -> None:
    rig, gateway = process
    async with rig.open("/rollout/r2") as idle, rig.open() as busy:
        _ = await ask(idle, "Hello")
        await rig.hangs(busy)
        gateway.process.send_signal(signal.SIGTERM)
        assert await closed(idle) == (1001, "the gateway stops")
        rig.host.let_go.set()
        assert completed(await answer(busy))
        assert (await closed(busy))[0] == 1001


async def test_a_killed_gateway_leaves_an_interrupted_call(process: tuple[Rig, Any]) -> None:
    rig, gateway = process
    async with rig.open() as connection:
        await rig.hangs(connection)
        _ = await rig.tape.open_span("r1")
        await gateway.kill()
        with pytest.raises(ConnectionClosed):
            _ = await answer(connection)
    await gateway.start()
    (span,) = await Tape(gateway.url, rig.tape.http).spans("r1", 1)
    assert span.status == "interrupted"


async def test_a_client_that_does_not_read_holds_its_upstream_up(rig: Rig) -> None:
    async with rig.open(max_queue=1, compression=None) as slow, rig.open("/rollout/r2") as other:
        await slow.send(request("big"))
        assert len(await ask(other, "Hello")) > 2
        assert rig.host.drained < 2 * BIG
        assert completed(await answer(slow))
    (span,) = await rig.spans()
    assert span.response_bytes > BIG


async def test_requests_of_one_connection_are_answered_in_their_order(rig: Rig) -> None:
    async with rig.open() as connection:
        for number in range(5):
            await connection.send(request(f"number {number}"))
        for _ in range(5):
            _ = await answer(connection)
    for number, span in enumerate(await rig.spans(5)):
        assert f"number {number}".encode() in await rig.tape.raw(span, "request")
        assert f"said {number + 1}".encode() in await rig.tape.raw(span, "response")


@pytest.mark.parametrize("message", ["{", "[]", '{"type": "response.create", "stream_id": 5}', b'\xff{"type": 1'])
async def test_what_cannot_be_read_is_refused_and_passes_no_budget(rig: Rig, message: str | bytes) -> None:
    async with rig.open() as connection:
        await connection.send(message)
        told = json.loads(await connection.recv())
        assert (told["type"], told["status"], told["error"]["code"]) == ("error", 400, "unreadable")
        assert completed(await ask(connection, "Hello"))
    assert len(rig.host.asked) == 1


async def test_frames_pass_as_they_are_however_they_are_cut(within: Within) -> None:
    """Fragments, a ping between them, masks and lengths of other forms than a library would choose."""
    asked = request("Hello").encode()
    sent = frame(0x01, asked[:10], mask=b"abcd") + frame(0x89, b"ping", mask=b"\0\0\0\0")
    sent += frame(0x00, b"", mask=b"wxyz") + frame(0x80, asked[10:], mask=b"efgh", long=True)
    ended = json.dumps({"type": "response.completed", "response": {"id": "resp_1", "output": []}}).encode()
    told = frame(0x8A, b"ping") + frame(0x01, ended[:5]) + frame(0x80, ended[5:], long=True)
    agreed = b"HTTP/1.1 101 Odd words\r\nUPGRADE: websocket\r\nX-Odd:  1 \r\n\r\n"
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _ = await reader.readuntil(b"\r\n\r\n")
        writer.write(agreed + told[:3])
        got.extend(await reader.readexactly(len(sent)))
        for at in range(3, len(told)):
            writer.write(told[at : at + 1])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with within(upstream=[{"name": "host", "base_url": url}]) as made:
        reader, writer = await asyncio.open_connection(*made.base.url.removeprefix("http://").split(":"))
        head = f"GET {made.path('/v1/responses')} HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
        writer.write(head.encode() + b"Sec-WebSocket-Key: x\r\nAuthorization: Bearer sk-x\r\n\r\n")
        for at in range(len(sent)):
            writer.write(sent[at : at + 1])
            await writer.drain()
        assert await reader.read() == agreed + told
        writer.close()
        server.close()
        assert bytes(got) == sent
        span = await made.span()
        assert (span.status, span.response_id) == ("ok", "resp_1")
        assert await made.tape.raw(span, "request") == asked


@pytest.mark.parametrize(
    ("sent", "code", "why"),
    [
        (frame(0x80, b"x", mask=b"abcd"), 1002, "a frame does not continue what came before"),
        (frame(0xC1, b"x", mask=b"abcd"), 1002, "a frame has bits of an extension that was not agreed on"),
        (bytes([0x81, 255]) + (1 << 40).to_bytes(8, "big"), 1009, "a message is larger than 268435456 bytes"),
    ],
)
async def test_frames_that_cannot_be_read_end_the_connection(rig: Rig, sent: bytes, code: int, why: str) -> None:
    async with rig.open(compression=None) as connection:
        _ = await ask(connection, "Hello")
        connection.transport.write(sent)
        assert await closed(connection) == (code, why)
    assert await rig.host.left.get() == code
    assert len(rig.host.asked) == 1


async def test_the_agents_sdk_speaks_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    client = openai.AsyncOpenAI(base_url=rig.url + "/rollout/r1/attempt/a1/v1", api_key="sk-not-real")
    model = OpenAIResponsesWSModel("gpt-5", client)
    done = await Runner.run(Agent("a", model=model), "Hello", run_config=RunConfig(tracing_disabled=True))
    assert done.final_output == "said 1"
    (span,) = await rig.spans()
    assert (span.status, span.attributes) == ("ok", {WEBSOCKET: True})


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_message_of_several_lines_is_one_event(end: bytes) -> None:
    (event,) = events(as_event(b'{"type": "x",' + end + b'"email": "bob@x"}'))
    assert json.loads(event.data) == {"type": "x", "email": "bob@x"}


@pytest.mark.parametrize("upstream", [{"max_concurrent": 1}])
async def test_each_answer_takes_a_place(rig: Rig) -> None:
    """An open connection takes none; a call over HTTP and an answer here stand in one queue."""

    async def waiting(count: int) -> bool:
        (view,) = [one for one in (await rig.tape.get("/api/upstreams"))["upstreams"] if one["name"] == "host"]
        return view["waiting"] == count

    async with rig.open() as first, rig.open("/rollout/r2/attempt/a1") as second:
        async with rig.open("/rollout/r3/attempt/a1") as third:
            await rig.hangs(first)
            await third.send(request("Nobody waits for this"))
            await until(lambda: waiting(1))
            await second.send(request("Hello"))
            await until(lambda: waiting(2))
        await until(lambda: waiting(1))
        assert len(rig.host.asked) == 1
        rig.host.let_go.set()
        assert completed(await answer(first))
        assert completed(await answer(second))
        # One that breaks off gives its place back, too.
        await first.send(request("leave"))
        with pytest.raises(ConnectionClosed):
            await answer(first)
        assert completed(await ask(second, "Again"))
    (gone,) = await rig.tape.spans("r3", 1)
    assert (gone.status, gone.error) == ("cancelled", "client_gone")
