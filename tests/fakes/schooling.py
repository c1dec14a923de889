"""Rollouts to learn from: groups of tasks on the tape of a real gateway, half of them answered well.

    await school(client, http, url, range(6))

Every other rollout of a group says what is wanted and has reward 1, the others say something else and have 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp
from fakes.workers import finish

from examples.demo.model import DemoAnswer, Json
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import Claim, ClaimRequest, RolloutSpec

GOOD, BAD = "the water and the wheel", "tool tool tool"
PER_GROUP = 4


def script(request: Json) -> DemoAnswer:
    """What the model answers, for `Provider.script`: its sampling follows from the seed."""
    return DemoAnswer(BAD if request["seed"] % 2 else GOOD)


async def school(client: Client, http: aiohttp.ClientSession, url: str, groups: Iterable[int]) -> None:
    """Queues and runs `PER_GROUP` rollouts of each of these groups."""
    specs = [
        RolloutSpec(id=f"task-{group}-{number}", group=f"task-{group}", input={"seed": number})
        for group in groups
        for number in range(PER_GROUP)
    ]
    await client.enqueue(specs)
    for _ in specs:
        for claim in (await client.claim(ClaimRequest(worker="w", wait_s=20))).claims:
            await _attend(client, http, url, claim)


async def _attend(client: Client, http: aiohttp.ClientSession, url: str, claim: Claim) -> None:
    seed = claim.rollout.input["seed"]
    question = {"role": "user", "content": f"{claim.rollout.group}?"}
    body = {"model": "base", "seed": seed, "messages": [question]}
    async with http.post(f"{url}{claim.address}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
    await finish(client, claim, float(seed % 2 == 0))
