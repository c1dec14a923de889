"""Who operates the queue: cancels rollouts and queues them again, whatever they are doing. Nothing is asked twice: what
was not answered may have been done."""

from __future__ import annotations

from itertools import count

from e2e.histories.world import World

from penstock.gateway.model.base import ActionRequest

DONE = (("cancel",), ("requeue",), ("requeue",), ("cancel", "requeue"), ("cancel", "cancel"), ("requeue", "cancel"))
"""What is done to one rollout, one after the other."""
NEWEST = 8
"""Of so many it is one: of those that workers have, or just had, or of those that wait."""


async def operator(world: World, actor: str) -> None:
    """Until it is over."""
    chance, numbers = world.chance(actor), count()
    while not world.over.is_set():
        await world.pause(chance.uniform(0.1, 0.6))
        some = world.taken if chance.random() < 0.8 else world.queued
        rollout = chance.choice(some[-NEWEST:]) if some else None
        for action in chance.choice(DONE) if rollout is not None else ():
            why = f"{actor}-{next(numbers)}"
            with world.history.doing(action, actor, rollout=rollout, why=why) as done:
                asked = world.client.cancel if action == "cancel" else world.client.requeue
                done.answer["stands"] = (await asked(str(rollout), ActionRequest(who=actor, why=why))).status
            await world.pause(chance.choice((0, 0, 0.05, world.lease_s)))
