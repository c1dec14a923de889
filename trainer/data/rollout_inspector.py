"""Decides if training can use a rollout of production, and says why not. Run once, when nothing more happens to the
rollout.

The rollout must be production's, with calls to the trained model; it must have a reward and no call under way; weights
of this run must have served it; `online.filter` must match; and `penstock doctor` must find it trainable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from penstock.adapters.source import ENDED
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.facts import BACKGROUND
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.rollout import RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.selection import RunVersions, TrainableRollout

NOT_FOUND: Final = 404
REFUSED: Final = 400
SILENT: Final = frozenset({"mode", "model", "filter"})
"""Reasons that need no message, because such a rollout was never meant to be used."""
WHY: Final = {
    "other_version": "it was served by weights that this run has neither made nor begun from",
    "no_group": 'it is of no group, and advantage.estimator compares groups: set "reinforce++", or queue in groups',
    "gone": "it is not on the tape any more",
}
"""Sentences for reasons that `penstock doctor` does not know."""


class RolloutInspector:
    """Inspects rollouts for one run. Call `begin` once the model is a resource."""

    def __init__(self, client: Client, config: TrainConfig) -> None:
        self._client, self._config = client, config
        self.versions = RunVersions(config.run.name, frozenset())

    async def begin(self) -> list[Resource]:
        """Return the versions of the model that are of the run. Raises `ConfigError`."""
        await self._check_filter()
        found = (await self._client.resource(self._config.model.name)).versions
        start = frozenset(one.version for one in found if self._is_start(one.content))
        self.versions = RunVersions(self._config.run.name, start)
        return [one for one in found if self.versions.step(one.version) is not None]

    async def _check_filter(self) -> None:
        try:
            # The gateway parses the filter before it looks for the rollout, which does not exist.
            _ = [it async for it in self._client.spans("none", filter=self._config.online.filter, limit=1)]
        except ClientError as error:
            if error.status == REFUSED:
                raise ConfigError(f"online.filter: {error}") from None
            if error.status != NOT_FOUND:
                raise

    def _is_start(self, content: Mapping[str, Any]) -> bool:
        """True if a version has the weights that the run began from."""
        adapter = self._config.model.adapter
        same = None if adapter is None else str(adapter.absolute())
        return content.get("base") == self._config.inference.base and content.get("adapter") == same

    def explain(self, name: str, reason: str) -> str:
        """Return a reason as a sentence."""
        why = WHY.get(reason, f"{reason}; penstock doctor {name} --model {self._config.model.name} says more")
        return f"not learnt from: rollout {name}, and others like it: {why}"

    async def inspect(self, name: str) -> TrainableRollout | str | None:
        """Return the candidate, or the reason why the rollout is none; None while that is not known."""
        try:
            rollout = await self._client.rollout(name)
            return "mode" if rollout.mode != "online" else await self._look(rollout)
        except ClientError as error:
            if error.status != NOT_FOUND:
                raise
            return "gone"

    async def _look(self, rollout: RolloutSummary) -> TrainableRollout | str | None:
        calls = [span async for span in self._client.spans(rollout.id, filter="kind:llm")]
        if not is_settled(rollout) or any(map(_runs, calls)):
            return None
        model = self._config.model.name
        served = [(span.versions or {}).get(model) for span in calls if span.model == model]
        step = self.versions.oldest(served)
        if step is None:
            return "other_version" if served else "model"
        if self._config.compares_groups and rollout.group is None:
            return "no_group"
        return await self._trouble(rollout.id) or trainable_rollout(rollout, step)

    async def _trouble(self, name: str) -> str | None:
        """Return why a rollout is not wanted or cannot be trained on; None if nothing is wrong."""
        wanted = self._config.online.filter
        if wanted and not [span async for span in self._client.spans(name, filter=wanted, limit=1)]:
            return "filter"
        found = await self._client.diagnosis(name, self._config.model.name)
        if found.trainable:
            return None
        every = [it for attempt in found.attempts for part in (attempt, *attempt.calls) for it in part.findings]
        return next((it.code for it in (*found.findings, *every) if it.blocks), "no_generation")


def is_settled(rollout: RolloutSummary) -> bool:
    """True if a rollout has a reward and has ended. One that does not come from the queue never ends formally, and a
    reward is enough."""
    judged = rollout.reward is not None and math.isfinite(rollout.reward)
    return judged and rollout.status in (ENDED if rollout.origin == "queued" else {*RolloutStatus})


def _runs(call: Span) -> bool:
    """True if a call has not ended. Calls in the background do not count: their answers may never be fetched."""
    return call.status == SpanStatus.OPEN and BACKGROUND not in (call.attributes or {})


def trainable_rollout(rollout: RolloutSummary, step: int) -> TrainableRollout:
    """Return a rollout that has a reward as a candidate, in its present state. `step`: the step of its weights."""
    assert rollout.reward is not None
    seen = {attempt.id: attempt.spans for attempt in rollout.attempts}
    return TrainableRollout(rollout.id, rollout.group, rollout.created_ns, step, rollout.reward, seen)
