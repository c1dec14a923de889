"""What the tape says of earlier rollouts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

from penstock.gateway.client.client import Client
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.rollout import RolloutSummary, Totals
from penstock.trainer.apo.advice.session import TapeObservationReader
from penstock.trainer.apo.config import RewardSettings
from penstock.trainer.apo.protocol import AgentTask


class Listed:
    """A gateway with one rollout of three calls."""

    async def rollouts(self, filter: str, limit: int) -> AsyncGenerator[RolloutSummary]:
        """As `Client.rollouts`."""
        yield RolloutSummary(id="r", input="a", reward=1.0, totals=Totals(calls=3))


async def test_steps_of_earlier_rollouts_cost_as_much_as_those_of_the_probe() -> None:
    tape = TapeObservationReader(cast(Client, Listed()), RewardSettings(range=(-1.0, 1.0), step_cost=0.2), None)
    seed = Resource(name="shop", version="v1", kind="prompt", content={"text": "a"}, sha256="", created_ns=0)
    (found,) = await tape.earlier_observations({"shop": seed}, [AgentTask("t0", "a", "t0")], "seed")
    assert found.reward == (2.0 - 3 * 0.2) / 2
