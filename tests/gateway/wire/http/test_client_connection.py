"""The client-facing side: what is refused and how, whose turn it is, and both planes on one connection."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Sequence

import pytest
from fakes.odd import request, send, wait
from fakes.raw import Headers, body_of, error_of, get, head, header_fields, post, reply
from fakes.rig import Inside, Rig, Within

from penstock.gateway import app

LIMITS = """
[limits]
request_bytes = 1000000
"""
OWN = "127.0.0.1"


@pytest.fixture(scope="module")
def gateway_config() -> str:
    """Small limits."""
    return LIMITS


@pytest.fixture
async def hasty(within: Within, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Inside]:
    """A gateway that soon closes clients that say nothing; the others' need not be in time."""
    monkeypatch.setattr(app, "CLIENT_S", 0.6)
    async with within() as made:
        yield made


def refused(answer: bytes, status: int) -> str:
    """The message of a refusal in OpenAI's shape."""
    error = error_of(answer, status)
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


def raw_post(rig: Rig, headers: Headers, body: bytes) -> bytes:
    return head(f"POST {rig.path()} HTTP/1.1", [("Host", "h"), *headers]) + body


SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
TE = ("Transfer-Encoding", "chunked")
SMUGGLERS: dict[str, tuple[Sequence[tuple[str, str]], bytes]] = {
    "length-then-chunked": ([("Content-Length", "5"), TE], b"0\r\n\r\n"),
    "chunked-then-length": ([TE, ("Content-Length", "5")], b"0\r\n\r\n"),
    "two-lengths": ([("Content-Length", "0"), ("Content-Length", "5")], b""),
    "equal-lengths": ([("Content-Length", "0"), ("Content-Length", "0")], b""),
    "list-of-lengths": ([("Content-Length", "0, 0")], b""),
    "signed-length": ([("Content-Length", "+0")], b""),
    "negative-length": ([("Content-Length", "-1")], b""),
    "hex-length": ([("Content-Length", "0x0")], b""),
    "huge-length": ([("Content-Length", "9" * 30)], b""),
    "unknown-coding": ([("Transfer-Encoding", "xchunked")], b"0\r\n\r\n"),
    "chunked-not-last": ([("Transfer-Encoding", "chunked, identity")], b"0\r\n\r\n"),
    "two-codings": ([TE, ("Transfer-Encoding", "identity")], b"0\r\n\r\n"),
    "vertical-tab": ([("Transfer-Encoding", "\x0bchunked")], b"0\r\n\r\n"),
    "space-before-colon": ([("Transfer-Encoding ", "chunked")], b"0\r\n\r\n"),
    "tab-before-colon": ([("Transfer-Encoding\t", "chunked")], b"0\r\n\r\n"),
    "folded": ([("X-A", "1\r\n Transfer-Encoding: chunked")], b"0\r\n\r\n"),
    "bare-lf": ([("X-A", "1\nTransfer-Encoding: chunked")], b"0\r\n\r\n"),
    "bare-cr": ([("X-A", "1\rTransfer-Encoding: chunked")], b"0\r\n\r\n"),
    "nul-in-value": ([("X-A", "a\0b")], b""),
    "nul-in-name": ([("X\0A", "b")], b""),
    "control-in-value": ([("X-A", "a\x01b")], b""),
    "no-colon": ([("X-A\r\nTransfer-Encoding chunked\r\nX-B", "1")], b""),
    "chunk-with-junk": ([TE], b"5\r\nhelloXX0\r\n\r\n"),
    "chunk-with-lf": ([TE], b"5\nhello\r\n0\r\n\r\n"),
    "chunk-with-0x": ([TE], b"0x5\r\nhello\r\n0\r\n\r\n"),
    "chunk-overflow": ([TE], b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
    "two-hosts": ([("Host", "localhost"), ("Host", "other.test")], b""),
    "length-in-trailer": ([TE], b"0\r\nContent-Length: 3\r\n\r\n"),
}


@pytest.mark.parametrize("name", SMUGGLERS)
async def test_smuggling_is_refused_and_nothing_of_it_goes_upstream(rig: Rig, name: str) -> None:
    headers, body = SMUGGLERS[name]
    async with rig.upstream([request()]) as upstream, rig.client() as client:
        client.send(raw_post(rig, headers, body) + SMUGGLED)
        got = await client.rest()
        refused(got, 400)
        assert got.count(b"HTTP/1.1 ") == 1
        assert upstream.connections == []


@pytest.mark.parametrize("hop", ["Content-Length", "transfer-encoding", "Host"])
async def test_framing_cannot_be_declared_hop_by_hop(rig: Rig, hop: str) -> None:
    _, seen = await rig.passes(rig.call(SMUGGLED, [("Connection", f"keep-alive, {hop}")]))
    assert body_of(seen) == SMUGGLED


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET http://169.254.169.254/latest HTTP/1.1", 400),
        ("GET * HTTP/1.1", 400),
        ("OPTIONS * HTTP/1.1", 400),
        ("CONNECT example.org:443 HTTP/1.1", 403),
        ("GET /v1/../../admin HTTP/1.1", 400),
        ("GET /v1/%2e%2E/admin HTTP/1.1", 400),
        ("GET /rollout/r1/attempt/a1/v1/..%2fx HTTP/1.1", 400),
        ("GET /rollout/r%2f1/attempt/a1/v1/models HTTP/1.1", 400),
        ("GET /v1/models HTTP/2.0", 505),
        ("GET /v1/models HTTP/1.2", 400),
        ("get /v1/models HTTP/1.1", 400),
        ("PRI * HTTP/2.0", 400),
    ],
)
async def test_a_request_line_that_is_refused(rig: Rig, line: str, status: int) -> None:
    async with rig.upstream([request()]) as upstream, rig.client() as client:
        client.send(head(line, [("Host", "h")]))
        assert refused(await client.message(), status)
        assert upstream.connections == []


async def test_bytes_that_are_no_http_are_refused(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        refused(await client.rest(), 400)


async def test_a_refusal_of_garbage_waits_for_the_answer_before_it(rig: Rig) -> None:
    script = [request(), wait("garbage"), send(reply(200, b'{"n":1}'))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call())
        await (await upstream.connection(0)).when(lambda: bool(upstream.connections[0].requests))
        client.send(b"garbage\r\n\r\n")
        upstream.go("garbage")
        assert await client.message() == reply(200, b'{"n":1}')
        refused(await client.rest(), 400)
    assert (await rig.span()).status == "ok"


async def test_what_follows_a_last_request_is_ignored(rig: Rig) -> None:
    async with rig.upstream([request(), send(reply(200, b"{}"))]), rig.client() as client:
        client.send(rig.call(headers=[("Connection", "close")]) + b"garbage")
        assert (await client.rest()).count(b"HTTP/1.1 ") == 1
    assert (await rig.span()).status == "ok"


@pytest.mark.parametrize(("first", "pieces"), [(0, 1), (0, 40), (40_000, 1), (40_000, 40), (None, 0)], ids=str)
async def test_an_oversize_head_is_refused(rig: Rig, first: int | None, pieces: int) -> None:
    """However it is cut into reads: also when most of it came in the read that began it, and where it is one line."""
    async with rig.upstream([request()]) as upstream, rig.client() as client:
        if first is None:
            client.send(get(rig.path() + "?" + "q" * 65_536))
        else:
            client.send(head(f"POST {rig.path()} HTTP/1.1", [("X-First", "z" * first)])[:-2])
            for number in range(pieces):
                client.send(f"X-{number}: {'y' * (70_000 // pieces)}\r\n".encode())
            client.send(b"\r\n")
        assert "65536" in refused(await client.rest(), 431)
        assert upstream.connections == []


async def test_an_endless_header_is_refused(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(head(f"POST {rig.path()} HTTP/1.1")[:-2] + b"X-A: ")
        for _ in range(20):
            client.send(b"y" * 4096)
        refused(await client.rest(), 431)


@pytest.mark.parametrize("declared", [True, False])
async def test_an_oversize_body_is_refused_and_the_limit_named(rig: Rig, declared: bool) -> None:
    async with rig.upstream([request()]) as upstream, rig.client() as client:
        if declared:
            # Expecting to be told to go on, it is told not to before it has sent a byte.
            client.send(raw_post(rig, [("Content-Length", "1000001"), ("Expect", "100-continue")], b""))
        else:
            client.send(raw_post(rig, [TE], b"%x\r\n" % 1_000_001 + b"y" * 1_000_001))
        assert "limits.request_bytes = 1000000" in refused(await client.rest(), 413)
        assert upstream.connections == []


async def test_the_limit_itself_is_allowed(rig: Rig) -> None:
    assert (await rig.passes(rig.call(b"y" * 1_000_000)))[0] == reply(200, b"{}")


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat", b"POST /v1 HTTP/1.1\r\nContent-Length: 5\r\n\r\nab"])
async def test_a_client_that_says_too_little_is_closed(hasty: Inside, start: bytes) -> None:
    async with hasty.client() as client:
        client.send(start)
        assert await client.gone() == "eof"
        assert client.received == b""


async def test_a_client_that_never_leaves_after_its_refusal_is_closed(hasty: Inside) -> None:
    async with hasty.client() as client:
        client.send(b"garbage\r\n\r\n")
        await client.rest()
        # Its half of the connection is still open, and read, until the gateway's patience ends: then it is reset.
        while not client.lost:
            client.send(b"x")
            await hasty.tape.get("/healthz")


async def test_a_websocket_is_refused_in_the_shape_of_its_api(rig: Rig) -> None:
    upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "x")]
    async with rig.upstream([request()]) as upstream, rig.client() as client:
        client.send(get(rig.path("/v1/responses"), [*upgrade, ("Sec-WebSocket-Extensions", "mux")]))
        assert "WebSocket" in error_of(await client.rest(), 426)["message"]
        assert upstream.connections == []


# -- whose turn it is --------------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(rig: Rig) -> None:
    count = 40
    script = [step for number in range(count) for step in (request(), send(reply(200, b"%d" % number)))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(b"".join(rig.call(b'{"n":%d}' % number) for number in range(count)))
        assert [body_of(await client.message()) for _ in range(count)] == [b"%d" % number for number in range(count)]
        seen = (await upstream.connection(0)).requests
        assert [body_of(one) for one in seen] == [b'{"n":%d}' % number for number in range(count)]
    assert [span.sequence for span in await rig.tape.spans(rig.rollout, count)] == list(range(1, count + 1))


async def test_more_than_64_pipelined_requests_are_refused_in_their_turn(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(get("/rollout/a%20b/attempt/a1/v1/models") * 100)
        for _ in range(64):
            assert "rollout 'a%20b'" in refused(await client.message(), 400)
        assert "64 requests wait" in refused(await client.rest(), 400)


async def test_the_two_planes_take_turns_on_one_connection(rig: Rig) -> None:
    script = [request(), wait("go"), send(reply(200, b'{"n":1}')), request(), send(reply(200, b'{"n":2}'))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(get("/healthz", host=OWN))
        assert json.loads(body_of(await client.message())) == {"status": "ok"}
        # A long call after a control request, and more of both in the same packet behind it.
        client.send(rig.call() + get("/api/rollouts", host=OWN) + rig.call() + get("/readyz?x=1", host=OWN))
        await upstream.connection(0)
        upstream.go("go")
        assert await client.message() == reply(200, b'{"n":1}')
        assert "rollouts" in json.loads(body_of(await client.message()))
        assert await client.message() == reply(200, b'{"n":2}')
        assert json.loads(body_of(await client.message())) == {"status": "ok"}
    assert len(await rig.tape.spans(rig.rollout, 2)) == 2


async def test_a_body_that_the_control_plane_does_not_read_does_no_harm(rig: Rig) -> None:
    async with rig.upstream([request(), send(reply(200, b"{}"))]), rig.client() as client:
        client.send(post("/healthz", b"x" * 300_000, host=OWN) + rig.call())
        assert (await client.message()).startswith(b"HTTP/1.1 405 ")
        assert await client.message() == reply(200, b"{}")


async def test_a_follower_of_the_feed_sees_calls_and_leaves(rig: Rig) -> None:
    async with rig.upstream([request(), send(reply(200, b"{}"))]), rig.client() as follower, rig.client() as client:
        follower.send(get("/api/changes", host=OWN))
        await follower.until(b"penstock changes")
        client.send(rig.call())
        await client.message()
        await follower.until(b'"rollout":"' + rig.rollout.encode() + b'"')
        follower.abort()


@pytest.mark.parametrize("path", ["/apis", "/metricsx", "/healthz2"])
async def test_control_paths_are_only_those(rig: Rig, path: str) -> None:
    _, seen = await rig.passes(get(path, [("x-rollout-id", rig.rollout), ("Authorization", "Bearer sk-proj-x")]))
    assert seen.startswith(f"GET /v1{path} ".encode())


@pytest.mark.parametrize(
    "below", ["/", "//", "/?utm=1", "/rollout/page/", "/rollout/page", "/rollout/page/attempt/a1/"]
)
async def test_the_address_itself_is_a_page_and_no_call(rig: Rig, below: str) -> None:
    """Claude Code asks `HEAD /` of its base URL before its first call; people open it in a browser."""
    async with rig.upstream([request()]) as upstream, rig.client() as client:
        client.send(head(f"HEAD {below} HTTP/1.1", [("Host", "agent.test")]) + get("/favicon.ico"))
        client.send(get(below) + get("/favicon.ico", [("Connection", "close")]))
        answers = re.split(rb"(?=HTTP/1\.1 )", await client.rest())[1:]
        assert [one.split()[1] for one in answers] == [b"200", b"204", b"200", b"204"]
        probed, _, page, _ = answers
        sizes = [int(header_fields(one)["content-length"]) for one in (probed, page)]
        assert (body_of(probed), sizes) == (b"", [len(body_of(page))] * 2)
        assert b"penstock show r1" in page
        assert upstream.connections == []
    async with rig.tape.http.get(f"{rig.base.url}/api/rollouts/page") as found:
        assert found.status == 404


async def test_the_page_leads_to_what_there_is(rig: Rig) -> None:
    async with rig.tape.http.get(rig.base.url) as answered:
        assert answered.content_type == "text/html"
        page = await answered.text()
    links = re.findall(r'href="(/[^"]+)"', page)
    assert len(links) == 4
    for link in links:
        async with rig.tape.http.get(rig.base.url + link) as answered:
            assert answered.status == 200


async def test_other_methods_of_the_address_itself_are_calls(rig: Rig) -> None:
    got, _ = await rig.passes(post(rig.path("/"), b"{}", [("Authorization", "Bearer sk-proj-x")]))
    assert (got, (await rig.span()).path) == (reply(200, b"{}"), "/")


async def test_a_client_of_http_1_0_may_ask_the_control_plane(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(head("GET /metrics HTTP/1.0", [("Host", OWN)]))
        got = await client.rest()
    assert got.startswith(b"HTTP/1.1 200 OK")
    assert header_fields(got)["connection"] == "close"
    assert b"penstock_calls_total" in body_of(got)


@pytest.mark.parametrize("path", ["/api/spans", "/api/whole"])
async def test_a_refusal_of_the_port_speaks_as_the_control_api(rig: Rig, path: str) -> None:
    """Also where the request never reaches it."""
    async with rig.client() as client:
        client.send(get(f"{path}?filter={'x' * 70_000}", host="localhost"))
        error = error_of(await client.message(), 431)
    assert (error.pop("type"), error.pop("field"), [*error]) == ("invalid_request", "headers", ["message"])


async def test_a_query_may_be_as_long_as_a_head(rig: Rig) -> None:
    """Many ids in one go, or a long filter: the server inside is no stricter than the port."""
    async with rig.client() as client:
        client.send(get(f"/api/rollouts?ids={','.join(f'r-{number:060}' for number in range(200))}", host="localhost"))
        assert (await client.message()).startswith(b"HTTP/1.1 200 ")
        client.send(get(f"/api/spans?filter={'x' * 30_000}", host="localhost"))
        assert error_of(await client.message(), 400)["field"] == "filter"
