"""Rollouts for a step: queued as groups, awaited, and read as samples.

Rollout ids are made of run, step, task and number. So ordering a step again, after a crash or on purpose, queues
nothing twice and finds what has ended meanwhile. A step never stalls: the gateway ends an attempt that takes too long,
and rollouts that have not ended when the step's time is over are cancelled; their groups go on with the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.adapters.episode import Episode
from penstock.adapters.samples import Options, Sample, samples
from penstock.adapters.selection import SampleReport
from penstock.adapters.source import load
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import MOST_ROLLOUTS, RolloutSpec
from penstock.gateway.model.rollout import FINAL, RolloutConfig, RolloutStatus
from penstock.gateway.wire.dialects.parts import distribution_changes
from penstock.trainer.data.tasks import RolloutTask

# Waits for rollouts to end: the gateway's change feed says when. Those that do not end in time are cancelled.

ENDED_ALREADY: Final = 409
FORGOTTEN: Final = 404


class RolloutWaiter:
    """Rollouts that were queued and are waited for. `run` must run beside it: it follows the gateway's changes."""

    def __init__(self, client: Client, names: Sequence[str] = ()) -> None:
        """`names`: patterns that all rollout ids match, such as RUN-*; every rollout when empty."""
        self._client, self._names = client, names
        self._waiting: dict[str, RolloutStatus] = {}
        """Newest known status by rollout id."""
        self._news = asyncio.Condition()
        self._follows = asyncio.Event()

    async def run(self) -> None:
        """Follows the changes of rollouts, for ever."""
        cursor = (await self._client.stats(spans=0)).cursor
        self._follows.set()
        async with aclosing(self._client.changes(cursor, ["rollout"], self._names, FINAL)) as changes:
            async for change in changes:
                if change.rollout is not None and change.rollout.id in self._waiting:
                    await self._note(change.rollout.id, change.rollout.status)

    async def _note(self, name: str, status: RolloutStatus) -> None:
        async with self._news:
            self._waiting[name] = status
            self._news.notify_all()

    async def enqueue(self, specs: Sequence[RolloutSpec]) -> None:
        """Queue rollouts, which must have names. One that is queued already is not queued again, and may have ended."""
        # Follow the changes first: a rollout that ends at once must not be missed.
        await self._follows.wait()
        self._waiting |= {spec.id or "": RolloutStatus.QUEUING for spec in specs}
        for start in range(0, len(specs), MOST_ROLLOUTS):
            for queued in await self._client.enqueue(specs[start : start + MOST_ROLLOUTS]):
                if queued.status in FINAL:
                    await self._note(queued.id, queued.status)

    async def wait_for(self, names: Sequence[str], timeout_s: float) -> int:
        """Wait until all have ended. Those that have not ended after `timeout_s` are cancelled; return how many."""
        late, left = list[str](), self._open(names)

        def over() -> bool:
            # Each rollout is checked once per wake-up at most: there may be very many rollouts and changes.
            while left and not self._open(left[-1:]):
                left.pop()
            return not left

        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(over)
        except TimeoutError:
            late = [name for name in self._open(names) if await self._cancel(name)]
        return len(late)

    def pending(self) -> int:
        """Return how many awaited rollouts have not ended."""
        return len(self._open(list(self._waiting)))

    def forget(self, names: Sequence[str]) -> None:
        """Stop waiting for these rollouts."""
        for name in names:
            self._waiting.pop(name, None)

    def _open(self, names: Sequence[str]) -> list[str]:
        # Another caller may have awaited the same rollout and forgotten it since.
        return [name for name in dict.fromkeys(names) if name in self._waiting and self._waiting[name] not in FINAL]

    async def _cancel(self, name: str) -> bool:
        """Cancel a rollout. False if it had ended already and the change feed has not said so yet."""
        try:
            await self._note(name, (await self._client.cancel(name)).status)
        except ClientError as error:
            if error.status not in (ENDED_ALREADY, FORGOTTEN):
                raise
            return error.status == FORGOTTEN
        return True


# Classifies the rollouts of a step that teach nothing. Pure.
#
# A rollout has one reason: the first that applies of
#
#     late, cancelled    it had not ended when the step's time was over, or somebody cancelled it
#     failed             its agent failed or ran out of time
#     no_calls           its agent made no call to a model through the gateway
#     REASON             it has no sample; the reason of `penstock doctor` that most of its calls have
#
# Rollouts that have a sample and no other reason have none. Rollouts that credit assignment leaves out later are
# counted by `learn`.


class ExampleRollout(NamedTuple):
    """A rollout that stands for all with the same reason."""

    rollout: str
    """Rollout id."""
    detail: str
    """The tape's words about it; empty if there are none."""


@dataclass(slots=True)
class RolloutOutcomes:
    """The reasons why rollouts of a step teach nothing."""

    lost: Counter[str] = field(default_factory=Counter[str])
    """Number of rollouts by reason."""
    examples: dict[str, ExampleRollout] = field(default_factory=dict[str, ExampleRollout])
    """First rollout by reason."""
    truncated: int = 0
    """Rollouts with a sample in which the model was cut off at the limit of tokens."""

    def record(self, episode: Episode, made: Sequence[Sample], report: SampleReport) -> None:
        """Add a rollout with its samples and the report of its calls that are in no sample."""
        self.truncated += any(segment.truncated for sample in made for segment in sample.segments)
        found = untrainable_reason(episode, made, report)
        if found is not None:
            reason, detail = found
            self.lost[reason] += 1
            self.examples.setdefault(reason, ExampleRollout(episode.rollout.id, detail))

    def add(self, other: RolloutOutcomes) -> None:
        self.lost += other.lost
        self.examples = other.examples | self.examples
        self.truncated += other.truncated


def untrainable_reason(episode: Episode, made: Sequence[Sample], report: SampleReport) -> tuple[str, str] | None:
    """Return why a rollout teaches nothing, as a reason and in words; None while no reason is known."""
    rollout = episode.rollout
    ends = [one.outcome.reason for one in rollout.attempts if one.outcome is not None and one.outcome.reason]
    if rollout.status == RolloutStatus.CANCELLED:
        return "cancelled", ends[-1] if ends else ""
    if rollout.status == RolloutStatus.FAILED:
        return "failed", ends[-1] if ends else str(rollout.attempts[-1].status) if rollout.attempts else ""
    if made:
        return None
    if not any(one.calls for one in episode.attempts):
        return "no_calls", ""
    reason = max(report.reasons, key=lambda name: report.reasons[name], default=None)
    return None if reason is None else (reason, next(one.detail for one in report.dropped if one.reason == reason))


# Compares the sampling settings of a step's calls with the training's assumption: `rollouts.temperature`, and no
# tokens cut off.
#
# An answer that was sampled with other settings comes from another distribution than the trainer's. Importance
# sampling corrects a little of it; tokens that top_p or top_k cut off cannot come back. So the run reports how many
# calls are concerned.


@dataclass(slots=True)
class SamplingCounts:
    """Counts of the calls that are in samples."""

    calls: int = 0
    """Number of calls."""
    mismatched: int = 0
    """Number of calls with settings that training does not assume."""
    settings: Counter[str] = field(default_factory=Counter[str])
    """Number of calls by setting that training does not assume, such as `top_p 0.9`."""

    def record(self, episode: Episode, made: Sequence[Sample], temperature: float) -> None:
        """Add the calls of a rollout that are in its samples."""
        used = {(one.attempt, part.sequence) for one in made for part in one.segments}
        calls = [call for one in episode.attempts for call in one.calls]
        for call in calls:
            if (call.span.attempt, call.span.sequence) in used:
                found = distribution_changes(call.skewing, temperature)
                self.calls += 1
                self.mismatched += bool(found)
                self.settings.update(found)

    def add(self, other: SamplingCounts) -> None:
        self.calls += other.calls
        self.mismatched += other.mismatched
        self.settings += other.settings

    @property
    def share(self) -> float:
        """Share of the calls with settings that training does not assume."""
        return self.mismatched / max(1, self.calls)

    def warning(self, temperature: float) -> str | None:
        """Return a warning for a person; None if all calls are as assumed."""
        if not self.mismatched:
            return None
        found = ", ".join(f"{name} ({count})" for name, count in self.settings.most_common(5))
        return (
            f"{self.mismatched} of {self.calls} calls ({self.share:.0%}) were sampled otherwise than training assumes, "
            f"which is temperature {temperature:g} (rollouts.temperature) and nothing else: {found}; let the agent "
            "leave these out, or set rollouts.temperature to what it asks for"
        )


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
