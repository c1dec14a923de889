"""Calls on WebSockets, of training runs and of arms of releases; tapes that cannot be written; and calls that no budget
counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.budgets import CHAT, GOOD, budget, call, toml, uses, world
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.odd import gone, request, send
from fakes.process import running
from fakes.responses_websocket import websocket_host
from fakes.rig import inside
from fakes.waiting import until
from websockets.asyncio.client import connect

from penstock.gateway.budgets.here import Here
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.store.directory import TapeError


@pytest.mark.parametrize("model", ["*", "m*"])
async def test_each_answer_on_a_websocket_is_a_call(tmp_path: Path, http: aiohttp.ClientSession, model: str) -> None:
    async with websocket_host() as host:
        config = f'[[upstream]]\nname = "host"\nbase_url = "{host.url}/v1"\n' + toml(budget(limit=2, model=model))
        async with running(tmp_path, config) as gateway:
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

        def fail(*_: object) -> int:
            raise TapeError("disk full")

        rig.gateway.store.write = fail  # type: ignore[method-assign]
        async with rig.upstream([request(), send(GOOD), request(), send(GOOD)]), rig.client() as client:
            client.send(rig.call(json.dumps(CHAT).encode()))
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

    def fail(*_: object) -> int:
        raise TapeError("disk full")

    async with inside(tmp_path, http, budget=[budget()]) as rig, rig.upstream([request(), gone()]) as up:
        async with rig.client() as client:
            client.send(rig.call(json.dumps(CHAT).encode()))
            await until(lambda: bool(up.connections and up.connections[0].requests))
            monkeypatch.setattr(rig.gateway.store, "write", fail)
            await rig.gateway.budgets.share()
            monkeypatch.undo()
        assert await uses(http, rig.base.url) == [("b", "", 0, 0)]


async def test_a_sum_that_cannot_be_read_is_asked_of_the_recorder(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise TapeError("damaged")

    monkeypatch.setattr(Here, "reserve", damaged)
    async with inside(tmp_path, http, budget=[budget(limit=1)]) as rig, rig.upstream([request(), send(GOOD)]):
        async with rig.client() as client:
            client.send(rig.call(json.dumps(CHAT).encode()))
            assert await client.message() == GOOD
        assert await uses(http, rig.base.url) == [("b", "", 1, 0)]
        async with rig.client() as client:
            client.send(rig.call(json.dumps(CHAT).encode()))
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
        body = json.dumps(CHAT).encode()
        client.send(rig.call(body))
        assert await client.message() == GOOD
        assert up.connections[0].requests[0].endswith(body)
        assert await uses(http, rig.base.url) == ([("b", "", 1, 0)] if counted else [])
