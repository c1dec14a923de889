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
from fakes.in_process import running_here
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
    http: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        async with self.http.get(f"{self.gateway.url}/api/rollouts/{path}") as answer:
            return await answer.json()

    async def spans(self, rollout: str, count: int) -> list[dict[str, Any]]:
        """All of a rollout, once there are so many."""
        found: list[dict[str, Any]] = []

        async def there() -> bool:
            nonlocal found
            found = sorted((await self.get(f"{rollout}/spans")).get("spans", []), key=lambda span: span["sequence"])
            return len(found) >= count

        await until(there)
        assert len(found) == count
        return found

    async def ended(self, rollout: str) -> dict[str, Any]:
        """Its only call, once that has its end."""

        async def there() -> bool:
            return (await self.spans(rollout, 1))[0]["end_ns"] is not None

        await until(there)
        return (await self.spans(rollout, 1))[0]

    async def ask(self, **said: Any) -> str:
        """Asks for a response in the background; its id."""
        async with self.http.post(self.gateway.openai("r") + "/responses", json=ASK | said) as answer:
            assert answer.status == 200
            body = await answer.text()
        return (
            json.loads(body.partition("data: ")[2].splitlines()[0])["response"]["id"]
            if said
            else json.loads(body)["id"]
        )

    async def fetch(self, name: str, rollout: str = "other", query: str = "") -> None:
        async with self.http.get(f"{self.gateway.openai(rollout)}/responses/{name}{query}") as answer:
            await answer.read()
            assert answer.status == 200

    async def uses(self) -> list[tuple[str, str, float, float]]:
        return await uses(self.http, self.gateway.url)

    async def check(self) -> None:
        """Its tape is whole."""
        checked = await Shell(self.gateway.url, self.gateway.data.parent).run("check", "--data", str(self.gateway.data))
        assert checked.code == 0, checked.text


def config(host: BackgroundHost, limit: int) -> str:
    return upstream("u", host.url, "openai") + toml(budget(name="cap", unit="tokens", limit=limit))


@asynccontextmanager
async def world(home: Path, http: aiohttp.ClientSession, limit: int = 100_000) -> AsyncGenerator[World]:
    async with background_host() as host, running_here(home, config(host, limit)) as gateway:
        yield World(gateway, host, http)


async def test_the_sdk_asks_and_fetches_twice(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http) as here:
        here.host.left = 1
        async with openai.AsyncOpenAI(base_url=here.gateway.openai("r"), api_key="k") as client:
            made = await client.responses.create(model="o3", background=True, input="think", max_output_tokens=8000)
            waiting, *_ = await here.spans("r", 1)
            assert (waiting["status"], waiting["usage"], waiting["end_ns"]) == ("open", None, None)
            ((_, _, guessed, _),) = await here.uses()
            assert 8000 < guessed != ALL
            states = [(await client.responses.retrieve(made.id)).status for _ in range(3)]
        assert states == ["queued", "completed", "completed"]
        asked, *fetched = await here.spans("r", 4)
        assert (asked["status"], asked["finish"], asked["model_served"]) == ("ok", "completed", "o3-2025")
        assert asked["usage"]["output_tokens"] == USAGE["output_tokens"]
        assert asked["attributes"]["penstock.fetched"] == "r/a1#3"
        assert [(one["dialect"], one["usage"]) for one in fetched] == [("retrieval", None)] * 3
        assert await here.uses() == [("cap", "", ALL, 0)]
        detail = await here.get("r/attempts/a1/spans/1")
        assert [part["text"] for part in detail["turn"]["choices"][0]["message"]["parts"]] == [SAID]
        assert not detail["turn"]["problems"]
        receipt = detail["exchange"]["sides"][0]
        assert (receipt["who"], "queued" in json.dumps(receipt)) == ("receipt", True)
        totals = (await here.get("r"))["totals"]
        assert (totals["input_tokens"], totals["output_tokens"]) == (USAGE["input_tokens"], USAGE["output_tokens"])
        shell = Shell(here.gateway.url, tmp_path)
        sql = await shell.run("sql", "select sum(output_tokens) as s from spans", "--json")
        assert str(USAGE["output_tokens"]) in sql.text
        assert "penstock.fetched" in (await shell.run("search", SAID, "--json")).text
        await here.check()


@pytest.mark.parametrize("how", ["/cancel", "?stream=true&starting_after=0", "a stream that breaks off"])
async def test_however_it_is_fetched(tmp_path: Path, http: aiohttp.ClientSession, how: str) -> None:
    async with world(tmp_path, http) as here:
        name = await here.ask(**({"stream": True} if how.startswith("a ") else {}))
        if how == "/cancel":
            here.host.ends = {"status": "cancelled", "usage": USAGE}
            async with http.post(f"{here.gateway.openai('other')}/responses/{name}/cancel") as answer:
                assert answer.status == 200
        else:
            assert (await here.spans("r", 1))[0]["status"] == "open"
            await here.fetch(name, query="?stream=true&starting_after=0")
        asked = await here.ended("r")
        assert asked["usage"]["output_tokens"] == USAGE["output_tokens"]
        assert asked["status"] == ("error" if how == "/cancel" else "ok")
        assert await here.uses() == [("cap", "", ALL, 0)]


async def test_what_nobody_fetches_stays_counted_as_a_guess(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http, limit=20_000) as here:
        for _ in range(2):
            await here.ask()
        async with http.post(here.gateway.openai("r") + "/responses", json=ASK) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "budget")
        here.host.ends = {"status": "failed", "usage": None, "error": {"code": "server_error", "message": "no"}}
        await here.fetch("resp_1", "r")
        await here.spans("r", 4)
        ((_, _, used, _),) = await here.uses()
        assert 8000 < used < 10_000, "of the one that failed nothing is counted"


async def test_a_rollout_is_forgotten_although_an_answer_is_waited_for(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path, http) as here, Client(here.gateway.url) as client:
        await client.enqueue([RolloutSpec(id="r", mode="train", input={})])
        await client.claim(ClaimRequest(worker="w", limit=1, modes=["train"]))
        name = await here.ask()
        await client.finish("r", "a1", FinishRequest(worker="w", status="succeeded"))
        await client.forget("r", Said(who="ben", why="it must go"))
        await here.fetch(name)
        assert [one["dialect"] for one in await here.spans("other", 1)] == ["retrieval"]
        await here.check()


async def test_of_two_calls_with_one_id_the_last_has_the_answer(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """And what was fetched before a call was made is not its answer."""
    async with world(tmp_path, http) as here:
        first = await here.ask()
        here.host.restart()
        assert await here.ask() == first
        assert [one["error"] for one in await here.spans("r", 2)] == ["not_fetched", None]
        for _ in range(2):
            await here.fetch(first)
        here.host.restart()
        assert await here.ask() == first
        *_, second, third = await here.spans("r", 3)
        assert (second["status"], third["status"]) == ("ok", "open")


async def test_it_outlives_the_process(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with background_host() as host:
        strict = '[tape]\nrecord = "strict"\n'
        async with running(tmp_path, strict + config(host, 100_000)) as gateway:
            here = World(gateway, host, http)
            name = await here.ask()
            await gateway.kill()
            await gateway.start()
            assert (await here.spans("r", 1))[0]["status"] == "open"
            await asyncio.gather(*(here.fetch(name) for _ in range(3)))
            await here.ended("r")
            assert await here.uses() == [("cap", "", ALL, 0)]


async def said(wire: Wire, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    wire.send(head.encode() + body)
    return json.loads((await wire.message()).partition(b"\r\n\r\n")[2])


async def test_another_worker_fetches_it_at_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Its process may write that before the other has written that it was asked for."""
    async with background_host() as host, running(tmp_path, config(host, 10**9), "--workers", "2") as gateway:
        here = World(gateway, host, http)
        first, second = list(workers(gateway.pid).values())[:2]
        async with served_by(gateway, first) as one, served_by(gateway, second) as other:
            for number in range(10):
                by, then = (one, other) if number % 2 else (other, one)
                made = await said(by, "POST", f"/rollout/r{number}/v1/responses", json.dumps(ASK).encode())
                state = await said(then, "GET", f"/rollout/x/v1/responses/{made['id']}")
                assert state["status"] == "completed"
        for number in range(10):
            await here.ended(f"r{number}")
        assert await here.uses() == [("cap", "", 10 * ALL, 0)]
