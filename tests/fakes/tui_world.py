"""Work on a gateway, for the tests of the TUI."""

from __future__ import annotations

from dataclasses import dataclass

from fakes.rig import Base

from penstock.gateway.client.sync import SyncClient
from penstock.gateway.model.queue import ClaimRequest, Event, FinishRequest, RolloutSpec
from penstock.gateway.model.rollout import Judgement

TASKS, TRIES = 6, 5


@dataclass(slots=True)
class World:
    """A gateway, and what is on it."""

    base: Base
    rollouts: list[str]
    """All of them, newest first."""
    ended: list[str]
    """Those that have ended, in their order."""

    @property
    def url(self) -> str:
        return self.base.url


def fill(base: Base) -> World:
    """Work for a gateway."""
    ids = [f"t{task}.{one}" for task in range(TASKS) for one in range(TRIES)]
    with SyncClient(base.url) as client:
        for id in ids:
            client.enqueue([RolloutSpec(id=id, input={"question": f"What is {id}?"}, group=id.partition(".")[0])])
        claims = client.claim(ClaimRequest(worker="w1", limit=9)).claims
        for number, claim in enumerate(claims):
            client.add_events(claim.rollout.id, claim.attempt.id, [Event(name="note", attributes={"text": "seen"})])
            if number < 8:
                good = number % 3 != 0
                said = Judgement(value=1.0 if good else 0.0, source="runner")
                finish = FinishRequest(worker="w1", status="succeeded" if good else "failed", rewards=[said])
                client.finish(claim.rollout.id, claim.attempt.id, finish)
        rows = list(client.rollouts())
    ended = [row.id for row in rows if row.ended_ns is not None]
    return World(base, [row.id for row in rows], ended)
