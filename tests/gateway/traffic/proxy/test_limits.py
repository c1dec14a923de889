"""No cap on concurrency, and memory that stays bounded whatever clients and upstreams do."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from fakes.odd import Step, gone, request, send, wait
from fakes.raw import Wire, chunk, events_head, head, post, reply
from fakes.rig import CHAT, Rig
from fakes.waiting import until

from penstock.gateway.traffic.calls.call_record import BufferUsage, CallRecord
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.wire.dialects import OPAQUE
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.request import HttpRequest

CALLS = 1000
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def gateway_config() -> str:
    """Little is kept of an answer."""
    return f"[limits]\nrecorded_bytes = {MEGABYTE}\n"


async def test_a_thousand_slow_calls_at_once(rig: Rig) -> None:
    body = b'{"model":"m","messages":"' + b"x" * 1000 + b'"}'
    before = rig.base.memory
    script: list[Step] = [request(), send(events_head()), wait("all"), send(chunk(b"data: [DONE]\n\n") + chunk(b""))]
    async with rig.upstream(script) as upstream, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(rig.client()) for _ in range(CALLS)]
        for client in clients:
            client.send(rig.call(body))
        # Each has its head, so each is with the upstream at the same time.
        for client in clients:
            await client.until(b"\r\n\r\n")
        assert len(upstream.connections) == CALLS
        await running(rig, CALLS)
        await rig.tape.open_span(rig.rollout)
        grown = rig.base.memory - before
        print(f"{CALLS} running calls take {grown / CALLS / 1024:.1f} KiB each")
        assert grown < 100 * MEGABYTE
        upstream.go("all")
        for client in clients:
            await client.until(b"0\r\n\r\n")
    await rig.tape.written()
    totals = (await rig.tape.get(f"/api/rollouts/{rig.rollout}"))["totals"]
    assert (totals["calls"], totals["errors"], totals["gaps"]) == (CALLS, 0, 0)
    assert await sequences(rig) == list(range(1, CALLS + 1))


async def running(rig: Rig, count: int) -> None:
    """Waits until that many calls are being served."""

    async def all_of_them() -> bool:
        async with rig.tape.http.get(rig.base.url + "/metrics") as response:
            text = await response.text()
        return float(text.partition("\npenstock_inflight_calls ")[2].split()[0]) == count

    await until(all_of_them)


async def sequences(rig: Rig) -> list[int]:
    """Of all spans of the rollout."""
    found: list[int] = []
    cursor = ""
    while True:
        page = await rig.tape.get(f"/api/rollouts/{rig.rollout}/spans?limit=1000{cursor}")
        found += [span["sequence"] for span in page["spans"]]
        if page["next"] is None:
            return sorted(found)
        cursor = f"&cursor={page['next']}"


async def test_a_slow_client_holds_its_upstream_and_not_our_memory(rig: Rig) -> None:
    piece = chunk(b"y" * 65536)
    count = 1000
    script: list[Step] = [request(), send(events_head()), wait("paused"), send(piece * count + chunk(b""))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.send(rig.call())
        await client.until(b"\r\n\r\n")
        client.pause()
        before = rig.base.memory
        upstream.go("paused")
        connection = await upstream.connection(0)
        await connection.finished.wait()
        left = await stuck(rig, connection)
        grown = rig.base.memory - before
        print(
            f"{left / MEGABYTE:.0f} of {len(piece) * count / MEGABYTE:.0f} MiB stay upstream, memory grew {grown} bytes"
        )
        assert left > len(piece) * count / 2
        assert grown < 16 * MEGABYTE
        client.resume()
        await client.exactly(len(piece) * count + 5)
    span = await rig.span()
    assert (span.status, span.response_bytes, span.truncated) == ("ok", 65536 * count, True)
    kept = await rig.tape.raw(span, "response")
    assert kept == b"y" * len(kept)
    assert MEGABYTE - 300_000 < len(kept) <= MEGABYTE


def test_what_is_kept_of_a_long_answer_is_its_beginning() -> None:
    admitted = CallRequest(CallAddress("r"), OPAQUE, "/", b"")
    record = CallRecord(admitted, HttpRequest(), Redactor(), 10, BufferUsage(1))
    for piece in (b"12345678", b"too much", b"9"):
        record.add_pieces([piece], 0.0)
    assert (record.pieces, record.response_bytes, record.truncated) == ([b"12345678"], 17, True)


async def stuck(rig: Rig, wire: Wire) -> int:
    """The bytes that a peer still has to write once it writes no more."""
    left, same = -1, 0
    while same < 20:
        found = wire.transport.get_write_buffer_size()
        same = same + 1 if found == left else 0
        left = found
        await rig.tape.get("/healthz")
    return left


async def test_a_slow_client_of_pipelined_answers(rig: Rig) -> None:
    """The pause outlives the answer that caused it."""
    big = reply(200, b"z" * 4_000_000)
    script: list[Step] = [step for _ in range(6) for step in (request(), send(big))]
    async with rig.upstream(script) as upstream, rig.client() as client:
        client.pause()
        client.send(rig.call() * 6)
        connection = await upstream.connection(0)
        await stuck(rig, connection)
        assert len(connection.requests) < 6
        client.resume()
        await client.exactly(len(big) * 6)
    assert len(await rig.tape.spans(rig.rollout, 6)) == 6


async def test_an_endless_pipeline_is_refused_and_its_end_still_seen(rig: Rig) -> None:
    one = post(rig.path(), b"w" * 100_000)
    async with rig.upstream([request(), gone()]) as upstream, rig.client() as client:
        with rig.base.grows_less_than(30 * MEGABYTE):
            client.send(one * 400)
            connection = await upstream.connection(0)
            assert await stuck(rig, client) == 0
        client.close()
        await connection.gone()
    assert (await rig.span()).status == "cancelled"


async def test_chunks_of_one_byte_do_not_multiply(rig: Rig) -> None:
    body = b"v" * 300_000
    start = head(f"POST {rig.path()} HTTP/1.1", [("Host", "h"), ("Transfer-Encoding", "chunked")])
    with rig.base.grows_less_than(30 * MEGABYTE):
        await rig.passes(start + b"1\r\nv\r\n" * len(body) + chunk(b""))
    assert await rig.tape.raw(await rig.span(), "request") == body


async def test_a_thousand_idle_connections_cost_little(rig: Rig) -> None:
    with rig.base.grows_less_than(40 * MEGABYTE):
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(rig.client()) for _ in range(1000)]
            clients[-1].send(post(f"/rollout/a%20b{CHAT}", b""))
            await clients[-1].message()
