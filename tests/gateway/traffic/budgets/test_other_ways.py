"""Calls that end otherwise than most, with budgets: on WebSockets, of training runs and arms of releases, of clients
that leave and gateways that die, on tapes that cannot be written; and calls that no budget counts."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.budgets import ASKED, CHAT, GOOD, budget, call, toml, uses, world
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.local import locally
from fakes.odd import gone, odd, request, send
from fakes.process import running, upstreams
from fakes.raw import chunk, events_head
from fakes.responses_websocket import websocket_host
from fakes.rig import Inside, inside
from fakes.waiting import until
from websockets.asyncio.client import connect

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.traffic.budgets.ledgers import LocalLedger
from penstock.gateway.traffic.budgets.operations import RESERVATIONS


def fail(*_: object) -> int:
    raise TapeError("disk full")


@pytest.mark.parametrize("model", ["*", "m*"])
async def test_each_answer_on_a_websocket_is_a_call(tmp_path: Path, http: aiohttp.ClientSession, model: str) -> None:
    async with websocket_host() as host:
        config = f'[[upstream]]\nname = "host"\nbase_url = "{host.url}/v1"\n' + toml(budget(limit=2, model=model))
        async with locally(tmp_path, config) as gateway:
            url = gateway.url.replace("http", "ws") + "/rollout/r/attempt/a1/v1/responses"
            asked = {"type": "response.create", "model": "m", "input": [{"role": "user", "content": "x"}]}
            last: dict[str, Any] = {}
            async with connect(url, proxy=None) as connection:
                for _ in range(3):
                    await connection.send(json.dumps(asked))
                    last = {"type": ""}
                    while last["type"] not in ("response.completed", "error"):
                        last = json.loads(await connection.recv())
            assert (last["type"], last["status"], last["error"]["code"]) == ("error", 429, "budget")
            assert "no room for this call" in last["error"]["message"]
            assert len(host.asked) == 2
            assert await uses(http, gateway.url) == [("b", "", 2, 0)]


async def test_a_training_run_has_a_budget(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(per="run", limit=2)) as (gateway, _), Client(gateway.url) as client:
        for rollout in ("one", "two"):
            await client.enqueue([RolloutSpec(id=rollout, mode="train", input={}, metadata={"penstock.run": "grpo-1"})])
        statuses = [(await call(http, gateway, rollout)).status for rollout in ("one", "two", "one", "other")]
        assert statuses == [200, 200, 429, 200]
        assert await uses(http, gateway.url) == [("b", "grpo-1", 2, 0)]


async def test_the_arms_of_a_release_have_budgets(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(per="arm", limit=3)) as (gateway, _), Client(gateway.url) as client:
        await client.add_version("travel", prompt(STABLE, sent=True))
        await client.add_version("travel", prompt(CANDIDATE))
        traffic = Traffic(gateway.url, http, client)
        release = await traffic.start("travel", "v2", policy(0.5))
        arms = [await traffic.rollout(f"r{number}", lambda _: None, calls=1) for number in range(20)]
        assert {"stable", "candidate"} <= set(arms)
        assert len(traffic.failures) == 20 - 6
        assert all("arm '" in failure for failure in traffic.failures)
        found = await uses(http, gateway.url)
        assert found == [("b", f"{release.id}:{arm}", 3, 0) for arm in ("candidate", "stable")]


async def test_while_the_tape_fails_the_mode_decides_and_what_passed_is_counted_later(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with inside(tmp_path, http, budget=[budget(unit="tokens", limit=50_000)]) as rig:
        write = rig.gateway.store.write

        rig.gateway.store.write = fail  # type: ignore[method-assign]
        async with rig.upstream([request(), send(GOOD), request(), send(GOOD)]), rig.client() as client:
            client.send(rig.call(ASKED))
            assert await client.message() == GOOD
            assert not await rig.gateway.recorder.flush()
            path = "/rollout/t/attempt/a1/mode/train/v1/chat/completions"
            async with http.post(rig.base.url + path, json=CHAT) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "tape")
            assert not await rig.gateway.recorder.flush()
            rig.gateway.store.write = write  # type: ignore[method-assign]
            _ = await rig.span()
            assert await uses(http, rig.base.url) == [("b", "", 18, 0)]


async def test_a_process_hands_over_although_its_tape_takes_nothing(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is reserved in memory cannot be brought to the tape then."""
    async with inside(tmp_path, http, budget=[budget()]) as rig, rig.upstream([request(), gone()]) as up:
        async with rig.client() as client:
            client.send(rig.call(ASKED))
            await until(lambda: bool(up.connections and up.connections[0].requests))
            monkeypatch.setattr(rig.gateway.store, "write", fail)
            await rig.gateway.budgets.move_to_tape()
            monkeypatch.undo()
        assert await uses(http, rig.base.url) == [("b", "", 0, 0)]


async def test_a_sum_that_cannot_be_read_is_asked_of_the_recorder(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise TapeError("damaged")

    monkeypatch.setattr(LocalLedger, "reserve", damaged)
    async with inside(tmp_path, http, budget=[budget(limit=1)]) as rig, rig.upstream([request(), send(GOOD)]):
        async with rig.client() as client:
            client.send(rig.call(ASKED))
            assert await client.message() == GOOD
        assert await uses(http, rig.base.url) == [("b", "", 1, 0)]
        async with rig.client() as client:
            client.send(rig.call(ASKED))
            assert (await client.message()).startswith(b"HTTP/1.1 429")


@pytest.mark.parametrize("counted", [True, False])
async def test_an_answer_has_nothing_of_budgets_in_it(
    tmp_path: Path, http: aiohttp.ClientSession, counted: bool
) -> None:
    budgets = [budget(per="all" if counted else "key")]
    async with (
        inside(tmp_path, http, budget=budgets) as rig,
        rig.upstream([request(), send(GOOD)]) as up,
        rig.client() as client,
    ):
        client.send(rig.call(ASKED))
        assert await client.message() == GOOD
        assert up.connections[0].requests[0].endswith(ASKED)
        assert await uses(http, rig.base.url) == ([("b", "", 1, 0)] if counted else [])


# -- clients that leave, gateways that die --


def event(text: str) -> bytes:
    return chunk(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")


async def shown(rig: Inside) -> dict[str, Any]:
    (use,) = (await rig.tape.get("/api/budgets"))["budgets"]
    return use


async def test_a_client_that_leaves_before_it_was_answered_has_used_nothing(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with (
        inside(tmp_path, http, budget=[budget(unit="tokens", limit=11_000)]) as rig,
        rig.upstream([request(), gone()], [request(), send(GOOD)]) as up,
    ):
        async with rig.client() as client:
            client.send(rig.call(ASKED))

            async def runs() -> bool:
                return bool((await shown(rig))["running"]) and bool(up.connections)

            await until(runs)
            assert (await shown(rig))["reserved"] > 9_000
            async with rig.client() as second:
                second.send(rig.call(ASKED))
                assert (await second.message()).startswith(b"HTTP/1.1 429")
        assert await uses(http, rig.base.url) == [("b", "", 0, 0)]
        async with rig.client() as third:
            third.send(rig.call(ASKED))
            assert await third.message() == GOOD
        assert await uses(http, rig.base.url) == [("b", "", 18, 0)]


async def test_of_an_answer_that_was_left_counts_what_came(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with (
        inside(tmp_path, http, budget=[budget(unit="tokens", limit=11_000)]) as rig,
        rig.upstream([request(), send(events_head() + event("word " * 400)), gone()]),
    ):
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
                client.send(rig.call(ASKED))
        assert await uses(http, rig.base.url) == [("b", "", 0, 0)]
        with rig.gateway.store.view() as view:
            assert list(view.scan(RESERVATIONS)) == []


@pytest.mark.slow
async def test_what_a_killed_gateway_has_reserved_is_free_when_it_starts_again(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with (
        odd([request(), gone()], [request(), send(GOOD)]) as up,
        running(tmp_path, upstreams(up.url + "/v1") + toml(budget(limit=1))) as gateway,
    ):
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

    is_leader, has_peers = False, True

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    def peer_processes(self) -> set[str]:
        return set()

    async def request_leader(self, name: str, *said: Any) -> None:
        self.asked.set()
        await self.answers.wait()

    def notify_leader(self, name: str, *said: Any) -> None:
        pass

    async def request_peers(self, name: str, *said: Any) -> dict[str, Any]:
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
            client.send(rig.call(ASKED))
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
