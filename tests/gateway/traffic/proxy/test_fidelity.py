"""What passes through the gateway is what was sent: every byte, in both directions, and on the tape."""

from __future__ import annotations

import gzip
import json

import pytest
from fakes.odd import Step, close, half_close, request, request_head, send, wait
from fakes.raw import body_of, chunk, events_head, head, header_fields, post, reply
from fakes.rig import CHAT, MESSAGES, Rig

EVENTS = (
    b": a comment\n\n"
    b'id: 7\r\nretry: 1500\r\nevent: odd\r\ndata: {"x": "\xf0\x9f\x92\xa7"}\r\n\r\n'
    b"data: one\rdata: two\r\r"
    b"data: [DONE]\n\n"
)
UNKNOWN = b'{ "zebra" : 1,"id":"x","vendor":{"b":[1.0,1e5, -0],"a":null}, "choices":[],"dup":1,"dup":2 }\n'
BIG = bytes(range(256)) * 20_000


def chunks(*pieces: bytes) -> bytes:
    return b"".join(map(chunk, [*pieces, b""]))


ANSWERS = {
    "unknown-fields": reply(200, UNKNOWN),
    "odd-headers": b"HTTP/1.1 200 OK\r\nX-A:1\r\nx-a:  2  \r\nX-a: 1\r\nSERVER: \xe9\r\nX-Empty:\r\n"
    b"Content-length: 2\r\n\r\n{}",
    "set-cookies": reply(200, b"{}", [("Set-Cookie", "a=1; Path=/"), ("Set-Cookie", "b=2")]),
    "gzip": reply(200, gzip.compress(UNKNOWN, mtime=0), [("Content-Encoding", "gzip")]),
    "sse": events_head() + chunks(EVENTS),
    "sse-cut-in-characters": events_head() + chunks(*[EVENTS[at : at + 3] for at in range(0, len(EVENTS), 3)]),
    "sse-one-byte-chunks": events_head() + chunks(*[EVENTS[at : at + 1] for at in range(len(EVENTS))]),
    "chunk-extensions-and-trailers": events_head([("Trailer", "X-Sum, X-Other")])
    + b'5;ext="q;\\"";n\r\nhello\r\n00000A\r\n0123456789\r\n0;last=1\r\nX-Sum: abc\r\nX-Other:  d\r\n\r\n',
    "empty": reply(200, b""),
    "empty-chunked": events_head() + chunk(b""),
    "no-content": b"HTTP/1.1 204 No Content\r\nx-request-id: 1\r\n\r\n",
    "not-modified": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 5\r\n\r\n',
    "odd-reason": b"HTTP/1.1 200 F\xfcr alles, was  recht ist\r\nContent-Length: 2\r\n\r\n{}",
    "no-reason": b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{}",
    "unknown-status": b"HTTP/1.1 299 Odd\r\nContent-Length: 2\r\n\r\n{}",
    "bad-request": reply(400, b'{"error":{"message":"no","vendor":[1]}}'),
    "unauthorized": reply(401, b'{"error":{"message":"no"}}', [("WWW-Authenticate", 'Bearer realm="x"')]),
    "rate-limit": reply(
        429, b'{"error":{"message":"slow"}}', [("Retry-After", "7"), ("x-ratelimit-remaining-tokens", "0")]
    ),
    "server-error": reply(500, b"<html>oops</html>", [("Content-Type", "text/html")]),
    "overloaded": b"HTTP/1.1 529 \r\nContent-Length: 2\r\n\r\n{}",
    "not-json": reply(200, bytes(range(256))),
    "big": reply(200, BIG),
    "big-chunked": events_head() + chunks(BIG, BIG[:100_000]),
}

ENDLESS = ("chunk-extensions-and-trailers", "empty-chunked", "big-chunked")
"""Streams that pass whole, and hold no answer that is."""


def payload(name: str) -> bytes:
    """The body that an answer carries."""
    if name.startswith("chunk-ext"):
        return b"hello0123456789"
    return b"" if name == "not-modified" else body_of(ANSWERS[name])


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_arrives_and_is_kept_byte_for_byte(rig: Rig, name: str) -> None:
    answer = ANSWERS[name]
    async with rig.upstream([request(), send(answer), request(), send(reply(200, b"again"))]), rig.client() as client:
        client.send(rig.call())
        assert await client.exactly(len(answer)) == answer
        # Nothing was added, and both connections can be used again.
        client.send(rig.call())
        assert await client.message() == reply(200, b"again")
    first, second = await rig.tape.spans(rig.rollout, 2)
    status = int(answer[9:12])
    error = f"http_{status}" if status >= 400 else "ended_early" if name in ENDLESS else None
    assert (first.http_status, first.status, first.error) == (status, "error" if error else "ok", error)
    assert await rig.tape.raw(first, "response") == payload(name)
    assert second.status == "ok"


async def test_the_tape_has_headers_trailers_and_arrival_times(rig: Rig) -> None:
    await rig.passes(rig.call(headers=[("X-B", "2"), ("x-b", "3")]), ANSWERS["chunk-extensions-and-trailers"])
    detail = await rig.tape.detail(await rig.span())
    assert detail.exchange is not None
    assert detail.exchange.trailers == [("X-Sum", "abc"), ("X-Other", "d")]
    assert detail.exchange.response_headers[-1] == ("Trailer", "X-Sum, X-Other")
    sent = [header for header in detail.exchange.request_headers if header[0].lower() == "x-b"]
    assert sent == [("X-B", "2"), ("x-b", "3")]
    assert sum(found.size for found in detail.exchange.chunks) == 15
    assert detail.span.first_byte_ns == pytest.approx(detail.exchange.chunks[0].at_ns, abs=1000)


@pytest.mark.parametrize("step", [1, 2, 7])
async def test_the_pace_of_an_answer_does_not_matter(rig: Rig, step: int) -> None:
    answer = events_head([("X-Long", "y" * 100)]) + chunks(EVENTS)
    pieces: list[Step] = [send(answer[at : at + step]) for at in range(0, len(answer), step)]
    async with rig.upstream([request(), *pieces]), rig.client() as client:
        client.send(rig.call())
        assert await client.exactly(len(answer)) == answer
    assert await rig.tape.raw(await rig.span(), "response") == EVENTS


async def test_the_first_event_is_not_held_back(rig: Rig) -> None:
    first = chunk(b"data: 1\n\n")
    script = [request(), send(events_head()), wait("head"), send(first), wait("first"), send(first + chunk(b""))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.until(b"\r\n\r\n")
        upstream.go("head")
        assert await client.until(b"\n\n\r\n") == first
        upstream.go("first")
        assert await client.until(b"0\r\n\r\n") == first + chunk(b"")
    assert len((await rig.tape.detail(await rig.span())).exchange.chunks) == 2  # type: ignore[union-attr]


HEADERS = [
    ("Content-Type", "application/json"), ("X-Stainless-Lang", "python"), ("x-dup", "1"), ("X-Dup", "2"),
    ("authorization", "Bearer sk-agent"), ("anthropic-version", "2023-06-01"), ("ACCEPT", "*/*"), ("X-Empty", ""),
    ("x-latin", "\xe9"), ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"), ("Cookie", "a=b"),
]  # fmt: skip


def fields(message: bytes) -> list[tuple[str, str]]:
    """Header fields of a message in order."""
    lines = message.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
    return [(name, value.strip(" ")) for name, _, value in (line.partition(":") for line in lines)]


@pytest.mark.parametrize(
    "body",
    [b"", UNKNOWN, gzip.compress(UNKNOWN, mtime=0), b'{"model":"m","text":"\\u00e9\xc3\xa9\xf0\x9f\x92\xa7"}', BIG],
    ids=["empty", "unknown", "gzip", "utf-8", "big"],
)
async def test_a_request_goes_upstream_byte_for_byte(rig: Rig, body: bytes) -> None:
    sent = [*HEADERS, ("Content-Length", str(len(body)))]
    start = head(f"POST {rig.path(CHAT + '?a=%2f&b')} HTTP/1.1", [("host", "gateway:1"), *sent])
    _, seen = await rig.passes(start + body)
    assert seen.startswith(b"POST /v1/chat/completions?a=%2f&b HTTP/1.1\r\n")
    assert fields(seen) == [("Host", rig.host), *sent]
    assert body_of(seen) == body
    assert await rig.tape.raw(await rig.span(), "request") == body


async def test_chunks_of_a_request_stay_the_clients_own(rig: Rig) -> None:
    pieces = [b'{"model":', b'"m"', b",", b'"x":"' + b"y" * 70_000 + b'"}']
    framing = [("Transfer-Encoding", "chunked"), ("Trailer", "X-Sum")]
    last = b"0\r\nX-Sum: 1\r\nAuthorization: Bearer no\r\n\r\n"
    start = head(f"POST {rig.path()} HTTP/1.1", [("Host", "h"), *framing])
    chunked = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    _, seen = await rig.passes(start + chunked + last)
    # Extensions end at the gateway, and so do trailers that would mean something else as headers.
    assert seen.partition(b"\r\n\r\n")[2] == b"".join(map(chunk, pieces)) + b"0\r\nX-Sum: 1\r\n\r\n"
    assert fields(seen) == [("Host", rig.host), *framing]
    assert await rig.tape.raw(await rig.span(), "request") == b"".join(pieces)


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS"])
async def test_any_method_and_path_passes(rig: Rig, method: str) -> None:
    path = "/v1/files/x/content?after=1"
    got, seen = await rig.passes(head(f"{method} {rig.path(path)} HTTP/1.1", [("Host", "h")]), reply(200, b"[1]"))
    assert (got, seen.partition(b"\r\n")[0]) == (reply(200, b"[1]"), f"{method} {path} HTTP/1.1".encode())
    span = await rig.span()
    assert (span.method, span.path, span.dialect) == (method, path, "opaque")


async def test_messages_go_to_the_anthropic_upstream(rig: Rig) -> None:
    _, seen = await rig.passes(rig.call(below=MESSAGES + "?beta=true"))
    assert seen.startswith(b"POST /v1/messages?beta=true HTTP/1.1")
    assert (await rig.span()).upstream == "anthropic-up"


async def test_a_head_request_has_no_body_whatever_it_says(rig: Rig) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    scripts = [request(), send(answer), request(), send(reply(200, b"{}"))]
    async with rig.upstream(scripts), rig.client() as client:
        client.send(head(f"HEAD {rig.path('/v1/models')} HTTP/1.1", [("Host", "h")]))
        assert await client.exactly(len(answer)) == answer
        client.send(rig.call())
        assert await client.message() == reply(200, b"{}")


@pytest.mark.parametrize("step", [1, 1000])
async def test_an_interim_answer_passes_before_the_answer(rig: Rig, step: int) -> None:
    unasked, answer = b"HTTP/1.1 100 Continue\r\n\r\n", reply(200, b"{}")
    passes = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n" + answer
    whole = unasked + passes
    pieces = [send(whole[at : at + step]) for at in range(0, len(whole), step)]
    async with rig.upstream([request(), *pieces]), rig.client() as client:
        client.send(rig.call())
        assert await client.exactly(len(passes)) == passes
    assert (await rig.span()).http_status == 200


async def test_an_answer_may_end_with_its_connection(rig: Rig) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with (
        rig.upstream([request(), send(answer + EVENTS[:20]), send(EVENTS[20:]), close()]),
        rig.client() as client,
    ):
        client.send(rig.call())
        got = await client.rest()
    assert client.end == "eof"
    assert body_of(got) == EVENTS
    assert header_fields(got)["connection"] == "close"
    span = await rig.span()
    assert (span.status, span.response_bytes, span.stream) == ("ok", len(EVENTS), True)


async def test_a_client_of_http_1_0_gets_what_it_understands(rig: Rig) -> None:
    script = [request(), send(events_head() + chunks(EVENTS[:9], EVENTS[9:]))]
    start = head(f"POST {rig.path()} HTTP/1.0", [("Connection", "keep-alive"), ("Content-Length", "2")])
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(start + b"{}")
        got = await client.rest()
        assert (await upstream.connection(0)).requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert got.partition(b"\r\n\r\n")[2] == EVENTS
    assert "transfer-encoding" not in header_fields(got)
    assert header_fields(got)["connection"] == "close"


async def test_an_upstream_of_http_1_0_is_understood(rig: Rig) -> None:
    answer = b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nx-Odd:1\r\n\r\n{}"
    async with rig.upstream([request(), send(answer), close()]), rig.client() as client:
        client.send(rig.call())
        assert await client.message() == answer.replace(b"1.0", b"1.1", 1)
        assert client.end == "open"


async def test_a_client_that_asks_for_it_is_closed(rig: Rig) -> None:
    async with rig.upstream([request(), send(reply(200, b"{}")), request(), send(reply(200, b"{}"))]) as upstream:
        for _ in range(2):
            async with rig.client() as client:
                client.send(rig.call(headers=[("Connection", "close")]))
                got = await client.rest()
                assert (client.end, body_of(got), header_fields(got)["connection"]) == ("eof", b"{}", "close")
        # The upstream's connection is ours, and stays.
        assert len(upstream.connections) == 1


async def test_an_upstream_that_closes_does_not_close_the_client(rig: Rig) -> None:
    answer = reply(200, b"{}", [("Connection", "close"), ("Keep-Alive", "timeout=5"), ("X-Kept", " yes ")])
    script = [request(), send(answer), close()]
    async with rig.upstream(script, script) as upstream, rig.client() as client:
        for _ in range(2):
            client.send(rig.call())
            assert await client.message() == reply(200, b"{}", [("X-Kept", " yes ")])
        assert len(upstream.connections) == 2


async def test_hop_by_hop_headers_end_at_the_gateway(rig: Rig) -> None:
    hops = [
        ("Connection", "keep-alive, X-Mine"), ("connection", "x-also"), ("Keep-Alive", "timeout=5"), ("TE", "trailers"),
        ("Proxy-Authorization", "Basic no"), ("Proxy-Connection", "keep-alive"), ("X-Mine", "1"), ("X-ALSO", "2"),
    ]  # fmt: skip
    answer_hops = [("Connection", "X-Theirs, keep-alive"), ("X-Theirs", "1"), ("Proxy-Authenticate", "Basic")]
    sent = rig.call(headers=[("X-Before", "1"), *hops, ("X-After", "2")])
    got, seen = await rig.passes(sent, reply(200, b"{}", answer_hops))
    assert got == reply(200, b"{}")
    assert [name for name, _ in fields(seen)] == ["Host", "Content-Type", "Content-Length", "X-Before", "X-After"]


async def test_expect_continue_is_answered_by_the_gateway(rig: Rig) -> None:
    expects = [("Host", "h"), ("Content-Length", "2"), ("Expect", "100-continue")]
    async with rig.upstream([request(), send(reply(200, b"{}"))]) as upstream, rig.client() as client:
        client.send(head(f"POST {rig.path()} HTTP/1.1", expects))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"{}")
        assert await client.message() == reply(200, b"{}")
        assert b"xpect" not in (await upstream.connection(0)).requests[0]


async def test_an_offer_of_http_2_is_ignored(rig: Rig) -> None:
    """Java's HttpClient offers h2c with every first request."""
    offer = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABk")]
    script = [request(), send(reply(200, b"1")), request(), send(reply(200, b"2"))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call(b'{"a":1}', headers=offer) + rig.call(b'{"a":2}'))
        assert [body_of(await client.message()) for _ in range(2)] == [b"1", b"2"]
        assert [json.loads(body_of(seen)) for seen in (await upstream.connection(0)).requests] == [{"a": 1}, {"a": 2}]


async def test_an_early_answer_to_a_long_request_arrives(rig: Rig) -> None:
    """An upstream that refuses before it has read everything must not be reused."""
    refusal = reply(413, b'{"error":1}')
    script = [request_head(), send(refusal), half_close()]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(post(rig.path(), BIG))
        assert await client.message() == refusal
        await (await upstream.connection(0)).gone()
