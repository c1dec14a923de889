"""The way of translated answers over real sockets: as they come, framed as the client takes them, and how they end."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes import vllm_wire
from fakes.odd import abort, close, request, send, wait
from fakes.raw import body_of, chunk, events_head, head, header_fields, post, reply
from fakes.rig import CHAT, MESSAGES, Inside, inside

from examples.demo.model import DemoAnswer, DemoToolCall
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.traffic.proxy.translation.messages import MessagesConverter
from penstock.gateway.wire.dialects.loose_json import Json, loads
from penstock.gateway.wire.dialects.sse import events
from penstock.gateway.wire.dialects.tokens import read_tokens

RESPONSES = "/v1/responses"
BOTH = pytest.mark.parametrize("below", [MESSAGES, RESPONSES])
ASK: Json = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
ASK_RESPONSES: Json = {"model": "policy", "input": "hi"}
CAPTURED: Json = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
SAID = DemoAnswer("To be, or not.", (DemoToolCall("c1", "get", '{"x": "é 1"}'),))
STREAM = b"".join(vllm_wire.chat_events(ASK | CAPTURED, SAID))
PLAIN = json.dumps(vllm_wire.chat(ASK | CAPTURED, SAID)).encode()
ENDS = {MESSAGES: "message_stop", RESPONSES: "response.completed"}
FAILED = {MESSAGES: "error", RESPONSES: "response.failed"}


@pytest.fixture
async def rig(litellm: LiteLlmApi, tmp_path: Path, http: aiohttp.ClientSession) -> AsyncGenerator[Inside]:
    """A gateway in this process that translates what goes to the odd upstream."""
    async with inside(tmp_path, http, route=[{"model": "policy", "upstream": ["up"], "train": True}]) as made:
        yield made


def asked(below: str, **more: Any) -> bytes:
    return json.dumps((ASK if below == MESSAGES else ASK_RESPONSES) | more).encode()


def call(rig: Inside, below: str, **more: Any) -> bytes:
    return rig.call(asked(below, **more), below=below)


def kinds(body: bytes) -> list[str]:
    return [loads(event.data)["type"] for event in events(body)]


def cut(body: bytes, size: int) -> bytes:
    """A body in chunks of this size."""
    return b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size)) + chunk(b"")


@BOTH
async def test_events_arrive_as_the_engine_makes_them(rig: Inside, below: str) -> None:
    """The client has an event before the engine sends the next chunk: nothing is gathered to be told at once."""
    made = STREAM.split(b"\n\n")
    script = [request(), send(events_head()), send(chunk(made[0] + b"\n\n")), wait("begun")]
    script += [send(chunk(made[1] + b"\n\n")), wait("said"), send(chunk(b"\n\n".join(made[2:])) + chunk(b""))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(call(rig, below, stream=True))
        await client.until(b"message_start" if below == MESSAGES else b"response.in_progress")
        upstream.go("begun")
        await client.until(b"text_delta" if below == MESSAGES else b"response.output_text.delta")
        upstream.go("said")
        await client.until(ENDS[below].encode())


@BOTH
@pytest.mark.parametrize(("size", "step"), [(1, 5), (50, 49), (100_000, 100_000)])
async def test_the_pace_of_a_stream_does_not_matter(rig: Inside, below: str, size: int, step: int) -> None:
    answer = events_head([("X-After", "1")]) + cut(STREAM, size)
    pieces = [send(answer[at : at + step]) for at in range(0, len(answer), step)]
    async with rig.upstream([request(), *pieces]) as upstream, rig.client() as client:
        client.send(call(rig, below, stream=True))
        got = await client.message()
        sent = body_of((await upstream.connection(0)).requests[0])
    assert kinds(body_of(got))[-1] == ENDS[below]
    assert header_fields(got.partition(b"\r\n\r\n")[0])["x-after"] == "1"
    span = await rig.span()
    assert (span.dialect, span.path, span.status, span.stream) == ("chat", CHAT, SpanStatus.OK, True)
    assert await rig.tape.raw(span, "request") == sent
    assert await rig.tape.raw(span, "response") == STREAM
    assert await rig.tape.raw(span, "request", "agent") == asked(below, stream=True)
    assert await rig.tape.raw(span, "response", "agent") == body_of(got)
    tokens = read_tokens(STREAM, True)
    assert tokens.complete
    assert (span.attributes or {})["penstock.translated"] == below.rpartition("/")[2]
    assert rig.gateway.metrics.captured_calls == {("yes",): 1}


@pytest.mark.parametrize("framing", ["length", "close", "1.0", "1.0 plain"])
async def test_streams_and_answers_however_they_are_framed(rig: Inside, framing: str) -> None:
    """A client of HTTP/1.0 takes no chunks; an engine's stream may have a length, or end with its connection."""
    plain = framing == "1.0 plain"
    version, body = ("1.0" if "1.0" in framing else "1.1"), asked(MESSAGES, stream=not plain)
    lengths: list[tuple[str, str]] = [("Content-Length", str(len(STREAM)))] if framing == "length" else []
    answer = {"length": head("HTTP/1.1 200 OK", [("Content-Type", "text/event-stream"), *lengths]) + STREAM}
    answer["close"] = answer["length"]
    answer |= {"1.0": events_head() + cut(STREAM, 100), "1.0 plain": reply(200, PLAIN)}
    script = [request(), send(answer[framing]), *([close()] if framing == "close" else [])]
    async with rig.upstream(script), rig.client() as client:
        own = [("Host", "h"), ("Content-Length", str(len(body)))]
        client.send(head(f"POST {rig.path(MESSAGES)} HTTP/{version}", own) + body)
        got = await (client.message() if framing == "length" else client.rest())
    if plain:
        assert loads(body_of(got))["stop_reason"] == "tool_use"
    else:
        assert kinds(body_of(got))[-1] == "message_stop"
    assert (await rig.span()).status == SpanStatus.OK


@BOTH
async def test_an_engine_that_breaks_off_is_an_error_and_no_end(rig: Inside, below: str) -> None:
    half = STREAM[: len(STREAM) // 2]
    async with rig.upstream([request(), send(events_head() + chunk(half)), abort()]), rig.client() as client:
        client.send(call(rig, below, stream=True))
        got = await client.rest()
    assert not got.endswith(b"0\r\n\r\n")
    assert kinds(body_of(got + chunk(b"")))[-1] == FAILED[below]
    span = await rig.span()
    assert (span.status, span.error) == (SpanStatus.ERROR, "upstream_closed")
    assert await rig.tape.raw(span, "response", "agent") == body_of(got + chunk(b""))


@BOTH
async def test_a_plain_answer_that_breaks_off_is_an_error(rig: Inside, below: str) -> None:
    async with rig.upstream([request(), send(reply(200, PLAIN)[:-10]), abort()]), rig.client() as client:
        client.send(call(rig, below))
        got = await client.message()
    assert got.startswith(b"HTTP/1.1 502 ")
    assert "broke off" in loads(body_of(got))["error"]["message"]


@BOTH
@pytest.mark.parametrize(
    ("answer", "stream", "said"),
    [
        (reply(200, gzip.compress(PLAIN, mtime=0), [("Content-Encoding", "gzip")]), False, "compressed"),
        (reply(200, PLAIN), True, "did not stream"),
        (events_head() + cut(STREAM, 100), False, "streamed"),
        (reply(200, b"{"), False, "not readable JSON"),
        (reply(200, b'{"choices":[{"message":{"content":"a"},"finish_reason":"abort"}]}'), False, "'abort'"),
    ],
    ids=["gzip", "plain", "events", "half", "abort"],
)
async def test_what_cannot_be_told_is_an_error(rig: Inside, below: str, answer: bytes, stream: bool, said: str) -> None:
    async with rig.upstream([request(), send(answer)]), rig.client() as client:
        client.send(call(rig, below, stream=stream))
        got = await client.message()
    assert got.startswith(b"HTTP/1.1 502 ")
    assert said in loads(body_of(got))["error"]["message"]
    span = await rig.span()
    assert (span.status, span.error) == (SpanStatus.ERROR, "translation")


@BOTH
@pytest.mark.parametrize("error", [b'{"error":{"message":"busy","type":"x"}}', b"busy"])
async def test_errors_of_the_engine_are_errors_of_the_agents_api(rig: Inside, below: str, error: bytes) -> None:
    async with rig.upstream([request(), send(reply(429, error, [("Retry-After", "7")]))]), rig.client() as client:
        client.send(call(rig, below, stream=True))
        got = await client.message()
    fields = header_fields(got.partition(b"\r\n\r\n")[0])
    assert (got[:13], fields["retry-after"], fields["content-type"]) == (b"HTTP/1.1 429 ", "7", "application/json")
    told = loads(body_of(got))
    assert (told["error"]["type"], told["error"]["message"]) == ("rate_limit_error", "busy")
    assert told.get("type") == ("error" if below == MESSAGES else None)
    assert (await rig.span()).error == "http_429"


@BOTH
async def test_a_client_that_leaves_ends_the_engines_work(rig: Inside, below: str) -> None:
    async with rig.upstream([request(), send(events_head() + chunk(STREAM[:900]))]) as upstream:
        async with rig.client() as client:
            client.send(call(rig, below, stream=True))
            await client.until(b"delta")
        await (await upstream.connection(0)).rest()
    span = await rig.span()
    assert (span.status, span.error) == (SpanStatus.CANCELLED, "client_gone")


@BOTH
async def test_a_client_may_leave_after_the_last_event(rig: Inside, below: str) -> None:
    async with rig.upstream([request(), send(events_head() + chunk(STREAM))]) as upstream:
        async with rig.client() as client:
            client.send(call(rig, below, stream=True))
            await client.until(ENDS[below].encode())
            await client.until(b"\n\n\r\n")
        await (await upstream.connection(0)).rest()
    assert (await rig.span()).status == SpanStatus.OK


async def test_an_engine_that_cannot_be_reached_is_an_error_of_the_agents_api(
    litellm: LiteLlmApi, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    route = [{"model": "policy", "upstream": ["gone"], "translate": True}]
    upstream = [{"name": "gone", "base_url": "http://127.0.0.1:1/v1"}]
    async with inside(tmp_path, http, upstream=upstream, route=route) as rig, rig.client() as client:
        client.send(call(rig, MESSAGES))
        got = await client.message()
        told = loads(body_of(got))
        assert (told["type"], told["error"]["type"]) == ("error", "api_error")
        span = await rig.span()
        assert (span.dialect, span.error, span.attributes) == ("chat", "connect", {"penstock.translated": "messages"})
        assert await rig.tape.raw(span, "response", "agent") == body_of(got)


async def test_an_agents_key_goes_where_the_engine_looks_for_it(rig: Inside) -> None:
    async with rig.upstream([request(), send(reply(200, PLAIN))]) as upstream, rig.client() as client:
        client.send(post(rig.path(MESSAGES), asked(MESSAGES), [("X-Api-Key", "sk-a"), ("Accept-Encoding", "gzip")]))
        await client.message()
        fields = header_fields((await upstream.connection(0)).requests[0].partition(b"\r\n\r\n")[0])
    assert (fields["authorization"], fields["accept-encoding"]) == ("Bearer sk-a", "identity")
    assert "x-api-key" not in fields


async def test_conversations_without_an_address_are_followed_in_the_agents_format(rig: Inside) -> None:
    """What the agent sends back is what it was told, not what the engine has said."""
    async with rig.upstream([request(), send(reply(200, PLAIN))]), rig.client() as client:
        client.send(post(MESSAGES, asked(MESSAGES)))
        answer = loads(body_of(await client.message()))
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "17"}
    said = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    async with rig.upstream([request(), send(reply(200, PLAIN))]), rig.client() as client:
        client.send(post(MESSAGES, asked(MESSAGES, messages=[*ASK["messages"], *said])))
        await client.message()
    await rig.gateway.recorder.flush()
    (one,) = (await rig.tape.get("/api/rollouts"))["rollouts"]
    assert one["totals"]["calls"] == 2


@pytest.mark.parametrize("broken", ["begin", "feed", "feed broken"])
async def test_a_bug_in_telling_ends_the_call_and_keeps_its_span(
    rig: Inside, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug")

    for name in broken.split():
        monkeypatch.setattr(MessagesConverter, name, fail)
    async with rig.upstream([request(), send(events_head() + chunk(STREAM[:900]))]), rig.client() as client:
        client.send(call(rig, MESSAGES, stream=True))
        await client.gone()
    span = await rig.span()
    assert (span.status, span.error) == (SpanStatus.ERROR, "internal")
    assert STREAM.startswith(await rig.tape.raw(span, "response"))


async def test_sampling_is_refused_where_the_version_of_the_api_has_none(rig: Inside) -> None:
    headers = [("anthropic-version", "2026-10-21")]
    async with rig.upstream(), rig.client() as client:
        client.send(rig.call(asked(MESSAGES, temperature=0.5), headers, MESSAGES))
        told = loads(body_of(await client.message()))["error"]
    assert (told["type"], told["message"][:12]) == ("invalid_request_error", "temperature:")
