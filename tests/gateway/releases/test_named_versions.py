"""Rollouts that name versions of their own get these, whatever is released, and take part in no release of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt, sent
from fakes.process import Gateway
from fakes.provider import Provider
from fakes.tape import Tape

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import Claim, ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.rollout import RolloutConfig, RolloutStatus

TEXTS = {"v1": STABLE, "v2": CANDIDATE, "mine": "You are mine. {date}."}
RULES = "Be kind and short to everybody."
ANN = ActionRequest(who="ann")


@pytest.fixture
async def traffic(gateway: Gateway, http: aiohttp.ClientSession, client: Client) -> Traffic:
    """Traffic to a gateway that knows three versions of the agents' prompt, and two of another."""
    for version, text in TEXTS.items():
        await client.add_version("travel", prompt(text, version == "v1", version))
    await client.add_version("rules", prompt(RULES, sent=True))
    await client.add_version("rules", prompt("Be kinder."))
    return Traffic(gateway.url, http, client)


def spec(name: str, versions: dict[str, str], **config: Any) -> RolloutSpec:
    return RolloutSpec(id=name, input=name, config=RolloutConfig(versions=versions, **config))


def of(version: str) -> str:
    return TEXTS[version].replace("{date}", "Tuesday")


async def claimed(client: Client) -> Claim:
    (claim,) = (await client.claim(ClaimRequest(worker="w"))).claims
    return claim


async def test_a_rollout_gets_the_version_that_it_names(
    traffic: Traffic, provider: Provider, client: Client, tape: Tape
) -> None:
    await client.enqueue([spec("r1", {"travel": "mine"})])
    await traffic.call("r1")
    await traffic.call("r1")
    assert sent(provider) == [of("mine")] * 2
    (pin,) = await client.pins("r1")
    assert (pin.resource, pin.version, pin.release, pin.arm) == ("travel", "mine", None, None)
    spans = await tape.spans("r1", 2)
    assert [(span.versions, span.arm) for span in spans] == [({"travel": "mine"}, None)] * 2
    assert traffic.failures == []


async def test_each_agent_of_a_rollout_gets_it(traffic: Traffic, provider: Provider, client: Client) -> None:
    await client.enqueue([spec("r1", {"travel": "mine"})])
    await asyncio.gather(*(traffic.call(f"r1/agent/{agent}") for agent in ("planner", "critic") * 3))
    assert set(sent(provider)) == {of("mine")}
    assert {(pin.agent, pin.version) for pin in await client.pins("r1")} == {("planner", "mine"), ("critic", "mine")}


async def test_many_versions_run_at_the_same_time(traffic: Traffic, client: Client, tape: Tape) -> None:
    versions = {f"r{at}": list(TEXTS)[at % 3] for at in range(30)}
    await client.enqueue([spec(name, {"travel": version}) for name, version in versions.items()])
    await asyncio.gather(*(traffic.call(name) for name in [*versions, "other"] * 2))
    assert traffic.failures == []
    for name, version in (versions | {"other": "v1"}).items():
        assert {json.dumps(span.versions) for span in await tape.spans(name, 2)} == {json.dumps({"travel": version})}


async def test_a_version_that_was_registered_just_before_is_there_at_once(
    traffic: Traffic, provider: Provider, client: Client
) -> None:
    for at in range(10):
        await client.add_version("travel", prompt(f"Number {at} of {{date}}.", version=f"n{at}"))
        await client.enqueue([spec(f"r{at}", {"travel": f"n{at}"})])
        await traffic.call(f"r{at}")
    assert sent(provider) == [f"Number {at} of Tuesday." for at in range(10)]


async def test_what_a_rollout_does_not_name_is_as_for_others(
    traffic: Traffic, provider: Provider, client: Client
) -> None:
    await client.enqueue([spec("r1", {"travel": "mine"}), spec("r2", {"travel": "mine", "rules": "v2"})])
    for name in ("r1", "r2"):
        await traffic.call(name)
        await traffic.call(name, RULES)
    assert sent(provider) == [of("mine"), RULES, of("mine"), "Be kinder."]


async def test_a_rollout_may_name_what_it_never_uses(traffic: Traffic, client: Client) -> None:
    await client.enqueue([spec("r1", {"rules": "v2"})])
    await traffic.call("r1", "Nobody knows this text.")
    assert await client.pins("r1") == []
    assert traffic.failures == []


async def test_a_live_release_does_not_touch_them(traffic: Traffic, provider: Provider, client: Client) -> None:
    names = [f"r{at}" for at in range(20)]
    await client.enqueue([spec(name, {"travel": "mine"}) for name in names])
    release = await traffic.start("travel", "v2", policy(0.5))
    for name in names[:10]:
        await traffic.call(name)
    await traffic.call("other")
    for name in names:
        await traffic.call(f"{name}/agent/critic")
    assert (await client.release(release.id)).release.assigned == 1, "the other one"
    assert sent(provider).count(of("mine")) == 30
    await client.decide(release.id, "promote", ANN)
    await traffic.call("later")
    for name in names:
        await traffic.call(name)
    assert sent(provider)[-20:] == [of("mine")] * 20
    assert sent(provider)[-21] == of("v2")
    for name in names:
        assert all((pin.version, pin.release, pin.mixed) == ("mine", None, False) for pin in await client.pins(name))


async def test_a_rollback_of_the_version_that_they_name_does_not_touch_them(
    traffic: Traffic, provider: Provider, client: Client
) -> None:
    await client.enqueue([spec("r1", {"travel": "v2"})])
    release = await traffic.start("travel", "v2", policy(0.5))
    await traffic.call("r1")
    await client.decide(release.id, "rollback", ANN)
    await traffic.call("r1")
    assert sent(provider) == [of("v2")] * 2


async def test_a_release_of_what_they_do_not_name_takes_them_in(traffic: Traffic, client: Client) -> None:
    await client.enqueue([spec("r1", {"travel": "mine"})])
    release = await traffic.start("rules", "v2", policy(0.5))
    await traffic.call("r1")
    await traffic.call("r1", RULES)
    assert (await client.release(release.id)).release.assigned == 1
    assert {pin.resource: pin.release for pin in await client.pins("r1")} == {"travel": None, "rules": release.id}


async def test_a_rollout_that_is_tried_again_has_the_same_version(
    traffic: Traffic, provider: Provider, client: Client
) -> None:
    await client.enqueue([spec("r1", {"travel": "mine"}, max_attempts=3, retry_on=["failed"])])
    for at in range(3):
        claim = await claimed(client)
        assert claim.rollout.config.versions == {"travel": "mine"}
        await traffic.call(f"r1/attempt/{claim.attempt.id}")
        await client.finish("r1", claim.attempt.id, FinishRequest(status="failed"))
        if at == 0:
            await traffic.start("travel", "v2", policy(0.9))
    assert (await client.rollout("r1")).status == RolloutStatus.FAILED
    assert sent(provider) == [of("mine")] * 3


async def test_a_rollout_that_is_queued_again_by_hand_has_the_same_version(
    traffic: Traffic, provider: Provider, client: Client
) -> None:
    await client.enqueue([spec("r1", {"travel": "mine"})])
    for _ in range(2):
        claim = await claimed(client)
        await traffic.call(f"r1/attempt/{claim.attempt.id}")
        await client.finish("r1", claim.attempt.id, FinishRequest(status="failed"))
        await client.requeue("r1")
    assert sent(provider) == [of("mine")] * 2


async def test_the_next_gateway_on_the_tape_gives_the_same_version(
    traffic: Traffic, provider: Provider, client: Client, gateway: Gateway
) -> None:
    await client.enqueue([spec(name, {"travel": "mine"}) for name in ("r1", "r2")])
    await traffic.call("r1")
    await gateway.restart()
    for name in ("r1", "r2"):
        await traffic.call(name)
    assert sent(provider) == [of("mine")] * 3


async def test_the_same_order_again_is_the_same_rollout_and_with_another_version_it_is_refused(
    traffic: Traffic, client: Client
) -> None:
    for created in (True, False):
        (made,) = await client.enqueue([spec("r1", {"travel": "mine"})])
        assert made.created == created
    with pytest.raises(ClientError, match=r"rollouts\[0\]\.id: 'r1' .* another config") as caught:
        await client.enqueue([spec("r1", {"travel": "v2"})])
    assert caught.value.status == 409


NONE_SUCH: list[tuple[dict[str, str], str, str]] = [
    ({"travel": "v9"}, "travel", "v9"),
    ({"hotel": "v1"}, "hotel", "v1"),
    ({"travel": "mine", "rules": "v3"}, "rules", "v3"),
    ({"rules": "travel"}, "rules", "travel"),
]
NO_TABLE: list[tuple[Any, str]] = [
    ({"travel": "a b"}, "rollouts.0.config.versions.travel: 'a b' is not an id"),
    ({"a/b": "v1"}, "rollouts.0.config.versions.a/b.[key]: 'a/b' is not an id"),
    ({"travel": ".."}, "it may not be . or .."),
    ({f"p{at}": "v1" for at in range(21)}, "rollouts.0.config.versions: it has more than 20 items"),
    (["travel"], "rollouts.0.config.versions: a list is not an object"),
    ({"travel": 1}, "rollouts.0.config.versions.travel: 1 is not text"),
]


async def test_wrong_versions_are_refused_with_their_field_and_the_way_out(traffic: Traffic) -> None:
    async def refusal(*rollouts: Any) -> dict[str, Any]:
        async with traffic.http.post(f"{traffic.url}/api/rollouts", json={"rollouts": rollouts}) as answer:
            assert answer.status == 400
            return (await answer.json())["error"]

    good = {"id": "good", "config": {"versions": {"travel": "mine"}}}
    for versions, field, version in NONE_SUCH:
        said = await refusal(good, {"id": "bad", "config": {"versions": versions}})
        assert said["field"] == f"rollouts[1].config.versions.{field}"
        for part in (f"no version '{version}' of a resource '{field}'", f"`penstock resource add {field}`"):
            assert part in said["message"]
        for name in ("good", "bad"):
            async with traffic.http.get(f"{traffic.url}/api/rollouts/{name}") as answer:
                assert answer.status == 404, "all of a request or nothing"
    for wrong, problem in NO_TABLE:
        assert problem in (await refusal({"config": {"versions": wrong}}))["message"]
