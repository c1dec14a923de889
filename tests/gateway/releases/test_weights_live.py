"""Weights behind running agents: loaded before they get traffic, unloaded when nobody needs them, waited for while they
change, released together with the prompt that they were trained with, and served by several engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.engine import CHAT, LOAD, MODELS, UNLOAD, FakeEngine, Planned, engine
from fakes.experiment import CANDIDATE, STABLE, Traffic, faults, policy, prompt
from fakes.local import locally
from fakes.process import Gateway, upstream
from fakes.tape import Tape
from fakes.waiting import until

from penstock.console.views import releases as display
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.facts import TRIES
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease, Release
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement, RolloutConfig
from penstock.gateway.model.state import PauseRequest, UpstreamView

ANN = ActionRequest(who="ann")
UPSTREAM = "fake-openai"


@pytest.fixture
async def client(served: Gateway) -> AsyncGenerator[Client]:
    async with Client(served.url) as made:
        yield made


@pytest.fixture
def traffic(served: Gateway, http: aiohttp.ClientSession, client: Client) -> Traffic:
    return Traffic(served.url, http, client, model="policy")


@pytest.fixture
def tape(served: Gateway, http: aiohttp.ClientSession) -> Tape:
    return Tape(served.url, http)


def version(adapter: str = "/adapters/1", upstream: str = UPSTREAM, **more: Any) -> NewVersion:
    return NewVersion(kind="model", content={"upstream": upstream, "base": "base", "adapter": adapter} | more)


async def register(client: Client, *numbers: int) -> None:
    """Versions of the policy, whose adapters have these numbers."""
    for number in numbers:
        await client.add_version("policy", version(f"/adapters/{number}"))


async def hold_up(traffic: Traffic, tape: Tape, *rollouts: str) -> list[asyncio.Future[Any]]:
    """Calls that wait for an engine that is paused."""
    made: list[asyncio.Future[Any]] = [asyncio.ensure_future(traffic.call(name)) for name in rollouts]

    async def all_wait() -> bool:
        found = (await tape.get("/api/upstreams"))["upstreams"]
        return next(one["waiting"] for one in found if one["name"] == UPSTREAM) == len(made)

    await until(all_wait)
    assert not any(one.done() for one in made)
    return made


async def test_adapters_are_loaded_before_traffic_and_unloaded_when_nobody_needs_them(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    await register(client, 1)
    await until(lambda: vllm.adapters == {"policy@v1": "/adapters/1"})
    # A worker holds a rollout that is pinned to v1.
    await client.enqueue([RolloutSpec(id="long")])
    (claim,) = (await client.claim(ClaimRequest(worker="w"))).claims
    await traffic.call("long")
    await register(client, 2)
    release = await traffic.start("policy", "v2", policy(0.5, checked="required"))
    assert vllm.adapters.keys() == {"policy@v1", "policy@v2"}
    await client.decide(release.id, "promote", ANN)
    await traffic.call("new")
    asked = [body["model"] for path, body in vllm.asked if path == CHAT and "max_tokens" not in body]
    assert asked[-1] == "policy@v2"
    await traffic.call("long")
    assert traffic.failures == []
    assert "policy@v1" in vllm.adapters
    await client.finish("long", claim.attempt.id, FinishRequest(worker="w", status="succeeded"))
    # Something must change before it looks again, or half a minute pass.
    await register(client, 3)
    await vllm.until(UNLOAD)
    await until(lambda: vllm.adapters == {"policy@v2": "/adapters/2"})


async def test_a_version_that_will_not_load_is_a_failed_release_and_no_failed_agent(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    vllm.files = {"/adapters/1"}
    await register(client, 1, 2)
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
    await register(client, 1, 2)
    _ = await traffic.start("policy", "v2", policy(0.5))
    await until(lambda: "2 adapters are needed at once and the server computes with 1 (--max-loras)" in served.log)


async def test_a_server_that_was_restarted_gets_its_adapters_back(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    await register(client, 1)
    await until(lambda: bool(vllm.adapters))
    await traffic.call("long")
    vllm.restart()
    await asyncio.gather(*(traffic.call(name) for name in ("r1", "r2", "long")))
    assert traffic.failures == []
    assert vllm.adapters == {"policy@v1": "/adapters/1"}


async def test_a_version_that_a_running_rollout_is_pinned_to_is_loaded_again_for_its_call(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    await register(client, 1, 2)
    await traffic.call("long")
    release = await traffic.start("policy", "v2", policy(0.5))
    await client.decide(release.id, "promote", ANN)
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
    await register(client, 1)
    asking = asyncio.ensure_future(traffic.call("r1"))
    await vllm.until(CHAT)
    loading.set()
    await asking
    assert traffic.failures == []


async def test_what_stays_unknown_is_told_to_the_agent(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    vllm.files = set()
    await register(client, 1)
    await traffic.call("r1")
    assert len(traffic.failures) == 1
    assert "404" in str(traffic.failures[0])
    assert sum(path == CHAT for path, _ in vllm.asked) == 2


async def test_calls_wait_while_an_upstream_is_paused(
    traffic: Traffic, client: Client, vllm: FakeEngine, tape: Tape
) -> None:
    traffic.model = "base"
    paused = await client.pause_upstream(UPSTREAM, 30)
    assert (paused.paused, paused.waiting) == (True, 0)
    waiting = await hold_up(traffic, tape, *(f"r{number}" for number in range(5)))
    assert not [path for path, _ in vllm.asked if path == CHAT]
    opened = await client.open_upstream(UPSTREAM)
    assert (opened.paused, opened.waited) == (False, 5)
    await asyncio.gather(*waiting)
    assert traffic.failures == []
    with pytest.raises(ClientError, match="there is no upstream 'nobody'"):
        await client.pause_upstream("nobody", 60)
    with pytest.raises(ClientError, match="bound_s"):
        await client.post(f"/api/upstreams/{UPSTREAM}/pause", UpstreamView, PauseRequest.model_construct(bound_s=0))


async def test_a_server_that_is_away_is_no_reason_to_stop(
    traffic: Traffic, client: Client, vllm: FakeEngine, served: Gateway
) -> None:
    vllm.plan("/v1/models", *[Planned(status=500, text="away")] * 50)
    await register(client, 1)
    await vllm.until("/v1/models")
    await until(lambda: "would not list its models" in served.log)
    await traffic.call("r1")
    await client.reward("r1", "a1", Judgement(value=1))
    assert served.log.count("would not list its models") == 1


async def test_what_a_check_has_loaded_is_not_taken_away(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    """Adapters are looked after while a release is checked: what was read of the tape before it began is no reason."""
    await register(client, 1)
    await until(lambda: bool(vllm.adapters))
    listing, answering = asyncio.Event(), asyncio.Event()
    listed = sum(path == MODELS for path, _ in vllm.asked)
    vllm.plan(MODELS, Planned(before=listing))
    vllm.plan(CHAT, Planned(before=answering))
    await register(client, 2)
    await vllm.until(MODELS, listed + 1)
    new = NewRelease(candidate="v2", policy=policy(0.5, checked="required"))
    release = await client.start_release("policy", new)
    await vllm.until(CHAT)
    listing.set()
    # Another look at the server has come and gone.
    await register(client, 3)
    await vllm.until(MODELS, listed + 3)
    answering.set()
    view = await traffic.when(release.id, lambda view: view.release.stage != "draft")
    assert view.release.live, view.release.reason


@pytest.mark.parametrize("end", ["promote", "abort"])
async def test_a_restarted_server_gets_what_running_rollouts_are_pinned_to(
    traffic: Traffic, client: Client, vllm: FakeEngine, end: str
) -> None:
    await register(client, 1, 2)
    await until(lambda: "policy@v1" in vllm.adapters)
    if end == "promote":
        await traffic.call("long")
    release = await traffic.start("policy", "v2", policy(0.999999))
    await until(lambda: "policy@v2" in vllm.adapters)
    if end == "abort":
        await traffic.call("long")
    await client.decide(release.id, end, ANN)
    vllm.restart()
    await register(client, 3)
    await until(lambda: vllm.adapters.keys() == {"policy@v1", "policy@v2"})


async def test_an_adapter_of_a_pinned_rollout_that_was_refused_once_is_tried_again(
    traffic: Traffic, client: Client, vllm: FakeEngine, served: Gateway
) -> None:
    await register(client, 1, 2)
    await until(lambda: "policy@v1" in vllm.adapters)
    await traffic.call("long")
    release = await traffic.start("policy", "v2", policy(0.5))
    await until(lambda: "policy@v2" in vllm.adapters)
    await client.decide(release.id, "promote", ANN)
    vllm.restart()
    vllm.files = {"/adapters/2"}
    await register(client, 3)
    await until(lambda: "/adapters/1" in served.log)
    assert vllm.adapters.keys() == {"policy@v2"}
    vllm.files = None
    await register(client, 4)
    await until(lambda: vllm.adapters.keys() == {"policy@v1", "policy@v2"})


async def test_a_call_that_waits_for_an_engine_is_not_sent_to_what_was_taken_back(
    traffic: Traffic, client: Client, vllm: FakeEngine, tape: Tape, http: aiohttp.ClientSession
) -> None:
    """It was given the candidate, which is rolled back and unloaded before the engine is opened."""
    await register(client, 1, 2)
    release = await traffic.start("policy", "v2", policy(0.999999, checked="required"))
    await until(lambda: vllm.adapters.keys() == {"policy@v1", "policy@v2"})
    await traffic.call("r1")
    await traffic.call("r2")
    await client.pause_upstream(UPSTREAM, 60)
    waiting = await hold_up(traffic, tape, "r1", "r1", "r2", "new")
    await client.decide(release.id, "rollback", ANN)
    del vllm.adapters["policy@v2"]
    async with http.post(f"{traffic.url}/api/upstreams/{UPSTREAM}/open") as answer:
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
        async with http.post(f"{served.url}/api/upstreams/{UPSTREAM}/open", headers=headers) as answer:
            assert answer.status == status


# --- weights and the prompt that they were trained with ---


OLD, NEW = ("policy@v1", STABLE), ("policy@v2", CANDIDATE)
NAMES = [f"r{number}" for number in range(24)]


@pytest.fixture
async def pairs(client: Client) -> None:
    """Two versions of the weights and of the prompt."""
    await register(client, 1, 2)
    for text, sent in ((STABLE, True), (CANDIDATE, False)):
        await client.add_version("travel", prompt(text, sent))


async def given(traffic: Traffic, vllm: FakeEngine, name: str) -> tuple[str, str]:
    """(weights, prompt) that a call of a rollout reached the server with."""
    text = STABLE.replace("{date}", name)
    await traffic.call(name, text)
    body = next(body for path, body in reversed(vllm.asked) if path == CHAT and name in json.dumps(body["messages"]))
    assert not traffic.failures
    return body["model"], body["messages"][0]["content"].replace(name, "{date}")


async def start_both(client: Client, **policies: Any) -> Release:
    how = policy(0.5, **policies)
    return await client.start_release("policy", NewRelease(candidate="v2", policy=how, companions={"travel": "v2"}))


@pytest.mark.usefixtures("pairs")
async def test_an_arm_has_both_or_none_and_both_are_taken_back(
    traffic: Traffic, client: Client, vllm: FakeEngine
) -> None:
    release = await traffic.start("policy", "v2", policy(0.5, checked="required"), companions={"travel": "v2"})
    assert (release.companions, release.companions_stable) == ({"travel": "v2"}, {"travel": "v1"})
    got = {name: await given(traffic, vllm, name) for name in NAMES}
    assert set(got.values()) == {OLD, NEW}
    for name in NAMES:
        pins = await client.pins(name)
        assert {pin.resource for pin in pins} == {"policy", "travel"}
        assert len({(pin.release, pin.arm, pin.probability, pin.number) for pin in pins}) == 1
        assert (got[name] == NEW) == (pins[0].arm == "candidate")
    assert (await client.release(release.id)).release.assigned == len(NAMES)
    await client.decide(release.id, "rollback", ANN)
    assert {await given(traffic, vllm, name) for name in NAMES} == {OLD}
    for name in NAMES:
        assert {pin.mixed for pin in await client.pins(name)} == {got[name] == NEW}


@pytest.mark.usefixtures("pairs")
async def test_promotion_makes_both_stable(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    release = await traffic.start("policy", "v2", policy(0.5), companions={"travel": "v2"})
    view = await client.resource("travel")
    assert view.releases == [release.id]
    with pytest.raises(ClientError, match=r"release policy-1 is live for the same calls"):
        await client.start_release("travel", NewRelease(candidate="v2", policy=policy(0.5)))
    assert "v1 → v2, travel v1 → v2" in str(display.started(release))
    assert display.versions(release, "candidate") == "v2 + travel v2"
    await client.decide(release.id, "promote", ANN)
    assert [(await client.resource(name)).stable.version for name in ("policy", "travel")] == ["v2", "v2"]
    assert await given(traffic, vllm, "new") == NEW
    with pytest.raises(ClientError, match=r"policy --candidate v1 --with travel=v1 takes it back"):
        await client.decide(release.id, "rollback", ANN)
    assert await faults(client, release.id) == []


@pytest.mark.usefixtures("pairs")
async def test_who_has_a_part_of_it_already_takes_no_part(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    early = [f"early{number}" for number in range(12)]
    # They have used the prompt, with a model that is none of ours.
    traffic.model = "base"
    for name in early:
        await traffic.call(name, STABLE.replace("{date}", name))
    traffic.model = "policy"
    fixed = [f"fixed{number}" for number in range(12)]
    await client.enqueue([RolloutSpec(id=name, config=RolloutConfig(versions={"travel": "v2"})) for name in fixed])
    release = await traffic.start("policy", "v2", policy(0.5), companions={"travel": "v2"})
    assert {await given(traffic, vllm, name) for name in early} == {OLD}
    assert {await given(traffic, vllm, name) for name in fixed} == {("policy@v1", CANDIDATE)}
    assert (await client.release(release.id)).release.assigned == 0


@pytest.mark.usefixtures("pairs")
async def test_a_companion_that_cannot_be_is_refused(client: Client) -> None:
    for companions, why in (
        ({"travel": "v9"}, "'travel' has no version 'v9'; it has v1, v2"),
        ({"nothing": "v1"}, "there is no resource 'nothing'"),
        ({"policy": "v1"}, "companions: 'policy' is what the release is of"),
    ):
        with pytest.raises(ClientError, match=why):
            await client.start_release("policy", NewRelease(candidate="v2", companions=companions, policy=policy(0.5)))


@pytest.mark.usefixtures("pairs")
async def test_a_check_looks_at_both(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    vllm.files = {"/adapters/1"}
    release = await start_both(client, checked="required")
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"
    assert "policy: " in view.release.reason
    assert "travel: it keeps its 1 slot" in view.release.reason


@pytest.mark.usefixtures("pairs")
async def test_recorded_calls_are_asked_again_with_both(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    for name in NAMES[:8]:
        await traffic.call(name)
    before = len(vllm.asked)
    release = await start_both(client, replayed="required", replay={"calls": 8})
    view = await traffic.when(release.id, lambda view: view.release.stage in ("canary", "rolled_back"))
    asked = [body for path, body in vllm.asked[before:] if path == CHAT]
    found = {(one["model"], one["messages"][0]["content"].replace("Tuesday", "{date}")) for one in asked}
    assert found == {OLD, NEW}, view


# --- several engines ---


ROUTE = '[[route]]\nmodel = "policy"\nupstream = ["other"]\nalias = { other = "its-own" }\n'


def settings(one: FakeEngine, two: FakeEngine, other: FakeEngine) -> str:
    """Three engines, of which the route names the last only."""
    engines = {"one": one, "two": two, "other": other}
    entries = [upstream(name, made.openai_url, "openai") for name, made in engines.items()]
    entries[0] = entries[0].rstrip("\n") + "\nmax_concurrent = 1\n\n"
    return "".join(entries) + ROUTE


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


async def loaded(*engines: FakeEngine) -> None:
    """Returns when they hold the version."""
    await until(lambda: all(one.adapters == {"policy@v1": "/adapters/1"} for one in engines))


async def test_each_engine_that_serves_a_version_is_a_candidate(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        one, two, other = [await stack.enter_async_context(engine()) for _ in range(3)]
        gateway = await stack.enter_async_context(locally(tmp_path, settings(one, two, other)))
        async with Client(gateway.url) as client:
            tape, traffic = Tape(gateway.url, http), Traffic(gateway.url, http, client, model="policy")
            with pytest.raises(ClientError, match=r"content\.also: 'nobody' is not configured"):
                await client.add_version("policy", version(upstream="one", also=["nobody"]))
            await client.add_version("policy", version(upstream="one", also=["two"]))

            await loaded(one, two)
            # The first has a place for one call: the second call goes to the other engine, and waits for nobody.
            goes_on = asyncio.Event()
            one.plan(CHAT, Planned(before=goes_on))
            first = asyncio.ensure_future(traffic.call("r1"))
            await one.until(CHAT)
            assert said(await traffic.call("r2")) == "I am policy@v1."
            goes_on.set()
            assert said(await first) == "I am policy@v1."
            # One that fails is asked once more, then the other is.
            one.plan(CHAT, Planned(status=503), Planned(status=503))
            assert said(await traffic.call("r3")) == "I am policy@v1."
            assert traffic.failures == []
            spans = [(await tape.spans(name, 1))[0] for name in ("r1", "r2", "r3")]
            assert [span.upstream for span in spans] == ["one", "two", "two"]
            assert [tried["why"] for tried in (spans[2].attributes or {})[TRIES]] == ["http_503", "http_503"]
            assert [span.versions for span in spans] == [{"policy": "v1"}] * 3
            assert [path for path, _ in other.asked if path == CHAT] == []


async def test_they_share_its_rollouts_by_the_weights_of_the_route(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with engine() as one, engine() as two, engine() as other:
        text = settings(one, two, other).replace('["other"]', "{ other = 1, one = 1, two = 1 }")
        async with locally(tmp_path, text) as gateway, Client(gateway.url) as client:
            traffic = Traffic(gateway.url, http, client, model="policy")
            await client.add_version("policy", version(upstream="one", also=["two"]))
            await loaded(one, two)
            for number in range(16):
                assert said(await traffic.call(f"r{number}")) == "I am policy@v1."
            assert traffic.failures == []
        calls = [sum(path == CHAT for path, _ in made.asked) for made in (one, two, other)]
        assert min(calls[:2]) > 0
        assert (sum(calls[:2]), calls[2]) == (16, 0)
