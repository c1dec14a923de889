"""The moves of a call: every state can be left until the last, and nothing else moves it."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.odd import gone, request, send
from fakes.raw import reply
from fakes.rig import inside

from penstock.gateway.proxy.call import Call
from penstock.gateway.proxy.state import MOVES, State


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


ANSWERED = [request(), send(reply(200, b"{}")), gone()]


async def test_an_ordinary_call_goes_through_its_states(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[State] = []
    move = Call._move  # pyright: ignore[reportPrivateUsage]

    def watched(self: Call, to: State) -> None:
        move(self, to)
        seen.append(to)

    monkeypatch.setattr(Call, "_move", watched)
    async with inside(tmp_path, http) as made:
        async with made.upstream(ANSWERED), made.client() as client:
            client.send(made.call())
            await client.message()
        await made.span()
        assert not made.gateway.proxy.running
    assert seen == [State.CONNECTING, State.SENT, State.STREAMING, State.ENDING, State.ENDED]


async def test_a_move_that_is_not_in_the_table_ends_the_call(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(MOVES, State.SENT, {State.ENDING: "planted"})
    async with inside(tmp_path, http) as made:
        async with made.upstream(ANSWERED), made.client() as client:
            client.send(made.call())
            await client.rest()
        assert (await made.span()).error == "internal"
    assert "a call cannot go from SENT to STREAMING" in caplog.text
