"""Decoding bodies, with its bounds, and reading whole exchanges."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import brotli
import pytest
import zstandard
from fakes.packing import PACKERS, bare, flushed
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.calls.turns import decode_body, read_exchange
from penstock.gateway.model.exchange import Exchange
from penstock.gateway.model.span import Span

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


def test_no_encoding() -> None:
    assert decode_body(TEXT, None) == (TEXT, None)


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_several_members(name: str) -> None:
    assert decode_body(PACKERS[name](b"one ") + PACKERS[name](TEXT), name) == (b"one " + TEXT, None)


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd", "br"])
def test_a_cut_body_gives_what_there_is(name: str) -> None:
    body = b"".join(b"%d " % number for number in range(20_000))
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


def test_what_is_not_known_is_said() -> None:
    assert decode_body(b"x", "compress") == (b"x", "content encoding 'compress' is not supported")


def test_a_window_that_http_forbids_is_refused() -> None:
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
    response = json.dumps(
        {"id": "i", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yo."}}]}
    ).encode()
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
