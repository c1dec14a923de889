"""Prepares prompts for a run that trains them too: the prompts it began with, and the laboratory that tries others."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.gateway_laboratory import ReflectionClient, seed_versions, text_of
from penstock.trainer.apo.protocol import AgentTask, Candidate
from penstock.trainer.apo.session import reflection_rollout, reflection_session
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.collector import RolloutWaiter
from penstock.trainer.data.tasks import RolloutTask
from penstock.trainer.engines.checkpoint import Checkpoints
from penstock.trainer.runs.companions import RetryClient
from penstock.trainer.runs.pinned_laboratory import PinnedLaboratory, settings_of, versions_of
from penstock.trainer.runs.prompt_front import FrontMember, PromptFront


@dataclass(slots=True)
class PromptSetup:
    """The prompts of one run. `awaited` must run beside it."""

    settings: ApoConfig
    laboratory: PinnedLaboratory
    front: PromptFront
    """The front at the beginning."""
    tasks: Sequence[RolloutTask]
    """Training tasks."""
    waiter: RolloutWaiter


@asynccontextmanager
async def prepare_prompts(
    given: ApoConfig | None,
    config: TrainConfig,
    tasks: Sequence[RolloutTask],
    held_out: Sequence[RolloutTask],
    client: RetryClient,
    gateway: str,
) -> AsyncGenerator[PromptSetup | None]:
    """Yield the prompts of a run with `--prompts`; None without it. Raises `ConfigError` and `CheckpointError`."""
    if given is None:
        yield None
        return
    settings = settings_of(given, config)
    _ = make_engine(settings.engine)
    async with reflection_session(client, reflection_rollout(settings)) as http:
        last = Checkpoints(config.run.directory / "checkpoints").latest()
        kept = None if last is None or "front" not in last[1] else PromptFront.from_state(last[1]["front"])
        # Releases in the meantime do not change the prompts that the run began with.
        found = await (seed_versions(client, settings) if kept is None else versions_of(client, kept.first.versions))
        seed = Candidate({name: text_of(version) for name, version in found.items()})
        begun = PromptFront(seed.id, [FrontMember(seed, {name: version.version for name, version in found.items()})])
        awaited = RolloutWaiter(client)
        reflecting = ReflectionClient(client, http, gateway, reflection_rollout(settings), settings.reflection)
        every = [*agent_tasks(tasks, "t"), *agent_tasks(held_out, "h")]
        laboratory = PinnedLaboratory(client, awaited, reflecting, settings, found, every)
        yield PromptSetup(settings, laboratory, begun if kept is None else kept, tasks, awaited)


def agent_tasks(tasks: Sequence[RolloutTask], letter: str) -> list[AgentTask]:
    """Return tasks for trials of prompts; the letter in their ids distinguishes training tasks from held-out ones."""
    return [AgentTask(f"{letter}{task.number}", task.input, f"{letter}{task.number}") for task in tasks]
