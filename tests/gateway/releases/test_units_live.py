"""Releases by user, as people meet them: calls with baggage, rewards, a restart, and nobody's name on disk."""

from __future__ import annotations

import asyncio
import json
from random import Random

from fakes.experiment import STABLE, Traffic, policy
from fakes.process import Gateway
from fakes.provider import Provider
from fakes.tape import Tape

from penstock.console.commands.check import examine
from penstock.console.commands.verify import verify_release
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import Event
from penstock.gateway.model.release import Assignment, AssignmentEvidence
from penstock.gateway.model.rollout import Judgement

ANN = ActionRequest(who="ann")
WINDOW_S = 10.0
"""The rollouts of a person begin within it, also where the machine stands still for some seconds."""


async def call(traffic: Traffic, rollout: str, user: str | None) -> None:
    """A call of a rollout; its own name is in the slot of the prompt, so that the provider's log tells whose it was."""
    baggage = {} if user is None else {"baggage": f"color=blue,user.id={user}%40example.com"}
    await traffic.call(rollout, STABLE.replace("{date}", rollout), **baggage)


async def taking_part(client: Client, release: str) -> tuple[list[Assignment], list[AssignmentEvidence]]:
    rows = [row async for row in client.assignments(release)]
    return [one for one, _ in rows], [one for _, one in rows if one is not None]


def versions(provider: Provider) -> dict[str, set[str]]:
    """Which texts the provider has got of each rollout."""
    got: dict[str, set[str]] = {}
    for seen in provider.log:
        text = json.loads(seen.body)["messages"][0]["content"]
        name = text.partition(" is ")[2].partition(".")[0]
        got.setdefault(name, set()).add("v2" if "careful" in text else "v1")
    return got


async def test_a_person_sees_one_version_through_ramp_restart_and_hold(
    traffic: Traffic, gateway: Gateway, provider: Provider, client: Client
) -> None:
    how = policy(0.4, 0.6, rollouts=1, unit="user.id")
    release = await traffic.start("travel", "v2", how)
    # So many that not all of them are given the same arm by chance. Each comes in the first two waves.
    first, *more = [[(f"r-{at}-{user}", f"user-{user}") for user in range(30)] for at in range(3)]
    order = [*Random(5).sample(first, 30), *Random(6).sample([*more[0], *more[1]], 60)]
    waves = [order[at : at + 23] for at in range(0, len(order), 23)]

    async def wave(at: int) -> None:
        await asyncio.gather(*(call(traffic, *one) for one in waves[at]))

    await wave(0)
    await gateway.restart()
    await wave(1)
    await call(traffic, "nobodys", None)
    view = await client.release(release.id)
    assert view.release.assigned == 31
    await client.decide(release.id, "hold", ANN)
    await wave(2)
    await client.decide(release.id, "resume", ANN)
    await wave(3)
    assert traffic.failures == []
    got, seen = versions(provider), dict[str, set[str]]()
    assert got.keys() == {name for name, _ in order} | {"nobodys"}
    for name, user in order:
        seen.setdefault(user, set()).update(got[name])
    assert {user: found for user, found in seen.items() if len(found) > 1} == {}
    assert set().union(*seen.values()) == {"v1", "v2"}, "both arms were used"
    now = (await client.release(release.id)).release
    assert (now.assigned, now.unnamed, now.assigned + now.joined) == (31, 1, len(order) + 1)
    assert (await verify_release(client, release.id)).problems == []


async def test_a_person_is_one_observation_and_every_reward_of_it_is_verified(traffic: Traffic, client: Client) -> None:
    how = policy(0.5, unit="user.id", outcome_deadline_s=WINDOW_S)
    release = await traffic.start("travel", "v2", how)
    for at, value in enumerate((1.0, 0.5)):
        for user in ("ada", "eve"):
            await call(traffic, f"{user}-{at}", user)
            await client.reward(f"{user}-{at}", "a1", Judgement(value=value))
    view = await traffic.when(release.id, lambda view: view.release.counted == 2)
    assigned, seen = await taking_part(client, release.id)
    assert [one.rollout for one in assigned] == ["ada-0", "eve-0"]
    assert [one.reward for one in seen] == [0.75, 0.75]
    assert [[part.rollout for part in one.parts] for one in seen] == [["ada-0", "ada-1"], ["eve-0", "eve-1"]]
    assert (view.figures["seen"], view.release.joined) == (2, 2)
    await call(traffic, "ada-later", "ada")
    assert (await client.pins("ada-later"))[0].number == 1, "it is on the arm, and not counted"
    done = await verify_release(client, release.id)
    assert (done.problems, done.observations, done.rewards, done.calls) == ([], 2, 4, 4)


async def test_a_hard_violation_in_a_later_rollout_of_a_person_rolls_back(traffic: Traffic, client: Client) -> None:
    release = await traffic.start("travel", "v2", policy(1 - 1e-9, unit="user.id", outcome_deadline_s=0.5))
    await call(traffic, "first", "ada")
    assert (await client.pins("first"))[0].arm == "candidate"
    await traffic.when(release.id, lambda view: view.release.counted == 1)
    await call(traffic, "later", "ada")
    await client.add_events("later", "a1", [Event(name="violation", attributes={"hard": True})])
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"


async def test_nobodys_name_is_on_the_tape(
    traffic: Traffic, gateway: Gateway, provider: Provider, client: Client, tape: Tape
) -> None:
    async def headers(rollout: str) -> str | None:
        (span,) = await tape.spans(rollout, 1)
        detail = await client.span(rollout, "a1", span.sequence)
        assert detail.exchange is not None
        return dict(detail.exchange.request_headers).get("baggage")

    name = "user-9f3c77d1"
    await call(traffic, "before", "early-bird")
    assert await headers("before") == "color=blue,user.id=early-bird%40example.com", "no release asks for it yet"
    await traffic.start("travel", "v2", policy(0.5, unit="user.id"))
    for at in range(3):
        await call(traffic, f"r-{at}", name)
        assert await headers(f"r-{at}") == "color=blue,user.id=***"
    assert provider.log[-1].header("baggage") == f"color=blue,user.id={name}%40example.com", "calls pass as sent"
    await gateway.restart()
    await call(traffic, "again", name)
    assert await headers("again") == "color=blue,user.id=***"
    assert await gateway.terminate() == 0
    files = [file for file in gateway.data.rglob("*") if file.is_file()]
    assert files
    for file in files:
        assert name.encode() not in file.read_bytes()
    assert examine(gateway.data)[1] == []
