"""Prepares prompts for a run that trains them too: the prompts it began with, and the laboratory that tries others."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.choose import make_engine
from penstock.trainer.apo.config import Config as Settings
from penstock.trainer.apo.gateway_laboratory import seeds, text_of
from penstock.trainer.apo.protocol import AgentTask
from penstock.trainer.apo.reflecting import Reflecting
from penstock.trainer.apo.session import reflection_session, reflections
from penstock.trainer.config import Config
from penstock.trainer.data.awaiting import Awaited
from penstock.trainer.data.tasks import Task
from penstock.trainer.engines.checkpoint import Checkpoints
from penstock.trainer.runs.patient_client import Patient
from penstock.trainer.runs.pinned_laboratory import PinnedLaboratory, settings_of, versions_of
from penstock.trainer.runs.prompt_front import Front, Member


@dataclass(slots=True)
class Prompting:
    """The prompts of one run. `awaited` must run beside it."""

    settings: Settings
    laboratory: PinnedLaboratory
    front: Front
    """The front at the beginning."""
    tasks: Sequence[Task]
    """Training tasks."""
    awaited: Awaited


@asynccontextmanager
async def prompting(
    given: Settings | None,
    config: Config,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    client: Patient,
    gateway: str,
) -> AsyncGenerator[Prompting | None]:
    """Yield the prompts of a run with `--prompts`; None without it. Raises `ConfigError` and `CheckpointError`."""
    if given is None:
        yield None
        return
    settings = settings_of(given, config)
    _ = make_engine(settings.engine)
    async with reflection_session(client, reflections(settings)) as http:
        last = Checkpoints(config.run.directory / "checkpoints").latest()
        kept = None if last is None or "front" not in last[1] else Front.restored(last[1]["front"])
        # Releases in the meantime do not change the prompts that the run began with.
        found = await (seeds(client, settings) if kept is None else versions_of(client, kept.first.versions))
        seed = Candidate({name: text_of(version) for name, version in found.items()})
        begun = Front(seed.id, [Member(seed, {name: version.version for name, version in found.items()})])
        awaited = Awaited(client)
        reflecting = Reflecting(client, http, gateway, reflections(settings), settings.reflection)
        every = [*agent_tasks(tasks, "t"), *agent_tasks(held_out, "h")]
        laboratory = PinnedLaboratory(client, awaited, reflecting, settings, found, every)
        yield Prompting(settings, laboratory, begun if kept is None else kept, tasks, awaited)


def agent_tasks(tasks: Sequence[Task], letter: str) -> list[AgentTask]:
    """Return tasks for trials of prompts; the letter in their ids distinguishes training tasks from held-out ones."""
    return [AgentTask(f"{letter}{task.number}", task.input, f"{letter}{task.number}") for task in tasks]
