"""One rollout, one arm, as the provider sees it; and what people decide, with the evidence of that moment."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict

import pytest
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.process import Gateway
from fakes.provider import Provider

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.audit import Said
from penstock.gateway.model.policy import Stage
from penstock.gateway.model.release import Entry, NewRelease
from penstock.gateway.model.resource import Audience

AGENTS = ("planner", "critic")
ANN = Said(who="ann")


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def sent(provider: Provider) -> list[str]:
    """System texts that the provider has seen."""
    return [json.loads(seen.body)["messages"][0]["content"] for seen in provider.log]


def day(rollout: str) -> str:
    """What an agent sends: its own rollout is in the slot, so that the provider's log tells whose call it was."""
    return STABLE.replace("{date}", rollout)


async def verified(client: Client, release: str) -> bool:
    from penstock.gateway.cli.verify import checked

    return not (await checked(client, release)).problems


# --- one arm ---


async def test_what_the_provider_got_of_a_rollout_is_one_version_whatever_happens(
    traffic: Traffic, gateway: Gateway, provider: Provider, client: Client
) -> None:
    """Two agents, through a ramp, a kill, a promotion, and the next release that takes it all back."""
    every = [f"{name}-{agent}" for name in "abcd" for agent in range(12)]

    async def call(name: str, agent: str) -> None:
        await traffic.call(f"{name}/agent/{agent}", day(name))

    async def wave(agents: tuple[str, ...], known: int) -> None:
        await asyncio.gather(*(call(name, agent) for name in every[:known] for agent in agents))

    release = await traffic.start("travel", "v2", policy(0.4, 0.6, rollouts=1))
    await wave(AGENTS[:1], 12)
    await gateway.kill()
    await gateway.start(gateway.port)
    await wave(AGENTS, 24)
    await client.decide(release.id, "promote", ANN)
    await wave(AGENTS[::-1], 36)
    back = await traffic.start("travel", "v1", policy(0.5))
    await wave(AGENTS, 48)
    await client.decide(back.id, "abort", ANN)
    await wave(AGENTS, 48)
    assert traffic.failures == []
    got = defaultdict[str, set[str]](set)
    for text in sent(provider):
        for name in every:
            for version, template in (("v1", STABLE), ("v2", CANDIDATE)):
                if text == template.replace("{date}", name):
                    got[name].add(version)
    assert got.keys() == set(every)
    assert {name: versions for name, versions in got.items() if len(versions) > 1} == {}
    for name in every:
        assert got[name] == {pin.version for pin in await client.pins(name)}
    assert {"v1", "v2"} == set().union(*(got[name] for name in every[:24])), "both arms were used"
    assert {"v2"} == set().union(*(got[name] for name in every[24:36])), "they began after the promotion"
    assert await verified(client, release.id)
    assert await verified(client, back.id)


async def test_an_agent_that_joins_after_a_rollback_gets_the_stable_version(
    traffic: Traffic, provider: Provider, client: Client
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5))
    for name in names("r", 20):
        await traffic.call(f"{name}/agent/planner")
    on_candidate = [name for name in names("r", 20) if (await client.pins(name))[0].arm == "candidate"]
    assert on_candidate
    await client.decide(release.id, "rollback", ANN)
    before = len(provider.log)
    for name in names("r", 20):
        await traffic.call(f"{name}/agent/critic")
    assert traffic.failures == []
    assert set(sent(provider)[before:]) == {traffic.text}
    for name in on_candidate:
        assert (await client.pins(name))[1].mixed


async def test_agents_that_call_at_the_same_time_are_on_one_arm(traffic: Traffic, client: Client) -> None:
    await traffic.start("travel", "v2", policy(0.5))
    every = [f"{name}/agent/{agent}" for agent in ("a", "b", "c") for name in names("r", 20)]
    await asyncio.gather(*(traffic.call(one) for one in every * 3))
    assert traffic.failures == []
    for name in names("r", 20):
        pins = await client.pins(name)
        assert len(pins) == 3
        assert len({(pin.arm, pin.number, pin.version) for pin in pins}) == 1
    assert (await client.release("travel-1")).release.assigned == 20


async def test_two_releases_are_assigned_independently(traffic: Traffic, client: Client) -> None:
    rules = "Be kind and short to everybody."
    await client.add_version("rules", prompt(rules, sent=True))
    await client.add_version("rules", prompt("Be kinder."))
    await traffic.start("travel", "v2", policy(0.5))
    await traffic.start("rules", "v2", policy(0.5))
    both: set[tuple[str | None, ...]] = set()
    for name in names("r", 64):
        await traffic.call(name)
        await traffic.call(name, rules)
        both.add(tuple(pin.arm for pin in await client.pins(name)))
    assert len(both) == 4


# --- people ---


def last(entries: list[Entry], action: str) -> Entry:
    return next(entry for entry in reversed(entries) if entry.action == action)


async def test_what_a_person_decides_has_the_evidence_of_the_moment(traffic: Traffic, client: Client) -> None:
    release = await traffic.start("travel", "v2", policy(0.5, margin_absolute=0.01))
    _ = await traffic.run(names("r", 30), lambda arm: 0.5)
    await traffic.call("awaited")
    view = await traffic.when(release.id, lambda view: view.release.counted == 30)
    assert (view.oldest, view.rewarded) == ("awaited", int(view.figures["candidate.assigned"]))
    await client.decide(release.id, "hold", ANN)
    await client.decide(release.id, "resume", ANN)
    _ = await traffic.run(names("s", 5), lambda arm: 0.5)
    await client.decide(release.id, "promote", ANN)
    entries = await client.audit(release.id)
    held = last(entries, "hold")
    assert (held.assignment, held.evidence) == (30, view.figures | {"split": 0.5})
    promoted = last(entries, "promote")
    assert promoted.evidence["seen"] == promoted.assignment == 30, "the outcome of the oldest is awaited"
    assert promoted.split == 0.0
    assert promoted.evidence["split"] == 0.5
    assert last(entries, "start").evidence == {}
    assert await verified(client, release.id)


async def test_before_the_canary_there_is_no_evidence(traffic: Traffic, client: Client) -> None:
    how = policy(0.5, shadowed="required")
    release = await client.start_release("travel", NewRelease(candidate="v2", policy=how))
    await traffic.when(release.id, lambda view: view.doing == "shadow")
    await client.decide(release.id, "abort", ANN)
    assert last(await client.audit(release.id), "abort").evidence == {}
    assert await verified(client, release.id)


async def test_what_cannot_be_done_is_refused_with_what_can(traffic: Traffic, client: Client) -> None:
    stages = {"stages": [Stage(split=0.5, rollouts=1, approval=True)]}
    release = await traffic.start("travel", "v2", policy(0.5).model_copy(update=stages))
    with pytest.raises(ClientError, match=r"travel-1 \(canary\) does not wait for approval: there is nothing"):
        await client.decide(release.id, "approve", ANN)
    await client.decide(release.id, "hold", ANN)
    with pytest.raises(ClientError, match="is held already: resume, promote, rollback or abort it"):
        await client.decide(release.id, "hold", ANN)
    await client.decide(release.id, "promote", ANN)
    with pytest.raises(ClientError, match="penstock release start travel --candidate v1 takes it back"):
        await client.decide(release.id, "rollback", ANN)
    only = Audience(agents=["the planner"], metadata={"team": "a"})
    other = await traffic.start("travel", "v1", policy(0.5), only=only.model_dump())
    await client.decide(other.id, "promote", ANN)
    again = "--candidate v2 --only 'agent=the planner' --only metadata.team=a takes it back"
    with pytest.raises(ClientError, match=again):
        await client.decide(other.id, "rollback", ANN)
