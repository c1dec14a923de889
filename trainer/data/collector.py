"""Rollouts for a step: queued as groups, awaited, and read as samples.

Rollout ids are made of run, step, task and number. So ordering a step again, after a crash or on purpose, queues
nothing twice and finds what has ended meanwhile. A step never stalls: the gateway ends an attempt that takes too long,
and rollouts that have not ended when the step's time is over are cancelled; their groups go on with the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.adapters.episode import Episode
from penstock.adapters.report import SampleReport
from penstock.adapters.samples import Options, Sample, samples
from penstock.adapters.source import load
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import RolloutConfig, RolloutStatus
from penstock.trainer.data.outcomes import RolloutOutcomes
from penstock.trainer.data.rollout_waiter import RolloutWaiter
from penstock.trainer.data.sampling import SamplingCounts
from penstock.trainer.data.tasks import RolloutTask


class CollectError(Exception):
    """Nothing could be collected; the message says why and what to do."""


VARIANT: Final = "penstock.variant"
"""Key of a rollout's metadata: the name of its variant."""


MOST_ATTEMPTS: Final = 1000
"""Limit of attempts per rollout. Only attempts whose runner went away are repeated (`retry_on`), which is no fault of
the rollout."""


class Variant(NamedTuple):
    """The versions that some rollouts of a group get, whatever is released."""

    name: str
    """Name in figures; empty where all rollouts are alike."""
    versions: Mapping[str, str]
    """Version by resource name."""


DEFAULT_VARIANT: Final = Variant("", {})
"""The variant of rollouts that get the released versions."""


@dataclass(frozen=True, slots=True)
class RolloutOrder:
    """Rollouts that were queued together."""

    mode: Mode
    names: tuple[str, ...]


@dataclass(slots=True)
class RolloutBatch:
    """The result of an order."""

    samples: list[Sample] = field(default_factory=list[Sample])
    report: SampleReport = field(default_factory=SampleReport)
    rewards: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Rewards by group, of the rollouts that have one."""
    by_variant: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """The same rewards by variant."""
    failed_rewards: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Rewards by group, of the rollouts that failed after a call to the model and have no sample."""
    ended: Counter[RolloutStatus] = field(default_factory=Counter[RolloutStatus])
    """Number of rollouts by final status."""
    late: int = 0
    """Rollouts that had not ended in time and were cancelled."""
    names: list[str] = field(default_factory=list[str])
    """Rollout ids."""
    outcomes: RolloutOutcomes = field(default_factory=RolloutOutcomes)
    """Reasons why rollouts teach nothing."""
    sampling: SamplingCounts = field(default_factory=SamplingCounts)
    """Sampling settings of the calls."""
    figures: dict[str, float] = field(default_factory=dict[str, float])
    """Further metrics to report."""

    @property
    def informative(self) -> int:
        """Number of groups whose rewards differ."""
        return sum(max(rewards) - min(rewards) > 0 for rewards in self.rewards.values())

    def add(self, other: RolloutBatch) -> None:
        """Adds the result of another order."""
        self.samples += other.samples
        self.report.add(other.report)
        self.rewards |= other.rewards
        for name, rewards in other.by_variant.items():
            self.by_variant.setdefault(name, []).extend(rewards)
        self.failed_rewards |= other.failed_rewards
        self.ended += other.ended
        self.late += other.late
        self.names += other.names
        self.outcomes.add(other.outcomes)
        self.sampling.add(other.sampling)
        self.figures |= other.figures

    @property
    def failed(self) -> float:
        """Share of the rollouts that failed or ran out of time."""
        return self.ended[RolloutStatus.FAILED] / max(1, self.ended.total())

    @property
    def mean(self) -> float | None:
        """Mean reward; None when there is none."""
        every = [reward for group in self.rewards.values() for reward in group]
        return sum(every) / len(every) if every else None


class RolloutCollector:
    """Queues rollouts of a run and waits for them. `run` must run beside it: it follows the gateway's changes."""

    def __init__(
        self,
        client: Client,
        run: str,
        options: Options,
        failed_reward: float | None = None,
        temperature: float = 1.0,
    ) -> None:
        """`options`: how samples are made; `failed_reward`: the reward of rollouts that fail without one, None for
        none; `temperature`: the temperature that training assumes."""
        self._client = client
        self._failed_reward, self._temperature = failed_reward, temperature
        self._run = run
        self._options = options
        self._awaited = RolloutWaiter(client, [f"{run}-*"])

    async def run(self) -> None:
        """Follows the changes of rollouts, for ever."""
        await self._awaited.run()

    async def order(
        self,
        mode: Mode,
        name: str,
        step: int,
        tasks: Sequence[RolloutTask],
        size: int,
        timeout_s: float,
        variants: Sequence[Variant] = (DEFAULT_VARIANT,),
    ) -> RolloutOrder:
        """Queue `size` rollouts of each task; groups are RUN-MODE-NAME-PLACE. `timeout_s` limits one attempt. The
        rollouts of each group are spread over the `variants`, and each group begins with the variant after the one that
        the group before began with."""
        about = {"penstock.run": self._run, "penstock.step": step}
        specs = [
            RolloutSpec(
                id=f"{group}-{number}",
                group=group,
                mode=mode,
                input=task.input,
                config=RolloutConfig(
                    timeout_s=timeout_s,
                    versions=dict(variant.versions),
                    reward_on_failure=self._failed_reward,
                    max_attempts=MOST_ATTEMPTS,
                ),
                metadata={**about, VARIANT: variant.name} if variant.name else about,
            )
            for place, task in enumerate(tasks)
            for group in [group_name(self._run, mode, name, place)]
            for number in range(size)
            for variant in [variants[(place + number) % len(variants)]]
        ]
        names = tuple(spec.id or "" for spec in specs)
        await self._awaited.enqueue(specs)
        return RolloutOrder(mode, names)

    async def gather(self, order: RolloutOrder, timeout_s: float) -> RolloutBatch:
        """Wait until all rollouts have ended, or `timeout_s` is over, and read them. Raises `CollectError` if none has
        ended in time."""
        done = RolloutBatch(late=await self._awaited.wait_for(order.names, timeout_s))
        if done.late == len(order.names):
            raise CollectError(
                f"none of {len(order.names)} rollouts has ended in {timeout_s:g} s (rollouts.timeout); is there a "
                f"runner? penstock run --watch --mode {order.mode} -- COMMAND"
            )
        async with aclosing(load(self._client, order.names)) as episodes:
            async for episode in episodes:
                add_episode(done, episode, self._options, self._temperature)
        self._awaited.forget(order.names)
        return done

    async def reward_error(self, rollout: str) -> str | None:
        """Return the runner's error about a missing reward; None if it reported none."""
        asked = self._client.spans(rollout, filter="name:reward_error", limit=1)
        said = [str((span.attributes or {}).get("reason", "")) async for span in asked]
        return said[0] if said else None


def group_name(run: str, mode: Mode, name: str, place: int) -> str:
    """Return the id of a task's group; `place` is the task's place in the order."""
    return f"{run}-{mode}-{name}-{place}"


def add_episode(done: RolloutBatch, episode: Episode, options: Options, temperature: float) -> None:
    """Add an episode's samples, its reward and its final status. `temperature`: the one that training assumes."""
    made, report = samples(episode, options)
    done.samples += made
    done.report.add(report)
    done.outcomes.record(episode, made, report)
    done.sampling.record(episode, made, temperature)
    rollout = episode.rollout
    done.names.append(rollout.id)
    done.ended[rollout.status] += 1
    if rollout.reward is not None:
        done.rewards.setdefault(episode.group, []).append(rollout.reward)
        if rollout.status == RolloutStatus.FAILED and not made and any(one.calls for one in episode.attempts):
            done.failed_rewards.setdefault(episode.group, []).append(rollout.reward)
        if name := (rollout.metadata or {}).get(VARIANT):
            done.by_variant.setdefault(str(name), []).append(rollout.reward)
