"""Clients that leave, and gateways that die: what of their calls counts, and when what they had reserved is free."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.budgets import CHAT, GOOD, budget, call, toml, uses, world
from fakes.odd import gone, odd, request, send
from fakes.process import running, upstreams
from fakes.raw import chunk, events_head
from fakes.rig import Inside, inside
from fakes.waiting import until

from penstock.gateway.budgets.operations import RESERVATIONS


def event(text: str) -> bytes:
    return chunk(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")


async def shown(rig: Inside) -> dict[str, Any]:
    (use,) = (await rig.tape.get("/api/budgets"))["budgets"]
    return use


async def test_a_client_that_leaves_before_it_was_answered_has_used_nothing(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        told = budget(unit="tokens", limit=11_000)
        rig = await stack.enter_async_context(inside(tmp_path, http, budget=[told]))
        up = await stack.enter_async_context(rig.upstream([request(), gone()], [request(), send(GOOD)]))
        async with rig.client() as client:
            client.send(rig.call(json.dumps(CHAT).encode()))

            async def runs() -> bool:
                return bool((await shown(rig))["running"]) and bool(up.connections)

            await until(runs)
            assert (await shown(rig))["reserved"] > 9_000
            async with rig.client() as second:
                second.send(rig.call(json.dumps(CHAT).encode()))
                assert (await second.message()).startswith(b"HTTP/1.1 429")
        assert await uses(http, rig.base.url) == [("b", "", 0, 0)]
        async with rig.client() as third:
            third.send(rig.call(json.dumps(CHAT).encode()))
            assert await third.message() == GOOD
        assert await uses(http, rig.base.url) == [("b", "", 18, 0)]


async def test_of_an_answer_that_was_left_counts_what_came(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        told = budget(unit="tokens", limit=11_000)
        rig = await stack.enter_async_context(inside(tmp_path, http, budget=[told]))
        script = [request(), send(events_head() + event("word " * 400)), gone()]
        _ = await stack.enter_async_context(rig.upstream(script))
        async with rig.client() as client:
            client.send(rig.call(json.dumps(CHAT | {"stream": True}).encode()))
            await client.until(b"word word")
        ((_, _, used, reserved),) = await uses(http, rig.base.url)
        assert 400 <= used <= 700
        assert reserved == 0
        use = await shown(rig)
        assert use["guessed"] == used, "nobody has counted it"


async def test_a_client_that_leaves_while_it_is_reserved_leaves_nothing_behind(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with inside(tmp_path, http, budget=[budget()]) as rig:
        for _ in range(20):
            async with rig.client() as client:
                client.send(rig.call(json.dumps(CHAT).encode()))
        assert await uses(http, rig.base.url) == [("b", "", 0, 0)]
        with rig.gateway.store.view() as view:
            assert list(view.scan(RESERVATIONS)) == []


async def test_what_a_killed_gateway_has_reserved_is_free_when_it_starts_again(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        up = await stack.enter_async_context(odd([request(), gone()], [request(), send(GOOD)]))
        config = upstreams(up.url + "/v1") + toml(budget(limit=1))
        gateway = await stack.enter_async_context(running(tmp_path, config))
        hanging = asyncio.ensure_future(call(http, gateway))

        async def runs() -> bool:
            async with http.get(gateway.url + "/api/budgets") as page:
                return bool((await page.json())["budgets"][0]["running"])

        await until(runs)
        _ = await gateway.kill()
        with pytest.raises(aiohttp.ClientError):
            await hanging
        await gateway.start(gateway.port)
        assert (await call(http, gateway)).status == 200
        assert await uses(http, gateway.url) == [("b", "", 1, 0)]


async def test_a_gateway_that_stops_settles_what_runs(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(limit=2)) as (gateway, _):
        assert (await call(http, gateway)).status == 200
        await gateway.restart()
        assert await uses(http, gateway.url) == [("b", "", 1, 0)]
        assert [(await call(http, gateway)).status for _ in range(2)] == [200, 429]


class _Team:
    """What one of several workers knows of the first one, which leaves it to the tape."""

    leads, several = False, True

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    def processes(self) -> set[str]:
        return set()

    async def ask_first(self, name: str, *said: Any) -> None:
        self.asked.set()
        await self.answers.wait()

    def tell_first(self, name: str, *said: Any) -> None:
        pass

    async def ask_others(self, name: str, *said: Any) -> dict[str, Any]:
        return {}


async def test_a_client_that_leaves_before_the_tape_is_asked_leaves_nothing_behind(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its span is written first, and what is reserved after that nobody would ever give back."""
    async with inside(tmp_path, http, budget=[budget()]) as rig:
        budgets, recorder, writes = rig.gateway.budgets, rig.gateway.recorder, threading.Event()
        budgets._alone, team = False, _Team()
        monkeypatch.setattr(budgets, "_team", team)
        async with rig.client() as client:
            client.send(rig.call(json.dumps(CHAT).encode()))
            await team.asked.wait()
            writing = recorder.submit(lambda tape: writes.wait())
        await until(lambda: not rig.gateway.proxy.running)
        team.answers.set()
        await asyncio.sleep(0)
        writes.set()
        assert await writing
        assert (await rig.span()).status == "cancelled"
        _ = await recorder.flush_all()
        with rig.gateway.store.view() as view:
            assert list(view.scan(RESERVATIONS)) == []
        assert budgets._open == set()
