"""The laboratory behind a gateway: candidates are versions of resources, trials are rollouts that have these versions.

A rollout is called RUN.CANDIDATE.TASK.NUMBER, so ordering it again, after a crash or on purpose, queues nothing twice
and finds what has ended meanwhile. Nothing that is released changes: each rollout names its versions itself, and many
candidates run at once.

A rollout that has failed, or has not ended in time, has the worst reward unless it was given another: leaving it out
would favour texts that make an agent hang. One that has succeeded and was not judged has none, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.parallel import each
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion, Resource
from penstock.gateway.model.rollout import Reward, RolloutConfig, RolloutStatus, RolloutSummary
from penstock.gateway.model.template import Template, TemplateError, check_candidate
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import Config
from penstock.trainer.apo.protocol import AgentTask, Reflection
from penstock.trainer.apo.reflecting import Reflecting
from penstock.trainer.apo.transcripts import told
from penstock.trainer.apo.trials import Order, Trial
from penstock.trainer.data.awaiting import Awaited

NOTE: Final = 4000
"""Characters of a version's note."""


class GatewayLaboratory:
    """Of one run. `awaited` must run beside it."""

    def __init__(
        self,
        client: Client,
        awaited: Awaited,
        reflecting: Reflecting,
        config: Config,
        seeds: Mapping[str, Resource],
        tasks: Sequence[AgentTask],
    ) -> None:
        """`seeds`: the version that each resource begins with."""
        self._client, self._awaited, self._reflecting, self._config = client, awaited, reflecting, config
        self._seeds = seeds
        self._tasks = {task.id: task for task in tasks}
        self._versions: dict[tuple[str, str], str] = {(name, text_of(one)): one.version for name, one in seeds.items()}
        """Versions that are registered, by resource and text."""

    # Candidates -------------------------------------------------------------------------------------------------------

    def problem(self, candidate: Candidate) -> str:
        """See `Laboratory`: the slots of a text must be those of the seed's."""
        for name, text in candidate.texts.items():
            template = self._seeds[name].template
            try:
                if template is not None:
                    check_candidate(template, Template.parse(text))
            except TemplateError as error:
                return f"{name}: {error}"
        return ""

    async def versions(self, candidate: Candidate) -> dict[str, str]:
        """The version of each resource that has the candidate's text; registered now where there is none."""
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

    async def run(self, candidates: Sequence[Candidate], orders: Sequence[Order], mode: Mode = "train") -> list[Trial]:
        """See `Laboratory`."""
        versions = {candidate.id: await self.versions(candidate) for candidate in candidates}
        specs = [self._spec(order, versions[order.candidate], mode) for order in orders]
        names = [spec.id or "" for spec in specs]
        if not names:
            return []
        await self._awaited.queue(specs)
        late = await self._awaited.ended(names, self._config.rollouts.timeout)
        if late == len(names):
            raise ConfigError(
                f"none of {len(names)} rollouts has ended in {self._config.rollouts.timeout:g} s (rollouts.timeout); "
                f"is there a runner? penstock run --watch --mode {mode} -- COMMAND, or --agent COMMAND here"
            )
        self._awaited.forget(names)
        return await each(lambda pair: self._trial(*pair, mode), list(zip(orders, names, strict=True)))

    def _spec(self, order: Order, versions: Mapping[str, str], mode: Mode) -> RolloutSpec:
        run, task = self._config.run.name, self._tasks[order.task]
        return RolloutSpec(
            id=f"{run}.{order.candidate}.{order.task}.{order.number}",
            group=f"{run}.{order.task}",
            mode=mode,
            input=task.input,
            config=RolloutConfig(timeout_s=self._config.rollouts.attempt_timeout, versions=dict(versions)),
            metadata={"penstock.run": run, "penstock.candidate": order.candidate},
        )

    async def _trial(self, order: Order, name: str, mode: Mode) -> Trial:
        rollout = await self._client.rollout(name)
        reward, reason = await self._judged(rollout)
        text = ""
        # Only rollouts of the search are reflected on.
        if mode == "train" and rollout.attempts:
            text = told(await self._client.transcript(name))
        return Trial(*order, reward, reason, text, rollout.totals.calls, name)

    async def _judged(self, rollout: RolloutSummary) -> tuple[float | None, str]:
        """(reward between 0 and 1, why). Raises `ConfigError` for one beyond the configured range."""
        reasons: list[str] = []
        async for span in self._client.spans(rollout.id, filter="kind:reward"):
            if said := Reward.of(span).reason:
                reasons.append(said)
        value = rollout.reward
        if value is None and rollout.status != RolloutStatus.SUCCEEDED:
            return 0.0, "; ".join(reasons) or f"the rollout has {rollout.status}"
        if value is None:
            return None, ""
        low, high = self._config.reward.low, self._config.reward.high
        if not low <= value <= high:
            raise ConfigError(
                f"rollout {rollout.id} has the reward {value:g}, which is not within {low:g} and {high:g}: set "
                "reward.low and reward.high to the range of your rewards"
            )
        return (value - low) / (high - low), "; ".join(reasons)

    # Reflections ------------------------------------------------------------------------------------------------------

    async def reflect(self, prompt: str, number: int) -> Reflection:
        """See `Laboratory`."""
        return await self._reflecting.ask(prompt, number)

    def most(self, prompt: str) -> tuple[int, float]:
        """See `Laboratory`."""
        return self._reflecting.most(prompt)


def text_of(version: Resource) -> str:
    """The text of a prompt's or a tool's version."""
    return str(version.content["text"])


async def seeds(client: Client, config: Config) -> dict[str, Resource]:
    """The stable version of each resource that is optimised. Raises `ConfigError` where one is not there, or is of
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
