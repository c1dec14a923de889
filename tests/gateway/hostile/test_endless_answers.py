"""Answers without end, many at a time: what the gateway keeps of all of them together has a bound. None is delayed."""

from __future__ import annotations

import pytest
from fakes.odd import Script, request, send, wait
from fakes.raw import chunk, events_head
from fakes.rig import Rig
from fakes.waiting import until

MEGABYTE = 1 << 20
LONG = b"data: " + b"x" * (5 * MEGABYTE // 2) + b"\n\n"


@pytest.fixture(scope="module")
def gateway_config() -> str:
    """Running calls may hold three megabytes."""
    return f"[tape]\nqueue_bytes = {3 * MEGABYTE // 4}\n"


async def held(rig: Rig) -> int:
    """What running calls hold, as the metrics say."""
    async with rig.tape.http.get(rig.base.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith("penstock_recorder_held_bytes "))


async def test_what_running_calls_hold_has_a_bound(rig: Rig) -> None:
    short, long = chunk(b"data: short\n\n"), events_head() + chunk(LONG)
    last = [request(), send(long + chunk(b""))]
    script: Script = [request(), send(long), wait("end"), send(chunk(b"")), *last]
    little: Script = [request(), send(events_head() + short + chunk(b"")), *last]
    async with rig.upstream(script, script, little) as upstream, rig.client() as first, rig.client() as second:
        first.send(rig.call())
        await first.until(b"x\n\n\r\n")
        await until(lambda: holds(rig, len(LONG)))
        second.send(rig.call())
        await second.until(b"x\n\n\r\n")
        async with rig.client() as third:
            third.send(rig.call())
            await third.until(short)
        upstream.go("end")
        await first.until(b"0\r\n\r\n")
        await second.until(b"0\r\n\r\n")
        await until(lambda: holds(rig, 0))
        async with rig.client() as fourth:
            fourth.send(rig.call())
            await fourth.until(b"0\r\n\r\n")
    spans = sorted(await rig.tape.spans(rig.rollout, 4), key=lambda span: span.start_ns)
    assert [span.truncated for span in spans] == [False, True, False, False]
    assert [span.response_bytes for span in spans] == [len(LONG), len(LONG), len(b"data: short\n\n"), len(LONG)]


async def holds(rig: Rig, least: int) -> bool:
    """Whether they hold so much; 0 for nothing at all."""
    found = await held(rig)
    return found >= least if least else found == 0
