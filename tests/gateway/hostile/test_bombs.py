"""Few bytes that stand for very many, from agents and from upstreams: they cost little, and the next caller nothing."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard
from fakes.odd import Script, request, send
from fakes.raw import chunk, error_of, events_head, get, head, post, reply
from fakes.rig import CHAT, Rig
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.reading.turns import MOST_ENCODINGS, MOST_MEMBERS, decode_body
from penstock.gateway.wire.dialects import loose_json, request_body
from penstock.gateway.wire.dialects.loose_json import RequestFields, is_bulky, loads, peek
from penstock.gateway.wire.dialects.request_body import skim

MEGABYTE = 1 << 20
GIGABYTES = 10
MOST_GROWN = 150 * MEGABYTE
MOST_UNPACKED = 256 * MEGABYTE
"""64 MB by the thread that records, and as much by the one that shows it."""
ZEROS = b"0" * MEGABYTE
GOOD = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'


def gzip_bomb() -> bytes:
    """A megabyte of zeros again and again: a block that knows nothing of those before it."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(ZEROS) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\x02\x03" + block * (GIGABYTES << 10)


def zstd_bomb() -> bytes:
    return zstandard.compress(ZEROS) * (GIGABYTES << 10)


def brotli_bomb() -> bytes:
    """It knows no way to say the same block twice, and 300 MB are as good as 10 GB behind a limit of 64."""
    return brotli.compress(ZEROS * 300, quality=1)


BOMBS: dict[str, Callable[[], bytes]] = {"gzip": gzip_bomb, "zstd": zstd_bomb, "br": brotli_bomb}


async def call_well(rig: Rig, name: str = "next") -> None:
    """The next caller."""
    next_one = Rig(rig.base, rig.tape, f"{rig.rollout}-{name}")
    assert (await next_one.passes(answer=reply(200, GOOD)))[0] == reply(200, GOOD)
    assert (await next_one.span()).status == "ok"


async def recorded_and_shown(rig: Rig, script: Script, sent: bytes, marks: bytes) -> None:
    """A call is recorded and shown, and the next one answered."""
    async with rig.upstream(script), rig.client() as client:
        client.send(sent)
        await client.until(marks)
    span = await rig.span()
    assert json.dumps(await rig.tape.get(f"/api/rollouts/{rig.rollout}/attempts/a1/spans/{span.sequence}"))
    await rig.tape.get(f"/api/rollouts/{rig.rollout}/diagnosis")
    await call_well(rig)


@pytest.mark.parametrize("name", BOMBS)
async def test_a_packed_answer(rig: Rig, name: str) -> None:
    bomb = BOMBS[name]()
    answer = events_head([("Content-Encoding", name)]) + chunk(bomb) + chunk(b"")
    with rig.base.grows_less_than(MOST_UNPACKED + 10 * len(bomb)):
        await recorded_and_shown(rig, [request(), send(answer)], rig.call(), b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("name", BOMBS)
async def test_a_packed_request(rig: Rig, name: str) -> None:
    bomb = BOMBS[name]()
    sent = rig.call(bomb, [("Content-Encoding", name)])
    with rig.base.grows_less_than(MOST_UNPACKED + 10 * len(bomb)):
        await recorded_and_shown(rig, [request(), send(reply(200, GOOD))], sent, GOOD)


async def test_a_key_behind_all_that_is_unpacked_is_not_on_the_tape(rig: Rig) -> None:
    key = b"sk-behind-0123456789abcdef"
    packed = zlib.compress(ZEROS * 4 + key, wbits=31)
    answer = events_head([("Content-Encoding", "gzip")]) + chunk(packed) + chunk(b"")
    headers = [("Authorization", f"Bearer {key.decode()}"), ("Content-Encoding", "gzip")]
    await rig.passes(rig.call(packed, headers), answer)
    span = await rig.span()
    assert span.truncated
    for side in ("request", "response"):
        assert await rig.tape.raw(span, side) == ZEROS


OBJECTS = loose_json.MOST_OBJECTS + 1
MANY: dict[str, bytes] = {
    "a model of lists": b'{"model":[' + b"[]," * OBJECTS + b"[]]}",
    "messages of nothing": b'{"model":"m","messages":[' + b"{}," * OBJECTS + b"{}]}",
    "numbers": b'{"model":"m","messages":[' + b"1," * (8 * OBJECTS) + b"1]}",
    "one name": b'{"model":"m"' + b',"model":"m"' * OBJECTS + b"}",
    "depth": b'{"model":"m","messages":' + b"[" * (8 * OBJECTS) + b"]" * (8 * OBJECTS) + b"}",
    "ten thousand deep": b'{"model":"m","messages":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
}


@pytest.mark.parametrize("what", MANY)
@pytest.mark.parametrize("named", [True, False], ids=["named", "implicit"])
async def test_a_request_of_many_values(rig: Rig, what: str, named: bool) -> None:
    """It passes as it came. Whose it is, and its model, are read as far as that is cheap."""
    body = MANY[what]
    with rig.base.grows_less_than(MOST_GROWN):
        sent = post(rig.path() if named else f"{CHAT}?{rig.rollout}", body)
        _, seen = await rig.passes(sent, reply(200, GOOD))
        assert seen.endswith(body)
        (span,) = await rig.unaddressed(1) if not named else [await rig.span()]
        assert span.request_bytes == len(body)
        await call_well(rig)


async def test_an_answer_of_many_values(rig: Rig) -> None:
    packed = zlib.compress(b'{"choices":[' + b"{}," * (4 * OBJECTS) + b"{}]}", 0, wbits=31)
    answer = reply(200, packed, [("Content-Encoding", "gzip")])
    with rig.base.grows_less_than(MOST_GROWN):
        await recorded_and_shown(rig, [request(), send(answer)], rig.call(), packed)
    turn = (await rig.tape.detail(await rig.span())).turn
    assert turn is not None
    assert any("which are not read" in problem for problem in turn.problems)


async def test_a_request_in_many_encodings(rig: Rig) -> None:
    body = zlib.compress(b'{"model":"m"}', wbits=31)
    for _ in range(200):
        body = zlib.compress(body, 0, wbits=31)
    _, seen = await rig.passes(rig.call(body, [("Content-Encoding", ", ".join(["gzip"] * 201))]))
    assert seen.endswith(body)
    assert (await rig.span()).model is None


def test_encodings_and_members_are_counted() -> None:
    packed = zlib.compress(b"x", wbits=31)
    assert decode_body(packed, "gzip")[0] == b"x"
    kept, problem = decode_body(packed, ",".join(["gzip"] * (MOST_ENCODINGS + 1)))
    assert (kept, str(MOST_ENCODINGS) in (problem or "")) == (packed, True)
    assert decode_body(packed * MOST_MEMBERS, "gzip") == (b"x" * MOST_MEMBERS, None)
    made, problem = decode_body(packed * (MOST_MEMBERS + 9), "gzip")
    assert (len(made), problem) == (MOST_MEMBERS + 1, f"gzip: it has more than {MOST_MEMBERS} members")


VALUES = st.recursive(
    st.integers(-(1 << 40), 1 << 40) | st.text(",[{", max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("[,", max_size=3), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("named", ["[300000000]", "[-1]", "[null]", '["a"]', "[[1]]", "1e400", "{}"])
@pytest.mark.parametrize("addressed", [True, False])
async def test_a_response_that_is_continued_by_no_id(rig: Rig, named: str, addressed: bool) -> None:
    """What stands there is looked at by whoever joins conversations, and by the thread that records."""
    below = "/v1/responses" if addressed else f"/v1/responses?{rig.rollout}"
    said = b'{"model":"m","input":"go on","previous_response_id":%b}' % named.encode()
    answer = reply(400, b'{"error":{"message":"no such id"}}')
    with rig.base.grows_less_than(MOST_GROWN):
        assert (await rig.passes(post(rig.path(below) if addressed else below, said), answer))[0] == answer
        (span,) = await (rig.tape.spans(rig.rollout, 1) if addressed else rig.unaddressed(1))
        assert (span.error, span.model) == ("http_400", "m")


@given(VALUES)
def test_what_is_of_common_size_is_read(value: object) -> None:
    body = json.dumps(value).encode()
    assert not is_bulky(body)
    assert loads(json.dumps([value, "x" * 200])) == [value, "x" * 200]


def test_what_is_bulky() -> None:
    text = b'{"model":"m","n":3,"messages":["' + b"word " * MEGABYTE + b'"]}'
    assert not is_bulky(text)
    assert not is_bulky(text.decode())
    many = b'{"model":"m","n":3,"x":[' + b"[]," * OBJECTS + b"1]}"
    assert is_bulky(many)
    assert is_bulky(many.decode())
    assert loads(many) is None
    assert (peek(many).model, peek(many).n) == ("m", 3), "what decides where it goes is read all the same"
    assert peek(many[:-1]) == RequestFields()


def test_a_large_request_has_a_bounded_number_of_items() -> None:
    for body in (
        b'{"messages":[' + b"1," * request_body.MOST_ITEMS + b"1]}",
        b"{" + b'"a":1,' * request_body.MOST_ITEMS + b'"messages":[1]}',
    ):
        with pytest.raises(ValueError, match=f"more than {request_body.MOST_ITEMS} items"):
            skim(body, frozenset({"messages"}))
    assert len(skim(b'{"messages":[' + b"1," * 1000 + b"1]}", frozenset({"messages"}))["messages"]) == 1001


EMPTY = 4 << 20
SPANS: dict[str, tuple[str, bytes, int]] = {
    "groups": ("application/x-protobuf", b"\x0a\x00" * EMPTY, 413),
    "too many groups": ("application/x-protobuf", b"\x0a\x00" * (8 * MEGABYTE + 1), 413),
    "objects": ("application/json", b'{"resourceSpans":[' + b"{}," * OBJECTS + b"{}]}", 413),
    "depth": ("application/json", b'{"resourceSpans":' + b"[" * 100_000, 400),
}


@pytest.mark.parametrize("what", SPANS)
async def test_spans_of_nothing(rig: Rig, what: str) -> None:
    """Their sender gets an answer, and everybody else is served meanwhile."""
    kind, body, status = SPANS[what]
    headers = [("Host", "h"), ("Content-Type", kind), ("Content-Length", str(len(body)))]
    with rig.base.grows_less_than(700 * MEGABYTE):
        async with rig.client() as client:
            client.send(head("POST /v1/traces HTTP/1.1", headers) + body)
            await call_well(rig)
            await client.when(lambda: b"\r\n\r\n" in client.received, 60)
            assert client.received.split(b" ", 2)[1] == b"%d" % status


@pytest.mark.parametrize("path", ["/api/rollouts", "/rollout/{rollout}/attempt/a1/rewards"])
async def test_a_body_of_many_values_is_refused_by_the_control_api(rig: Rig, path: str) -> None:
    body = b'{"rollouts":[' + b"{}," * OBJECTS + b"{}]}"
    with rig.base.grows_less_than(64 * MEGABYTE):
        async with rig.client() as client:
            client.send(post(path.format(rollout=rig.rollout), body, host="localhost"))
            assert error_of(await client.message(), 413)["field"] == "body"


@pytest.mark.parametrize("depth", [300, 10_000])
async def test_the_control_api_reads_nothing_that_is_too_deep(rig: Rig, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    cursor = base64.urlsafe_b64encode(b"[" * depth).decode().rstrip("=")
    asked = [
        post("/api/rollouts", b'{"rollouts":[{"input":' + deep + b"}]}", host="localhost"),
        post("/api/policy/test", b'{"rules":' + deep + b"}", host="localhost"),
        get(f"/api/spans?cursor={cursor}", host="localhost"),
        get(f"/api/spans?filter={'-' * depth}status:ok", host="localhost"),
    ]
    async with rig.client() as client:
        for sent in asked:
            client.send(sent)
            answer = await client.message()
            assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 ")), (sent[:60], answer)
            assert answer.startswith(b"HTTP/1.1 400 ") or depth < 10_000, sent[:60]
    assert "Traceback" not in rig.base.log
