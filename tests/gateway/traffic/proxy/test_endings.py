"""Answers with a good HTTP status that are none, through a real gateway: the bytes pass, and the span tells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.odd import gone, request, send
from fakes.raw import body_of, chunk, events_head, reply
from fakes.rig import CHAT, MESSAGES, Rig, Within
from fakes.waiting import until

DELTA = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
FINISH = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"Overloaded.","code":500}}\n\n'
USAGE = b'{"input_tokens":9,"output_tokens":1}'
START = b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":%b}}\n\n' % USAGE
LATE = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'
BODY = b'{"error":{"message":"No such model.","type":"invalid_request_error"}}'


def streamed(*events: bytes) -> bytes:
    return events_head() + b"".join(map(chunk, [*events, b""]))


CASES: dict[str, tuple[str, bytes, str | None]] = {
    "whole": (CHAT, streamed(DELTA, FINISH, DONE), None),
    "never-done": (CHAT, streamed(DELTA, FINISH), None),
    "cut": (CHAT, streamed(DELTA), "ended_early"),
    "error": (CHAT, streamed(DELTA, ERROR, DONE), "stream_error"),
    "error-body": (CHAT, reply(200, BODY), "error_body"),
    "detail-body": (CHAT, reply(200, b'{"detail":"Not authenticated"}'), "error_body"),
    "responses-detail": ("/v1/responses", reply(200, b'{"detail":"Not authenticated"}'), "error_body"),
    "messages-cut": (MESSAGES, streamed(START), "ended_early"),
    "messages-error": (MESSAGES, streamed(START, LATE), "stream_error"),
}


@pytest.mark.parametrize("name", list(CASES))
async def test_the_bytes_pass_and_the_span_tells(rig: Rig, name: str) -> None:
    below, answer, error = CASES[name]
    async with rig.upstream([request(), send(answer)]), rig.client() as client:
        client.send(rig.call(below=below))
        assert await client.exactly(len(answer)) == answer
    span = await rig.span()
    assert (span.http_status, span.error, span.status) == (200, error, "error" if error else "ok")
    assert await rig.tape.raw(span, "response") == body_of(answer)
    totals = (await rig.tape.get(f"/api/rollouts/{rig.rollout}"))["totals"]
    assert (totals["calls"], totals["errors"], totals["uncounted"]) == (1, error is not None, error != "error_body")
    assert len((await rig.tape.get(f"/api/spans?filter=rollout%3D{rig.rollout}+status%3Aerror"))["spans"]) == bool(
        error
    )
    if error is not None:
        found = await rig.tape.get(f"/api/rollouts/{rig.rollout}/diagnosis")
        assert f"it failed ({error})" in json.dumps(found)
        assert found["trainable"] is False


async def test_what_a_cut_stream_said_of_its_tokens_is_no_count(rig: Rig) -> None:
    """message_start has a number for what will be generated: it is not one."""
    await rig.passes(rig.call(below=MESSAGES), CASES["messages-cut"][1])
    span = await rig.span()
    assert span.usage is not None
    assert (span.usage.input_tokens, span.usage.output_tokens) == (9, None)
    assert span.estimate is not None
    assert span.estimate.input_tokens is None


async def test_what_is_learnt_of_a_whole_answer_is_learnt_of_one_whose_client_leaves_after_the_last_event(
    within: Within,
) -> None:
    """A session of exact tokens would wait for ever for a call that has gone on from it."""
    script = [request(), send(events_head() + chunk(DELTA + FINISH + DONE)), gone()]
    async with within(route=[{"model": "m", "upstream": ["up"], "train": True}]) as rig:
        async with rig.upstream(script), rig.client() as client:
            client.send(rig.call(b'{"model":"m","stream":true,"messages":[]}'))
            await client.until(DONE)
            client.close()
            span = await rig.span()
            assert (span.status, span.error) == ("ok", None)
        assert rig.gateway.metrics.captured_calls == {("no",): 1}


async def test_it_is_counted_as_it_ended(rig: Rig) -> None:
    before = await counts(rig)
    async with (
        rig.upstream([request(), send(CASES["error"][1]), request(), send(CASES["whole"][1])]),
        rig.client() as client,
    ):
        for _ in range(2):
            client.send(rig.call())
            await client.message()
    await rig.tape.spans(rig.rollout, 2)
    wanted = {status: before.get(status, 0) + 1 for status in ("ok", "error")}

    async def counted() -> bool:
        after = await counts(rig)
        assert after.get("ok", 0) <= wanted["ok"]
        return after == before | wanted

    await until(counted)


async def counts(rig: Rig) -> dict[str, float]:
    """Finished calls of chat by status."""
    async with rig.tape.http.get(f"{rig.base.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    named = 'penstock_calls_total{dialect="chat",status="'
    found: Any = (line.removeprefix(named).split('"} ') for line in lines if line.startswith(named))
    return {status: float(count) for status, count in found}
