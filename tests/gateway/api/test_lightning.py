"""Agent Lightning's store API, asked of a real gateway as its client asks."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import StartGateway
from fakes.local import Local, locally
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.waiting import until, when
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec

Json = Any
CONFIG: Json = {"timeout_seconds": None, "unresponsive_seconds": None, "max_attempts": 1, "retry_condition": []}


@dataclass
class Store:
    """Agent Lightning's client, less what checks its answers."""

    url: str
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: Json = None, status: int | None = None) -> Json:
        async with self.http.request(method, f"{self.url}/v1/agl{path}", json=body) as answer:
            found = await answer.json()
            wanted = (200, 201) if status is None else (status,)
            assert answer.status in wanted, (answer.status, found)
            return found

    async def get(self, path: str, status: int | None = None) -> Json:
        return await self.ask("GET", path, None, status)

    async def post(self, path: str, body: Json = None, status: int | None = None) -> Json:
        return await self.ask("POST", path, body, status)

    async def queued(self, *inputs: Json, **more: Json) -> list[str]:
        tasks = [{"input": one, **more} for one in inputs]
        made = await self.post("/queues/rollouts/enqueue", {"rollouts": tasks}, 201)
        return [one["rollout_id"] for one in made]

    async def taken(self, worker: str | None = "w1", **more: Json) -> tuple[str, str]:
        """(Rollout, attempt) of a task that a worker has."""
        _ = await self.queued("task", **more)
        [claim] = await self.post("/queues/rollouts/dequeue", {"worker_id": worker})
        return claim["rollout_id"], claim["attempt"]["attempt_id"]

    async def states(self, rollout: str) -> tuple[str, list[str]]:
        """How a rollout stands, and its attempts."""
        found = (await self.get(f"/rollouts/{rollout}/attempts"))["items"]
        return (await self.get(f"/rollouts/{rollout}"))["status"], [one["status"] for one in found]

    async def until(self, rollout: str, status: str) -> None:
        _ = await when(lambda: self.get(f"/rollouts/{rollout}"), lambda found: found["status"] == status)


@pytest.fixture
def store(local: Local, http: aiohttp.ClientSession) -> Store:
    return Store(local.url, http)


@pytest.fixture
async def api(local: Local) -> AsyncGenerator[Client]:
    async with Client(local.url) as made:
        yield made


def span(rollout: str, attempt: str, number: int = 1, own: str = "00000000000000b1", **more: Json) -> Json:
    ids = {"trace_id": "0" * 31 + "a", "span_id": own}
    context = {**ids, "is_remote": False, "trace_state": {"k": "v"}}
    return {
        "rollout_id": rollout, "attempt_id": attempt, "sequence_id": number, **ids, "parent_id": None, "name": "step",
        "status": {"status_code": "OK", "description": None}, "attributes": {"a": 1, "b": [1.5, 2.0]},
        "events": [{"name": "e", "attributes": {"x": True}, "timestamp": 1700000000.25}],
        "links": [{"context": context, "attributes": None}], "start_time": 1700000000.123456, "end_time": None,
        "context": context, "parent": None, "resource": {"attributes": {"service.name": "s"}, "schema_url": "u"},
        **more,
    }  # fmt: skip


async def spans(store: Store, rollout: str, **asked: Json) -> list[Json]:
    return (await store.post("/spans/search", {"rollout_id": rollout, **asked}))["items"]


# -- rollouts and attempts ---------------------------------------------------------------------------------------------


async def test_a_task_comes_back_as_it_was_given_and_is_a_rollout_of_the_gateway(store: Store, api: Client) -> None:
    config = {"timeout_seconds": 60, "unresponsive_seconds": 0, "max_attempts": 5000, "retry_condition": ["running"]}
    resources = await store.post("/resources", {}, 201)
    given = {"mode": "val", "config": config, "metadata": {"n": 2**70, "odd": "é\u2028"}}
    [name] = await store.queued({"deep": [{"a": None}]}, **given)
    found = await store.get(f"/rollouts/{name}")
    assert (found["input"], found["status"], found["config"]) == ({"deep": [{"a": None}]}, "queuing", config)
    assert (found["mode"], found["metadata"]) == ("val", given["metadata"])
    assert found["resources_id"] == resources["resources_id"]
    own = await api.rollout(name)
    assert (own.origin, own.mode, own.config.max_attempts, own.config.retry_on) == ("queued", "val", 1000, [])
    [bare] = await store.queued(None)
    assert {"mode": None, "config": CONFIG, "metadata": {}}.items() <= (await store.get(f"/rollouts/{bare}")).items()


async def test_the_queue_is_one(store: Store, api: Client) -> None:
    [made] = await api.enqueue([RolloutSpec(input={"q": 1}, mode="test")])
    [claim] = await store.post("/queues/rollouts/dequeue", {"worker_id": "w1"})
    assert (claim["rollout_id"], claim["mode"], claim["attempt"]["worker_id"]) == (made.id, "test", "w1")
    assert await store.post("/queues/rollouts/dequeue") == []
    [name] = await store.queued(1)
    [own] = (await api.claim(ClaimRequest(worker="ours"))).claims
    assert own.rollout.id == name
    _ = await api.finish(name, own.attempt.id, FinishRequest(worker="ours", status="environment"))
    found = (await store.get(f"/rollouts/{name}"))["attempt"]
    assert (found["status"], found["metadata"], found["worker_id"]) == (
        "failed",
        {"penstock.status": "environment"},
        "ours",
    )
    page = await store.post("/rollouts/search", {"status_in": ["preparing", "requeuing"], "sort_by": "start_time"})
    assert [one["rollout_id"] for one in page["items"]] == [made.id, name]


FAILING = {"config": {"max_attempts": 2, "retry_condition": ["failed", "timeout"]}}


@pytest.mark.parametrize(
    ("more", "steps", "rollout", "attempts"),
    [
        ({}, ["running", "succeeded"], "succeeded", ["succeeded"]),
        ({}, ["failed"], "failed", ["failed"]),
        (FAILING, ["failed"], "requeuing", ["failed"]),
        (FAILING, ["timeout", "succeeded"], "succeeded", ["succeeded"]),
        (FAILING, ["unresponsive", "running"], "running", ["running"]),
        ({}, ["succeeded", "failed"], "failed", ["failed"]),
        ({}, ["succeeded", "preparing"], "409", ["succeeded"]),
    ],
)
async def test_a_rollout_follows_its_newest_attempt(
    store: Store, more: Json, steps: list[str], rollout: str, attempts: list[str]
) -> None:
    name, attempt = await store.taken(**more)
    for at, status in enumerate(steps):
        wanted = 409 if rollout == "409" and at == len(steps) - 1 else 200
        _ = await store.post(f"/rollouts/{name}/attempts/latest", {"status": status}, wanted)
    found, states = await store.states(name)
    assert states == attempts
    assert rollout == "409" or found == rollout
    ended = (await store.get(f"/rollouts/{name}/attempts/latest"))["end_time"]
    assert (ended is not None) == (attempts[-1] in ("failed", "succeeded"))
    assert attempt.startswith("at-")
    assert name.startswith("ro-")


async def test_an_older_attempt_changes_nothing_of_its_rollout(store: Store) -> None:
    name, old = await store.taken()
    again = await store.post(f"/rollouts/{name}/attempts", {"worker_id": "w2"}, 201)
    assert (again["status"], again["attempt"]["sequence_id"]) == ("preparing", 2)
    _ = await store.post("/spans", span(name, old), 201)
    assert await store.states(name) == ("preparing", ["running", "preparing"])
    _ = await store.post(f"/rollouts/{name}/attempts/{old}", {"status": "failed"})
    assert await store.states(name) == ("preparing", ["failed", "preparing"])
    _ = await store.post(f"/rollouts/{name}", {"status": "requeuing"})
    [third] = await store.post("/queues/rollouts/dequeue", {"limit": 5})
    assert third["attempt"]["sequence_id"] == 3


async def test_a_field_that_is_left_out_stays_and_null_clears(store: Store) -> None:
    [name] = await store.queued({"a": 1}, mode="train", metadata={"k": 1})
    found = await store.post(f"/rollouts/{name}", {"metadata": None, "mode": "val", "input": [1], "resources_id": "rs"})
    assert (found["metadata"], found["mode"], found["input"], found["status"]) == (None, "val", [1], "queuing")
    for field in ("status", "config"):
        said = await store.post(f"/rollouts/{name}", {field: None}, 400)
        assert field in said["detail"]
    [claim] = await store.post("/queues/rollouts/dequeue")
    assert (claim["rollout_id"], claim["mode"]) == (name, "val")
    aid = claim["attempt"]["attempt_id"]
    told = {"last_heartbeat_time": 1700000000.123, "metadata": {"k": [1]}, "worker_id": "w9"}
    found = await store.post(f"/rollouts/{name}/attempts/{aid}", told)
    assert told.items() <= found.items()
    assert (await store.get("/workers/w9"))["current_attempt_id"] == aid


async def test_limits_end_attempts_in_time(store: Store) -> None:
    config = {"timeout_seconds": 0.05, "max_attempts": 2, "retry_condition": ["timeout"]}
    name, _ = await store.taken(config=config)
    await store.until(name, "requeuing")
    assert (await store.states(name))[1] == ["timeout"]
    _ = await store.post(f"/rollouts/{name}", {"status": "cancelled"})
    name, attempt = await store.taken(config={"unresponsive_seconds": 0.05})
    await store.until(name, "failed")
    assert (await store.states(name))[1] == ["unresponsive"]
    _ = await store.post(f"/rollouts/{name}", {"config": {}})
    _ = await store.post("/spans", span(name, attempt), 201)
    assert await store.states(name) == ("failed", ["running"])


async def test_a_wait_ends_with_its_rollouts_its_time_or_its_client(store: Store, local: Local) -> None:
    one, two, three = await store.queued(1, 2, 3)
    _ = await store.post(f"/rollouts/{one}", {"status": "succeeded"})
    found = await store.post("/waits/rollouts", {"rollout_ids": [one, two, "none"], "timeout": 0})
    assert [it["rollout_id"] for it in found] == [one]
    waiting = asyncio.ensure_future(store.post("/waits/rollouts", {"rollout_ids": [three, two]}))
    for name in (two, three):
        await asyncio.sleep(0)
        assert not waiting.done()
        _ = await store.post(f"/rollouts/{name}", {"status": "cancelled"})
    assert [it["rollout_id"] for it in await waiting] == [three, two]
    [left] = await store.queued(4)
    leaving = asyncio.ensure_future(store.post("/waits/rollouts", {"rollout_ids": [left]}))
    service = local.gateway._lightning  # pyright: ignore[reportPrivateUsage]
    await until(lambda: service.running == 1)
    _ = leaving.cancel()
    await until(lambda: service.running == 0)


# -- spans -------------------------------------------------------------------------------------------------------------


async def test_a_span_comes_out_as_it_went_in(store: Store, api: Client) -> None:
    name, attempt = await store.taken()
    large = {"prompt_token_ids": list(range(20_000)), "text": "x" * 50_000}
    sent = span(name, attempt, 7, attributes=large, extra={"kept": [1, {"a": None}], "n": 2**70})
    assert await store.post("/spans", sent, 201) == sent
    assert await spans(store, name) == [sent]
    assert await store.post("/spans", sent, 201) is None, "the attempt has it"
    assert (await store.post("/spans/next", {"rollout_id": name, "attempt_id": attempt})) == {"sequence_id": 8}
    [own] = [one async for one in api.spans(name, attempt)]
    assert (own.kind, own.name, own.status, own.span_id) == ("otel", "step", "ok", sent["span_id"])
    assert len((own.attributes or {})["prompt_token_ids"]) == 128, "a head stays small"
    assert await store.states(name) == ("running", ["running"])


async def test_spans_are_found(store: Store) -> None:
    name, attempt = await store.taken()
    for number, own in ((3, "c1"), (1, "b2"), (2, "b1")):
        _ = await store.post("/spans", span(name, attempt, number, own, name=f"n{own}", parent_id="p" + own), 201)

    async def found(**asked: Json) -> list[str]:
        return [one["span_id"] for one in await spans(store, name, **asked)]

    assert await found() == ["b2", "b1", "c1"]
    assert await found(sort_by="span_id", sort_order="desc", limit=2) == ["c1", "b2"]
    assert await found(name_contains="b", span_id="b1") == ["b1"]
    assert await found(name_contains="nb2", span_id="c1", filter_logic="or") == ["b2", "c1"]
    assert await found(attempt_id="latest", offset=2) == ["c1"]
    assert await found(attempt_id="at-other") == []
    assert await spans(store, "nobody") == []
    page = await store.get(f"/spans?rollout_id={name}&limit=1")
    assert (len(page["items"]), page["total"], page["limit"], page["offset"]) == (1, 3, 1, 0)


async def test_a_reward_in_a_span_is_one_of_the_call_that_it_links_to(
    store: Store, api: Client, provider: Provider
) -> None:
    name, attempt = await store.taken()
    answer = await _chat(store, name, attempt)
    attributes = {
        "agentlightning.reward.0.value": 0.75,
        "agentlightning.link.0.key_match": "gen_ai.response.id",
        "agentlightning.link.0.value_match": answer["id"],
    }
    _ = await store.post("/spans", span(name, attempt, attributes=attributes), 201)
    found = await api.rollout(name)
    assert found.reward == 0.75
    [reward] = [one async for one in api.spans(name, attempt) if one.kind == "reward"]
    assert (reward.attributes or {})["penstock.reward.span"] == 1
    call, own = await spans(store, name)
    assert (call["name"], own["attributes"]) == ("openai.chat.completion", attributes)
    assert call["sequence_id"] < own["sequence_id"] or own["sequence_id"] == 1


async def _chat(store: Store, rollout: str, attempt: str) -> Json:
    url = f"{store.url}/rollout/{rollout}/attempt/{attempt}/v1/chat/completions"
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    async with store.http.post(url, json=body) as answer:
        assert answer.status == 200
        return await answer.json()


async def test_calls_come_out_as_spans_in_their_order(store: Store) -> None:
    name, attempt = await store.taken()
    for _ in range(2):
        _ = await _chat(store, name, attempt)
    after = await store.post("/spans/next", {"rollout_id": name, "attempt_id": attempt})
    found = [one for one in await spans(store, name) if one["name"] == "openai.chat.completion"]
    assert [one["sequence_id"] for one in found] == [1, 2]
    assert after == {"sequence_id": 3}
    said = found[0]["attributes"]
    assert (said["gen_ai.prompt.0.role"], said["gen_ai.prompt.0.content"]) == ("user", "hi")
    assert said["gen_ai.completion.0.role"] == "assistant"
    assert said["gen_ai.request.temperature"] == 0.5
    assert (found[0]["rollout_id"], found[0]["context"]["span_id"]) == (name, found[0]["span_id"])


def _otlp(rollout: str, attempt: str, span_id: bytes, **more: Json) -> bytes:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    for key, value in {"rollout_id": rollout, "attempt_id": attempt, **more}.items():
        resource.resource.attributes.add(key=f"agentlightning.{key}", value=AnyValue(string_value=value))
    found = resource.scope_spans.add().spans.add(name="told", trace_id=b"t" * 16, span_id=span_id)
    found.start_time_unix_nano, found.end_time_unix_nano = 1_700_000_000_250_000_000, 1_700_000_001_000_000_000
    ids = ArrayValue(values=[AnyValue(int_value=one) for one in range(1000)])
    found.attributes.append(KeyValue(key="response_token_ids", value=AnyValue(array_value=ids)))
    return request.SerializeToString()


async def test_telemetry_is_kept_like_a_span(store: Store) -> None:
    name, attempt = await store.taken()
    for own, more in ((b"12345678", {}), (b"12345679", {"span_sequence_id": "9"}), (b"12345678", {})):
        body = _otlp(name, attempt, own, **more)
        kind = {"Content-Type": "application/x-protobuf"}
        async with store.http.post(f"{store.url}/v1/traces", data=body, headers=kind) as answer:
            assert answer.status == 200
    first, second = await spans(store, name)
    assert (first["sequence_id"], second["sequence_id"], first["name"]) == (1, 9, "told")
    assert first["attributes"] == {"response_token_ids": list(range(1000))}
    assert (first["start_time"], first["status"]["status_code"]) == (1_700_000_000.25, "UNSET")
    assert first["resource"]["attributes"]["agentlightning.rollout_id"] == name
    assert await store.states(name) == ("running", ["running"])


# -- resources and workers ---------------------------------------------------------------------------------------------


async def test_resources_have_versions(store: Store) -> None:
    model: Json = {
        "resource_type": "llm",
        "endpoint": "http://h/v1",
        "model": "m",
        "api_key": None,
        "sampling_parameters": {},
    }
    prompt = {"resource_type": "prompt_template", "template": "{a}", "engine": "f-string"}
    made = await store.post("/resources", {"main": {**model, "extra": 1}, "p": prompt}, 201)
    assert made["resources_id"].startswith("rs-")
    assert made["version"] == 1
    assert made["resources"] == {"main": model, "p": prompt}
    other = await store.post("/resources/mine", {"p": prompt})
    assert (other["version"], await store.get("/resources/latest")) == (1, other)
    again = await store.post(f"/resources/{made['resources_id']}", {"p": prompt})
    assert (again["version"], again["create_time"]) == (2, made["create_time"])
    assert await store.get("/resources/latest") == again == await store.get(f"/resources/{made['resources_id']}")
    assert await store.get("/resources/none") is None
    page = await store.get("/resources?resources_id_contains=rs-&sort_by=version")
    assert page["items"] == [again]
    for wrong in ({"x": {"resource_type": "odd"}}, {"x": {"resource_type": "llm", "model": "m"}}, [1]):
        assert isinstance((await store.post("/resources", wrong, 422))["detail"], list)


async def test_workers_are_busy_idle_or_lost(store: Store) -> None:
    assert await store.get("/workers/w1") is None
    name, attempt = await store.taken("w1")
    busy = await store.get("/workers/w1")
    assert (busy["status"], busy["current_rollout_id"]) == ("busy", name)
    _ = await store.post("/workers/w1", {"heartbeat_stats": {"cpu": 2**70}})
    _ = await store.post(f"/rollouts/{name}/attempts/{attempt}", {"status": "unresponsive"})
    lost = await store.get("/workers/w1")
    assert (lost["status"], lost["current_rollout_id"], lost["heartbeat_stats"]) == ("unknown", None, {"cpu": 2**70})
    _ = await store.post("/queues/rollouts/dequeue", {"worker_id": "w2"})
    page = await store.post("/workers/search", {"status_in": ["idle"], "filter_logic": "and"})
    assert [one["worker_id"] for one in page["items"]] == ["w2"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/rollouts/none", None, 404),
        ("POST", "/rollouts/none", {"input": 1}, 404),
        ("POST", "/rollouts/none/attempts", None, 404),
        ("POST", "/rollouts/none/attempts/latest", {"status": "failed"}, 404),
        ("POST", "/spans", span("none", "at-1"), 404),
        ("POST", "/spans", {"rollout_id": "r"}, 422),
        ("POST", "/spans", span("r", "a", attributes={"a": {"b": 1}}), 422),
        ("POST", "/spans", span("../r", "a"), 422),
        ("POST", "/spans/next", {"rollout_id": "none", "attempt_id": "a"}, 404),
        ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"mode": "train"}]}, 422),
        ("POST", "/queues/rollouts/enqueue", None, 422),
        ("POST", "/queues/rollouts/dequeue", {"worker_id": "a/b"}, 422),
        ("POST", "/workers/w1", {"heartbeat_stats": None}, 400),
        ("GET", "/rollouts?limit=0", None, 400),
        ("GET", "/rollouts?offset=-1", None, 400),
        ("GET", "/rollouts?sort_by=nothing", None, 400),
        ("GET", "/rollouts?sort_order=up", None, 422),
        ("POST", "/workers/search", {"filter_logic": "nor"}, 422),
        ("GET", "/workers/%2e%2e%2fa", None, 400),
        ("GET", "/nothing", None, 404),
        ("GET", "/spans/next", None, 405),
    ],
)
async def test_a_refusal_says_why(store: Store, method: str, path: str, body: Json, status: int) -> None:
    said = (await store.ask(method, path, body, status))["detail"]
    assert said
    assert isinstance(said, list if status == 422 else str)
    assert (await store.get("/rollouts"))["total"] == 0, "nothing was kept"


async def test_bodies_that_are_no_json_are_refused(store: Store) -> None:
    for body in (b"{", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'"\\ud800"', b"null"):
        for path in ("/spans", "/resources", "/queues/rollouts/enqueue"):
            headers = {"Content-Type": "application/json"}
            async with store.http.post(f"{store.url}/v1/agl{path}", data=body, headers=headers) as answer:
                assert answer.status == 422, (body[:20], path, await answer.text())
    async with store.http.post(
        f"{store.url}/v1/agl/spans", data=b"{}", headers={"Content-Type": "text/plain"}
    ) as answer:
        assert answer.status == 415


async def test_a_key_is_a_password(
    tmp_path: Path, provider: Provider, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "the-key-of-the-owner-1")
    config = "require_token = true\n" + upstreams(openai=provider.openai_url)
    async with locally(tmp_path, config) as made:
        address = made.url.removeprefix("http://")
        for key, status in (("the-key-of-the-owner-1", 200), ("another", 401), ("", 401)):
            login = f"x:{key}@" if key else ""
            async with http.get(f"http://{login}{address}/v1/agl/rollouts") as answer:
                assert answer.status == status
            body, kind = _otlp("r1", "a1", b"12345678"), {"Content-Type": "application/x-protobuf"}
            async with http.post(f"http://{login}{address}/v1/traces", data=body, headers=kind) as answer:
                assert answer.status == status
            headers = {"Authorization": "Basic " + base64.b64encode(f"x:{key}".encode()).decode()}
            async with http.get(f"{made.url}/api/rollouts", headers=headers) as answer:
                assert answer.status == 401, "it is none at the control API"


# -- a gateway that dies -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_what_was_answered_outlives_the_gateway(start_gateway: StartGateway, http: aiohttp.ClientSession) -> None:
    gateway = await start_gateway("")
    store = Store(gateway.url, http)
    resources = await store.post("/resources", {}, 201)
    claims = [await store.taken(f"w{number}") for number in range(4)]
    kept: list[Json] = []

    async def write(name: str, attempt: str) -> None:
        for number in range(1, 10_000):
            given = (await store.post("/spans/next", {"rollout_id": name, "attempt_id": attempt}))["sequence_id"]
            kept.append(await store.post("/spans", span(name, attempt, given, f"{number:016x}"), 201))
            assert given == number

    writing: list[Awaitable[None]] = [asyncio.ensure_future(write(*claim)) for claim in claims]
    await until(lambda: len(kept) > 100)
    await gateway.kill()
    assert all(isinstance(one, aiohttp.ClientError) for one in await asyncio.gather(*writing, return_exceptions=True))
    await gateway.start()
    store.url = gateway.url
    assert await store.get("/resources/latest") == resources
    for name, attempt in claims:
        theirs = [one for one in kept if one["rollout_id"] == name]
        found = await spans(store, name, attempt_id=attempt)
        assert found[: len(theirs)] == theirs
        assert len(found) <= len(theirs) + 1
        given = (await store.post("/spans/next", {"rollout_id": name, "attempt_id": attempt}))["sequence_id"]
        assert given > len(theirs)
        assert await store.states(name) == ("running", ["running"])
    assert json.dumps(await store.get("/workers/w3"))
