"""Reads facts about rollouts from the tape: tools, repeated rewards, outputs, tokens. And earlier rollouts of the same
prompt.

Earlier rollouts cost nothing. They count if they had the version of the prompt that the probe begins from, and exactly
the input of a task of the train split. So nothing of the validation or the test split is used.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.gateway.client.client import Client
from penstock.gateway.client.concurrency import map_concurrently
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.rollout import Attempt, Reward, RolloutSummary
from penstock.gateway.model.transcript import Transcript
from penstock.trainer.apo.advice.observation import Observation
from penstock.trainer.apo.advice.regrader import Regrader
from penstock.trainer.apo.advice.tool_failures import complains_of_tools, tool_failures
from penstock.trainer.apo.config import RewardSettings as Range
from penstock.trainer.apo.protocol import AgentTask
from penstock.trainer.apo.trials import Trial

EARLIER: Final = 200
"""Most earlier rollouts that are read."""


class TapeObservationReader:
    """Reads rollouts of one gateway."""

    def __init__(self, client: Client, rewards: Range, regrader: Regrader | None) -> None:
        self._client, self._rewards, self._regrader = client, rewards, regrader
        self.problems: list[str] = []
        """Errors of the grader when it was asked again."""

    async def read(self, trials: Sequence[Trial]) -> list[Observation]:
        return await map_concurrently(self._observe, list(trials))

    async def _observe(self, trial: Trial) -> Observation:
        rollout = await self._client.rollout(trial.rollout)
        return await self._observed(rollout, trial.candidate, trial.task, trial.reward, trial.reason)

    async def _observed(
        self, rollout: RolloutSummary, prompt: str, task: str, reward: float | None, reason: str
    ) -> Observation:
        if not rollout.attempts:
            return Observation(prompt, task, reward, reason, rollout=rollout.id)
        last = rollout.attempts[-1]
        transcript = await self._client.transcript(rollout.id, last.id)
        tools = tool_failures(await self._client.tools(rollout.id, last.id), transcript)
        blamed = tools.misused or int(bool(tools.tools) and complains_of_tools([reason]))
        totals = rollout.totals
        counted = None if totals.input_tokens is None else totals.input_tokens + (totals.output_tokens or 0)
        return Observation(
            prompt,
            task,
            reward,
            reason,
            output_of(last, transcript),
            await self._judged(rollout.id, last.id),
            tools.tools,
            blamed,
            tools.broken,
            counted,
            rollout.id,
        )

    async def _judged(self, rollout: str, attempt: str) -> tuple[float, ...]:
        """Return the rewards of an attempt by the source that has given most of them; empty unless there are
        several."""
        by_source: defaultdict[str, list[float]] = defaultdict(list)
        async for span in self._client.spans(rollout, attempt, filter="kind:reward"):
            said = Reward.of(span)
            if said.trusted and said.span is None and said.value is not None:
                by_source[said.source].append(self._scaled(said.value))
        most = max(by_source.values(), key=len, default=[])
        return tuple(most) if len(most) > 1 else ()

    def _scaled(self, value: float, calls: int = 0) -> float:
        """Return a reward as 0 to 1. `calls`: calls of the model, if their cost is to be subtracted as in a run."""
        low, high = self._rewards.range
        return min(1.0, max(0.0, (value - low - self._rewards.step_cost * calls) / (high - low)))

    async def regrade(self, observations: Sequence[Observation]) -> list[Observation]:
        """See `ObservationReader`: the reward function of the run judges the rollouts on the tape once more."""
        if self._regrader is None:
            return list(observations)
        return await map_concurrently(self._again, list(observations))

    async def _again(self, one: Observation) -> Observation:
        if self._regrader is None or one.reward is None or one.judged:
            return one
        transcript = await self._client.transcript(one.rollout)
        if transcript.attempt.reward is None:
            return one
        value, problem = await self._regrader.judge(transcript)
        if value is None:
            self.problems.append(problem)
            return one
        # Both without the cost of steps, which is no noise of the grader.
        return replace(one, judged=(self._scaled(transcript.attempt.reward), self._scaled(value)))

    async def earlier_observations(
        self, seeds: Mapping[str, Resource], tasks: Sequence[AgentTask], prompt: str
    ) -> list[Observation]:
        """Return earlier rollouts of tasks of the train split with the seed; of a single text only, because the calls
        of an agent with several do not show together which versions it had."""
        if len(seeds) != 1:
            return []
        by_input = {key_of(task.input): task.id for task in tasks}
        ((name, seed),) = seeds.items()
        found: list[Observation] = []
        async for rollout in self._client.rollouts(f"version={name}@{seed.version} status:ended", EARLIER):
            task = by_input.get(key_of(rollout.input))
            own = "penstock.candidate" in (rollout.metadata or {})
            if task is not None and not own and rollout.reward is not None:
                reward = self._scaled(rollout.reward, rollout.totals.calls)
                found.append(await self._observed(rollout, prompt, task, reward, ""))
        return found


def key_of(value: Any) -> str:
    """Return a text that is equal for equal inputs."""
    return json.dumps(value, sort_keys=True, default=str)


def output_of(attempt: Attempt, transcript: Transcript) -> str:
    """Return a digest of the agent's output, else of the model's last text; empty without either."""
    outcome = None if attempt.outcome is None else attempt.outcome.output
    said = key_of(outcome) if outcome is not None else transcript.text
    return hashlib.sha256(said.encode()).hexdigest()[:16] if said else ""
