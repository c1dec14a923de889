"""A call that is over is gone: it leaves no ring of objects, which only the collector finds. That stops the event loop
for 15 ms after some hundred of them, and a call holds the bytes of its bodies until then."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.odd import Script, close, request, send
from fakes.raw import post, reply
from fakes.rig import CHAT, Within

from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.proxy.call_lifecycle import CallLifecycle

CALLS = 5
OK = reply(200, b'{"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}')
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
STREAM = reply(200, EVENTS, [("Content-Type", "text/event-stream")])
BUSY = reply(503, b'{"error":{"message":"busy"}}')
BUDGETS: dict[str, Any] = {
    "budget": [
        {"name": "all", "unit": "tokens", "limit": 10**9, "window": "1d"},
        {"name": "loops", "per": "rollout", "unit": "calls", "limit": 10**6, "window": "total"},
    ]
}
FULL: dict[str, Any] = {"budget": [{"name": "all", "unit": "calls", "limit": 1, "window": "1d"}]}


def whole(answer: bytes) -> Script:
    return [step for _ in range(CALLS) for step in (request(), send(answer))]


CASES: dict[str, tuple[dict[str, Any], Callable[[], list[Script]]]] = {
    "plain": ({}, lambda: [whole(OK)]),
    "a stream": ({}, lambda: [whole(STREAM)]),
    "an error": ({}, lambda: [whole(BUSY)]),
    "broken off": ({}, lambda: [[request(), send(STREAM[:-20]), close()]] * CALLS),
    "strict": ({"tape": {"record": "strict"}}, lambda: [whole(OK)]),
    "counted by budgets": (BUDGETS, lambda: [whole(OK)]),
    "a stream that budgets count": (BUDGETS, lambda: [whole(STREAM)]),
    "broken off, counted": (BUDGETS, lambda: [[request(), send(STREAM[:-20]), close()]] * CALLS),
    "refused by a budget": (FULL, lambda: [whole(OK)]),
    "a new name": ({"route": [{"model": "m", "upstream": "up", "alias": "other"}]}, lambda: [whole(OK)]),
    "of a model in training": ({"route": [{"model": "m", "upstream": "up", "train": True}]}, lambda: [whole(OK)]),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_of_before() -> Iterator[None]:
    """What was there before is not looked at: it is much, and looked at often."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def rings() -> list[object]:
    """Calls that only the collector finds."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [found for found in gc.garbage if isinstance(found, CallRecord | CallLifecycle)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("path", [f"/rollout/r1/attempt/a1{CHAT}", CHAT])
@pytest.mark.parametrize("kind", CASES)
async def test_a_call_that_is_over_is_gone(within: Within, kind: str, path: str) -> None:
    config, scripts = CASES[kind]
    async with within(**config) as rig, rig.upstream(*scripts()):
        gc.collect()
        gc.disable()
        try:
            for number in range(CALLS):
                body = b'{"model":"m","messages":[{"role":"user","content":"%d"}]}' % number
                async with rig.client() as client:
                    client.send(post(path, body, [("Connection", "close")]))
                    assert await client.rest()
            await rig.gateway.recorder.flush()
            assert rings() == []
        finally:
            gc.enable()
