"""A model that two upstreams serve: when the second is asked, what its client sees, and what the tape says of it.
Where an answer was held or came of the other one, nothing is lost, and it has an end."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import islice
from time import monotonic
from typing import NamedTuple

import pytest
from fakes.odd import Script, close, gone, request, send, wait
from fakes.ports import steady_ports
from fakes.raw import body_of, chunk, events_head, reply
from fakes.rig import CHAT, Within
from fakes.two_upstreams import NOTHING, PLAIN, STREAM, Pair, Two, says_so
from fakes.waiting import until

from penstock.gateway.model.facts import TRIES
from penstock.gateway.model.times import Backoff
from penstock.gateway.traffic.proxy import call, failover_policy
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.failover_policy import AnswerWatch, FirstContentDetector
from penstock.gateway.traffic.upstreams import health, pool

OK = reply(200, b'{"fine":1}')
EVENT = chunk(b"data: 1\n\n")
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
EVENTS = events_head() + EVENT + LAST
BUSY = reply(429, b'{"error":{"message":"not now"}}', [("Retry-After", "7")])
TOO_LONG = reply(400, b'{"error":{"code":"context_length_exceeded","message":"too long"}}')


class Case(NamedTuple):
    """What the first upstream does with a call."""

    script: Script
    why: str = ""
    """It was not the one that answered."""
    body: bytes = STREAM
    up: Mapping[str, object] = NOTHING
    spare: Mapping[str, object] = NOTHING
    below: str = CHAT


def says(*events: bytes) -> Script:
    return [request(), send(events_head() + b"".join(map(chunk, events))), gone()]


HASTY, SHORT, LONG = {"read_timeout": 0.5}, {"context": 10}, {"context": 11}
PING = b": ping\n\n"
MOVES: dict[str, Case] = {
    **{
        f"answers {status}": Case(
            [request(), send(reply(status, b"{}", [("Retry-After", "7")]))], f"http_{status}", b'{"model":"m","x":1}'
        )
        for status in (408, 429, 500, 502, 503, 504)
    },
    "says nothing": Case([request()], "timeout", up=HASTY),
    "accepts it and says nothing": Case([request(), send(events_head())], "timeout", up=HASTY),
    "only keeps alive": Case([*says(PING)[:2], send(chunk(PING))], "timeout", up=HASTY),
    "accepts it and leaves": Case([request(), send(events_head()), close()], "upstream_closed"),
    "leaves": Case([request(), close()], "upstream_closed"),
    "begins with an error": Case(says(b'data: {"error":{"message":"overloaded"}}\n\n'), "error_event"),
    "begins with an error of messages": Case(says(b'data: {"type":"error","error":{"type":"x"}}\n\n'), "error_event"),
    "is silent for too long": Case([request()], "timeout", up={"read_timeout": 0.3}),
    "finds it too long": Case([request(), send(TOO_LONG)], "too_long", PLAIN, SHORT, LONG),
}


@pytest.mark.parametrize("name", MOVES)
async def test_one_that_cannot_serve_it_now(two: Two, name: str) -> None:
    script, why, body, up, spare, _ = MOVES[name]
    answer = EVENTS if body == STREAM else OK
    async with two(script, [request(), send(answer)], up, spare) as it:
        assert await it.ask(body) == answer
        assert body_of(it.up.connections[0].requests[0]) == body
        assert body_of(it.spare.connections[0].requests[0]) == body.replace(b'"m"', b'"m-of-spare"')
        span = await it.span()
        assert (span.status, span.http_status, span.upstream, span.model) == ("ok", 200, "spare", "m")
        assert span.stream == (body == STREAM)
        assert await it.tries() == [("up", why)]
        async with it.rig.tape.http.get(f"{it.rig.base.url}/metrics") as metrics:
            counted = f'penstock_upstream_retries_total{{upstream="up",why="{why}"}} 1.0'
            assert counted in (await metrics.text()).splitlines()


BATCHES = "/v1/batches"
STAYS: dict[str, tuple[Case, bytes]] = {
    **{
        f"answers {status}": (Case([request()], body=PLAIN), reply(status, b'{"error":{}}'))
        for status in (400, 401, 403, 404, 422, 501)
    },
    "makes something and fails": (Case([request()], body=PLAIN, below=BATCHES), reply(500, b"{}")),
    "makes something and leaves": (Case([request(), close()], body=PLAIN, below=BATCHES), b""),
    "makes something and breaks off": (Case([request(), send(OK[:20]), close()], body=PLAIN, below=BATCHES), b""),
    "finds it too long, as the next would": (Case([request()], "", PLAIN, SHORT, SHORT), TOO_LONG),
    "finds it too long, of unknown length": (Case([request()], "", PLAIN, NOTHING, LONG), TOO_LONG),
    "finds it too long before one of unknown length": (Case([request()], "", PLAIN, SHORT), TOO_LONG),
    "refuses it for something else": (Case([request()], "", PLAIN, SHORT, LONG), reply(400, b'{"error":{}}')),
}


@pytest.mark.parametrize("name", STAYS)
async def test_what_another_would_say_too_or_make_again_passes(two: Two, name: str) -> None:
    (script, _, body, up, spare, below), refused = STAYS[name]
    async with two([*script, *([send(refused)] if refused else [])], [request()], up, spare) as it:
        answer = await it.ask(body, below)
        assert answer == refused or (not refused and answer.startswith(b"HTTP/1.1 502 "))
        assert (it.spare.connections, await it.tries()) == ([], [])
        assert (await it.span()).error == (f"http_{int(refused[9:12])}" if refused else "upstream_closed")


async def test_the_last_answer_passes_as_it_came(two: Two) -> None:
    other = reply(429, b"{}", [("Retry-After", "9")])
    async with two([request(), send(BUSY)], [request(), send(other)]) as it:
        assert await it.ask() == other
        span = await it.span()
        assert (span.status, span.error, span.upstream) == ("error", "http_429", "spare")


async def test_an_answer_that_has_begun_is_that_of_the_first(two: Two) -> None:
    first = [request(), send(events_head()), wait("on"), send(EVENT), wait("end"), close()]
    async with two(first, [request()]) as it:
        it.client.send(it.rig.call(STREAM))
        it.up.go("on")
        assert await it.client.until(EVENT) == events_head() + EVENT
        it.up.go("end")
        await it.client.gone()
        assert it.spare.connections == []
        assert (await it.span()).status == "error"


@pytest.mark.parametrize("waits", [False, True], ids=["answers", "is waited for"])
async def test_a_client_that_leaves_before_it_is_clear_who_answers(
    two: Two, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(failover_policy, "MAX_RETRY_AFTER_S", 600.0)
    later = reply(429, b"{}", [("Retry-After", "600")])
    async with two([request(), send(later if waits else events_head()), says_so(), gone()], [request()]) as it:
        it.client.send(it.rig.call(STREAM))
        await it.asked()
        it.client.abort()
        assert (await it.span()).status == "cancelled"
        assert [len(one.connections) for one in (it.up, it.spare)] == [1, 0]


async def test_a_connection_that_closes_after_a_while_was_no_race(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "_RACE_S", 0.0)
    async with within() as rig:
        script = [request(), send(OK), request(), close()]
        async with rig.upstream(script, [request(), send(OK)]) as upstream, rig.client() as client:
            client.send(rig.call())
            assert await client.message() == OK
            client.send(rig.call())
            assert (await client.message()).startswith(b"HTTP/1.1 502 ")
            assert len(upstream.connections) == 1


CHUNK = b'data: {"object":"chat.completion.chunk","choices":[%s]}\n\n'
ROLE = b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'
FAILED = b'data: {"type":"response.failed","response":{"status":"failed","error":%s}}\n\n'
SSE = b"text/event-stream"


@pytest.mark.parametrize(
    ("payload", "type", "found"),
    [
        ([b'{"a"'], b"application/json", "something"), ([], b"application/json", "nothing"), ([b""], b"", "nothing"),
        ([b": ping\n\n"], SSE, "nothing"), ([b"event: x\n"], SSE, "nothing"), ([b"data: {}"], SSE, "nothing"),
        ([b"event: x\nda", b"ta: {}\n"], b"text/event-stream; charset=utf-8", "something"),
        ([b": data: no\n\n"], SSE, "nothing"), ([b": x\r\ndata:1\r\n"], SSE, "something"),
        ([b"data: [DONE]\n\n"], SSE, "something"), ([b"data: {broken\n\n"], SSE, "something"),
        ([CHUNK % ROLE], SSE, "nothing"), ([CHUNK % b""], SSE, "nothing"), ([CHUNK % b"1"], SSE, "something"),
        ([CHUNK % ROLE, CHUNK % b'{"delta":{"content":"a"}}'], SSE, "something"),
        ([CHUNK % b'{"delta":{"reasoning":"hm"}}'], SSE, "something"),
        ([CHUNK % b'{"delta":{},"finish_reason":"stop"}'], SSE, "something"),
        ([CHUNK % ROLE, b'data: {"error":{"message":"overloaded"}}\n\n'], SSE, "an error"),
        ([b'data: {"error":"no"}\n\n'], SSE, "an error"), ([b'data: {"error":null}\n\n'], SSE, "something"),
        ([b'data: {"error":{"type":"invalid_request_error"}}\n\n'], SSE, "something"),
        ([b'data: {"type":"error","code":"server_error","message":"no"}\n\n'], SSE, "an error"),
        ([b'data: {"type":"error","code":"invalid_prompt","message":"no"}\n\n'], SSE, "something"),
        ([FAILED % b'{"code":"rate_limit_exceeded","message":"no"}'], SSE, "an error"),
        ([FAILED % b'{"code":"invalid_prompt","message":"no"}'], SSE, "something"), ([FAILED % b"1"], SSE, "something"),
        ([b'data: {"type":"response.failed"}\n\n'], SSE, "something"),
        ([b'data: {"type":{}}\n\n'], SSE, "something"), ([b'data: {"type":["ping"]}\n\n'], SSE, "something"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], SSE, "something"),
        ([b'data: {"type":"message_start"}\n\ndata: {"type":"ping"}\n\n'], SSE, "nothing"),
        ([b'data: {"type":"message_start"}\n\ndata: {"type":"content_block_delta"}\n\n'], SSE, "something"),
        ([b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'], SSE, "an error"),
        ([b'data: {"type":"response.created","response":{"error":null}}\n\n'], SSE, "nothing"),
    ],
)  # fmt: skip
def test_what_an_answer_says(payload: list[bytes], type: bytes, found: str) -> None:
    assert FirstContentDetector(type).classify(payload) == found


def test_an_answer_with_a_content_encoding_is_not_looked_into() -> None:
    assert FirstContentDetector(SSE, encoded=True).classify([b"\x1f\x8b"]) == "something"


def test_a_beginning_that_comes_in_many_reads_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    beginning = FirstContentDetector(b"text/event-stream")
    for _ in range(50):
        for _ in range(4000):
            assert beginning.classify([b" 12345678 "]) == "nothing"
        assert beginning.classify([b"\n"]) == "nothing"
    assert beginning.classify([b"da", b"ta: 1", b"\r"]) == "something"


async def test_a_silent_one_costs_one_call_its_patience_and_no_other(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RESTS", Backoff(30.0, 30.0))
    answers = [step for _ in range(3) for step in (request(), send(OK))]
    async with two([request()], answers, HASTY) as it:
        for _ in range(3):
            assert await it.ask() == OK
        assert len(it.up.connections) == 1
        shown = {one["name"]: one for one in (await it.rig.tape.get("/api/upstreams"))["upstreams"]}
        assert (shown["up"]["health"], shown["up"]["failing"]) == ("resting", "timeout")
        assert (shown["spare"]["health"], shown["spare"]["failing"]) == ("good", "")
        assert 0 < shown["up"]["rests_s"] <= health.RESTS.longest_s
        # Its rest is over: one call is given to it, and then all are.
        it.up.scripts = [answers]
        pool = it.rig.gateway.pools["up"]
        pool.config = pool.config.model_copy(update={"read_timeout": 600.0})
        pool.health._until = 0.0
        for _ in range(2):
            assert await it.ask() == OK
        spans = await it.rig.tape.spans(it.rig.rollout, 5)
    assert [span.upstream for span in spans] == ["spare"] * 3 + ["up"] * 2
    assert [TRIES in (span.attributes or {}) for span in spans] == [True] + [False] * 4


async def test_what_an_upstream_said_tells_more_than_that_the_next_cannot_be_reached(two: Two) -> None:
    async with two([request(), send(BUSY)], [], spare={"base_url": f"http://127.0.0.1:{steady_ports(1)[0]}/v1"}) as it:
        assert await it.ask() == BUSY
        span = await it.span()
        assert (span.status, span.error, span.http_status, span.upstream) == ("error", "http_429", 429, "up")
        assert await it.tries() == [("up", "http_429"), ("spare", "connect")]


async def test_that_a_prompt_is_too_long_tells_more_than_that_the_next_one_breaks_off(two: Two) -> None:
    async with two([request(), send(TOO_LONG), request(), send(OK)], [request(), close()], SHORT, LONG) as it:
        # It is given one call, to see how it is, and it answers that.
        state = it.rig.gateway.pools["up"].health
        state.failed("timeout", -10.0)
        assert await it.ask() == TOO_LONG
        assert state.state(0.0) == "good"
        span = await it.span()
        assert (span.upstream, span.http_status, span.error) == ("up", 400, "http_400")
        assert await it.rig.tape.raw(span, "request") == PLAIN


@pytest.mark.parametrize(("status", "headers"), [(500, []), (503, []), (503, [("Retry-After", "0")])])
async def test_one_that_fails_for_a_moment_is_asked_once_more(
    two: Two, status: int, headers: list[tuple[str, str]]
) -> None:
    async with two([request(), send(reply(status, b"{}", headers)), request(), send(OK)], [request()]) as it:
        assert await it.ask() == OK
        one, again = it.up.connections[0].requests
        assert one == again
        assert it.spare.connections == []
        assert (await it.span()).upstream == "up"
        assert await it.tries() == [("up", f"http_{status}")]


async def test_a_model_that_begins_late_is_waited_for_from_the_second_time_on(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LEAST_FIRST_CONTENT_S", 0.1)
    monkeypatch.setattr(health, "FIRST_CONTENT_TIMES", 1e6)
    late = [request(), send(events_head()), says_so(), wait("thought"), send(EVENT + LAST)]
    async with two(late, late) as it:
        it.client.send(it.rig.call(STREAM))
        await until(lambda: it.spare.signal("asked").is_set())
        it.spare.go("thought")
        assert await it.client.message() == EVENTS
        assert await it.tries() == [("up", "no_content")]
        assert it.rig.gateway.proxy.first_content_timeouts.limit_s("m") > 1.0
        assert it.rig.gateway.proxy.first_content_timeouts.limit_s("another") == 0.1


class Hole:
    """A way to an upstream on which nothing ever comes back."""

    def __init__(self) -> None:
        self.asked = 0

    async def connect(self, connection: object, host: str, port: int) -> None:
        self.asked += 1
        await asyncio.Event().wait()


async def test_one_that_never_connects_keeps_one_call_waiting_and_no_other(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CONNECT_S", 60.0)
    async with two([], [request(), send(OK)] * 5) as it, AsyncExitStack() as stack:
        hole = Hole()
        monkeypatch.setattr(it.rig.gateway.pools["up"], "transport", hole)
        clients = [await stack.enter_async_context(it.rig.client()) for _ in range(4)]
        for client in clients:
            client.send(it.rig.call())
        answers = [asyncio.ensure_future(client.message()) for client in clients]
        for answer in islice(asyncio.as_completed(answers), 3):
            assert await answer == OK
        next(answer for answer in answers if not answer.done()).cancel()
        assert await it.ask() == OK
        assert hole.asked == 4
        tried = [(span.attributes or {}).get(TRIES) for span in await it.rig.tape.spans(it.rig.rollout, 4)]
        assert sorted((one or [{"why": ""}])[0]["why"] for one in tried) == ["", *["connecting"] * 3]


# -- what was held -----------------------------------------------------------------------------------------------------

ENDS_BY_CLOSING = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nConnection: close\r\n\r\n"
HEARD = chunk(b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n')
WHOLE = {"stream": "whole"}


def watched(it: Pair) -> AnswerWatch | None:
    """The watch on the answer of the only call."""
    calls = list(it.rig.gateway.proxy.running)
    return calls[0]._watch if calls and isinstance(calls[0], HttpCall) else None


async def test_a_refusal_that_ended_by_closing_ends_at_its_client(two: Two) -> None:
    refused = ENDS_BY_CLOSING % (b"429 Too Many Requests", b"application/json") + b'{"a":1}'
    async with two([request(), send(refused), close()], [close()]) as it:
        it.client.send(it.rig.call())
        assert await it.client.rest() == refused


async def test_an_answer_that_was_held_and_ended_by_closing_ends_at_its_client(two: Two) -> None:
    head = ENDS_BY_CLOSING % (b"200 OK", b"text/event-stream")
    first = [request(), send(head + b"data: 1\n\n"), send(b"data: [DONE]\n\n"), close()]
    async with two(first, [request()], route=WHOLE) as it:
        it.client.send(it.rig.call(STREAM))
        assert await it.client.rest() == head + b"data: 1\n\ndata: [DONE]\n\n"


async def test_a_request_with_a_content_encoding_goes_on_under_the_name_of_the_next(two: Two) -> None:
    packed = gzip.compress(b'{"model":"m","x":1}')
    async with two([request(), close()], [request(), send(OK)]) as it:
        it.client.send(it.rig.call(packed, [("Content-Encoding", "gzip")]))
        assert await it.client.message() == OK
        assert body_of(it.up.connections[0].requests[0]) == packed
        (asked,) = it.spare.connections[0].requests
        assert body_of(asked) == b'{"model":"m-of-spare","x":1}'
        assert b"content-encoding" not in asked.lower()


async def test_a_role_that_comes_at_once_is_not_what_is_waited_for(two: Two) -> None:
    second = [request(), send(events_head() + HEARD), wait("thought"), send(EVENT + LAST)]
    async with two([request(), close()], second) as it:
        it.client.send(it.rig.call(STREAM))
        assert await it.client.until(HEARD) == events_head() + HEARD
        heard, watch = monotonic(), watched(it)
        it.spare.go("thought")
        assert await it.client.until(LAST) == EVENT + LAST
        (took,) = it.rig.gateway.proxy.first_content_timeouts._took["m"]
        assert watch is not None
        assert took >= heard - watch.sent_at


async def test_a_client_that_catches_up_does_not_move_the_begin_of_the_wait(two: Two) -> None:
    second = [request(), wait("asked"), send(events_head() + HEARD), wait("thought"), send(EVENT + LAST)]
    async with two([request(), close()], second) as it:
        it.client.send(it.rig.call(STREAM))
        await until(lambda: any(made.requests for made in it.spare.connections))
        (call,) = it.rig.gateway.proxy.running
        assert isinstance(call, HttpCall)
        asked = monotonic()
        call.hold()
        call.go_on()
        it.spare.go("asked")
        assert await it.client.until(HEARD) == events_head() + HEARD
        watch = watched(it)
        assert watch is not None
        assert watch.sent_at <= asked
        it.spare.go("thought")
        assert await it.client.until(LAST) == EVENT + LAST


async def test_the_end_of_an_answer_that_had_to_be_whole_is_not_what_is_waited_for(two: Two) -> None:
    first = [request(), send(events_head() + EVENT), wait("made"), send(LAST)]
    async with two(first, [request()], route=WHOLE) as it:
        it.client.send(it.rig.call(STREAM))
        await until(lambda: (found := watched(it)) is not None and found.spoke_at is not None)
        watch = watched(it)
        assert watch is not None
        spoke = monotonic()
        it.up.go("made")
        assert await it.client.until(LAST) == EVENTS
        (took,) = it.rig.gateway.proxy.first_content_timeouts._took["m"]
        assert took <= spoke - watch.sent_at


async def test_a_client_that_leaves_lets_another_call_show_how_an_upstream_is(two: Two) -> None:
    async with two([request(), gone()], [request()]) as it:
        state = it.rig.gateway.pools["up"].health
        state.failed("timeout", monotonic() - 10.0)
        it.client.send(it.rig.call())
        up = await it.up.connection(0)
        assert state.passed_over(monotonic())
        it.client.close()
        await up.gone()
        assert (await it.span()).status == "cancelled"
        assert not state.passed_over(monotonic())


async def test_a_call_that_has_waited_for_a_place_in_vain_goes_elsewhere(two: Two) -> None:
    async with two([request()], [request(), send(OK)], {"max_concurrent": 1, "read_timeout": 0.1}) as it:
        pools = it.rig.gateway.pools
        pools["up"].concurrency_limit.running += 1
        pools["spare"].health.failed("timeout", monotonic(), 300.0)
        # It was to show how that one is, and has not come to it.
        pools["up"].health.failed("timeout", monotonic() - 10.0)
        assert await it.ask() == OK
        assert (await it.tries())[0] == ("up", "busy")
        assert not pools["up"].health.passed_over(monotonic())
        pools["up"].concurrency_limit.running -= 1
