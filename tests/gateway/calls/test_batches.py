"""Each result of a batch is a call beside the one that made the batch, once, whoever fetches it and however often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
import pytest
from fakes.batch_host import CHAT, IN, OUT, RESPONSES, BatchHost, batch_host, said
from fakes.budgets import budget, toml, uses
from fakes.gateway_workers import served_by, workers
from fakes.in_process import running_here
from fakes.process import Gateway, running, upstream
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.audit import Said
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec

ALL = IN + OUT
NAMES = ("one", "two", "bad", "late")
BUDGETS = toml(
    budget(name="cap", unit="tokens", limit=10**6, unread="call"), budget(name="n", limit=10**6),
    budget(name="mine", unit="tokens", limit=10**6, unread="call", per="rollout"),
    budget(name="usd", unit="usd", limit=10, unread="call"),
)  # fmt: skip


class World(NamedTuple):
    gateway: Gateway
    host: BatchHost


@asynccontextmanager
async def world(home: Path, *flags: str, more: str = "", own: bool = False) -> AsyncGenerator[World]:
    """`own`: in a process of its own."""
    async with batch_host() as host:
        kinds = (("o", f"{host.url}/v1", "openai"), ("a", host.url, "anthropic"), ("g", host.url, "gemini"))
        config = more + "".join(upstream(*kind) for kind in kinds) + BUDGETS
        async with running(home, config, *flags) if own else running_here(home, config) as gateway:
            host.results_at = gateway.address("other")
            yield World(gateway, host)


async def spans(http: aiohttp.ClientSession, gateway: Gateway, rollout: str, count: int) -> list[dict[str, Any]]:
    """Results in a rollout, by their names, once there are so many; more fail the test."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        nonlocal found
        async with http.get(f"{gateway.url}/api/rollouts/{rollout}/spans", params={"limit": 1000}) as page:
            every = (await page.json()).get("spans", [])
        found = [one for one in every if "penstock.batch.custom_id" in (one["attributes"] or {})]
        return len(found) >= count

    await until(there)
    assert len(found) == count
    return sorted(found, key=lambda one: one["attributes"]["penstock.batch.custom_id"])


async def turn(http: aiohttp.ClientSession, gateway: Gateway, span: dict[str, Any]) -> dict[str, Any]:
    path = f"{span['rollout']}/attempts/{span['attempt']}/spans/{span['sequence']}"
    async with http.get(f"{gateway.url}/api/rollouts/{path}") as answer:
        return (await answer.json())["turn"]


async def settled(
    http: aiohttp.ClientSession, gateway: Gateway, results: int, rates: tuple[float, float] = (1.25, 5.0)
) -> None:
    """Budgets have counted so many results, at the price of a batch, and the call that made it: that of the rollout
    which has made it too, and no other's."""
    tokens, dollars = results * ALL, results * (IN * rates[0] + OUT * rates[1]) / 1e6
    wanted = [("cap", "", tokens), ("mine", "r", tokens), ("n", "", results + 1), ("usd", "", pytest.approx(dollars))]

    async def there() -> bool:
        return [it[:3] for it in await uses(http, gateway.url)] == wanted

    await until(there)


def lines(url: str = CHAT, names: tuple[str, ...] = NAMES) -> bytes:
    field = "messages" if url == CHAT else "input"
    bodies = {
        name: {"model": "gpt-4o", field: [{"role": "user", "content": f"ask {name}"}], "max_tokens": 5}
        for name in names
    }
    asked = [{"custom_id": name, "method": "POST", "url": url, "body": body} for name, body in bodies.items()]
    return b"\n".join(json.dumps(one).encode() for one in asked) + b"\n"


async def ordered(client: openai.AsyncOpenAI, url: Any = CHAT, names: tuple[str, ...] = NAMES) -> str:
    """Brings a file and makes a batch of it; its id."""
    file = await client.files.create(file=("b.jsonl", lines(url, names)), purpose="batch")
    made = await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    return made.id


def sdk(gateway: Gateway, rollout: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.openai(rollout), api_key="k", max_retries=0)


@pytest.mark.parametrize("url", [CHAT, RESPONSES])
async def test_openai_s(tmp_path: Path, http: aiohttp.ClientSession, url: str) -> None:
    async with world(tmp_path) as (gateway, host), sdk(gateway, "r") as client, sdk(gateway, "other") as other:
        name = await ordered(client, url)
        state = await other.batches.retrieve(name)
        for _ in range(2):
            for file in (state.error_file_id, state.output_file_id):
                assert (await other.files.content(str(file))).content == host.sent[f"/v1/files/{file}/content"]
        bad, late, one, two = await spans(http, gateway, "r", 4)
        assert [(it["status"], it["error"], it["http_status"]) for it in (bad, late, one)] == [
            ("error", "http_400", 400), ("error", "batch_expired", None), ("ok", None, 200),
        ]  # fmt: skip
        assert one["dialect"] == two["dialect"] == ("chat" if url == CHAT else "responses")
        assert (one["usage"]["input_tokens"], one["usage"]["billed"]) == (IN, {"tier": "batch"})
        assert (one["model"], one["model_served"]) == ("gpt-4o", "gpt-4o-2024-08-06")
        assert one["attributes"]["penstock.batch"] == f"openai/{name}"
        await posted(http, gateway, one, "/v1/batches")
        read = await turn(http, gateway, one)
        assert read["choices"][0]["message"]["parts"][0]["text"] == said("one")
        assert read["messages"][0]["parts"][0]["text"] == "ask one"
        assert (read["problems"], read["usage"]["billed"]) == ([], {"tier": "batch"})
        assert (await turn(http, gateway, late))["error"]
        await settled(http, gateway, 2)
        if url == CHAT:
            await shown(http, gateway, tmp_path)
        async with http.get(f"{gateway.url}/api/rollouts/r") as answer:
            assert (await answer.json())["totals"]["uncounted"] == 0, "what expired has used nothing"
        async with http.get(f"{gateway.url}/api/rollouts/other") as answer:
            totals = (await answer.json())["totals"]
        assert (totals["calls"], totals["input_tokens"]) == (5, 0), "what fetches uses nothing"


async def posted(http: aiohttp.ClientSession, gateway: Gateway, span: dict[str, Any], path: str) -> None:
    """It stands below the call that made the batch."""
    async with http.get(f"{gateway.url}/api/rollouts/{span['rollout']}/spans") as page:
        made = next(one for one in (await page.json())["spans"] if one["path"] == path)
    assert (span["parent_id"], span["trace_id"]) == (made["span_id"], made["trace_id"])
    assert (made["dialect"], made["usage"]) == ("opaque", None)


async def shown(http: aiohttp.ClientSession, gateway: Gateway, home: Path) -> None:
    """Every view says the same: the costs are those of a batch."""
    shell = Shell(gateway.url, home)
    assert said("two") in (await shell.run("show", "r")).text
    assert "penstock.batch.custom_id" in (await shell.run("search", said("two"), "--json")).text
    row = json.loads(
        (await shell.run("sql", "select sum(cost) as c, sum(input_tokens) as t from spans", "--json")).text
    )
    assert (row["c"], row["t"]) == (pytest.approx(2 * (IN * 1.25 + OUT * 5.0) / 1e6), 2 * IN)
    checked = await shell.run("check", "--data", str(home / "data"))
    assert checked.code == 0, checked.text


def params(names: tuple[str, ...]) -> list[Any]:
    asked = {"model": "claude-sonnet-4-5", "max_tokens": 5}
    return [
        {"custom_id": name, "params": asked | {"messages": [{"role": "user", "content": f"ask {name}"}]}}
        for name in names
    ]


@pytest.mark.parametrize("packed", [False, True])
async def test_anthropic_s(tmp_path: Path, http: aiohttp.ClientSession, packed: bool) -> None:
    async with world(tmp_path) as (gateway, host):
        host.packed = packed
        async with anthropic.AsyncAnthropic(base_url=gateway.address("r"), api_key="k", max_retries=0) as client:
            made = await client.messages.batches.create(requests=params((*NAMES, "stopped")))
            for _ in range(2):
                found = [one async for one in await client.messages.batches.results(made.id)]
                assert [one.custom_id for one in found] == ["stopped", *reversed(NAMES)]
        bad, late, one, stopped, _ = await spans(http, gateway, "r", 5)
        assert [it["error"] for it in (bad, late, stopped)] == ["batch_error", "batch_expired", "batch_cancelled"]
        assert (one["dialect"], one["usage"]["billed"]["tier"], one["finish"]) == ("messages", "batch", "end_turn")
        assert one["attributes"]["penstock.fetched"].startswith("other/")
        await posted(http, gateway, one, "/v1/messages/batches")
        read = await turn(http, gateway, one)
        assert read["messages"][0]["parts"][0]["text"] == "ask one"
        assert "max_tokens is too high" in (await turn(http, gateway, bad))["error"]
        await settled(http, gateway, 2, (1.5, 7.5))


async def test_gemini_s(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Answers have keys, or are known by their places."""
    asked: list[dict[str, Any]] = [{"request": {"contents": [{"parts": [{"text": f"ask {at}"}]}]}} for at in range(3)]
    asked[1] |= {"metadata": {"key": "bad"}}
    async with world(tmp_path) as (gateway, _):
        body = {"batch": {"displayName": "b", "inputConfig": {"requests": {"requests": asked}}}}
        url = gateway.address("r") + "/v1beta"
        headers = {"x-goog-api-key": "k"}
        async with http.post(f"{url}/models/gemini-2.5-flash:batchGenerateContent", json=body, headers=headers) as made:
            name = (await made.json())["name"]
        for _ in range(2):
            async with http.get(f"{url}/{name}", headers=headers) as got:
                assert got.status == 200
        first, last, bad = await spans(http, gateway, "r", 3)
        told = (first["dialect"], first["model"], first["usage"]["output_tokens"])
        assert told == ("gemini", "gemini-2.5-flash", OUT)
        assert [it["attributes"]["penstock.batch.custom_id"] for it in (last, bad)] == ["2", "bad"]
        assert (bad["status"], bad["error"]) == ("error", "batch_error")
        assert (await turn(http, gateway, last))["messages"][0]["parts"][0]["text"] == "ask 2"
        await settled(http, gateway, 2, (0.15, 1.25))


async def test_once_over_a_kill_and_whoever_fetches_first(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Also where results are fetched before it is known whose they are."""
    async with world(tmp_path, more='[tape]\nrecord = "strict"\n', own=True) as (gateway, _):
        async with sdk(gateway, "r") as client:
            name = await ordered(client)
            _ = await client.files.content(f"out-{name}")
        await gateway.kill()
        await gateway.start()
        async with sdk(gateway, "other") as client:
            assert not await spans(http, gateway, "r", 0)
            _ = await client.batches.retrieve(name)
            await spans(http, gateway, "r", 3)
            _ = await client.files.content(f"err-{name}")
            await gateway.kill()
            await gateway.start()
        async with sdk(gateway, "last") as client:
            await spans(http, gateway, "r", 4)
            for kind in ("out", "err"):
                _ = await client.files.content(f"{kind}-{name}")
            async with http.get(gateway.url + "/metrics") as page:
                assert "penstock_batch_results_total" in await page.text()
            await settled(http, gateway, 2)
            await spans(http, gateway, "r", 4)


async def test_a_provider_that_begins_anew_gives_old_names_to_new_batches(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path) as (gateway, host), sdk(gateway, "r") as client:
        for round_ in (1, 2):
            name = await ordered(client, names=("one",))
            _ = await client.batches.retrieve(name)
            for _ in range(2):
                _ = await client.files.content(f"out-{name}")
            await spans(http, gateway, "r", round_)
            host.restart()
        assert name == "batch_1"


async def test_two_workers_fetch_at_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, "--workers", "2", own=True) as (gateway, _):
        first, second = list(workers(gateway.pid).values())[:2]
        names = tuple(f"q{number}" for number in range(40))
        async with sdk(gateway, "r") as client:
            name = await ordered(client, names=names)
            _ = await client.batches.retrieve(name)
        async with served_by(gateway, first) as one, served_by(gateway, second) as other:
            for wire in (one, other):
                wire.send(f"GET /rollout/x/v1/files/out-{name}/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            await asyncio.gather(one.message(), other.message())
        await spans(http, gateway, "r", 40)
        await settled(http, gateway, 40)


async def test_what_is_not_read_is_said(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The answer is larger than what is recorded; nobody knows who has made the batch."""
    names = tuple(f"q{number}" for number in range(3000))
    async with world(tmp_path, more="[limits]\nrecorded_bytes = 300_000\n") as (gateway, host):
        async with http.post(f"{host.url}/v1/messages/batches", json={"requests": params(names)}) as made:
            assert made.status == 200
        url = f"{gateway.address('r')}/v1/messages/batches/msgbatch_1/results"
        async with http.get(url, headers={"x-api-key": "k"}) as answer:
            assert await answer.read() == host.sent["/v1/messages/batches/msgbatch_1/results"]
        events: list[dict[str, Any]] = []

        async def told() -> bool:
            nonlocal events
            async with http.get(f"{gateway.url}/api/spans", params={"filter": "kind:event"}) as page:
                events = (await page.json())["spans"]
            return bool(events)

        await until(told)
        (event,) = events
        assert event["name"] == "penstock.batch.left_out"
        assert "recorded_bytes" in event["attributes"]["penstock.batch.left_out.why"]
        async with http.get(f"{gateway.url}/api/rollouts/r") as answer:
            calls = (await answer.json())["totals"]["calls"]
        assert 1 < calls < len(names)
        async with http.get(f"{gateway.url}/api/rollouts/r/spans", params={"limit": 2}) as page:
            first = (await page.json())["spans"][1]
        assert first["parent_id"] is None
        assert "empty" in str((await turn(http, gateway, first))["problems"])


async def test_results_of_a_forgotten_rollout_are_those_of_who_fetches_them(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path) as (gateway, _), Client(gateway.url) as client, sdk(gateway, "r") as first:
        await client.enqueue([RolloutSpec(id="r", mode="train", input={})])
        await client.claim(ClaimRequest(worker="w", limit=1, modes=["train"]))
        name = await ordered(first)
        await client.finish("r", "a1", FinishRequest(worker="w", status="succeeded"))
        await client.forget("r", Said(who="ben", why="it must go"))
        async with sdk(gateway, "other") as other:
            _ = await other.batches.retrieve(name)
            _ = await other.files.content(f"out-{name}")
        found = await spans(http, gateway, "other", 3)
        assert {it["request_bytes"] for it in found} == {0}
