"""The laboratory behind a gateway: candidates are versions of resources, trials are rollouts that have these versions.

The id of a rollout is RUN.CANDIDATE.TASK.NUMBER, so ordering it again, after a crash or on purpose, queues nothing
twice and finds ended rollouts. Releases stay as they are: each rollout names its versions itself, and many candidates
run at once.

A rollout that has failed, or has not ended in time, has the worst reward unless it was given another: leaving it out
would favour texts that make an agent hang. One that has succeeded and was not judged has none, and is left out. The
cost of steps (`reward.step_cost`) is subtracted from the reward, down to 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.concurrency import map_concurrently
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion, Resource
from penstock.gateway.model.rollout import Reward, RolloutConfig, RolloutStatus, RolloutSummary
from penstock.gateway.model.run import EventLevel
from penstock.gateway.model.span import Span
from penstock.gateway.model.template import Template, TemplateError, check_candidate
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.early_warnings import FirstRolloutCheck, RolloutFacts
from penstock.trainer.apo.protocol import AgentTask, Reflection
from penstock.trainer.apo.reflection_client import ReflectionClient
from penstock.trainer.apo.transcripts import render_transcript
from penstock.trainer.apo.trials import Trial, TrialSpec
from penstock.trainer.data.rollout_waiter import RolloutWaiter

NOTE: Final = 4000
"""Most characters of a version's note."""


class GatewayLaboratory:
    """The laboratory of one run. `awaited` must run beside it."""

    def __init__(
        self,
        client: Client,
        awaited: RolloutWaiter,
        reflecting: ReflectionClient,
        config: ApoConfig,
        seeds: Mapping[str, Resource],
        tasks: Sequence[AgentTask],
    ) -> None:
        """`seed_versions`: the version that each resource begins with."""
        self._client, self._awaited, self._reflecting, self._config = client, awaited, reflecting, config
        self._seeds = seeds
        self._tasks = {task.id: task for task in tasks}
        self._versions: dict[tuple[str, str], str] = {(name, text_of(one)): one.version for name, one in seeds.items()}
        """Registered versions by (resource, text)."""
        self._first = FirstRolloutCheck(tuple(seeds))
        self.tell: Callable[[str, EventLevel], Awaitable[None]] = _nobody
        """Called with messages for a person."""

    # Candidates -------------------------------------------------------------------------------------------------------

    def problem(self, candidate: Candidate) -> str:
        """See `Laboratory`: a text must have the slots of the seed's."""
        for name, text in candidate.texts.items():
            template = self._seeds[name].template
            try:
                if template is not None:
                    check_candidate(template, Template.parse(text))
            except TemplateError as error:
                return f"{name}: {error}"
        return ""

    async def versions(self, candidate: Candidate) -> dict[str, str]:
        """Return the version of each resource that has the candidate's text; registers missing ones."""
        found: dict[str, str] = {}
        for name, text in candidate.texts.items():
            if (name, text) not in self._versions:
                seed = self._seeds[name]
                content = {**seed.content, "text": text, "sent": False}
                version = f"{self._config.run.name}.{candidate.id}"
                note = f"{self._config.run.name}: {candidate.claim}"[:NOTE]
                new = NewVersion(
                    kind=seed.kind, content=content, version=version, parent=seed.version, author="apo", note=note
                )
                self._versions[name, text] = (await self._client.add_version(name, new)).version
            found[name] = self._versions[name, text]
        return found

    # Rollouts ---------------------------------------------------------------------------------------------------------

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        versions = {candidate.id: await self.versions(candidate) for candidate in candidates}
        specs = [self._spec(order, versions[order.candidate], mode) for order in orders]
        names = [spec.id or "" for spec in specs]
        if not names:
            return []
        await self._awaited.enqueue(specs)
        late = await self._awaited.wait_for(names, self._config.rollouts.timeout)
        if late == len(names):
            raise ConfigError(
                f"none of {len(names)} rollouts has ended in {self._config.rollouts.timeout:g} s (rollouts.timeout); "
                f"is there a runner? penstock run --watch --mode train,val,test -- COMMAND, or --agent COMMAND here"
            )
        self._awaited.forget(names)
        found = await map_concurrently(lambda pair: self._trial(*pair, mode), list(zip(orders, names, strict=True)))
        await self._look([seen for _, seen in found])
        return [trial for trial, _ in found]

    async def _look(self, new: Sequence[RolloutFacts]) -> None:
        """Raise `ConfigError` when the first rollouts show that nothing can be learnt."""
        if self._first.done:
            return
        if problem := self._first.problem(new):
            raise ConfigError(problem)
        if self._first.done and (missing := self._first.missing()):
            await self.tell(f"{' and '.join(missing)}: not found in any call of the first rollouts", "warning")

    def _spec(self, order: TrialSpec, versions: Mapping[str, str], mode: Mode) -> RolloutSpec:
        run, task = self._config.run.name, self._tasks[order.task]
        return RolloutSpec(
            id=f"{run}.{order.candidate}.{order.task}.{order.number}",
            group=f"{run}.{order.task}",
            mode=mode,
            input=task.input,
            config=RolloutConfig(timeout_s=self._config.rollouts.attempt_timeout, versions=dict(versions)),
            metadata={"penstock.run": run, "penstock.candidate": order.candidate},
        )

    async def _trial(self, order: TrialSpec, name: str, mode: Mode) -> tuple[Trial, RolloutFacts]:
        rollout = await self._client.rollout(name)
        spans = [span async for span in self._client.spans(name)]
        reward, reason = self._judged(rollout, spans)
        text = ""
        # Reflections see rollouts of the search only.
        if mode == "train" and rollout.attempts:
            text = render_transcript(await self._client.transcript(name))
        calls, versions = rollout.totals.calls, {one for span in spans for one in span.versions or ()}
        failure = "" if rollout.status == RolloutStatus.SUCCEEDED else reason
        seen = RolloutFacts(name, calls, versions, rollout.reward is not None, failure)
        return Trial(*order, reward, reason, text, calls, name), seen

    def _judged(self, rollout: RolloutSummary, spans: Sequence[Span]) -> tuple[float | None, str]:
        """Return (reward between 0 and 1, the reason for it). Raises `ConfigError` for one beyond the configured
        range."""
        reasons = [said for span in spans if span.kind == "reward" and (said := Reward.of(span).reason)]
        value = rollout.reward
        if value is None and rollout.status != RolloutStatus.SUCCEEDED:
            return 0.0, "; ".join(reasons) or _ended(rollout)
        if value is None:
            return None, ""
        low, high = self._config.reward.range
        if not low <= value <= high:
            raise ConfigError(
                f"rollout {rollout.id} has the reward {value:g}, which is not within {low:g} and {high:g}: set "
                "reward.range to the range of your rewards"
            )
        cost = self._config.reward.step_cost * rollout.totals.calls
        if cost:
            reasons.append(f"it took {rollout.totals.calls} calls of the model; fewer are better")
        return max(0.0, (value - low - cost) / (high - low)), "; ".join(reasons)

    # Reflections ------------------------------------------------------------------------------------------------------

    async def reflect(self, prompt: str, number: int) -> Reflection:
        return await self._reflecting.ask(prompt, number)

    def most(self, prompt: str) -> tuple[int, float]:
        return self._reflecting.most(prompt)


async def _nobody(text: str, level: EventLevel) -> None: ...


def _ended(rollout: RolloutSummary) -> str:
    """Return how a rollout has ended, with the reason of its last attempt if there is one."""
    outcome = rollout.attempts[-1].outcome if rollout.attempts else None
    said = None if outcome is None else outcome.reason
    return f"the rollout has {rollout.status}" + (f": {said}" if said else "")


def text_of(version: Resource) -> str:
    """Return the text of a prompt's or a tool's version."""
    return str(version.content["text"])


async def seed_versions(client: Client, config: ApoConfig) -> dict[str, Resource]:
    """Return the stable version of each optimised resource. Raises `ConfigError` if one does not exist, or is of
    another kind."""
    found: dict[str, Resource] = {}
    for key, kind, names in (("prompts", "prompt", config.texts.prompts), ("tools", "tool-text", config.texts.tools)):
        for name in names:
            try:
                view = await client.resource(name)
            except ClientError as error:
                raise ConfigError(f"texts.{key}: {name!r}: {error}") from None
            if view.kind != kind:
                raise ConfigError(f"texts.{key}: {name!r} is a {view.kind}, not a {kind}")
            found[name] = next(one for one in view.versions if one.version == view.stable.version)
    return found
