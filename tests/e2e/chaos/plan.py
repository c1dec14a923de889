"""What a chaos run is: its size, its seed, and what every rollout's agent does. Pure.

The same seed makes the same rollouts and the same choice of victims; when exactly a kill strikes is the machine's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import RolloutConfig

KINDS = {
    "plain": 70,
    "stubborn": 8,  # ignores TERM: only KILL ends it
    "forking": 8,  # leaves a grandchild behind, in a session of its own, that ignores TERM
    "flaky": 5,  # fails the first time that it comes to its end
    "hanging": 3,  # hangs the first time, until its time is over; ignores TERM
    "broken": 3,  # always fails
    "unwanted": 3,  # is cancelled from outside at some time
}
"""How agents behave, and how many of a hundred behave so."""
ENDLESS = 1000


@dataclass(frozen=True)
class Plan:
    """The size of a run."""

    seed: int = 1
    rollouts: int = 150
    runners: int = 4
    workers: int = 2
    """Agents at a time, of each runner."""
    agent_kills: int = 15
    runner_kills: int = 3
    gateway_kills: int = 1
    calm_after_gateway: bool = True
    """Runners are killed only after the gateway: what they held needs no longer than its lease then."""
    lease_s: int = 3
    timeout_s: float = 3.0
    """Of rollouts whose agents hang."""
    patience_s: float = 600.0
    """After which it has failed. A machine that is busy takes minutes."""

    @property
    def names(self) -> list[str]:
        """The rollouts."""
        return [f"c{number}" for number in range(self.rollouts)]

    def kind(self, name: str) -> str:
        """How its agents behave."""
        return self._of(name).choices(list(KINDS), list(KINDS.values()))[0]

    def calls(self, name: str) -> int:
        """How many calls its agents make."""
        return self._of(name).randint(1, 4)

    def reward(self, name: str) -> float:
        """What its agents print."""
        return self._of(name).randint(0, 1000) / 1000

    def _of(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def spec(self, name: str) -> RolloutSpec:
        """The rollout, as it is enqueued."""
        kind = self.kind(name)
        task: dict[str, Any] = {"kind": kind, "calls": self.calls(name), "reward": self.reward(name)}
        config = RolloutConfig(
            max_attempts=2 if kind == "broken" else ENDLESS,
            retry_on=["failed", "timeout", "unresponsive"],
            timeout_s=self.timeout_s if kind == "hanging" else None,
        )
        return RolloutSpec(id=name, input=task, mode="train", group=kind, config=config)

    def strikes(self) -> list[tuple[float, str]]:
        """(share of the rollouts that have ended by then, what is killed), in order."""
        chance = random.Random(self.seed)
        gateway = sorted(
            chance.uniform(0.1, 0.35 if self.calm_after_gateway else 0.9) for _ in range(self.gateway_kills)
        )
        begin = gateway[-1] if gateway and self.calm_after_gateway else 0.05
        made = [(at, "gateway") for at in gateway]
        made += [(chance.uniform(begin, 0.9), "runner") for _ in range(self.runner_kills)]
        made += [(chance.uniform(0.02, 0.95), "agent") for _ in range(self.agent_kills)]
        return sorted(made)
