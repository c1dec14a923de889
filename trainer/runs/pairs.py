"""`penstock train grpo --prompts`: trains weights step by step, and looks for better prompts in rounds in between.

    a step        as in `runs.grpo`, but the rollouts of a group are spread over the prompts of the front; credit is
                  within the group, so prompts and weights are both compared on the same task
    a round       before the first step and every `prompts.every` steps (`prompt_rounds`), with the newest weights
    evaluation    with the leader of the front
    its end       the front is compared once more, then the four cells: old and new prompt with old and new weights, on
                  held-out tasks. Leader and newest weights are released as one

The checkpoint has the front besides the state of every run, so a restarted run continues with the same prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.gateway_laboratory import ReflectionClient, seed_versions, text_of
from penstock.trainer.apo.protocol import AgentTask, Candidate, Trial, TrialSpec
from penstock.trainer.apo.session import reflection_rollout, reflection_session
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.collector import RolloutBatch, RolloutCollector, RolloutWaiter, Variant
from penstock.trainer.data.tasks import RolloutTask
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import Checkpoints, State
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.update import Metrics
from penstock.trainer.runs.evaluation import EvaluationSuite
from penstock.trainer.runs.grpo import TrainingLoop
from penstock.trainer.runs.prompt_rounds import (
    Age,
    Cell,
    FrontMember,
    PinnedLaboratory,
    PromptFront,
    PromptRounds,
    Rewards,
    cell_lines,
    cell_metrics,
    settings_of,
    versions_of,
)
from penstock.trainer.runs.supervision import RetryClient, RunReporter
from penstock.trainer.serving.publisher import Publisher
from penstock.trainer.serving.vllm import Replicas, ServerSupervisor

CLAIM: Final = 120
"""Most characters of a prompt's claim in an event."""


class PairLoop(TrainingLoop):
    """One run that trains weights and prompts."""

    def __init__(
        self,
        config: TrainConfig,
        engine: TrainingEngine,
        collector: RolloutCollector,
        publisher: Publisher,
        reporter: RunReporter,
        prompting: PromptSetup,
        suites: Sequence[EvaluationSuite],
        servers: ServerSupervisor | Replicas | None,
    ) -> None:
        super().__init__(config, engine, collector, publisher, reporter, prompting.tasks, suites, servers)
        self._prompting = prompting
        self._rounds = PromptRounds(
            config.prompts, prompting.settings, agent_tasks(prompting.tasks, "t"), prompting.front
        )

    @property
    def front(self) -> PromptFront:
        """The present front of prompts."""
        return self._rounds.front

    # -- the state -----------------------------------------------------------------------------------------------------

    def _restored(self, state: State) -> None:
        if "front" not in state:
            raise CheckpointError(
                "the checkpoint is of a run without --prompts; give this one a run.directory of its own"
            )
        self._rounds.front = PromptFront.from_state(state["front"])
        self._restored_curriculum(state)

    def _state(self) -> State:
        return {**super()._state(), "front": self.front.state()}

    def _kept(self) -> frozenset[int]:
        # Step 0: the old weights of the cells.
        return super()._kept() | {0}

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _due(self, step: int) -> bool:
        """True if a round is held before a step."""
        return (step - 1) % self.config.prompts.every == 0

    def _ahead(self, step: int) -> bool:
        return super()._ahead(step) and not self._due(step)

    def _at_once(self, step: int) -> bool:
        # A round may find another leader.
        return super()._at_once(step) or self._due(step + 1)

    async def _collect(self, step: int) -> tuple[RolloutBatch, int]:
        if self._due(step):
            await self._round(step)
        return await super()._collect(step)

    def _variants(self) -> Sequence[Variant]:
        return [one.variant for one in self.front.members]

    def _evaluated(self) -> Variant:
        return self.front.leader.variant

    def _figures(self, collected: RolloutBatch) -> Metrics:
        spent = {f"reflection/{name}": value for name, value in self.front.spent.items()}
        return spent | self.front.figures(collected.by_variant)

    async def _round(self, step: int) -> None:
        self._reporter.phase(step, "looks for prompts")
        await self._rounds.run_round(lambda label: self._at(label, step, self.progress.version))
        await self._tell(step, f"round {self.front.rounds}, with the weights of step {self.progress.version}")

    def _at(self, label: str, step: int, weights: int) -> PinnedLaboratory:
        """Return the laboratory with the weights of a step."""
        pins = {self.config.model.name: f"{self.config.run.name}.{weights}"}
        return self._prompting.laboratory.with_pins(label, step, pins)

    async def _tell(self, step: int, what: str) -> None:
        """Report the prompts of the front."""
        for one in self.front.members:
            place, mean = self.front.labels[one.candidate.id], "none" if one.mean is None else f"{one.mean:.3f}"
            about = f": {one.candidate.claim[:CLAIM]}" if one.candidate.claim else ""
            await self._reporter.event(step, f"{what}: prompt {place} ({one.candidate.id}), reward {mean}{about}")
            for name, version in one.versions.items():
                await self._reporter.new_version(name, version)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _release(self) -> None:
        step = self.progress.step
        self._reporter.phase(step, "compares the prompts with the last weights")
        await self._rounds.compare_front(lambda label: self._at(label, step, self.progress.version))
        await self._tell(step, "at the end")
        await self._cells(step)
        await self._show(step)

    async def _cells(self, step: int) -> None:
        """Compare old and new prompt with old and new weights, on the first held-out suite; report the cells."""
        if not self._suites:
            await self._reporter.event(step, "no cells: no tasks are held out ([[evaluate.suite]])", "warning")
            return
        self._reporter.phase(step, "compares old and new on held-out tasks")
        found: dict[Cell, Rewards] = {}
        ages: dict[Age, int] = {"old": 0, "new": self.progress.version}
        for age, weights in ages.items():
            found |= await self._column(age, self._at(f"cells-{weights}", step, weights))
        await self._reporter.point(step, cell_metrics(found))
        for line in cell_lines(found):
            await self._reporter.event(step, f"held-out tasks, {line}")

    async def _column(self, age: Age, laboratory: PinnedLaboratory) -> dict[Cell, Rewards]:
        """Return the cells of the same weights."""
        first, leader = self.front.first.candidate, self.front.leader.candidate
        # If first and leader are the same prompt, it counts as old.
        prompts: Mapping[str, Age] = {leader.id: "new", first.id: "old"}
        orders = [
            TrialSpec(prompt, task.id, number)
            for suite in self._suites[:1]
            for number in range(suite.settings.samples)
            for task in agent_tasks(suite.tasks, "h")
            for prompt in prompts
        ]
        trials = await laboratory.run([first, leader], orders, "val")
        return {(prompt, age): self._by_task([one for one in trials if prompts[one.candidate] == prompt])
                for prompt in prompts.values()}  # fmt: skip

    def _by_task(self, trials: Sequence[Trial]) -> Rewards:
        """Return the rewards by task, in their original units."""
        low, high = self._prompting.settings.reward.range
        found: defaultdict[str, list[float]] = defaultdict(list)
        for trial in trials:
            if trial.reward is not None:
                found[trial.task].append(low + trial.reward * (high - low))
        return found

    async def _show(self, step: int) -> None:
        """Release leader and newest weights to production as one, as `publish.release` says."""
        leader, front = self.front.leader, self.front
        prompts = {} if leader.candidate.id == front.seed else dict(leader.versions)
        if not prompts:
            await self._reporter.event(step, "no prompt is better than the one that the run began with")
        if not self.progress.version:
            await self._reporter.event(step, "nothing was learnt: there is no pair to release", "warning")
            return
        version = f"{self.config.run.name}.{self.progress.version}"
        said = await self._publisher.release_as_configured(version, self.config.publish, prompts)
        await self._reporter.event(step, *said)


# The prompts that a run begins with, and the laboratory that tries others.


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
