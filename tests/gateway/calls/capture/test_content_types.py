"""Streams under other content types, and plain answers under theirs, as proxies of engines send them: what the agent
gets, when it gets it, and what is on the tape."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import vllm_wire
from fakes.odd import close, request, send, wait
from fakes.raw import body_of, chunk, head, post, reply
from fakes.rig import CHAT, Rig
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.capture.framing import Framing, cleaned
from penstock.gateway.calls.capture.request import Asked
from penstock.gateway.demo.model import Answer, Call
from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.sse import begins
from penstock.gateway.http.upstream_connection import UpstreamConnection

Json = dict[str, Any]
ASK: Json = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
MORE = {"return_token_ids": True, "logprobs": True}
CALLS = Answer("Let me look.", (Call("c1", "get", '{"x": 1}'),))
GIVEN, CLEAN = (b"".join(vllm_wire.chat_events(one, CALLS)) for one in (ASK | MORE, ASK))
PLAIN_GIVEN, PLAIN_CLEAN = (json.dumps(vllm_wire.chat(one, CALLS)).encode() for one in (ASK | MORE, ASK))
BODY = json.dumps(ASK | {"stream": True}).encode()
KINDS = [None, "application/json", "text/plain; charset=utf-8", "application/octet-stream", "text/event-stream"]


@pytest.fixture(scope="module")
def gateway_config() -> str:
    return '[[route]]\nmodel = "policy"\nupstream = "up"\ntrain = true\n\n[[route]]\nmodel = "*"\nupstream = "up"\n\n'


def headed(kind: str | None, *more: tuple[str, str]) -> bytes:
    given = [] if kind is None else [("Content-Type", kind)]
    return head("HTTP/1.1 200 OK", [*given, *(more or [("Transfer-Encoding", "chunked")])])


def chunked(body: bytes, size: int) -> bytes:
    return b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size)) + chunk(b"")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [1, 4, 30])
async def test_a_stream_is_one_under_any_type_and_is_not_held_back(rig: Rig, kind: str | None, first: int) -> None:
    event = GIVEN.index(b"\n\n") + 2
    script = [request(), send(headed(kind)), send(chunk(GIVEN[:first]) + chunk(GIVEN[first:event])), wait("seen")]
    script += [send(chunked(GIVEN[event:], 100))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call(BODY))
        seen = await client.until(b"\n\n\r\n")
        upstream.go("seen")
        seen += await client.message()
    assert seen.startswith(headed(kind))
    assert b"".join(seen.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]) == CLEAN
    span = await rig.span()
    assert (span.stream, span.status, span.finish, span.tool_calls) == (True, "ok", "tool_calls", 1)
    assert await rig.tape.raw(span, "response") == GIVEN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_a_plain_answer_is_one_under_any_type(rig: Rig, kind: str | None, framing: str) -> None:
    more = {"length": ("Content-Length", str(len(PLAIN_GIVEN))), "close": ("Connection", "close")}
    answer = headed(kind, *([more[framing]] if framing in more else []))
    answer += chunked(PLAIN_GIVEN, 50) if framing == "chunked" else PLAIN_GIVEN
    ends = [close()] if framing == "close" else []
    async with rig.upstream([request(), send(answer), *ends]), rig.client() as client:
        client.send(rig.call(BODY))
        got = await (client.rest() if framing == "close" else client.message())
    assert body_of(got) == PLAIN_CLEAN
    span = await rig.span()
    assert (span.stream, span.status, span.finish, span.tool_calls) == (False, "ok", "tool_calls", 1)


class Client:
    """What a client gets of the reads of a link."""

    head_only = False

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.way: Framing | None = None

    def on_answer(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> None:
        self.way = cleaned(Asked(b"", tuple(MORE), False), connection, connection.chunked)
        self.got.append(head + raw if self.way is None else self.way.begin(connection, head, raw))
        connection.pieces = []

    def on_data(self, connection: UpstreamConnection, raw: bytes) -> None:
        self.got.append(raw if self.way is None else self.way.go_on(connection, raw))
        connection.pieces = []

    def on_broken(self, connection: UpstreamConnection, reason: str) -> None:
        raise AssertionError(reason)


def received(*reads: bytes) -> list[bytes]:
    """What the client has got of each read."""
    owner = SimpleNamespace(name="u", connections=0, put_back=lambda _: None, forget=lambda _: None)  # pyright: ignore
    connection, client = UpstreamConnection(cast(Any, owner)), Client()
    connection.connection_made(cast(Any, SimpleNamespace(is_closing=lambda: False, write=lambda _: None)))  # pyright: ignore
    connection.send(cast(Any, client), b"", b"")
    for read in reads:
        connection.data_received(read)
    return client.got


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


@pytest.mark.parametrize("kind", ["application/json", None])
async def test_a_stream_with_a_length_is_cleaned_too(rig: Rig, kind: str | None) -> None:
    answer = headed(kind, ("Content-Length", str(len(GIVEN)))) + GIVEN
    async with rig.upstream([request(), send(answer[:70]), send(answer[70:])]), rig.client() as client:
        client.send(rig.call(BODY))
        assert body_of(await client.message()) == CLEAN
    assert (await rig.span()).stream


@pytest.mark.parametrize("packed", [False, True])
async def test_other_routes_pass_it_as_it_came(rig: Rig, packed: bool) -> None:
    more = [("Content-Encoding", "gzip")] if packed else []
    answer = reply(200, gzip.compress(CLEAN, mtime=0) if packed else CLEAN, [("Content-Type", "text/plain"), *more])
    async with rig.upstream([request(), send(answer)]), rig.client() as client:
        client.send(post(rig.path(CHAT), BODY.replace(b"policy", b"other")))
        assert await client.exactly(len(answer)) == answer
    span = await rig.span()
    assert (span.stream, span.finish, span.tool_calls) == (True, "tool_calls", 1)


async def test_an_error_of_a_trained_model_passes_under_any_type(rig: Rig) -> None:
    answer = headed("text/event-stream") + chunk(b'{"error":{"message":"No."}}') + chunk(b"")
    async with rig.upstream([request(), send(answer)]), rig.client() as client:
        client.send(rig.call(BODY))
        assert await client.message() == answer
    span = await rig.span()
    assert (span.stream, span.status, span.error) == (False, "error", "error_body")


async def test_a_client_that_leaves_after_the_last_event_has_had_it_all(rig: Rig) -> None:
    script = [request(), send(headed("application/json") + chunk(CLEAN)), wait("never")]
    async with rig.upstream(script), rig.client() as client:
        client.send(post(rig.path(CHAT), BODY.replace(b"policy", b"other")))
        await client.until(b"[DONE]\n\n")
    span = await rig.span()
    assert (span.status, span.stream) == ("ok", True)


@given(kept=st.integers(0, 40), field=st.sampled_from([b"data: x", b"event: a", b"id:1", b"retry: 3", b": ping"]))
def test_the_first_bytes_tell(kept: int, field: bytes) -> None:
    for before in (b"", b"\xef\xbb\xbf", b"\n\r\n"):
        whole = before + field + b"\n\n"
        assert begins(whole[:kept]) in (None, True)
        assert begins(whole) is True
    for other in (b"{", b" [", b"data", b"dat", b"identity", b"<html>", b"\x1f\x8b", b"retry"):
        assert begins(other + b" 1") is False


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
