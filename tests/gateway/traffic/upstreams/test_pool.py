"""Upstreams that misbehave: what the client sees, what the tape says, and which connections are used again."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncGenerator, Callable
from unittest.mock import Mock

import pytest
from fakes.odd import Connection, Script, Step, abort, close, gone, request, send, wait
from fakes.ports import steady_ports
from fakes.raw import body_of, chunk, connect, error_of, events_head, head, post, reply
from fakes.rig import CHAT, MESSAGES, Inside, Rig, Within
from fakes.two_upstreams import Two

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.upstreams import pool
from penstock.gateway.traffic.upstreams.pool import ConnectionPool, Connector
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection

EVENT = chunk(b"data: 1\n\n")
OK = reply(200, b'{"fine":1}')


# -- before the answer -------------------------------------------------------------------------------------------------

ENDS: dict[str, Step] = {"closes": close(), "resets": abort()}


@pytest.mark.parametrize("end", ENDS)
async def test_an_upstream_that_ends_without_an_answer_is_a_502(rig: Rig, end: str) -> None:
    async with rig.upstream([request(), ENDS[end]]) as upstream, rig.client() as client:
        client.send(rig.call())
        error = error_of(await client.message(), 502)
        assert error["code"] == "upstream_closed"
        assert "upstream 'up'" in error["message"]
        # A connection that was new is not tried again.
        assert len(upstream.connections) == 1
    span = await rig.span()
    assert (span.status, span.error, span.http_status, span.upstream) == ("error", "upstream_closed", 502, "up")
    assert span.response_bytes > 0


async def test_the_answer_to_a_head_request_has_no_body(rig: Rig) -> None:
    async with rig.upstream([request(), close()], [request(), send(OK)]), rig.client() as client:
        client.send(head(f"HEAD {rig.path('/v1/models')} HTTP/1.1", [("Host", "h")]) + rig.call())
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 502 ")
        assert await client.message() == OK


async def test_in_the_shape_of_messages(rig: Rig) -> None:
    async with rig.upstream([request(), close()]), rig.client() as client:
        client.send(rig.call(below=MESSAGES))
        said = json.loads(body_of(await client.message()))
    assert (said["type"], said["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize("end", ENDS)
async def test_an_idle_connection_that_ends_is_replaced_silently(rig: Rig, end: str) -> None:
    """The server's keep-alive ended in the moment in which the call was sent."""
    first: Script = [request(), send(OK), request(), ENDS[end]]
    async with rig.upstream(first, [request(), send(reply(200, b"second"))]) as upstream, rig.client() as client:
        client.send(rig.call())
        assert await client.message() == OK
        client.send(rig.call(b"again"))
        assert await client.message() == reply(200, b"second")
        assert len(upstream.connections) == 2
        # Sent twice, whole both times, and recorded once.
        assert [body_of(found.requests[-1]) for found in upstream.connections] == [b"again", b"again"]
    assert [span.status for span in await rig.tape.spans(rig.rollout, 2)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("second", "connections"), [([close()], 2), ([send(b"HTTP/1.1 2"), close()], 1)], ids=["closes", "a byte was seen"]
)
async def test_it_is_sent_again_only_once_and_not_once_a_byte_was_seen(
    rig: Rig, second: Script, connections: int
) -> None:
    scripts: tuple[Script, Script] = ([request(), send(OK), request(), *second], [request(), close()])
    async with rig.upstream(*scripts) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.message()
        client.send(rig.call())
        error_of(await client.message(), 502)
        assert len(upstream.connections) == connections


async def test_a_connection_that_ended_while_it_was_idle_is_not_used(rig: Rig) -> None:
    async with rig.upstream([request(), send(OK), close()], [request(), send(OK)]) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.message()
        await (await upstream.connection(0)).gone()
        client.send(rig.call())
        assert await client.message() == OK


async def test_an_idle_connection_is_closed_in_time(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_S", 0.5)
    async with (
        within() as rig,
        rig.upstream([request(), send(OK), gone()]) as upstream,
        rig.client() as client,
    ):
        client.send(rig.call())
        await client.message()
        # Long before the usual 55 seconds.
        assert await (await upstream.connection(0)).gone(30.0) == "eof"


async def test_bytes_on_an_idle_connection_end_it(rig: Rig) -> None:
    script: Script = [request(), send(OK), wait("idle"), send(b"HTTP/1.1 200 OK\r\n\r\nsmuggled"), gone()]
    async with rig.upstream(script, [request(), send(OK)]) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.message()
        upstream.go("idle")
        await (await upstream.connection(0)).gone()
        client.send(rig.call())
        assert await client.message() == OK


@pytest.mark.parametrize("script", [[send(b"x"), abort()], [abort()], [close()]])
async def test_a_connection_that_ends_before_it_is_used_is_a_502(rig: Rig, script: Script) -> None:
    async with rig.upstream(script):
        for _ in range(20):
            async with rig.client() as client:
                client.send(rig.call())
                error_of(await client.message(), 502)
    spans = await rig.tape.spans(rig.rollout, 20)
    assert {span.error for span in spans} <= {"upstream_closed", "upstream_protocol", "connect"}


GARBAGE = {
    "not-http": b"SSH-2.0-OpenSSH_9.6\r\n",
    "http-0.9": b"<html>hello</html>",
    "bad-version": b"HTTP/3.7 200 OK\r\nContent-Length: 0\r\n\r\n",
    "bad-status": b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
    "long-status": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "bare-lf": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n\r\n\r\n",
    "nul": b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
    "folded": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 2\r\n\r\n",
    "length-and-chunked": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nrest",
    "endless-head": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000,
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_an_answer_that_is_no_http_is_a_502(rig: Rig, name: str) -> None:
    async with rig.upstream([request(), send(GARBAGE[name]), gone()]) as upstream, rig.client() as client:
        client.send(rig.call())
        error = error_of(await client.message(), 502)
        assert error["code"] == "upstream_protocol"
        assert "not HTTP" in error["message"]
        await (await upstream.connection(0)).gone()
    assert (await rig.span()).error == "upstream_protocol"


# -- after the answer has begun ----------------------------------------------------------------------------------------

TRUNCATED = {
    "length": (reply(200, b"0123456789")[:-4], b"012345"),
    "chunks": (events_head() + EVENT + b"a\r\n123", b"data: 1\n\n123"),
    "last-chunk": (events_head() + EVENT, b"data: 1\n\n"),
    "trailers": (events_head() + EVENT + b"0\r\nX: 1\r\n", b"data: 1\n\n"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", TRUNCATED)
async def test_an_answer_that_breaks_off_breaks_off_at_the_client(rig: Rig, name: str, end: str) -> None:
    sent, payload = TRUNCATED[name]
    async with rig.upstream([request(), send(sent), wait("seen"), ENDS[end]]) as upstream, rig.client() as client:
        client.send(rig.call())
        assert await client.exactly(len(sent)) == sent
        upstream.go("seen")
        assert await client.rest() == b""
    span = await rig.span()
    assert (span.status, span.error, span.http_status) == ("error", "upstream_closed", 200)
    assert await rig.tape.raw(span, "response") == payload


async def test_an_answer_without_an_end_that_is_reset_is_reset_at_the_client(rig: Rig) -> None:
    """Closing would make it look complete."""
    sent = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhalf"
    async with rig.upstream([request(), send(sent), wait("seen"), abort()]) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.until(b"half")
        upstream.go("seen")
        assert await client.gone() == "reset"
    assert (await rig.span()).error == "upstream_closed"


async def test_bytes_after_the_end_of_an_answer_never_reach_a_client(rig: Rig) -> None:
    smuggled = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    async with rig.upstream([request(), send(OK + smuggled), gone()], [request(), send(OK)]) as upstream:
        async with rig.client() as client:
            client.send(rig.call())
            assert b"evil" not in await client.message()
            client.send(rig.call())
            assert b"evil" not in await client.message()
        await (await upstream.connection(0)).gone()
    assert [span.error for span in await rig.tape.spans(rig.rollout, 2)] == ["upstream_protocol", None]


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (events_head() + EVENT + b"zz\r\n", events_head() + EVENT),
        (events_head() + EVENT + b"3\r\nabcXX", events_head() + EVENT),
    ],
)
async def test_broken_chunks_break_the_answer(rig: Rig, sent: bytes, arrives: bytes) -> None:
    script = [request(), send(arrives), wait("seen"), send(sent[len(arrives) :]), gone()]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call())
        assert await client.exactly(len(arrives)) == arrives
        upstream.go("seen")
        assert await client.rest() == b""
    assert (await rig.span()).error == "upstream_protocol"


# -- silence -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def hasty(within: Within) -> AsyncGenerator[Inside]:
    """A gateway with short patience, but with more than a machine that is busy keeps a process waiting."""
    async with within(first={"read_timeout": 2.0}) as made:
        yield made


async def test_an_upstream_that_says_nothing_is_a_504(hasty: Inside) -> None:
    async with hasty.upstream([request(), gone()]) as upstream, hasty.client() as client:
        client.send(hasty.call())
        error = error_of(await client.message(), 504)
        assert "2 s (upstream.read_timeout)" in error["message"]
        await (await upstream.connection(0)).gone()
    span = await hasty.span()
    assert (span.status, span.error, span.http_status) == ("error", "timeout", 504)


async def test_an_upstream_that_falls_silent_breaks_the_answer(hasty: Inside) -> None:
    async with hasty.upstream([request(), send(events_head() + EVENT), gone()]) as upstream, hasty.client() as client:
        client.send(hasty.call())
        assert await client.rest() == events_head() + EVENT
        await (await upstream.connection(0)).gone()
    span = await hasty.span()
    assert (span.status, span.error, span.response_bytes) == ("error", "timeout", 9)


async def test_silence_is_counted_from_when_the_request_was_sent(hasty: Inside) -> None:
    """A request may take longer to arrive than the upstream may be silent."""
    async with hasty.upstream([request(), wait("tick"), send(OK)]) as upstream, hasty.client() as client:
        whole = hasty.call(b"x" * 10)
        client.send(whole[:-1])
        await hasty.tape.when("slow-upload", "a1", later(2.2))
        client.send(whole[-1:])
        await hasty.tape.when("slow-upload", "a1", later(0.2))
        upstream.go("tick")
        assert await client.message() == OK


def later(seconds: float) -> Callable[[object], bool]:
    """A condition that holds after a while."""
    due = time.monotonic() + seconds
    return lambda _: time.monotonic() >= due


async def test_a_bug_in_the_end_of_an_answer_does_not_leave_it_open(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    script = [request(), send(events_head() + EVENT), wait("seen"), close()]
    async with within() as rig:
        async with rig.upstream(script) as odd_, rig.client() as client:
            client.send(rig.call())
            await client.until(EVENT)
            monkeypatch.setattr(HttpCall, "on_broken", fail)
            odd_.go("seen")
            assert await client.rest() == b""
        assert (await rig.span()).error == "internal"


# -- connecting --------------------------------------------------------------------------------------------------------


async def call(url: str, model: str) -> bytes:
    async with connect(url) as client:
        client.send(post(f"/rollout/inside/attempt/a1{CHAT}", json.dumps({"model": model}).encode()))
        return await client.message()


async def test_an_unreachable_upstream_and_failover(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        spares = [
            {"name": "dead", "base_url": f"http://127.0.0.1:{steady_ports(1)[0]}/v1"},
            {"name": "mute", "base_url": f"http://127.0.0.1:{full.getsockname()[1]}/v1"},
        ]
        leads = {"dead": ["dead"], "mute": ["mute"], "*": ["dead", "mute", "up"]}
        async with (
            within(spares, route=[{"model": model, "upstream": names} for model, names in leads.items()]) as rig,
            rig.upstream([request(), send(OK), request(), close()], [request(), send(OK)]) as upstream_,
        ):
            error = error_of(await call(rig.base.url, "dead"), 502)
            assert (error["code"], "upstream 'dead'" in error["message"]) == ("connect", True)
            error = error_of(await call(rig.base.url, "mute"), 504)
            assert (error["code"], "no connection within 0.2 s" in error["message"]) == ("connect_timeout", True)
            assert await call(rig.base.url, "any") == OK
            assert await call(rig.base.url, "any") == OK
            assert len(upstream_.connections) == 2
            spans = await rig.tape.spans(rig.rollout, 4)
        for filler in fillers:
            filler.close()
    assert [span.upstream for span in spans] == ["dead", "mute", "up", "up"]
    assert [span.error for span in spans] == ["connect", "connect_timeout", None, None]


class Late(Connector):
    """Connects, and is given up in the same moment."""

    def __init__(self) -> None:
        super().__init__("late")
        self.transport = Mock()
        self.connected = asyncio.Event()

    async def open(self, connection: UpstreamConnection) -> None:
        connection.connection_made(self.transport)
        self.connected.set()
        await asyncio.Event().wait()

    def put_back(self, connection: UpstreamConnection) -> None: ...

    def forget(self, connection: UpstreamConnection) -> None: ...


async def test_a_connection_that_comes_too_late_is_closed() -> None:
    late = Late()
    task = late.connect(Mock())
    await late.connected.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    late.transport.abort.assert_called_once_with()


async def test_failover_ends_with_the_first_byte(two: Two) -> None:
    breaking: Script = [request(), send(events_head() + EVENT), wait("seen"), abort_now()]
    async with two([request(), close()], breaking, route={"upstream": ["up", "spare", "up"]}) as it:
        it.client.send(it.rig.call())
        await it.client.until(EVENT)
        it.spare.go("seen")
        await it.client.gone()
        assert [len(one.connections) for one in (it.up, it.spare)] == [1, 1]
        span = await it.span()
    assert (span.upstream, span.error) == ("spare", "upstream_closed")


def abort_now() -> Step:
    """Resets, whatever is still unsent."""

    async def step(connection: Connection) -> None:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.transport.abort()

    return step


async def test_an_alias_changes_the_models_name_only(within: Within) -> None:
    body = b'{ "messages":[{"model":"no","content":"\\"model\\":\\"a\\""}],"model" : "policy" ,"x":1.0}'
    expected = body.replace(b'"policy"', b'"Qwen/Qwen3-8B"')
    async with within(route=[{"model": "policy", "upstream": "up", "alias": "Qwen/Qwen3-8B"}]) as rig:
        start = head(f"POST {rig.path()} HTTP/1.1", [("Host", "h"), ("Transfer-Encoding", "chunked")])
        _, whole = await rig.passes(rig.call(body))
        _, chunked = await rig.passes(start + chunk(body[:40]) + chunk(body[40:]) + chunk(b""))
        assert [body_of(one) for one in (whole, chunked)] == [expected, expected]
        assert f"Content-Length: {len(expected)}\r\n".encode() in whole
        first, _ = await rig.tape.spans(rig.rollout, 2)
    assert (first.model, first.request_bytes) == ("policy", len(expected))


@pytest.mark.parametrize(
    ("base_url", "dialect", "path", "target"),
    [
        ("http://h/v1", "openai", "/v1/chat/completions", "/v1/chat/completions"),
        ("http://h/v1", "openai", "/chat/completions", "/v1/chat/completions"),
        ("http://h/api/openai", "openai", "/v1/models?a=1", "/api/openai/models?a=1"),
        ("http://h/v1", "openai", "/v1beta/x", "/v1/v1beta/x"),
        ("http://h/v1", "openai", "/v1", "/v1"),
        ("http://h", "anthropic", "/v1/messages", "/v1/messages"),
        ("http://h/v1", "anthropic", "/v1/messages", "/v1/messages"),
        ("http://h/x", "anthropic", "/v1/messages", "/x/v1/messages"),
    ],
)
def test_what_the_upstream_is_asked_for(base_url: str, dialect: str, path: str, target: str) -> None:
    made = ConnectionPool(UpstreamSettings.model_validate({"name": "u", "base_url": base_url, "dialect": dialect}))
    assert made.target(path) == target
    assert made.url(path) == "http://h" + target
