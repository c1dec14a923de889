"""The plan of a call is a value, and a feature plugs in without the plan or the call knowing of it. Of a call's states
each can be left until the last, and nothing moves it but the table."""

from __future__ import annotations

import json

import pytest
from fakes.odd import gone, request, send
from fakes.raw import body_of
from fakes.rig import CHAT, GOOD, Within

from penstock.gateway.config import RouteSettings
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.call_lifecycle import MOVES, CallState
from penstock.gateway.traffic.proxy.plan import plan
from penstock.gateway.traffic.proxy.proxy_context import CallFilter, CallPlan
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.http.request import HttpRequest

ROUTES = [{"model": "small", "upstream": "up", "alias": "qwen", "train": True}]
BODY = b'{"model":"small","messages":[{"role":"user","content":"hi"}]}'


def asked(body: bytes) -> tuple[CallRequest, HttpRequest]:
    """A call that has just come."""
    made = HttpRequest()
    made.method, made.target = "POST", CHAT.encode()
    made.headers = [(b"accept-encoding", b"Accept-Encoding", b"gzip")]
    return CallRequest(CallAddress("r"), find("POST", CHAT), CHAT, body), made


async def test_a_plan_says_where_a_call_goes_and_leaves_the_request_alone(within: Within) -> None:
    async with within(route=ROUTES) as made:
        shared = made.gateway.proxy
        call, came = asked(BODY)
        headers = list(came.headers)
        decided = plan(shared, call, came)
        assert isinstance(decided, CallPlan)
        assert [pool.name for pool in decided.pools] == ["up"]
        assert json.loads(decided.body)["model"] == "qwen"
        assert decided.captured == ("return_token_ids", "logprobs")
        assert decided.headers == [(b"accept-encoding", b"Accept-Encoding", b"identity")]
        assert (call.body, came.headers) == (BODY, headers)
        other, came = asked(BODY.replace(b"small", b"large"))
        decided = plan(shared, other, came)
        assert isinstance(decided, CallPlan)
        assert (decided.body, decided.filters, decided.headers) == (other.body, (), came.headers)


class Counting(CallFilter):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_end(self, record: CallRecord, status: str) -> None:
        self.seen.append(f"ending {status}")
        record.attributes = {**record.attributes, "planted": "yes"}

    def on_complete(self, record: CallRecord, token_ids: bool) -> None:
        self.seen.append("completed")

    def on_recorded(self, record: CallRecord) -> None:
        self.seen.append("handed over")


class Planted:
    """A feature of calls with a route."""

    def __init__(self) -> None:
        self.part = Counting()

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        return route is not None

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        send.body = send.body.replace(b"hi", b"HI")
        send.filters += (self.part,)


async def test_a_feature_plugs_in_at_one_place(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted()

    def build(*_: object) -> tuple[Planted]:
        return (planted,)

    monkeypatch.setattr("penstock.gateway.app.build_middleware", build)
    async with within(route=[{"model": "small", "upstream": "up"}]) as made:
        _, seen = await made.passes(made.call(BODY))
        assert b'"content":"HI"' in body_of(seen)
        assert (await made.span()).attributes == {"planted": "yes"}
    assert planted.part.seen == ["ending ok", "completed", "handed over"]


# -- states ------------------------------------------------------------------------------------------------------------


def reachable(start: CallState) -> set[CallState]:
    """What can come of it."""
    found, left = set[CallState](), [start]
    while left:
        for state in MOVES[left.pop()]:
            if state not in found:
                found.add(state)
                left.append(state)
    return found


def test_every_state_is_in_the_table_and_comes_to_its_end() -> None:
    assert set(MOVES) == set(CallState)
    assert {CallState.PLANNING} | reachable(CallState.PLANNING) == set(CallState)
    assert all(CallState.ENDED in reachable(state) for state in CallState if state is not CallState.ENDED)
    assert all(why for moves in MOVES.values() for why in moves.values())


def test_what_has_not_ended_can_end_at_any_time_and_what_has_ended_stays_so() -> None:
    assert all(CallState.ENDING in MOVES[state] for state in CallState if state < CallState.ENDING)
    assert reachable(CallState.ENDING) == {CallState.ENDED}
    assert CallState.PLANNING not in reachable(CallState.STREAMING), "what has begun to be answered is not sent again"


async def test_an_ordinary_call_goes_through_its_states(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CallState] = []
    move = HttpCall._move  # pyright: ignore[reportPrivateUsage]

    def watched(self: HttpCall, to: CallState) -> None:
        move(self, to)
        seen.append(to)

    monkeypatch.setattr(HttpCall, "_move", watched)
    async with within() as made:
        await made.passes()
        await made.span()
        assert not made.gateway.proxy.running
    assert seen == [CallState.CONNECTING, CallState.SENT, CallState.STREAMING, CallState.ENDING, CallState.ENDED]


async def test_a_move_that_is_not_in_the_table_ends_the_call(
    within: Within, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(MOVES, CallState.SENT, {CallState.ENDING: "planted"})
    async with within() as made:
        async with made.upstream([request(), send(GOOD), gone()]), made.client() as client:
            client.send(made.call())
            await client.rest()
        assert (await made.span()).error == "internal"
    assert "cannot go from SENT to STREAMING" in caplog.text


async def test_of_two_routes_of_a_model_the_first_counts(within: Within) -> None:
    routes = [{"model": "m", "upstream": "up", "stream": "whole"}, {"model": "m", "upstream": "up"}]
    async with within(route=routes) as made:
        await made.passes()
        assert (await made.span()).attributes == {"penstock.whole": True}
