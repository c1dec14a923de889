"""Who uses the gateway meanwhile: callers, a producer, workers, who releases, followers. Each writes down what it did.

They behave as their seeds say until they are told to stop. What is not answered is asked again, as clients do, where it
may be asked again: each time is an operation of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import suppress
from itertools import count
from typing import Any

import aiohttp
from e2e.histories import weights
from e2e.histories.history import Operation
from e2e.histories.release_rules import TEXT
from e2e.histories.tape import subject
from e2e.histories.tool_calls import ToolClient
from e2e.histories.work_rules import MAX_ATTEMPTS
from e2e.histories.world import AGAIN_S, PATIENCE, World
from fakes.experiment import policy, prompt

from penstock.gateway.client.client import ClientError
from penstock.gateway.model.answers import Change
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import Claim, ClaimRequest, FinishRequest, HeartbeatRequest, HeldAttempt, RolloutSpec
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.rollout import Judgement, RolloutConfig

BACKLOG = 20
"""So many rollouts wait at most, or they would never be given to anybody."""
TOOLS = 0.5
"""How often a tool is used after a call."""
MODELS = ("m", "m", "m", weights.RESOURCE, weights.RESOURCE, "slow", "breaks")


async def call(world: World, actor: str, chance: random.Random, address: str, **asked: Any) -> Operation:
    """A call of a model. `address`: below the gateway's URL; `asked`: its `rollout` and `attempt`, and perhaps `token`.
    Some are cut off by their client."""
    name, stream, token = f"{chance.getrandbits(64) | 1:016x}", chance.random() < 0.6, asked.pop("token", "none")
    cut, model = stream and chance.random() < 0.1, chance.choice(MODELS)
    text = (TEXT % 1).replace("{date}", "Tuesday")
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"Go on, {name}."}]
    body = {"model": model, "stream": stream, "user": name, "messages": messages}
    headers = {"traceparent": f"00-{chance.getrandbits(128) | 1:032x}-{name}-01", "Authorization": f"Bearer {token}"}
    with world.history.doing("call", actor, call=name, cut=cut, model=model, stream=stream, **asked) as done:
        try:
            url = f"{world.url}{address}/v1/chat/completions"
            async with world.http.post(url, json=body, headers=headers, timeout=PATIENCE) as answer:
                if cut:
                    _ = await answer.content.readany()
                    raise ClientError("the client has left")
                told = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClientError(f"{type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise ClientError(told.decode(), answer.status)
        if stream and not told.endswith(b"data: [DONE]\n\n"):
            raise ClientError("the stream has no end")
        if not stream:
            _ = json.loads(told)
    return done


async def caller(world: World, actor: str) -> None:
    """Rollouts that nobody has queued: some calls, then often a reward."""
    chance = world.chance(actor)
    for number in count():
        name = f"{actor}-{number}"
        where = {"rollout": name, "attempt": "a1"}
        tools = ToolClient(world, actor, chance, f"/rollout/{name}/attempt/a1", where)
        for _ in range(chance.randint(1, 5)):
            if world.over.is_set():
                return
            _ = await call(world, actor, chance, tools.address, **where)
            if chance.random() < TOOLS:
                _ = await tools.use()
            await world.pause(chance.uniform(0, 0.1))
        await tools.end()
        if chance.random() < 0.5:
            await reward(world, actor, name, "a1", chance.random())


async def reward(world: World, actor: str, rollout: str, attempt: str, value: float) -> None:
    """How well it went; asked again until it is known."""
    said = Judgement(value=value, source="judge", key=f"{actor}-{value}")

    async def once() -> Operation:
        with world.history.doing("reward", actor, rollout=rollout, attempt=attempt, key=said.key) as done:
            done.answer["sequence"] = (await world.client.reward(rollout, attempt, said)).sequence
        return done

    _ = await world.again(once)


async def producer(world: World, actor: str) -> None:
    """Queues tasks, a few at a time."""
    chance, numbers = world.chance(actor), count()
    while not world.over.is_set():
        names = [f"q{next(numbers)}" for _ in range(chance.randint(1, 3))]
        config = RolloutConfig(max_attempts=MAX_ATTEMPTS, retry_on=["failed", "unresponsive"])
        specs = [RolloutSpec(id=name, input={"task": name}, config=config) for name in names]

        async def once(names: list[str] = names, specs: list[RolloutSpec] = specs) -> Operation:
            with world.history.doing("enqueue", actor, rollouts=names) as done:
                done.answer["created"] = [one.id for one in await world.client.enqueue(specs) if one.created]
            return done

        if (await world.again(once)).result == "ok":
            world.queued += names
        await world.pause(chance.uniform(0.1, 0.6))
        while len(world.queued) - len(set(world.taken)) > BACKLOG and not world.over.is_set():
            await world.pause(AGAIN_S)


async def worker(world: World, actor: str) -> None:
    """Takes work and does it, well or badly; now and then it vanishes, or sleeps for longer than its lease."""
    chance = world.chance(actor)
    while not world.over.is_set():
        request = ClaimRequest(worker=actor, limit=1, wait_s=1, lease_s=world.lease_s)
        claims: list[Claim] = []
        with world.history.doing("claim", actor, worker=actor, lease_s=world.lease_s) as done:
            claims = (await world.client.claim(request)).claims
            done.answer["claims"] = [(one.rollout.id, one.attempt.id) for one in claims]
        if done.result != "ok":
            await world.pause(AGAIN_S)
        for one in claims:
            world.taken.append(one.rollout.id)
            await _work(world, actor, chance, one)


async def _work(world: World, actor: str, chance: random.Random, claim: Claim) -> None:
    rollout, attempt, mood = claim.rollout.id, claim.attempt.id, chance.random()
    where = {"rollout": rollout, "attempt": attempt}
    tools = ToolClient(world, actor, chance, claim.address, where, claim.token)
    for _ in range(chance.randint(1, 4)):
        _ = await call(world, actor, chance, claim.address, token=claim.token, **where)
        if chance.random() < TOOLS:
            _ = await tools.use()
        if not await _heartbeat(world, actor, rollout, attempt):
            # One that does not care, or has not heard of it, ends it all the same.
            if mood < 0.6:
                return
            break
    if mood < 0.1:
        return
    if mood < 0.2:
        await world.pause(world.lease_s * chance.uniform(0.8, 2))
    end = "succeeded" if chance.random() < 0.7 else "failed"
    said = Judgement(value=chance.random(), source="runner", key=f"{actor}-{attempt}-end")
    asked = FinishRequest(worker=actor, status=end, rewards=[said])

    async def once() -> Operation:
        with world.history.doing("finish", actor, rollout=rollout, attempt=attempt, status=end, key=said.key) as done:
            _ = await world.client.finish(rollout, attempt, asked)
        return done

    done = await world.again(once)
    if done.result == "ok" and chance.random() < 0.3:
        await reward(world, actor, rollout, attempt, chance.random())


async def _heartbeat(world: World, actor: str, rollout: str, attempt: str) -> bool:
    """False when it was told that the attempt is not its own any more."""
    held = [HeldAttempt(rollout=rollout, attempt=attempt, running=True)]
    names = [(rollout, attempt)]
    with world.history.doing("heartbeat", actor, lease_s=world.lease_s, names=names) as done:
        request = HeartbeatRequest(attempts=held, lease_s=world.lease_s)
        answers = (await world.client.heartbeat(actor, request)).attempts
        done.answer["held"] = [(one.rollout, one.attempt) for one in answers if one.held]
        return bool(done.answer["held"])
    return True


async def releaser(world: World, actor: str, resource: str) -> None:
    """Registers versions, one after the other, tries each on half of the rollouts, and promotes it or takes it back."""
    chance = world.chance(actor)
    _ = await world.again(lambda: _version(world, actor, resource, 1))
    for number in count(2):
        if world.over.is_set():
            return
        _ = await world.again(lambda number=number: _version(world, actor, resource, number))
        started = await world.again(lambda number=number: _release(world, actor, resource, f"v{number}"))
        await world.pause(chance.uniform(0.5, 3))
        action = chance.choice(("promote", "rollback"))
        if "release" in started.answer:
            name = started.answer["release"]
            _ = await world.again(lambda name=name, action=action: _decide(world, actor, name, action))


async def _version(world: World, actor: str, resource: str, number: int) -> Operation:
    version = f"v{number}"
    with world.history.doing("version", actor, resource=resource, version=version) as done:
        is_weights, text = resource == weights.RESOURCE, TEXT % number
        new = weights.adapter(number, version) if is_weights else prompt(text, number == 1, version)
        _ = await world.client.add_version(resource, new)
    return done


async def _release(world: World, actor: str, resource: str, version: str) -> Operation:
    """One that was started, or was to be decided, without an answer is found again."""
    with world.history.doing("release", actor, resource=resource, version=version) as done:
        live = await world.client.releases(resource, live=True)
        new = NewRelease(candidate=version, policy=policy(0.5, rollouts=1000))
        release = live[0] if live else await world.client.start_release(resource, new)
        done.answer["release"] = release.id
    return done


async def _decide(world: World, actor: str, release: str, action: str) -> Operation:
    with world.history.doing("decide", actor, release=release, action=action) as done:
        _ = await world.client.decide(release, action, ActionRequest(who="ann", why="to see what happens"))
    return done


async def follower(world: World, actor: str) -> None:
    """Follows the feed from its beginning; comes back with the last cursor after a lost connection, and by itself."""
    chance, since = world.chance(actor), 0
    while not world.over.is_set():
        world.history.note("follow", actor, since=since)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(chance.uniform(0.5, 4)):
                async for change in _changes(world, since):
                    since = change.cursor
                    of = change.rollout or change.attempt or change.span
                    status = None if of is None else of.status
                    world.history.note("change", actor, cursor=since, what=subject(change), status=status)
        await world.pause(chance.uniform(0.05, 0.3))


async def _changes(world: World, since: int) -> AsyncGenerator[Change]:
    """Not by the typed client, which comes back by itself. One whose cursor is refused says so."""
    async with world.http.get(f"{world.url}/api/changes", params={"since": since}) as answer:
        if answer.status == 400:
            world.history.note("follow", "follower", since=since, refused=await answer.text())
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield Change.model_validate_json(line[6:])
