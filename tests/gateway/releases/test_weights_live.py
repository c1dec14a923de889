"""Weights behind running agents: loaded before they get traffic, unloaded when nobody needs them, waited for while they
change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

import aiohttp
import pytest
from fakes.engine import CHAT, LOAD, MODELS, UNLOAD, FakeEngine, Planned
from fakes.experiment import PATIENCE, Traffic, policy
from fakes.process import Gateway
from fakes.tape import Tape

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.audit import Said
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.upstream import PauseRequest, UpstreamView


@pytest.fixture
async def client(served: Gateway) -> AsyncGenerator[Client]:
    async with Client(served.url) as made:
        yield made


@pytest.fixture
def traffic(served: Gateway, http: aiohttp.ClientSession, client: Client) -> Traffic:
    return Traffic(served.url, http, client, model="policy")


def adapter(number: int) -> NewVersion:
    content = {"upstream": "fake-openai", "base": "base", "adapter": f"/adapters/{number}"}
    return NewVersion(kind="model", content=content)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - the fake's own state
            await asyncio.sleep(0.01)


async def test_adapters_are_loaded_before_traffic_and_unloaded_when_nobody_needs_them(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    await client.add_version("policy", adapter(1))
    await until(lambda: vllm.adapters == {"policy@v1": "/adapters/1"})
    # A worker holds a rollout that is pinned to v1.
    await client.enqueue([RolloutSpec(id="long")])
    (claim,) = (await client.claim(ClaimRequest(worker="w"))).claims
    await traffic.call("long")
    await client.add_version("policy", adapter(2))
    release = await traffic.start("policy", "v2", policy(0.5, checked="required"))
    assert vllm.adapters.keys() == {"policy@v1", "policy@v2"}
    await client.decide(release.id, "promote", Said(who="ann"))
    await traffic.call("new")
    asked = [
        body["model"] for path, body in vllm.asked if path.endswith("/chat/completions") and "max_tokens" not in body
    ]
    assert asked[-1] == "policy@v2"
    await traffic.call("long")
    assert traffic.failures == []
    assert "policy@v1" in vllm.adapters
    await client.finish("long", claim.attempt.id, FinishRequest(worker="w", status="succeeded"))
    # Something must change before it looks again, or half a minute pass.
    await client.add_version("policy", adapter(3))
    await vllm.until(UNLOAD)
    await until(lambda: vllm.adapters == {"policy@v2": "/adapters/2"})


async def test_a_version_that_will_not_load_is_a_failed_release_and_no_failed_agent(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    vllm.files = {"/adapters/1"}
    await client.add_version("policy", adapter(1))
    await client.add_version("policy", adapter(2))
    await vllm.until(LOAD)
    new = NewRelease(candidate="v2", policy=policy(0.5, checked="required"))
    release = await client.start_release("policy", new)
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"
    assert "/adapters/2" in view.release.reason
    await traffic.call("r1")
    assert traffic.failures == []


async def test_too_few_slots_are_reported(traffic: Traffic, client: Client, vllm: FakeEngine, served: Gateway) -> None:
    vllm.slots = 1
    await client.add_version("policy", adapter(1))
    await client.add_version("policy", adapter(2))
    _ = await traffic.start("policy", "v2", policy(0.5))
    await until(lambda: "2 adapters are needed at once and the server computes with 1 (--max-loras)" in served.log)


async def test_a_server_that_was_restarted_gets_its_adapters_back(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    await client.add_version("policy", adapter(1))
    await until(lambda: bool(vllm.adapters))
    await traffic.call("long")
    vllm.restart()
    await asyncio.gather(*(traffic.call(name) for name in ("r1", "r2", "long")))
    assert traffic.failures == []
    assert vllm.adapters == {"policy@v1": "/adapters/1"}


async def test_a_version_that_a_running_rollout_is_pinned_to_is_loaded_again_for_its_call(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    await client.add_version("policy", adapter(1))
    await client.add_version("policy", adapter(2))
    await traffic.call("long")
    release = await traffic.start("policy", "v2", policy(0.5))
    await client.decide(release.id, "promote", Said(who="ann"))
    await until(lambda: "policy@v2" in vllm.adapters)
    del vllm.adapters["policy@v1"]
    await traffic.call("long")
    assert traffic.failures == []
    assert vllm.adapters.keys() == {"policy@v1", "policy@v2"}


async def test_the_first_version_of_a_model_may_be_asked_for_at_once(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    loading = asyncio.Event()
    vllm.plan(LOAD, Planned(before=loading))
    await client.add_version("policy", adapter(1))
    asking = asyncio.ensure_future(traffic.call("r1"))
    await vllm.until(CHAT)
    loading.set()
    await asking
    assert traffic.failures == []


async def test_what_stays_unknown_is_told_to_the_agent(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    vllm.files = set()
    await client.add_version("policy", adapter(1))
    await traffic.call("r1")
    assert len(traffic.failures) == 1
    assert "404" in str(traffic.failures[0])
    assert sum(path.endswith("/chat/completions") for path, _ in vllm.asked) == 2


async def test_calls_wait_while_an_upstream_is_paused(
    traffic: Traffic, client: Client, vllm: FakeEngine, served: Gateway, http: aiohttp.ClientSession
) -> None:
    traffic.model = "base"
    path = "/api/upstreams/fake-openai"
    paused = await client.pause_upstream("fake-openai", 30)
    assert (paused.paused, paused.waiting) == (True, 0)
    waiting = [asyncio.ensure_future(traffic.call(f"r{number}")) for number in range(5)]
    tape = Tape(served.url, http)

    async def count() -> int:
        found = await tape.get("/api/upstreams")
        return next(one["waiting"] for one in found["upstreams"] if one["name"] == "fake-openai")

    async with asyncio.timeout(PATIENCE):
        while await count() < 5:  # noqa: ASYNC110 - as a person would ask
            await asyncio.sleep(0.01)
    assert not any(one.done() for one in waiting)
    assert not [path for path, _ in vllm.asked if path.endswith("/chat/completions")]
    opened = await client.open_upstream("fake-openai")
    assert (opened.paused, opened.waited) == (False, 5)
    await asyncio.gather(*waiting)
    assert traffic.failures == []
    with pytest.raises(ClientError, match="there is no upstream 'nobody'"):
        await client.pause_upstream("nobody", 60)
    with pytest.raises(ClientError, match="bound_s"):
        await client.post(f"{path}/pause", UpstreamView, PauseRequest.model_construct(bound_s=0))


async def test_a_server_that_is_away_is_no_reason_to_stop(
    traffic: Traffic, client: Client, vllm: FakeEngine, served: Gateway
) -> None:
    vllm.plan("/v1/models", *[Planned(status=500, text="away")] * 50)
    await client.add_version("policy", adapter(1))
    await vllm.until("/v1/models")
    await until(lambda: "would not list its models" in served.log)
    await traffic.call("r1")
    await client.reward("r1", "a1", Judgement(value=1))
    assert served.log.count("would not list its models") == 1


async def test_what_a_check_has_loaded_is_not_taken_away(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    """Adapters are looked after while a release is checked: what was read of the tape before it began is no reason."""
    await client.add_version("policy", adapter(1))
    await until(lambda: bool(vllm.adapters))
    listing, answering = asyncio.Event(), asyncio.Event()
    listed = sum(path == MODELS for path, _ in vllm.asked)
    vllm.plan(MODELS, Planned(before=listing))
    vllm.plan(CHAT, Planned(before=answering))
    await client.add_version("policy", adapter(2))
    await vllm.until(MODELS, listed + 1)
    new = NewRelease(candidate="v2", policy=policy(0.5, checked="required"))
    release = await client.start_release("policy", new)
    await vllm.until(CHAT)
    listing.set()
    # Another look at the server has come and gone.
    await client.add_version("policy", adapter(3))
    await vllm.until(MODELS, listed + 3)
    answering.set()
    view = await traffic.when(release.id, lambda view: view.release.stage != "draft")
    assert view.release.live, view.release.reason


@pytest.mark.parametrize("end", ["promote", "abort"])
async def test_a_restarted_server_gets_what_running_rollouts_are_pinned_to(
    traffic: Traffic, client: Client, vllm: FakeEngine, end: str
) -> None:
    await client.add_version("policy", adapter(1))
    await client.add_version("policy", adapter(2))
    await until(lambda: "policy@v1" in vllm.adapters)
    if end == "promote":
        await traffic.call("long")
    release = await traffic.start("policy", "v2", policy(0.999999))
    await until(lambda: "policy@v2" in vllm.adapters)
    if end == "abort":
        await traffic.call("long")
    await client.decide(release.id, end, Said(who="ann"))
    vllm.restart()
    await client.add_version("policy", adapter(3))
    await until(lambda: vllm.adapters.keys() == {"policy@v1", "policy@v2"})


async def test_an_adapter_of_a_pinned_rollout_that_was_refused_once_is_tried_again(
    traffic: Traffic, client: Client, vllm: FakeEngine, served: Gateway
) -> None:
    await client.add_version("policy", adapter(1))
    await client.add_version("policy", adapter(2))
    await until(lambda: "policy@v1" in vllm.adapters)
    await traffic.call("long")
    release = await traffic.start("policy", "v2", policy(0.5))
    await until(lambda: "policy@v2" in vllm.adapters)
    await client.decide(release.id, "promote", Said(who="ann"))
    vllm.restart()
    vllm.files = {"/adapters/2"}
    await client.add_version("policy", adapter(3))
    await until(lambda: "/adapters/1" in served.log)
    assert vllm.adapters.keys() == {"policy@v2"}
    vllm.files = None
    await client.add_version("policy", adapter(4))
    await until(lambda: vllm.adapters.keys() == {"policy@v1", "policy@v2"})


async def test_what_was_held_before_its_checks_cannot_be_promoted(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    await client.add_version("policy", adapter(1))
    await client.add_version("policy", adapter(2))
    answering = asyncio.Event()
    vllm.plan(CHAT, Planned(before=answering))
    new = NewRelease(candidate="v2", policy=policy(0.5, checked="required"))
    release = await client.start_release("policy", new)
    await vllm.until(CHAT)
    await client.decide(release.id, "hold", Said(who="ann"))
    with pytest.raises(ClientError, match="was held in draft"):
        await client.decide(release.id, "promote", Said(who="ann"))
    answering.set()


async def test_a_call_that_waits_for_an_engine_is_not_sent_to_what_was_taken_back(
    traffic: Traffic, client: Client, vllm: FakeEngine, served: Gateway, http: aiohttp.ClientSession
) -> None:
    """It was given the candidate, which is rolled back and unloaded before the engine is opened."""
    await client.add_version("policy", adapter(1))
    await client.add_version("policy", adapter(2))
    release = await traffic.start("policy", "v2", policy(0.999999, checked="required"))
    await until(lambda: vllm.adapters.keys() == {"policy@v1", "policy@v2"})
    await traffic.call("r1")
    await traffic.call("r2")
    path = "/api/upstreams/fake-openai"
    await client.pause_upstream("fake-openai", 60)
    waiting = [asyncio.ensure_future(traffic.call(name)) for name in ("r1", "r1", "r2", "new")]
    tape = Tape(served.url, http)

    async def count() -> int:
        found = await tape.get("/api/upstreams")
        return next(one["waiting"] for one in found["upstreams"] if one["name"] == "fake-openai")

    async with asyncio.timeout(PATIENCE):
        while await count() < 4:  # noqa: ASYNC110 - as a person would ask
            await asyncio.sleep(0.01)
    await client.decide(release.id, "rollback", Said(who="ann"))
    del vllm.adapters["policy@v2"]
    async with http.post(served.url + f"{path}/open") as answer:
        assert (answer.status, (await answer.json())["paused"]) == (200, False), "it needs no body"
    answers = await asyncio.gather(*waiting)
    assert traffic.failures == []
    assert {json.dumps(one["choices"]).count("I am policy@v1.") for one in answers} == {1}
    for name, calls in (("r1", 3), ("r2", 2), ("new", 1)):
        (pin,) = await client.pins(name)
        assert (pin.version, pin.mixed) == ("v1", True)
        spans = await tape.spans(name, calls)
        assert spans[-1].versions == {"policy": "v1"}


async def test_a_page_from_elsewhere_opens_nothing(served: Gateway, http: aiohttp.ClientSession) -> None:
    for headers, status in (({"Origin": "http://evil.example"}, 403), ({"Content-Type": "text/plain"}, 415)):
        async with http.post(served.url + "/api/upstreams/fake-openai/open", headers=headers) as answer:
            assert answer.status == status
