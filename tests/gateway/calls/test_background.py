"""Answers in the background belong to the call that has asked for them, whoever fetches them, however and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai
import pytest
from fakes.background import SAID, USAGE, BackgroundHost, background_host
from fakes.budgets import budget, toml, uses
from fakes.gateway_workers import served_by, workers
from fakes.process import Gateway, running, upstream
from fakes.raw import Wire
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.audit import Said
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec

ALL = USAGE["total_tokens"]
ASK: dict[str, Any] = {"model": "o3", "background": True, "max_output_tokens": 8000, "input": "think it over"}


class World(NamedTuple):
    gateway: Gateway
    host: BackgroundHost


@asynccontextmanager
async def world(home: Path, *flags: str, limit: int = 100_000, more: str = "") -> AsyncGenerator[World]:
    async with background_host() as host:
        config = more + upstream("u", host.url, "openai") + toml(budget(name="cap", unit="tokens", limit=limit))
        async with running(home, config, *flags) as gateway:
            yield World(gateway, host)


async def spans(http: aiohttp.ClientSession, gateway: Gateway, rollout: str, count: int) -> list[dict[str, Any]]:
    """All of a rollout, once there are so many."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        nonlocal found
        async with http.get(f"{gateway.url}/api/rollouts/{rollout}/spans") as page:
            found = sorted((await page.json()).get("spans", []), key=lambda span: span["sequence"])
        return len(found) >= count

    await until(there)
    assert len(found) == count
    return found


async def ask(http: aiohttp.ClientSession, gateway: Gateway, rollout: str = "r", **said: Any) -> str:
    """Asks for a response in the background; its id."""
    async with http.post(gateway.openai(rollout) + "/responses", json=ASK | said) as answer:
        assert answer.status == 200
        body = await answer.text()
        return (
            json.loads(body.partition("data: ")[2].splitlines()[0])["response"]["id"]
            if said
            else json.loads(body)["id"]
        )


async def fetch(http: aiohttp.ClientSession, gateway: Gateway, name: str, rollout: str = "r", query: str = "") -> int:
    async with http.get(f"{gateway.openai(rollout)}/responses/{name}{query}") as answer:
        await answer.read()
        return answer.status


async def test_the_sdk_asks_and_fetches_twice(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path) as (gateway, host):
        host.left = 1
        async with openai.AsyncOpenAI(base_url=gateway.openai("r"), api_key="k") as client:
            made = await client.responses.create(model="o3", background=True, input="think", max_output_tokens=8000)
            waiting, *_ = await spans(http, gateway, "r", 1)
            assert (waiting["status"], waiting["usage"], waiting["end_ns"]) == ("open", None, None)
            ((_, _, guessed, _),) = await uses(http, gateway.url)
            assert 8000 < guessed != ALL
            states = [(await client.responses.retrieve(made.id)).status for _ in range(3)]
        assert states == ["queued", "completed", "completed"]
        asked, *fetched = await spans(http, gateway, "r", 4)
        assert (asked["status"], asked["finish"], asked["model_served"]) == ("ok", "completed", "o3-2025")
        assert asked["usage"]["output_tokens"] == USAGE["output_tokens"]
        assert asked["attributes"]["penstock.fetched"] == "r/a1#3"
        assert [(one["dialect"], one["usage"]) for one in fetched] == [("retrieval", None)] * 3
        assert await uses(http, gateway.url) == [("cap", "", ALL, 0)]
        await shown(http, gateway, tmp_path)


async def shown(http: aiohttp.ClientSession, gateway: Gateway, home: Path) -> None:
    """Every view says the same."""
    async with http.get(f"{gateway.url}/api/rollouts/r/attempts/a1/spans/1") as answer:
        detail = await answer.json()
    assert [part["text"] for part in detail["turn"]["choices"][0]["message"]["parts"]] == [SAID]
    assert not detail["turn"]["problems"]
    receipt = detail["exchange"]["sides"][0]
    assert receipt["who"] == "receipt"
    assert "queued" in json.dumps(receipt)
    async with http.get(f"{gateway.url}/api/rollouts/r") as answer:
        totals = (await answer.json())["totals"]
    assert (totals["input_tokens"], totals["output_tokens"]) == (USAGE["input_tokens"], USAGE["output_tokens"])
    sql = await Shell(gateway.url, home).run("sql", "select sum(output_tokens) as s from spans", "--json")
    assert str(USAGE["output_tokens"]) in sql.text
    found = await Shell(gateway.url, home).run("search", SAID, "--json")
    assert "penstock.fetched" in found.text
    checked = await Shell(gateway.url, home).run("check", "--data", str(home / "data"))
    assert checked.code == 0, checked.text


@pytest.mark.parametrize("how", ["?stream=true&starting_after=0", "/cancel"])
async def test_however_it_is_fetched(tmp_path: Path, http: aiohttp.ClientSession, how: str) -> None:
    async with world(tmp_path) as (gateway, host):
        name = await ask(http, gateway)
        if how == "/cancel":
            host.ends = {"status": "cancelled", "usage": USAGE}
            async with http.post(f"{gateway.openai('other')}/responses/{name}/cancel") as answer:
                assert answer.status == 200
        else:
            assert await fetch(http, gateway, name, "other", how) == 200
        await ended(http, gateway, "r")
        (asked,) = await spans(http, gateway, "r", 1)
        assert asked["usage"]["output_tokens"] == USAGE["output_tokens"]
        assert asked["status"] == ("error" if how == "/cancel" else "ok")
        assert await uses(http, gateway.url) == [("cap", "", ALL, 0)]


async def ended(http: aiohttp.ClientSession, gateway: Gateway, rollout: str) -> None:
    async def there() -> bool:
        return (await spans(http, gateway, rollout, 1))[0]["end_ns"] is not None

    await until(there)


async def test_a_stream_that_breaks_off_goes_on_by_its_id(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path) as (gateway, _):
        name = await ask(http, gateway, stream=True)
        assert (await spans(http, gateway, "r", 1))[0]["status"] == "open"
        assert await fetch(http, gateway, name, "other", "?stream=true&starting_after=0") == 200
        await ended(http, gateway, "r")
        assert (await spans(http, gateway, "r", 1))[0]["usage"]["output_tokens"] == USAGE["output_tokens"]


async def test_what_nobody_fetches_stays_counted_as_a_guess(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, limit=20_000) as (gateway, host):
        for _ in range(2):
            await ask(http, gateway)
        async with http.post(gateway.openai("r") + "/responses", json=ASK) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "budget")
        host.ends = {"status": "failed", "usage": None, "error": {"code": "server_error", "message": "no"}}
        assert await fetch(http, gateway, "resp_1") == 200
        await spans(http, gateway, "r", 4)
        ((_, _, used, _),) = await uses(http, gateway.url)
        assert 8000 < used < 10_000, "of the one that failed nothing is counted"


async def test_a_rollout_is_forgotten_although_an_answer_is_waited_for(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path) as (gateway, _), Client(gateway.url) as client:
        await client.enqueue([RolloutSpec(id="r", mode="train", input={})])
        await client.claim(ClaimRequest(worker="w", limit=1, modes=["train"]))
        name = await ask(http, gateway)
        await client.finish("r", "a1", FinishRequest(worker="w", status="succeeded"))
        await client.forget("r", Said(who="ben", why="it must go"))
        assert await fetch(http, gateway, name, "other") == 200
        assert [one["dialect"] for one in await spans(http, gateway, "other", 1)] == ["retrieval"]
        checked = await Shell(gateway.url, tmp_path).run("check", "--data", str(tmp_path / "data"))
        assert checked.code == 0, checked.text


async def test_of_two_calls_with_one_id_the_last_has_the_answer(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """And what was fetched before a call was made is not its answer."""
    async with world(tmp_path) as (gateway, host):
        first = await ask(http, gateway)
        host.restart()
        assert (name := await ask(http, gateway)) == first
        assert [one["error"] for one in await spans(http, gateway, "r", 2)] == ["not_fetched", None]
        for _ in range(2):
            assert await fetch(http, gateway, name, "other") == 200
        host.restart()
        assert await ask(http, gateway) == name
        *_, second, third = await spans(http, gateway, "r", 3)
        assert (second["status"], third["status"]) == ("ok", "open")


async def test_it_outlives_the_process(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, more='[tape]\nrecord = "strict"\n') as (gateway, _):
        name = await ask(http, gateway)
        await gateway.kill()
        await gateway.start()
        assert (await spans(http, gateway, "r", 1))[0]["status"] == "open"
        await asyncio.gather(*(fetch(http, gateway, name, "other") for _ in range(3)))
        await ended(http, gateway, "r")
        assert await uses(http, gateway.url) == [("cap", "", ALL, 0)]


async def said(wire: Wire, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    wire.send(head.encode() + body)
    return json.loads((await wire.message()).partition(b"\r\n\r\n")[2])


async def test_another_worker_fetches_it_at_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Its process may write that before the other has written that it was asked for."""
    async with world(tmp_path, "--workers", "2", limit=10**9) as (gateway, _):
        first, second = list(workers(gateway.pid).values())[:2]
        async with served_by(gateway, first) as one, served_by(gateway, second) as other:
            for number in range(10):
                by, then = (one, other) if number % 2 else (other, one)
                made = await said(by, "POST", f"/rollout/r{number}/v1/responses", json.dumps(ASK).encode())
                state = await said(then, "GET", f"/rollout/x/v1/responses/{made['id']}")
                assert state["status"] == "completed"
        for number in range(10):
            await ended(http, gateway, f"r{number}")
        assert await uses(http, gateway.url) == [("cap", "", 10 * ALL, 0)]
