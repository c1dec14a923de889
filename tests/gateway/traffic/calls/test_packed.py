"""Bodies that come with a content encoding: large ones are unpacked where nobody else waits for that."""

from __future__ import annotations

import gzip
import json
import random
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import brotli
import pytest
import zstandard
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.odd import request, send
from fakes.packing import PACKERS, bare, flushed
from fakes.raw import header_fields, post, reply
from fakes.rig import CHAT, inside
from fakes.waiting import until
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Exchange
from penstock.gateway.reading.turns import decode_body, read_exchange
from penstock.gateway.traffic.calls import conversation_matcher
from penstock.gateway.traffic.calls.admission import PACKED

ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
NOISE = random.Random(1).randbytes(2 * PACKED).hex()


def body(said: str) -> bytes:
    """A request, packed."""
    asked = {"model": "m", "messages": [{"role": "user", "content": said}]}
    return gzip.compress(json.dumps(asked).encode())


async def test_large_ones_are_unpacked_on_the_thread(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[tuple[bool, bool]] = []
    real = conversation_matcher.decode_body

    def noting(packed: bytes, names: str | None) -> tuple[bytes, str | None]:
        on_loop = threading.current_thread() is threading.main_thread()
        unpacked.append((len(packed) > PACKED, on_loop))
        return real(packed, names)

    monkeypatch.setattr(conversation_matcher, "decode_body", noting)
    large = body(NOISE)
    calls = [
        ("/rollout/r1/attempt/a1" + CHAT, body("few")),
        ("/rollout/r1/attempt/a1" + CHAT, large),
        (CHAT + "?r2", large),
        (CHAT + "?r3", large[:-9]),
    ]
    script = [step for _ in calls for step in (request(), send(reply(200, ANSWER)))]
    async with inside(tmp_path, http) as rig, rig.upstream(script) as upstream, rig.client() as client:
        for path, sent in calls:
            client.send(post(path, sent, [("Content-Encoding", "gzip")]))
            assert (await client.message()) == reply(200, ANSWER)
        arrived = (await upstream.connection(0)).requests
        assert [one.endswith(sent) for one, (_, sent) in zip(arrived, calls, strict=True)] == [True] * 4
        few, many = await rig.tape.spans("r1", 2)
        assert (few.model, many.model) == ("m", "m")
        others: list[str | None] = []
        while len(others) < 2:
            page = await rig.tape.get("/api/spans")
            others = [span.get("model") for span in page["spans"] if span["path"][-2:] in ("r2", "r3")]
        assert sorted(others, key=str) == [None, "m"], "what is cut off passes unread"
    assert unpacked == [(False, True), (True, False), (True, False), (True, False)]


async def test_one_whose_version_is_taken_away_while_it_waits_goes_as_it_came(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """It was unpacked for the version that it is not given after all."""
    async with inside(tmp_path, http) as rig, Client(rig.base.url) as operator, rig.client() as client:
        traffic = Traffic(rig.base.url, http, operator)
        await operator.add_version("travel", prompt(STABLE, sent=True))
        await operator.add_version("travel", prompt(CANDIDATE))
        release = await traffic.start("travel", "v2", policy(0.999999))
        gate = rig.gateway.proxy.pools["up"].gate
        gate.pause(30)
        said = [{"role": "system", "content": traffic.text}, {"role": "user", "content": "Hello"}]
        asked = {"model": "m", "messages": said}
        packed = gzip.compress(json.dumps(asked).encode())
        client.send(rig.call(packed, [("Content-Encoding", "gzip")]))

        async def waits() -> bool:
            return gate.waiting == 1

        await until(waits)
        await operator.decide(release.id, "rollback", ActionRequest(who="ann"))
        async with rig.upstream([request(), send(reply(200, ANSWER))]) as upstream:
            gate.open()
            assert await client.message() == reply(200, ANSWER)
        (arrived,) = upstream.connections[0].requests
        assert arrived.endswith(packed)
        assert header_fields(arrived.partition(b"\r\n\r\n")[0])["content-encoding"] == "gzip"
        assert await rig.tape.raw(await rig.span(), "request") == packed


# -- decoding bodies, with its bounds, and reading whole exchanges -----------------------------------------------------


TEXT = b'{"model":"m","text":"' + b"abc" * 5000 + b'"}'
NAMES: dict[str, Callable[[bytes], bytes]] = {
    **PACKERS,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    " deflate ": bare,
    "identity": lambda body: body,
    "": lambda body: body,
    "gzip, zstd": lambda body: zstandard.compress(gzip.compress(body)),
    "br,gzip": lambda body: gzip.compress(brotli.compress(body)),
}


@pytest.mark.parametrize("name", list(NAMES))
def test_encodings(name: str) -> None:
    assert decode_body(NAMES[name](TEXT), name) == (TEXT, None)
    assert decode_body(b"", name) == (b"", None)
    assert decode_body(TEXT, None) == (TEXT, None)


def test_several_members() -> None:
    for name in ("gzip", "zstd"):
        assert decode_body(PACKERS[name](b"one ") + PACKERS[name](TEXT), name) == (b"one " + TEXT, None)


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd", "br"])
def test_a_cut_body_gives_what_there_is(name: str) -> None:
    body = b"".join(b"%d " % number for number in range(50_000))
    decoded, problem = decode_body(PACKERS[name](body)[:-9], name)
    assert body.startswith(decoded)
    assert len(decoded) > len(body) // 2
    assert problem == f"{name}: ends early"


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd", "br"])
def test_a_bomb_is_defused(name: str) -> None:
    decoded, problem = decode_body(PACKERS[name](b"\0" * 3_000_000), name, limit=100_000)
    assert decoded == b"\0" * 100_000
    assert problem == f"{name}: larger than 100000 bytes once decoded"


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd", "br"])
def test_a_stream_that_is_flushed_event_by_event_is_read_as_far_as_it_came(name: str) -> None:
    body, ends = b"", list[int]()
    for piece in flushed(name, (b"data: %d\n\n" % number for number in range(100))):
        body += piece
        ends.append(len(body))
    for count in (1, 50, 99):
        whole = b"".join(b"data: %d\n\n" % number for number in range(count))
        assert decode_body(body[: ends[count - 1]], name) == (whole, f"{name}: ends early")


@given(st.binary(max_size=200_000), st.integers(1, 100_000))
def test_a_decoder_of_brotli_gives_all_and_stops_at_its_limit(body: bytes, limit: int) -> None:
    body *= 20
    decoded, problem = decode_body(brotli.compress(body, quality=3), "br", limit)
    assert decoded == body[:limit]
    assert (problem is None) == (len(body) <= limit)


def test_a_bomb_of_brotli_costs_no_more_memory_than_its_limit() -> None:
    bomb = brotli.compress(b"\0" * (256 << 20), quality=5)
    assert len(bomb) < 1000
    tracemalloc.start()
    try:
        decoded, problem = decode_body(bomb, "br", limit=1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(decoded), problem) == (1 << 20, "br: larger than 1048576 bytes once decoded")
    assert peak < 8 << 20


def test_what_is_not_known_or_a_window_that_http_forbids_is_refused() -> None:
    assert decode_body(b"x", "compress") == (b"x", "content encoding 'compress' is not supported")
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    _, problem = decode_body(packer.compress(b"x" * 100) + packer.flush(), "zstd")
    assert problem is not None
    assert problem.startswith("zstd: cannot be decoded")


@given(st.binary(max_size=300), st.sampled_from([*NAMES, "x"]), st.booleans())
def test_any_bytes(body: bytes, name: str, framed: bool) -> None:
    magic = {"gzip": b"\x1f\x8b\x08\0", "zstd": b"\x28\xb5\x2f\xfd", "deflate": b"\x78\x9c"}.get(name, b"")
    decoded, problem = decode_body(magic + body if framed else body, name)
    assert isinstance(decoded, bytes)
    assert problem is None or isinstance(problem, str)


def exchange(request: bytes, response: bytes, encoding: str = "") -> Exchange:
    headers = [("Content-Encoding", encoding)] if encoding else []
    return Exchange(
        url="http://up/v1/chat/completions",
        request_headers=headers,
        request_body=request,
        response_headers=[("content-type", "application/json"), *headers],
        response_body=response,
    )


def span(**fields: Any) -> Span:
    return Span(rollout="r", attempt="a", sequence=1, dialect="chat", **fields)


def test_an_exchange_is_decoded_and_read() -> None:
    request = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi."}]}).encode()
    message = {"role": "assistant", "content": "Yo."}
    response = json.dumps({"id": "i", "choices": [{"index": 0, "message": message}]}).encode()
    packed = exchange(gzip.compress(request), gzip.compress(response), "gzip")
    turn = read_exchange("chat", packed, span(http_status=200))
    assert turn.messages[0].parts[0].text == "Hi."
    assert turn.choices[0].message.parts[0].text == "Yo."
    assert (turn.problems, turn.error) == ([], None)


def test_problems_come_in_order() -> None:
    turn = read_exchange("chat", exchange(b"{}", b"x", "compress"), span(truncated=True))
    assert turn.problems == [
        "the exchange was too large to be kept whole",
        "request: content encoding 'compress' is not supported",
        "response: content encoding 'compress' is not supported",
        "response: not a readable JSON object",
    ]


@pytest.mark.parametrize(
    ("body", "error"),
    [(b"<h1>Bad gateway</h1>\n", "<h1>Bad gateway</h1>"), (b"", "HTTP 502"), (b'{"error":{"message":"No."}}', "No.")],
)
def test_an_error_of_any_kind_is_an_error(body: bytes, error: str) -> None:
    assert read_exchange("chat", exchange(b"{}", body), span(http_status=502)).error == error
    assert read_exchange("new", exchange(b"{}", body), span(http_status=502)).error == error
