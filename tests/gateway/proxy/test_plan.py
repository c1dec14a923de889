"""The plan of a call is a value, and a feature plugs in without the plan or the call knowing of it. Of a call's states
each can be left until the last, and nothing moves it but the table."""

from __future__ import annotations

import json

import pytest
from fakes.odd import gone, request, send
from fakes.raw import body_of
from fakes.rig import CHAT, GOOD, Within

from penstock.gateway.calls.address import Address
from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.calls.record import Record
from penstock.gateway.dialects import find
from penstock.gateway.http.request import Request
from penstock.gateway.proxy.call import Call
from penstock.gateway.proxy.parts import Part, Send
from penstock.gateway.proxy.plan import plan
from penstock.gateway.proxy.state import MOVES, State
from penstock.gateway.upstream_settings import Route

ROUTES = [{"model": "small", "upstream": "up", "alias": "qwen", "train": True}]
BODY = b'{"model":"small","messages":[{"role":"user","content":"hi"}]}'


def asked(body: bytes) -> tuple[Admitted, Request]:
    """A call that has just come."""
    made = Request()
    made.method, made.target = "POST", CHAT.encode()
    made.headers = [(b"accept-encoding", b"Accept-Encoding", b"gzip")]
    return Admitted(Address("r"), find("POST", CHAT), CHAT, body), made


async def test_a_plan_says_where_a_call_goes_and_leaves_the_request_alone(within: Within) -> None:
    async with within(route=ROUTES) as made:
        shared = made.gateway.proxy
        call, came = asked(BODY)
        headers = list(came.headers)
        decided = plan(shared, call, came)
        assert isinstance(decided, Send)
        assert [pool.name for pool in decided.pools] == ["up"]
        assert json.loads(decided.body)["model"] == "qwen"
        assert decided.captured == ("return_token_ids", "logprobs")
        assert decided.headers == [(b"accept-encoding", b"Accept-Encoding", b"identity")]
        assert (call.body, came.headers) == (BODY, headers)
        other, came = asked(BODY.replace(b"small", b"large"))
        decided = plan(shared, other, came)
        assert isinstance(decided, Send)
        assert (decided.body, decided.parts, decided.headers) == (other.body, [], came.headers)


class Counting(Part):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def ending(self, record: Record, status: str) -> None:
        self.seen.append(f"ending {status}")
        record.attributes = {**record.attributes, "planted": "yes"}

    def completed(self, record: Record, token_ids: bool) -> None:
        self.seen.append("completed")

    def handed_over(self, record: Record) -> None:
        self.seen.append("handed over")


class Planted:
    """A feature of calls with a route."""

    def __init__(self) -> None:
        self.part = Counting()

    def plan(self, send: Send, route: Route | None) -> None:
        if route is not None:
            send.body = send.body.replace(b"hi", b"HI")
            send.parts.append(self.part)


async def test_a_feature_plugs_in_at_one_place(within: Within) -> None:
    planted = Planted()
    async with within(route=[{"model": "small", "upstream": "up"}]) as made:
        made.gateway.proxy.features = (planted,)
        _, seen = await made.passes(made.call(BODY))
        assert b'"content":"HI"' in body_of(seen)
        assert (await made.span()).attributes == {"planted": "yes"}
    assert planted.part.seen == ["ending ok", "completed", "handed over"]


# -- states ------------------------------------------------------------------------------------------------------------


def reachable(start: State) -> set[State]:
    """What can come of it."""
    found, left = set[State](), [start]
    while left:
        for state in MOVES[left.pop()]:
            if state not in found:
                found.add(state)
                left.append(state)
    return found


def test_every_state_is_in_the_table_and_comes_to_its_end() -> None:
    assert set(MOVES) == set(State)
    assert {State.PLANNING} | reachable(State.PLANNING) == set(State)
    assert all(State.ENDED in reachable(state) for state in State if state is not State.ENDED)
    assert all(why for moves in MOVES.values() for why in moves.values())


def test_what_has_not_ended_can_end_at_any_time_and_what_has_ended_stays_so() -> None:
    assert all(State.ENDING in MOVES[state] for state in State if state < State.ENDING)
    assert reachable(State.ENDING) == {State.ENDED}
    assert State.PLANNING not in reachable(State.STREAMING), "what has begun to be answered is not sent again"


async def test_an_ordinary_call_goes_through_its_states(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[State] = []
    move = Call._move  # pyright: ignore[reportPrivateUsage]

    def watched(self: Call, to: State) -> None:
        move(self, to)
        seen.append(to)

    monkeypatch.setattr(Call, "_move", watched)
    async with within() as made:
        await made.passes()
        await made.span()
        assert not made.gateway.proxy.running
    assert seen == [State.CONNECTING, State.SENT, State.STREAMING, State.ENDING, State.ENDED]


async def test_a_move_that_is_not_in_the_table_ends_the_call(
    within: Within, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(MOVES, State.SENT, {State.ENDING: "planted"})
    async with within() as made:
        async with made.upstream([request(), send(GOOD), gone()]), made.client() as client:
            client.send(made.call())
            await client.rest()
        assert (await made.span()).error == "internal"
    assert "cannot go from SENT to STREAMING" in caplog.text
