"""Chooses the rollouts of production that a step learns from.

Nobody queues production's rollouts, most of them repeat no task, and their rewards come late. A rollout can be used
when all calls to its model were served by weights of this run that are not too old; `RolloutInspector` finds that out.
A step takes the oldest of these, and only rollouts whose rewards it can compare: if all rewards are the same, it waits
for one that differs (`pick`, which is pure).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import NotFound
from penstock.gateway.model.facts import BACKGROUND
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.rollout import FINAL, RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.serving.publisher import step_of

EPS: Final = 1e-6
"""Rewards that differ by less are equal; as in `trainer.mathematics.advantage`."""


@dataclass(frozen=True, slots=True)
class TrainableRollout:
    """A rollout that training can use."""

    rollout: str
    """Rollout id."""
    group: str | None
    """Its group, which is the task that it repeats; None without one."""
    created_ns: int
    """Time when the gateway first saw it, in ns."""
    version: int
    """Step of the oldest weights that served it."""
    reward: float
    seen: Mapping[str, int]
    """Its attempts, each with its highest span at the inspection: later spans are not learnt from."""


@dataclass(frozen=True, slots=True)
class RunVersions:
    """The age of versions of the model."""

    run: str
    """Name of the run, whose versions are RUN.STEP."""
    start: frozenset[str]
    """Versions of the resource with the weights that the run began from."""

    def step(self, version: str | None) -> int | None:
        """Return the step that made a version; 0 for the weights that the run began from, None if it is not of this
        run."""
        return 0 if version in self.start else step_of(self.run, version or "")

    def oldest(self, versions: Iterable[str | None]) -> int | None:
        """Return the step of the oldest version; None when there is none, or one is not of this run."""
        steps = [self.step(version) for version in versions]
        return None if not steps or None in steps else min(step for step in steps if step is not None)


def pick(ready: Iterable[TrainableRollout], enough: int, least: int | None) -> list[TrainableRollout]:
    """Return the rollouts that a step learns from, oldest first; none when there are not enough. If `least` is None:
    `enough` rollouts, not all of the same reward, which are compared with each other. Else whole groups of at least
    `least` rollouts whose rewards differ, as many groups as it takes to have `enough` rollouts."""
    order = sorted(ready, key=lambda one: (one.created_ns, one.rollout))
    if least is None:
        return _batch(order, enough)
    chosen: list[TrainableRollout] = []
    for group in _groups(order):
        if len(group) >= least and _differ(group):
            chosen += group
        if len(chosen) >= enough:
            return chosen
    return []


def _batch(order: Sequence[TrainableRollout], enough: int) -> list[TrainableRollout]:
    first = list(order[:enough])
    if len(first) < enough:
        return []
    if _differ(first):
        return first
    other = next((one for one in order[enough:] if _differ([first[0], one])), None)
    return [] if other is None else [*first[:-1], other]


def _groups(order: Iterable[TrainableRollout]) -> Iterable[list[TrainableRollout]]:
    """Group the candidates, in the order of each group's first."""
    groups: dict[str, list[TrainableRollout]] = {}
    for one in order:
        if one.group is not None:
            groups.setdefault(one.group, []).append(one)
    return groups.values()


def _differ(some: Sequence[TrainableRollout]) -> bool:
    rewards = [one.reward for one in some]
    return max(rewards) - min(rewards) >= EPS


# Decides if training can use a rollout of production, and says why not. Run once, when nothing more happens to the
# rollout.
#
# The rollout must be production's, with calls to the trained model; it must have a reward and no call under way;
# weights of this run must have served it; `online.filter` must match; and `penstock doctor` must find it trainable.

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
            if not isinstance(error, NotFound):
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
        except NotFound:
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
    return judged and rollout.status in (FINAL if rollout.origin == "queued" else {*RolloutStatus})


def _runs(call: Span) -> bool:
    """True if a call has not ended. Calls in the background do not count: their answers may never be fetched."""
    return call.status == SpanStatus.OPEN and BACKGROUND not in (call.attributes or {})


def trainable_rollout(rollout: RolloutSummary, step: int) -> TrainableRollout:
    """Return a rollout that has a reward as a candidate, in its present state. `step`: the step of its weights."""
    assert rollout.reward is not None
    seen = {attempt.id: attempt.spans for attempt in rollout.attempts}
    return TrainableRollout(rollout.id, rollout.group, rollout.created_ns, step, rollout.reward, seen)
