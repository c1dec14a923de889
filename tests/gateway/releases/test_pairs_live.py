"""Weights and the prompt that they were trained with, released as one: one assignment, one chain, one way back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from fakes.engine import FakeEngine
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.process import Gateway

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.display import releases as display
from penstock.gateway.model.audit import Said
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import RolloutConfig

ANN = Said(who="ann")
OLD, NEW = ("policy@v1", STABLE), ("policy@v2", CANDIDATE)
NAMES = [f"r{number}" for number in range(24)]


def adapter(number: int) -> NewVersion:
    content = {"upstream": "fake-openai", "base": "base", "adapter": f"/adapters/{number}"}
    return NewVersion(kind="model", content=content)


@pytest.fixture
async def client(served: Gateway) -> AsyncGenerator[Client]:
    async with Client(served.url) as made:
        for number in (1, 2):
            await made.add_version("policy", adapter(number))
        await made.add_version("travel", prompt(STABLE, sent=True))
        await made.add_version("travel", prompt(CANDIDATE))
        yield made


@pytest.fixture
def traffic(served: Gateway, http: aiohttp.ClientSession, client: Client) -> Traffic:
    return Traffic(served.url, http, client, model="policy")


async def given(traffic: Traffic, vllm: FakeEngine, name: str) -> tuple[str, str]:
    """(weights, prompt) that a call of a rollout reached the server with."""
    text = STABLE.replace("{date}", name)
    await traffic.call(name, text)
    body = next(
        body
        for path, body in reversed(vllm.asked)
        if path.endswith("/chat/completions") and name in json.dumps(body["messages"])
    )
    assert not traffic.failures
    return body["model"], body["messages"][0]["content"].replace(name, "{date}")


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
    from penstock.gateway.cli.verify import checked

    assert not (await checked(client, release.id)).problems


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


async def test_a_companion_that_cannot_be_is_refused(client: Client) -> None:
    for companions, why in (
        ({"travel": "v9"}, "'travel' has no version 'v9'; it has v1, v2"),
        ({"nothing": "v1"}, "there is no resource 'nothing'"),
        ({"policy": "v1"}, "companions: 'policy' is what the release is of"),
    ):
        with pytest.raises(ClientError, match=why):
            await client.start_release("policy", NewRelease(candidate="v2", companions=companions, policy=policy(0.5)))


async def test_a_check_looks_at_both(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    vllm.files = {"/adapters/1"}
    new = NewRelease(candidate="v2", policy=policy(0.5, checked="required"), companions={"travel": "v2"})
    release = await client.start_release("policy", new)
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"
    assert "policy: " in view.release.reason
    assert "travel: it keeps its 1 slot" in view.release.reason


async def test_recorded_calls_are_asked_again_with_both(traffic: Traffic, client: Client, vllm: FakeEngine) -> None:
    for name in NAMES[:8]:
        await traffic.call(name)
    before = len(vllm.asked)
    how = policy(0.5, replayed="required", replay={"calls": 8, "budget": 40})
    release = await client.start_release("policy", NewRelease(candidate="v2", policy=how, companions={"travel": "v2"}))
    view = await traffic.when(release.id, lambda view: view.release.stage in ("canary", "rolled_back"))
    asked = [body for path, body in vllm.asked[before:] if path.endswith("/chat/completions")]
    found = {(one["model"], one["messages"][0]["content"].replace("Tuesday", "{date}")) for one in asked}
    assert found == {OLD, NEW}, view
