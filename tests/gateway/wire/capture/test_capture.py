"""Calls of a model that is trained: the engine is asked for tokens, the tape has them, and the client notices nothing.

The provider speaks vLLM's wire form and answers the same request the same, so that what a client gets through the
gateway can be compared with what it gets from the provider directly, byte for byte.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import AsyncGenerator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from conftest import StartGateway
from fakes import framed, vllm_wire
from fakes.engine import engine
from fakes.formats import Failure
from fakes.odd import Step, abort, close, request, send, wait
from fakes.packing import PACKERS
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.raw import body_of, chunk, connect, events_head, head, header_fields, post, reply
from fakes.rig import CHAT, Inside, Rig, inside
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionToolUnionParam

from examples.demo.model import DemoAnswer, DemoToolCall
from penstock.gateway.client.client import Client
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.span import Span
from penstock.gateway.wire.capture import CaptureRequest
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.dialects.tokens import read_tokens
from penstock.gateway.wire.rewriting import capture_framing

Json = dict[str, Any]
COMPLETIONS = "/v1/completions"
TRAIN = '[[route]]\nmodel = "policy*"\nupstream = "{}"\ntrain = true\n\n'
ASK: Json = {"model": "policy", "messages": [{"role": "user", "content": "Où est 17?"}]}
TOOLS: list[ChatCompletionToolUnionParam] = [
    {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
]
CALLS = DemoAnswer("Let me look.", (DemoToolCall("c1", "get", '{"x": "é 1"}'), DemoToolCall("c2", "get", "{}")))


@pytest.fixture(scope="module")
def gateway_config() -> str:
    return TRAIN.format("up") + '[[route]]\nmodel = "*"\nupstream = "up"\n\n'


@pytest.fixture
async def captured(provider: Provider, tmp_path: Path, http: aiohttp.ClientSession) -> AsyncGenerator[Inside]:
    """A gateway in front of a provider that speaks as vLLM does."""
    provider.formats = vllm_wire.FORMATS
    provider.script = lambda asked: CALLS if asked.get("tools") else DemoAnswer("To be, or not to be.")
    route = [{"model": "policy*", "upstream": ["vllm"], "train": True}]
    upstream = [{"name": "vllm", "base_url": provider.openai_url}]
    async with inside(tmp_path, http, upstream=upstream, route=route) as made:
        yield made


async def asked_of(url: str, path: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """The whole answer to a raw request."""
    async with connect(url) as client:
        client.send(post(path, body, headers))
        return await client.message()


def told(answer: bytes) -> dict[str, str]:
    """The head without what differs between two answers."""
    return {name: value for name, value in header_fields(answer.partition(b"\r\n\r\n")[0]).items() if name != "date"}


def generated(response: bytes, span: Span) -> list[tuple[list[int], int]]:
    """Ids and number of log-probabilities of each choice."""
    tokens = read_tokens(response, span.stream)
    assert tokens.complete
    return [(list(array("i", one.ids)), one.logprobs) for _, one in sorted(tokens.outputs.items())]


CASES: list[tuple[str, Json]] = [
    (CHAT, {}),
    (CHAT, {"n": 2}),
    (CHAT, {"tools": TOOLS}),
    (CHAT, {"tools": TOOLS, "n": 2, "stream_options": {"include_usage": True}}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"return_token_ids": True}),
    (COMPLETIONS, {"prompt": "To be"}),
    (COMPLETIONS, {"prompt": "To be", "n": 2}),
    (COMPLETIONS, {"prompt": "To be", "logprobs": 1}),
    (COMPLETIONS, {"prompt": "To be", "return_token_ids": True}),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("path", "more"), CASES, ids=str)
async def test_the_client_sees_what_it_would_have_seen(
    captured: Inside, provider: Provider, path: str, more: Json, stream: bool
) -> None:
    body = json.dumps(ASK | more | ({"stream": True} if stream else {})).encode()
    through = await asked_of(captured.base.url, captured.path(path), body)
    seen = provider.log[-1]
    directly = await asked_of(provider.url, path, body)
    assert body_of(through) == body_of(directly)
    assert told(through) == told(directly)
    span = await captured.span()
    assert await captured.tape.raw(span, "request") == seen.body
    assert await captured.tape.raw(span, "response") == seen.response
    tokens = generated(seen.response, span)
    assert [len(ids) == logprobs > 0 for ids, logprobs in tokens] == [True] * more.get("n", 1)
    assert captured.gateway.metrics.captured_calls == {("yes",): 1}


@pytest.mark.parametrize("name", list(PACKERS))
async def test_a_request_with_an_encoding_is_asked_for_more_without_it(
    captured: Inside, provider: Provider, name: str
) -> None:
    body = json.dumps(ASK).encode()
    through = await asked_of(captured.base.url, captured.path(), PACKERS[name](body), ("Content-Encoding", name))
    directly = await asked_of(provider.url, CHAT, body)
    seen = provider.log[0]
    assert body_of(through) == body_of(directly)
    assert (json.loads(seen.body)["return_token_ids"], seen.header("content-encoding")) == (True, None)
    assert all(ids for ids, _ in generated(seen.response, await captured.span()))


async def test_who_asks_for_everything_other_models_other_apis_and_errors_are_let_alone(
    captured: Inside, provider: Provider
) -> None:
    everything = ASK | {"logprobs": True, "return_token_ids": True}
    embed: Json = {"model": "policy", "input": "a"}
    for path, asked in ((CHAT, everything), (CHAT, ASK | {"model": "judge"}), ("/v1/embeddings", embed)):
        provider.formats = vllm_wire.FORMATS if path == CHAT else Provider().formats
        body = json.dumps(asked).encode()
        through = await asked_of(captured.base.url, captured.path(path), body, ("Accept-Encoding", "br"))
        seen = provider.log[-1]
        assert (seen.body, seen.header("accept-encoding")) == (body, "br")
        assert body_of(through) == seen.response
    provider.script = [Failure(429, '{"choices":[{"token_ids":[1]}]}', headers={"Retry-After": "7"})]
    provider.formats = vllm_wire.FORMATS
    through = await asked_of(captured.base.url, captured.path(), json.dumps(ASK).encode())
    assert body_of(through) == provider.log[-1].response
    assert told(through)["retry-after"] == "7"
    first, *_ = await captured.tape.spans(captured.rollout, 4)
    assert first.attributes is None
    assert captured.gateway.metrics.captured_calls == {}


async def test_the_tape_tells_what_was_added_and_an_answer_without_encoding_is_asked_for(
    captured: Inside, provider: Provider
) -> None:
    body = json.dumps(ASK | {"temperature": 0.5, "logprobs": True}).encode()
    await asked_of(captured.base.url, captured.path(), body)
    assert provider.log[-1].body == b'{"return_token_ids":true,' + body[1:]
    span = await captured.span()
    assert span.attributes == {"penstock.captured": ["return_token_ids"]}
    detail = await captured.tape.detail(span)
    assert detail.turn is not None
    assert detail.turn.sampling == {"temperature": 0.5, "logprobs": True}
    body = json.dumps(ASK).encode()
    through = await asked_of(captured.base.url, captured.path(), body, ("Accept-Encoding", "gzip"))
    assert provider.log[-1].header("accept-encoding") == "identity"
    provider.encoding = "gzip"
    directly = await asked_of(provider.url, CHAT, body, ("Accept-Encoding", "gzip"))
    assert body_of(through) == gzip.decompress(body_of(directly))
    assert "content-encoding" not in told(through)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_official_client_notices_nothing(captured: Inside, provider: Provider, stream: bool) -> None:
    async def story(base_url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k") as client:
            create: Any = client.chat.completions.create
            made = await create(model="policy", messages=ASK["messages"], tools=TOOLS, stream=stream)
            return [one.to_json() async for one in made] if stream else [made.to_json()]

    through = await story(captured.base.url + captured.path("/v1"))
    assert provider.log[-1].body.startswith(b'{"return_token_ids":true,"logprobs":true,')
    assert through == await story(provider.openai_url)
    assert any('"name": "get"' in one for one in through)
    span = await captured.span()
    assert span.tool_calls == 2
    ((ids, logprobs),) = generated(provider.log[0].response, span)
    assert len(ids) == logprobs


async def test_a_resource_is_captured_by_the_route_of_its_name(
    start_gateway: StartGateway, http: aiohttp.ClientSession
) -> None:
    async with engine() as vllm:
        made = await start_gateway(TRAIN.format("fake-openai") + upstreams(openai=vllm.openai_url))
        content = {"upstream": "fake-openai", "base": "base", "adapter": "/adapters/1"}
        async with Client(made.url) as client:
            await client.add_version("policy", NewVersion(kind="model", content=content))
        await vllm.until("/v1/load_lora_adapter")
        async with http.post(made.openai("r1") + "/chat/completions", json=ASK) as response:
            assert response.status == 200
    asked = [body for path, body in vllm.asked if path == CHAT][-1]
    assert asked == ASK | {"model": "policy@v1", "return_token_ids": True, "logprobs": True}


# -- on the wire: an upstream that does as it is told ----------------------------------------------------------------

BODY = json.dumps(ASK | {"stream": True}).encode()
MORE = {"return_token_ids": True, "logprobs": True}
GIVEN, CLEAN = (b"".join(vllm_wire.chat_events(one, CALLS)) for one in (ASK | MORE, ASK))
PLAIN_GIVEN, PLAIN_CLEAN = (json.dumps(vllm_wire.chat(one, CALLS)).encode() for one in (ASK | MORE, ASK))


def chunked(body: bytes, size: int) -> list[bytes]:
    return [chunk(body[at : at + size]) for at in range(0, len(body), size)]


def headed(kind: str | None, *more: tuple[str, str]) -> bytes:
    given = [] if kind is None else [("Content-Type", kind)]
    return head("HTTP/1.1 200 OK", [*given, *(more or [("Transfer-Encoding", "chunked")])])


def whole(body: bytes, size: int) -> bytes:
    return b"".join(chunked(body, size)) + chunk(b"")


async def passed(rig: Rig, answer: bytes, *ends: Step, step: int = 1 << 20, sent: bytes = b"") -> bytes:
    """What the client gets of an answer that comes in such steps: a message, or all until the gateway leaves."""
    pieces = [send(answer[at : at + step]) for at in range(0, len(answer), step)]
    async with rig.upstream([request(), *pieces, *ends]), rig.client() as client:
        client.send(sent or rig.call(BODY))
        return await (client.rest() if ends or b"HTTP/1.0" in sent else client.message())


@pytest.mark.parametrize(("size", "step"), [(1, 5), (3, 1), (50, 49), (1000, 7), (100_000, 100_000)])
async def test_the_pace_of_a_stream_does_not_matter(rig: Rig, size: int, step: int) -> None:
    answer = events_head() + b"".join(chunked(GIVEN, size)) + b"0\r\nX-Sum: 1\r\n\r\n"
    got = await passed(rig, answer, step=step)
    assert body_of(got) == CLEAN
    assert got.endswith(b"0\r\nX-Sum: 1\r\n\r\n")
    assert got.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" == events_head()
    assert await rig.tape.raw(await rig.span(), "response") == GIVEN


@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=repr)
async def test_events_keep_their_ends_comments_and_keep_alives(rig: Rig, end: bytes) -> None:
    alive, events = b": ping" + end + end, GIVEN.split(b"\n\n")[:-1]
    assert len(events) > CLEAN.count(b"\n\n")
    given = b"".join(alive + event + end + end for event in events)
    answer = events_head() + whole(given, 11)
    got = body_of(await passed(rig, answer))
    assert got.replace(alive, b"") == CLEAN.replace(b"\n", end)
    assert got.count(alive) == len(events)


async def test_an_event_is_passed_on_as_soon_as_it_is_whole(rig: Rig) -> None:
    first, *others = GIVEN.split(b"\n\n")[:3]
    script = [request(), send(events_head()), send(chunk(first + b"\n")), wait("sent"), send(chunk(b"\n" + others[0]))]
    script += [wait("seen"), send(chunk(b"\n\n") + chunk(b""))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call(BODY))
        await client.until(b"\r\n\r\n")
        upstream.go("sent")
        clean = CLEAN.split(b"\n\n")
        assert await client.until(b"\n\n\r\n") == chunk(clean[0] + b"\n\n")
        upstream.go("seen")
        assert await client.until(b"0\r\n\r\n") == chunk(clean[1] + b"\n\n") + chunk(b"")


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(rig: Rig) -> None:
    answer = events_head() + whole(GIVEN, 100)
    sent = head(f"POST {rig.path()} HTTP/1.0", [("Content-Length", str(len(BODY)))]) + BODY
    got = await passed(rig, answer, sent=sent)
    assert got.partition(b"\r\n\r\n")[2] == CLEAN
    assert "transfer-encoding" not in header_fields(got)


@pytest.mark.parametrize("framing", ["length", "chunked", "close", "1.0"])
async def test_a_plain_answer_however_it_is_framed(rig: Rig, framing: str) -> None:
    json_head = "HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"
    heads = {"length": f"content-LENGTH:  {len(PLAIN_GIVEN)}\r\n", "1.0": "", "close": ""}
    framed = PLAIN_GIVEN
    if framing in ("chunked", "1.0"):
        heads[framing] = "Transfer-Encoding: chunked\r\n"
        framed = whole(PLAIN_GIVEN, 300)
    answer = (json_head + heads[framing] + "X-After: 1\r\n\r\n").encode() + framed
    ends = [close()] if framing == "close" else []
    version = "1.0" if framing == "1.0" else "1.1"
    sent = head(f"POST {rig.path()} HTTP/{version}", [("Host", "h"), ("Content-Length", str(len(BODY)))]) + BODY
    got = await passed(rig, answer, *ends, step=97, sent=sent)
    assert body_of(got) == PLAIN_CLEAN
    assert header_fields(got.partition(b"\r\n\r\n")[0])["x-after"] == "1"
    if framing == "length":
        assert header_fields(got.partition(b"\r\n\r\n")[0])["content-length"] == str(len(PLAIN_CLEAN))
    assert await rig.tape.raw(await rig.span(), "response") == PLAIN_GIVEN


@pytest.mark.parametrize(
    "answer",
    [
        reply(200, PLAIN_CLEAN, [("X-B", "2")]),
        reply(200, b'{"choices":[{"token_ids":[1]}'),
        reply(200, gzip.compress(PLAIN_GIVEN, mtime=0), [("Content-Encoding", "gzip")]),
        reply(500, PLAIN_GIVEN),
        reply(200, b""),
        headed("application/json") + b"".join(chunked(PLAIN_CLEAN, 100)) + b"0\r\nX-Sum: 1\r\n\r\n",
        headed("application/x-ndjson", ("Content-Length", str(len(PLAIN_GIVEN)))) + PLAIN_GIVEN,
        events_head([("Content-Encoding", "gzip")]) + chunk(gzip.compress(GIVEN, mtime=0)) + chunk(b""),
    ],
    ids=["ignores", "half", "gzip", "error", "empty", "chunked", "ndjson", "gzip-stream"],
)
async def test_what_needs_no_change_or_is_not_understood_passes_byte_for_byte(rig: Rig, answer: bytes) -> None:
    pieces = [send(answer[at : at + 61]) for at in range(0, len(answer), 61)]
    async with rig.upstream([request(), *pieces]), rig.client() as client:
        client.send(rig.call(BODY))
        assert await client.exactly(len(answer)) == answer
        assert client.end == "open"


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_what_is_too_large_to_be_held_passes_as_it_came(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, framing: str
) -> None:
    monkeypatch.setattr("penstock.gateway.traffic.proxy.plan.capture_framing", partial(capture_framing, limit=1000))
    answer = reply(200, PLAIN_GIVEN)
    if framing == "chunked":
        headers = [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        answer = head("HTTP/1.1 200 OK", headers) + whole(PLAIN_GIVEN, 100)
    script = [request(), send(answer[:1500]), wait("passed"), send(answer[1500:])]
    async with inside(tmp_path, http, route=[{"model": "policy", "upstream": ["up"], "train": True}]) as made:
        async with made.upstream(script) as upstream, made.client() as client:
            client.send(made.call(BODY))
            assert await client.exactly(1500) == answer[:1500]
            upstream.go("passed")
            assert await client.exactly(len(answer) - 1500) == answer[1500:]
        await made.span()
        assert made.gateway.metrics.captured_calls == {("no",): 1}


@pytest.mark.parametrize("how", [close, abort])
async def test_an_upstream_that_breaks_off_breaks_the_clients_answer_too(rig: Rig, how: Any) -> None:
    cut = GIVEN.index(b'"token_ids":[') + 10
    got = (await passed(rig, events_head() + chunk(GIVEN[:cut]), how())).partition(b"\r\n\r\n")[2]
    whole = GIVEN[:cut].rpartition(b"\n\n")[0].count(b"\n\n") + 1
    assert got == chunk(b"".join(one + b"\n\n" for one in CLEAN.split(b"\n\n")[:whole]))
    span = await rig.span()
    assert (span.status, span.error) == ("error", "upstream_closed")
    assert await rig.tape.raw(span, "response") == GIVEN[:cut]


async def test_half_a_plain_answer_is_seen_to_be_half(rig: Rig) -> None:
    answer = reply(200, PLAIN_GIVEN)
    got = await passed(rig, answer[:-20], close())
    assert got == answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    assert (await rig.span()).status == "error"


async def test_a_request_in_chunks_grows(rig: Rig) -> None:
    framing = [("Host", "h"), ("Transfer-Encoding", "chunked"), ("Accept-encoding", "gzip")]
    async with rig.upstream([request(), send(reply(200, b"{}"))]) as upstream, rig.client() as client:
        client.send(head(f"POST {rig.path()} HTTP/1.1", framing) + whole(BODY, 10))
        await client.message()
        seen = (await upstream.connection(0)).requests[0]
    assert body_of(seen) == b'{"return_token_ids":true,"logprobs":true,' + BODY[1:]
    assert header_fields(seen)["accept-encoding"] == "identity"


async def test_a_tape_that_is_waited_for_holds_the_last_byte_only(
    provider: Provider, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    provider.formats = vllm_wire.FORMATS
    route, tape = [{"model": "policy", "upstream": ["vllm"], "train": True}], {"record": "strict"}
    upstream = [{"name": "vllm", "base_url": provider.openai_url}]
    async with inside(tmp_path, http, upstream=upstream, route=route, tape=tape) as made:
        for stream in (False, True):
            body = json.dumps(ASK | {"stream": stream}).encode()
            through = await asked_of(made.base.url, made.path(), body)
            assert body_of(through) == body_of(await asked_of(provider.url, CHAT, body))


async def test_metrics_tell_when_an_engine_gives_no_ids(rig: Rig, http: aiohttp.ClientSession) -> None:
    await passed(rig, reply(200, PLAIN_CLEAN))
    await rig.span()
    async with http.get(f"http://{urlsplit(rig.base.url).netloc}/metrics") as response:
        rows = (await response.text()).splitlines()
    assert any(row.startswith('penstock_captured_calls_total{ids="no"}') for row in rows)


# -- streams under other content types, and plain answers under theirs, as proxies of engines send them ---------------

KINDS = [None, "application/json", "text/plain; charset=utf-8", "application/octet-stream", "text/event-stream"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [1, 4, 30])
async def test_a_stream_is_one_under_any_type_and_is_not_held_back(rig: Rig, kind: str | None, first: int) -> None:
    event = GIVEN.index(b"\n\n") + 2
    script = [request(), send(headed(kind)), send(chunk(GIVEN[:first]) + chunk(GIVEN[first:event])), wait("seen")]
    script += [send(whole(GIVEN[event:], 100))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call(BODY))
        seen = await client.until(b"\n\n\r\n")
        upstream.go("seen")
        seen += await client.message()
    assert seen.startswith(headed(kind))
    assert b"".join(seen.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]) == CLEAN
    span = await rig.span()
    assert (span.stream, span.status, span.finish, span.tool_calls) == (True, "ok", "tool_calls", 2)
    assert await rig.tape.raw(span, "response") == GIVEN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_a_plain_answer_is_one_under_any_type(rig: Rig, kind: str | None, framing: str) -> None:
    more = {"length": ("Content-Length", str(len(PLAIN_GIVEN))), "close": ("Connection", "close")}
    answer = headed(kind, *([more[framing]] if framing in more else []))
    answer += whole(PLAIN_GIVEN, 50) if framing == "chunked" else PLAIN_GIVEN
    ends = [close()] if framing == "close" else []
    assert body_of(await passed(rig, answer, *ends)) == PLAIN_CLEAN
    span = await rig.span()
    assert (span.stream, span.status, span.finish, span.tool_calls) == (False, "ok", "tool_calls", 2)


def received(*reads: bytes) -> list[bytes]:
    """What the client has got of each read."""
    asked = CaptureRequest(b"", tuple(MORE), False)
    return framed.received(lambda connection: capture_framing(asked, connection, connection.chunked), reads)


@pytest.mark.parametrize("kind", [*KINDS, "text/html", "application/vnd.engine+json"])
@given(places=st.lists(st.integers(0, len(PLAIN_GIVEN)), max_size=3))
def test_a_plain_answer_is_cleaned_however_its_head_and_body_are_read(kind: str | None, places: list[int]) -> None:
    ends = sorted({0, len(PLAIN_GIVEN), *places})
    pieces = [PLAIN_GIVEN[start:end] for start, end in pairwise(ends)]
    got = b"".join(received(headed(kind, ("Content-Length", str(len(PLAIN_GIVEN)))), *pieces))
    assert body_of(got) == PLAIN_CLEAN


@pytest.mark.parametrize("before", [b"", b"\n "])
def test_what_turns_out_to_be_no_json_is_not_held_back(before: bytes) -> None:
    head = headed("text/plain", ("Content-Length", "8"))
    assert received(head + before, b"some", b"word"[len(before) :]) == [
        b"",
        head + before + b"some",
        b"word"[len(before) :],
    ]


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", None])
async def test_a_stream_with_a_length_is_cleaned_too_and_one_without_tokens_passes(rig: Rig, kind: str | None) -> None:
    given = headed(kind, ("Content-Length", str(len(GIVEN)))) + GIVEN
    for answer in (given, headed(kind) + whole(CLEAN, 10_000)):
        assert body_of(await passed(rig, answer, step=70)) == CLEAN
    assert [span.stream for span in await rig.tape.spans(rig.rollout, 2)] == [True, True]


@pytest.mark.parametrize("packed", [False, True])
async def test_other_routes_pass_it_as_it_came(rig: Rig, packed: bool) -> None:
    more = [("Content-Encoding", "gzip")] if packed else []
    answer = reply(200, gzip.compress(CLEAN, mtime=0) if packed else CLEAN, [("Content-Type", "text/plain"), *more])
    async with rig.upstream([request(), send(answer)]), rig.client() as client:
        client.send(post(rig.path(CHAT), BODY.replace(b"policy", b"other")))
        assert await client.exactly(len(answer)) == answer
    span = await rig.span()
    assert (span.stream, span.finish, span.tool_calls) == (True, "tool_calls", 2)


async def test_an_error_of_a_trained_model_passes_under_any_type(rig: Rig) -> None:
    answer = headed("text/event-stream") + chunk(b'{"error":{"message":"No."}}') + chunk(b"")
    assert await passed(rig, answer) == answer
    span = await rig.span()
    assert (span.stream, span.status, span.error) == (False, "error", "error_body")


async def test_a_client_that_leaves_after_the_last_event_has_had_it_all(rig: Rig) -> None:
    script = [request(), send(headed("application/json") + chunk(CLEAN)), wait("never")]
    async with rig.upstream(script):
        async with rig.client() as client:
            client.send(post(rig.path(CHAT), BODY.replace(b"policy", b"other")))
            await client.until(b"[DONE]\n\n")
        span = await rig.span()  # before the upstream leaves, too
    assert (span.status, span.stream) == ("ok", True)


@given(kept=st.integers(0, 40), field=st.sampled_from([b"data: x", b"event: a", b"id:1", b"retry: 3", b": ping"]))
def test_the_first_bytes_tell(kept: int, field: bytes) -> None:
    for before in (b"", b"\xef\xbb\xbf", b"\n\r\n"):
        whole = before + field + b"\n\n"
        assert begins_event_stream(whole[:kept]) in (None, True)
        assert begins_event_stream(whole) is True
    for other in (b"{", b" [", b"data", b"dat", b"identity", b"<html>", b"\x1f\x8b", b"retry"):
        assert begins_event_stream(other + b" 1") is False


@pytest.mark.parametrize(
    ("dialect", "request_body", "path", "asks"),
    [
        ("chat", b'{"stream" : true}', "", True),
        ("chat", b'{"messages":[{"content":"{\\"stream\\": true}"}]}', "", False),
        ("gemini", b"{}", "/v1beta/models/m:streamGenerateContent?alt=sse", True),
        ("gemini", b"{}", "/v1beta/models/m:generateContent", False),
        ("converse", b"{}", "/model/m/converse-stream", True),
        ("converse", b"{}", "/model/m/converse", False),
        ("mcp", b'{"stream": true}', "/mcp/a", False),
        ("opaque", b'{"stream": true}', "/v1/other", True),
    ],
)
def test_who_asks_for_a_stream(dialect: str, request_body: bytes, path: str, asks: bool) -> None:
    assert by_name(dialect).asks_stream(request_body, path) == asks
