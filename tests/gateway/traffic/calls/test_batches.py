"""Results of batches and answers in the background are calls of who asked, whoever fetches them and however often."""

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
from fakes.background import SAID as THOUGHT
from fakes.background import USAGE, BackgroundHost, background_host
from fakes.batch_host import CHAT, IN, OUT, RESPONSES, BatchHost, batch_host, said
from fakes.budgets import budget, toml, uses
from fakes.gateway_workers import served_by, workers
from fakes.local import locally
from fakes.process import Gateway, running, upstream
from fakes.raw import Wire
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec

ALL = IN + OUT
NAMES = ("one", "two", "bad", "late")
ASK: dict[str, Any] = {"model": "o3", "background": True, "max_output_tokens": 8000, "input": "think it over"}
BUDGETS = toml(
    budget(name="cap", unit="tokens", limit=10**6, unknown="pass"), budget(name="n", limit=10**6),
    budget(name="mine", unit="tokens", limit=10**6, unknown="pass", per="rollout"),
    budget(name="usd", unit="usd", limit=10, unknown="pass"),
)  # fmt: skip


class Here(NamedTuple):
    """A gateway, and the host behind it."""

    gateway: Gateway
    http: aiohttp.ClientSession

    async def get(self, path: str, **query: Any) -> Any:
        async with self.http.get(f"{self.gateway.url}/api/{path}", params=query) as answer:
            return await answer.json()

    async def spans(self, rollout: str, count: int, results: bool = False) -> list[dict[str, Any]]:
        """All of a rollout, once there are so many; more fail the test. `results`: those of batches, by their names."""
        found: list[dict[str, Any]] = []
        name = "penstock.batch.custom_id"

        async def there() -> bool:
            nonlocal found
            every = (await self.get(f"rollouts/{rollout}/spans", limit=1000)).get("spans", [])
            found = [one for one in every if not results or name in (one["attributes"] or {})]
            return len(found) >= count

        await until(there)
        assert len(found) == count
        return sorted(found, key=lambda one: one["attributes"][name] if results else one["sequence"])

    async def results(self, rollout: str, count: int) -> list[dict[str, Any]]:
        return await self.spans(rollout, count, results=True)

    async def detail(self, span: dict[str, Any]) -> dict[str, Any]:
        return await self.get(f"rollouts/{span['rollout']}/attempts/{span['attempt']}/spans/{span['sequence']}")

    async def turn(self, span: dict[str, Any]) -> dict[str, Any]:
        return (await self.detail(span))["turn"]

    async def uses(self) -> list[tuple[str, str, float, float]]:
        return await uses(self.http, self.gateway.url)

    async def check(self) -> None:
        """Its tape is whole."""
        checked = await Shell(self.gateway.url, self.gateway.data.parent).run("check", "--data", str(self.gateway.data))
        assert checked.code == 0, checked.text

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
        state = json.loads(body.partition("data: ")[2].splitlines()[0])["response"] if said else json.loads(body)
        return state["id"]

    async def fetch(self, name: str, rollout: str = "other", query: str = "") -> None:
        async with self.http.get(f"{self.gateway.openai(rollout)}/responses/{name}{query}") as answer:
            await answer.read()
            assert answer.status == 200

    async def claimed(self, client: Client) -> None:
        """A worker has the rollout."""
        await client.enqueue([RolloutSpec(id="r", mode="train", input={})])
        await client.claim(ClaimRequest(worker="w", limit=1, modes=["train"]))

    async def forgotten(self, client: Client) -> None:
        """The rollout is, once it has ended."""
        await client.finish("r", "a1", FinishRequest(worker="w", status="succeeded"))
        await client.forget("r", ActionRequest(who="ben", why="it must go"))


class World(NamedTuple):
    here: Here
    host: BatchHost


@asynccontextmanager
async def world(
    home: Path, http: aiohttp.ClientSession, *flags: str, more: str = "", own: bool = False
) -> AsyncGenerator[World]:
    """`own`: in a process of its own."""
    async with batch_host() as host:
        kinds = (("o", f"{host.url}/v1", "openai"), ("a", host.url, "anthropic"), ("g", host.url, "gemini"))
        config = more + "".join(upstream(*kind) for kind in kinds) + BUDGETS
        async with running(home, config, *flags) if own else locally(home, config) as gateway:
            host.results_at = gateway.address("other")
            yield World(Here(gateway, http), host)


async def settled(here: Here, results: int, rates: tuple[float, float] = (1.25, 5.0)) -> None:
    """Budgets have counted so many results, at the price of a batch, and the call that made it: that of the rollout
    which has made it too, and no other's."""
    tokens, dollars = results * ALL, results * (IN * rates[0] + OUT * rates[1]) / 1e6
    wanted = [("cap", "", tokens), ("mine", "r", tokens), ("n", "", results + 1), ("usd", "", pytest.approx(dollars))]

    async def there() -> bool:
        return [it[:3] for it in await here.uses()] == wanted

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


def sdk(here: Here, rollout: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=here.gateway.openai(rollout), api_key="k", max_retries=0)


@pytest.mark.slow
@pytest.mark.parametrize("url", [CHAT, RESPONSES])
async def test_openai_s(tmp_path: Path, http: aiohttp.ClientSession, url: str) -> None:
    async with world(tmp_path, http) as (here, host), sdk(here, "r") as client, sdk(here, "other") as other:
        name = await ordered(client, url)
        state = await other.batches.retrieve(name)
        for _ in range(2):
            for file in (state.error_file_id, state.output_file_id):
                assert (await other.files.content(str(file))).content == host.sent[f"/v1/files/{file}/content"]
        bad, late, one, two = await here.results("r", 4)
        assert [(it["status"], it["error"], it["http_status"]) for it in (bad, late, one)] == [
            ("error", "http_400", 400), ("error", "batch_expired", None), ("ok", None, 200),
        ]  # fmt: skip
        assert one["dialect"] == two["dialect"] == ("chat" if url == CHAT else "responses")
        assert (one["usage"]["input_tokens"], one["usage"]["billed"]) == (IN, {"tier": "batch"})
        assert (one["model"], one["model_served"]) == ("gpt-4o", "gpt-4o-2024-08-06")
        assert one["attributes"]["penstock.batch"] == f"openai/{name}"
        await posted(here, one, "/v1/batches")
        read = await here.turn(one)
        assert read["choices"][0]["message"]["parts"][0]["text"] == said("one")
        assert read["messages"][0]["parts"][0]["text"] == "ask one"
        assert (read["problems"], read["usage"]["billed"]) == ([], {"tier": "batch"})
        assert (await here.turn(late))["error"]
        await settled(here, 2)
        if url == CHAT:
            await shown(here)
        assert (await here.get("rollouts/r"))["totals"]["uncounted"] == 0, "what expired has used nothing"
        totals = (await here.get("rollouts/other"))["totals"]
        assert (totals["calls"], totals["input_tokens"]) == (5, 0), "what fetches uses nothing"


async def posted(here: Here, span: dict[str, Any], path: str) -> None:
    """It stands below the call that made the batch."""
    every = (await here.get(f"rollouts/{span['rollout']}/spans"))["spans"]
    made = next(one for one in every if one["path"] == path)
    assert (span["parent_id"], span["trace_id"]) == (made["span_id"], made["trace_id"])
    assert (made["dialect"], made["usage"]) == ("opaque", None)


async def shown(here: Here) -> None:
    """Every view says the same: the costs are those of a batch."""
    shell = Shell(here.gateway.url, here.gateway.data.parent)
    assert said("two") in (await shell.run("show", "r")).text
    assert "penstock.batch.custom_id" in (await shell.run("search", said("two"), "--json")).text
    costs = await shell.run("sql", "select sum(cost) as c, sum(input_tokens) as t from spans", "--json")
    row = json.loads(costs.text)
    assert (row["c"], row["t"]) == (pytest.approx(2 * (IN * 1.25 + OUT * 5.0) / 1e6), 2 * IN)
    await here.check()


def params(names: tuple[str, ...]) -> list[Any]:
    asked = {"model": "claude-sonnet-4-5", "max_tokens": 5}
    return [
        {"custom_id": name, "params": asked | {"messages": [{"role": "user", "content": f"ask {name}"}]}}
        for name in names
    ]


@pytest.mark.parametrize("packed", [False, True])
async def test_anthropic_s(tmp_path: Path, http: aiohttp.ClientSession, packed: bool) -> None:
    async with world(tmp_path, http) as (here, host):
        host.packed = packed
        async with anthropic.AsyncAnthropic(base_url=here.gateway.address("r"), api_key="k", max_retries=0) as client:
            made = await client.messages.batches.create(requests=params((*NAMES, "stopped")))
            for _ in range(2):
                found = [one async for one in await client.messages.batches.results(made.id)]
                assert [one.custom_id for one in found] == ["stopped", *reversed(NAMES)]
        bad, late, one, stopped, _ = await here.results("r", 5)
        assert [it["error"] for it in (bad, late, stopped)] == ["batch_error", "batch_expired", "batch_cancelled"]
        assert (one["dialect"], one["usage"]["billed"]["tier"], one["finish"]) == ("messages", "batch", "end_turn")
        assert one["attributes"]["penstock.fetched"].startswith("other/")
        await posted(here, one, "/v1/messages/batches")
        read = await here.turn(one)
        assert read["messages"][0]["parts"][0]["text"] == "ask one"
        assert "max_tokens is too high" in (await here.turn(bad))["error"]
        await settled(here, 2, (1.5, 7.5))


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_gemini_s(tmp_path: Path, http: aiohttp.ClientSession, version: str) -> None:
    """Answers have keys, or are known by their places."""
    asked: list[dict[str, Any]] = [{"request": {"contents": [{"parts": [{"text": f"ask {at}"}]}]}} for at in range(3)]
    asked[1] |= {"metadata": {"key": "bad"}}
    async with world(tmp_path, http) as (here, _):
        body = {"batch": {"displayName": "b", "inputConfig": {"requests": {"requests": asked}}}}
        url = here.gateway.address("r") + f"/{version}"
        headers = {"x-goog-api-key": "k"}
        async with http.post(f"{url}/models/gemini-2.5-flash:batchGenerateContent", json=body, headers=headers) as made:
            name = (await made.json())["name"]
        for _ in range(2):
            async with http.get(f"{url}/{name}", headers=headers) as got:
                assert got.status == 200
        first, last, bad = await here.results("r", 3)
        told = (first["dialect"], first["model"], first["usage"]["output_tokens"])
        assert told == ("gemini", "gemini-2.5-flash", OUT)
        assert [it["attributes"]["penstock.batch.custom_id"] for it in (last, bad)] == ["2", "bad"]
        assert (bad["status"], bad["error"]) == ("error", "batch_error")
        assert (await here.turn(last))["messages"][0]["parts"][0]["text"] == "ask 2"
        await settled(here, 2, (0.15, 1.25))


@pytest.mark.slow
async def test_once_over_a_kill_and_whoever_fetches_first(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Also where results are fetched before it is known whose they are."""
    async with world(tmp_path, http, more='[tape]\nrecord = "strict"\n', own=True) as (here, _):
        async with sdk(here, "r") as client:
            name = await ordered(client)
            _ = await client.files.content(f"out-{name}")
        await here.gateway.kill()
        await here.gateway.start()
        async with sdk(here, "other") as client:
            assert not await here.results("r", 0)
            _ = await client.batches.retrieve(name)
            await here.results("r", 3)
            _ = await client.files.content(f"err-{name}")
            await here.gateway.kill()
            await here.gateway.start()
        async with sdk(here, "last") as client:
            await here.results("r", 4)
            for kind in ("out", "err"):
                _ = await client.files.content(f"{kind}-{name}")
            async with http.get(here.gateway.url + "/metrics") as page:
                assert "penstock_batch_results_total" in await page.text()
            await settled(here, 2)
            await here.results("r", 4)


async def test_a_provider_that_begins_anew_gives_old_names_to_new_batches(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path, http) as (here, host), sdk(here, "r") as client:
        for round_ in (1, 2):
            name = await ordered(client, names=("one",))
            _ = await client.batches.retrieve(name)
            for _ in range(2):
                _ = await client.files.content(f"out-{name}")
            await here.results("r", round_)
            host.restart()
        assert name == "batch_1"


@pytest.mark.slow
async def test_two_workers_fetch_at_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http, "--workers", "2", own=True) as (here, _):
        first, second = list(workers(here.gateway.pid).values())[:2]
        names = tuple(f"q{number}" for number in range(40))
        async with sdk(here, "r") as client:
            name = await ordered(client, names=names)
            _ = await client.batches.retrieve(name)
        async with served_by(here.gateway, first) as one, served_by(here.gateway, second) as other:
            for wire in (one, other):
                wire.send(f"GET /rollout/x/v1/files/out-{name}/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            await asyncio.gather(one.message(), other.message())
        await here.results("r", 40)
        await settled(here, 40)


async def test_what_is_not_read_is_said(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The answer is larger than what is recorded; nobody knows who has made the batch."""
    names = tuple(f"q{number}" for number in range(3000))
    async with world(tmp_path, http, more="[limits]\nrecorded_bytes = 300_000\n") as (here, host):
        async with http.post(f"{host.url}/v1/messages/batches", json={"requests": params(names)}) as made:
            assert made.status == 200
        url = f"{here.gateway.address('r')}/v1/messages/batches/msgbatch_1/results"
        async with http.get(url, headers={"x-api-key": "k"}) as answer:
            assert await answer.read() == host.sent["/v1/messages/batches/msgbatch_1/results"]
        events: list[dict[str, Any]] = []

        async def told() -> bool:
            nonlocal events
            events = (await here.get("spans", filter="kind:event"))["spans"]
            return bool(events)

        await until(told)
        (event,) = events
        assert event["name"] == "penstock.batch.left_out"
        assert "recorded_bytes" in event["attributes"]["penstock.batch.left_out.why"]
        assert 1 < (await here.get("rollouts/r"))["totals"]["calls"] < len(names)
        first = (await here.get("rollouts/r/spans", limit=2))["spans"][1]
        assert first["parent_id"] is None
        assert "empty" in str((await here.turn(first))["problems"])


async def test_results_of_a_forgotten_rollout_are_those_of_who_fetches_them(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path, http) as (here, _), Client(here.gateway.url) as client, sdk(here, "r") as first:
        await here.claimed(client)
        name = await ordered(first)
        await here.forgotten(client)
        async with sdk(here, "other") as other:
            _ = await other.batches.retrieve(name)
            _ = await other.files.content(f"out-{name}")
        found = await here.results("other", 3)
        assert {it["request_bytes"] for it in found} == {0}


# -- answers in the background belong to the call that has asked for them, whoever fetches them ------------------------

BACKGROUND = USAGE["total_tokens"]


def config(host: BackgroundHost, limit: int) -> str:
    return upstream("u", host.url, "openai") + toml(budget(name="cap", unit="tokens", limit=limit))


class Background(NamedTuple):
    here: Here
    host: BackgroundHost


@asynccontextmanager
async def background(home: Path, http: aiohttp.ClientSession, limit: int = 100_000) -> AsyncGenerator[Background]:
    async with background_host() as host, locally(home, config(host, limit)) as gateway:
        yield Background(Here(gateway, http), host)


@pytest.mark.slow
async def test_the_sdk_asks_and_fetches_twice(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with background(tmp_path, http) as (here, host):
        host.left = 1
        async with openai.AsyncOpenAI(base_url=here.gateway.openai("r"), api_key="k") as client:
            made = await client.responses.create(model="o3", background=True, input="think", max_output_tokens=8000)
            waiting, *_ = await here.spans("r", 1)
            assert (waiting["status"], waiting["usage"], waiting["end_ns"]) == ("open", None, None)
            ((_, _, guessed, _),) = await here.uses()
            assert 8000 < guessed != BACKGROUND
            states = [(await client.responses.retrieve(made.id)).status for _ in range(3)]
        assert states == ["queued", "completed", "completed"]
        asked, *fetched = await here.spans("r", 4)
        assert (asked["status"], asked["finish"], asked["model_served"]) == ("ok", "completed", "o3-2025")
        assert asked["usage"]["output_tokens"] == USAGE["output_tokens"]
        assert asked["attributes"]["penstock.fetched"] == "r/a1#3"
        assert [(one["dialect"], one["usage"]) for one in fetched] == [("retrieval", None)] * 3
        assert await here.uses() == [("cap", "", BACKGROUND, 0)]
        detail = await here.detail(asked)
        assert [part["text"] for part in detail["turn"]["choices"][0]["message"]["parts"]] == [THOUGHT]
        assert not detail["turn"]["problems"]
        receipt = detail["exchange"]["sides"][0]
        assert (receipt["who"], "queued" in json.dumps(receipt)) == ("receipt", True)
        totals = (await here.get("rollouts/r"))["totals"]
        assert (totals["input_tokens"], totals["output_tokens"]) == (USAGE["input_tokens"], USAGE["output_tokens"])
        shell = Shell(here.gateway.url, tmp_path)
        sql = await shell.run("sql", "select sum(output_tokens) as s from spans", "--json")
        assert str(USAGE["output_tokens"]) in sql.text
        assert "penstock.fetched" in (await shell.run("search", THOUGHT, "--json")).text


@pytest.mark.parametrize("how", ["/cancel", "?stream=true&starting_after=0", "a stream that breaks off"])
async def test_however_it_is_fetched(tmp_path: Path, http: aiohttp.ClientSession, how: str) -> None:
    async with background(tmp_path, http) as (here, host):
        name = await here.ask(**({"stream": True} if how.startswith("a ") else {}))
        if how == "/cancel":
            host.ends = {"status": "cancelled", "usage": USAGE}
            async with http.post(f"{here.gateway.openai('other')}/responses/{name}/cancel") as answer:
                assert answer.status == 200
        else:
            assert (await here.spans("r", 1))[0]["status"] == "open"
            await here.fetch(name, query="?stream=true&starting_after=0")
        asked = await here.ended("r")
        assert asked["usage"]["output_tokens"] == USAGE["output_tokens"]
        assert asked["status"] == ("error" if how == "/cancel" else "ok")
        assert await here.uses() == [("cap", "", BACKGROUND, 0)]


async def test_what_nobody_fetches_stays_counted_as_a_guess(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with background(tmp_path, http, limit=20_000) as (here, host):
        for _ in range(2):
            await here.ask()
        async with http.post(here.gateway.openai("r") + "/responses", json=ASK) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, "budget")
        host.ends = {"status": "failed", "usage": None, "error": {"code": "server_error", "message": "no"}}
        await here.fetch("resp_1", "r")
        await here.spans("r", 4)
        ((_, _, used, _),) = await here.uses()
        assert 8000 < used < 10_000, "of the one that failed nothing is counted"


@pytest.mark.slow
async def test_a_rollout_is_forgotten_although_an_answer_is_waited_for(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with background(tmp_path, http) as (here, _), Client(here.gateway.url) as client:
        await here.claimed(client)
        name = await here.ask()
        await here.forgotten(client)
        await here.fetch(name)
        assert [one["dialect"] for one in await here.spans("other", 1)] == ["retrieval"]
        await here.check()


async def test_of_two_calls_with_one_id_the_last_has_the_answer(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """And what was fetched before a call was made is not its answer."""
    async with background(tmp_path, http) as (here, host):
        first = await here.ask()
        host.restart()
        assert await here.ask() == first
        assert [one["error"] for one in await here.spans("r", 2)] == ["not_fetched", None]
        for _ in range(2):
            await here.fetch(first)
        host.restart()
        assert await here.ask() == first
        *_, second, third = await here.spans("r", 3)
        assert (second["status"], third["status"]) == ("ok", "open")


@pytest.mark.slow
async def test_it_outlives_the_process(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with background_host() as host:
        strict = '[tape]\nrecord = "strict"\n'
        async with running(tmp_path, strict + config(host, 100_000)) as gateway:
            here = Here(gateway, http)
            name = await here.ask()
            await gateway.kill()
            await gateway.start()
            assert (await here.spans("r", 1))[0]["status"] == "open"
            await asyncio.gather(*(here.fetch(name) for _ in range(3)))
            await here.ended("r")
            assert await here.uses() == [("cap", "", BACKGROUND, 0)]


async def answered(wire: Wire, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    wire.send(head.encode() + body)
    return json.loads((await wire.message()).partition(b"\r\n\r\n")[2])


@pytest.mark.slow
async def test_another_worker_fetches_it_at_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Its process may write that before the other has written that it was asked for."""
    async with background_host() as host, running(tmp_path, config(host, 10**9), "--workers", "2") as gateway:
        here = Here(gateway, http)
        first, second = list(workers(gateway.pid).values())[:2]
        async with served_by(gateway, first) as one, served_by(gateway, second) as other:
            for number in range(10):
                by, then = (one, other) if number % 2 else (other, one)
                made = await answered(by, "POST", f"/rollout/r{number}/v1/responses", json.dumps(ASK).encode())
                state = await answered(then, "GET", f"/rollout/x/v1/responses/{made['id']}")
                assert state["status"] == "completed"
        for number in range(10):
            await here.ended(f"r{number}")
        assert await here.uses() == [("cap", "", 10 * BACKGROUND, 0)]
