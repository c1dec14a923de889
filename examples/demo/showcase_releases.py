"""Resources and releases of the showcase: a prompt in canary, one that a person took back, one that did harm."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from examples.demo.order_desk import CAREFUL, STABLE
from examples.demo.showcase_parts import TASKS, Showcase, wait_for_release
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement

CANARY: Final = 28
"""Number of rollouts in the canary."""
MOST_HARMED: Final = 80
"""Number of rollouts within which a candidate that always fails is rolled back."""
PARCELS: Final = "You tell customers of Acme where their parcels are."
SKIP: Final = {"checked": "skip", "replayed": "skip", "shadowed": "skip"}


def _prompt(text: str, version: str, parent: str | None = None, note: str = "") -> NewVersion:
    content = {"text": text, "sent": parent is None}
    return NewVersion(kind="prompt", content=content, version=version, parent=parent, author="anna", note=note)


async def resources(made: Showcase) -> None:
    """Registers three prompts with two versions each."""
    client = made.client
    await client.add_version("desk", _prompt(STABLE, "v1"))
    await client.add_version("desk", _prompt(CAREFUL, "v2", "v1", "names the article of a refund"))
    await client.add_version("greeting", _prompt("You greet customers of Acme. Be brief.", "v1"))
    await client.add_version("greeting", _prompt("You greet customers of Acme. Be funny.", "v2", "v1", "more fun"))
    await client.add_version("parcels", _prompt(PARCELS, "v1"))
    await client.add_version("parcels", _prompt("Customers of Acme wait. Be short.", "v2", "v1", "fewer tokens"))


async def releases(made: Showcase) -> None:
    """Makes three releases: a person rolled the first one back, its rules the second, and the third is in its canary
    and does well."""
    client = made.client
    stages = [CanaryStage(split=0.5, rollouts=60)]
    how = ReleasePolicy.model_validate({"stages": stages, "margin_absolute": 0.1, "horizon": 400} | SKIP)
    fun = await client.start_release("greeting", NewRelease(candidate="v2", policy=how, author="ben", why="more fun"))
    await wait_for_release(client, fun.id, lambda view: view.release.stage == "canary")
    await client.decide(fun.id, "rollback", ActionRequest(who="anna", why="two customers found it rude"))
    await _harmful(made, how)
    new = NewRelease(candidate="v2", policy=how, author="anna", why="fewer refunds of whole orders")
    started = await client.start_release("desk", new)
    made.release = started.id
    await wait_for_release(client, started.id, lambda view: view.release.stage == "canary")
    names = [f"canary-{number:02}" for number in range(1, CANARY + 1)]
    for at in range(0, CANARY, 4):
        await asyncio.gather(*(canary_rollout(made, name) for name in names[at : at + 4]))
    await wait_for_release(client, started.id, lambda view: view.release.assigned >= CANARY and not view.waiting)


async def _harmful(made: Showcase, how: ReleasePolicy) -> None:
    """Makes a release whose candidate fails where the stable version does not: the gateway rolls it back."""
    new = NewRelease(candidate="v2", policy=how, author="ben", why="shorter answers")
    started = await made.client.start_release("parcels", new)
    await wait_for_release(made.client, started.id, lambda view: view.release.stage == "canary")
    for first in range(1, MOST_HARMED, 4):
        await asyncio.gather(*(_parcel(made, f"parcel-{number:02}") for number in range(first, first + 4)))
        view = await made.client.release(started.id)
        if view.release.stage == "rolled_back":
            return
    await wait_for_release(made.client, started.id, lambda view: view.release.stage == "rolled_back")


async def _parcel(made: Showcase, name: str) -> None:
    """Makes a rollout of the harmful release: an answer without tools."""
    agent = made.agent(name, prompt=PARCELS)
    await agent.answer("Where is my parcel of order 1004?", 3, stream=False, tools=False)
    harmed = any(pin.arm == "candidate" for pin in await made.client.pins(name))
    reason = "the answer does not say where the parcel is" if harmed else "the answer says where the parcel is"
    await made.finish(name, True, Judgement(value=0.0 if harmed else 1.0, source="judge", reason=reason))


async def canary_rollout(made: Showcase, name: str) -> None:
    """Makes a rollout of the canary; the candidate earns more reward."""
    draw = random.Random(name)
    await made.agent(name).answer(draw.choice(list(TASKS.values())), draw.choice((1, 3, 4)), stream=draw.random() < 0.5)
    pins = await made.client.pins(name)
    arm = next((pin.arm for pin in pins if pin.arm == "candidate"), "stable")
    made.judged[arm] += 1
    # The first, second ... rollout of an arm has the same reward every time, whichever rollouts those are.
    luck = random.Random(f"{arm}-{made.judged[arm]}").random()
    value = 1.0 if luck < (0.9 if arm == "candidate" else 0.6) else 0.0
    reason = "the customer got what was asked for" if value else "the answer names no article"
    await made.finish(name, True, Judgement(value=value, source="judge", reason=reason))
