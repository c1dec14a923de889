"""`penstock train grpo --online`: an endless run that learns from production.

    rollouts      production's own, as their rewards come (`data.production`), instead of queued ones
    a step        as in `runs.grpo`: credit, update, publish to the modes of training, evaluate, report, save
    production    gets the weights by one release after the other, with its canary (`serving.production_release`)
    its end       the last step; or it stops itself when evaluation falls (`mathematics.early_stop`) or a release of its
                  is rolled back. Production's stable weights stay as they are, and its live release is held for a
person

A run that has stopped itself stops again when it is started again, because its last weights are bad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.gateway.client.client import Client
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.collector import RolloutBatch, RolloutCollector
from penstock.trainer.data.consumed_log import ConsumedLog
from penstock.trainer.data.production import ProductionRollouts
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.early_stop import EvaluationHistory
from penstock.trainer.mathematics.update import Metrics
from penstock.trainer.runs.evaluation import EvaluationSuite, PendingEvaluation, TrainingProgress, reward_of
from penstock.trainer.runs.grpo import TrainingLoop
from penstock.trainer.runs.report import RunHalt, RunReporter
from penstock.trainer.serving.production_release import ProductionReleaser
from penstock.trainer.serving.publisher import Publisher, release_policy
from penstock.trainer.serving.vllm import Replicas, ServerSupervisor


class OnlineLoop(TrainingLoop):
    """One online run. `production` must run beside it."""

    def __init__(
        self,
        config: TrainConfig,
        engine: TrainingEngine,
        client: Client,
        collector: RolloutCollector,
        publisher: Publisher,
        reporter: RunReporter,
        suites: Sequence[EvaluationSuite],
        servers: ServerSupervisor | Replicas | None,
    ) -> None:
        super().__init__(config, engine, collector, publisher, reporter, [], suites, servers)
        self._client = client
        self.production = ProductionRollouts(client, config, ConsumedLog(config.run.directory / "taken"))
        policy = release_policy(config.publish)
        self._showing = ProductionReleaser(client, publisher, reporter, config.model.name, config.run.name, policy)
        self._evaluations = EvaluationHistory(config.online.max_drop)

    async def run(self) -> None:
        """Run until the last step is done. Raises `RunHalt`."""
        async for point in self._client.points(self.config.run.name):
            self._note(point.step, point.values)
        await super().run()

    async def _collect(self, step: int) -> tuple[RolloutBatch, int]:
        """Wait until there are enough rollouts, and return them. Raises `RunHalt`."""
        await self._stop_if_fallen()
        self._reporter.phase(step, "waits for rewards of production")
        await self.production.begin(self.progress.version)
        released, told = True, False
        while True:
            if released:
                await self._show()
            for text in await self.production.inspect_quiet():
                await self._reporter.event(step, text, "warning")
            found = await self.production.take(step, self.progress.version)
            if found is not None:
                return found, 0
            if self.production.stale and not told:
                told = True
                await self._reporter.event(step, self._behind(), "warning")
            released = await self.production.wait_for_news()

    async def _stop_if_fallen(self) -> None:
        if (trouble := self._evaluations.stop_reason) is not None:
            await self._showing.hold(trouble)
            raise RunHalt(trouble)

    def _behind(self) -> str:
        version = f"{self.config.run.name}.{self.progress.version}"
        return (
            f"production is served by weights more than {self.config.rollouts.staleness} versions (rollouts.staleness) "
            f"behind {version}, and is not learnt from until a release has shown it newer ones"
        )

    async def _show(self) -> None:
        await self._showing.release_next(self.progress, low=bool(self._evaluations.low))

    def _at_once(self, step: int) -> bool:
        # The evaluation decides if the run goes on, and the next step may wait for days.
        return True

    async def _results(self, asked: PendingEvaluation) -> Metrics:
        found = await super()._results(asked)
        self._note(asked.step, found)
        return found

    def _note(self, step: int, values: Mapping[str, float | None]) -> None:
        """Note an evaluation, if there was one: the first suite decides."""
        value = values.get(reward_of(self.config.evaluate.suite[0])) if self.config.evaluate.suite else None
        if value is not None:
            self._evaluations.add(step, value)

    def _staleness(self, place: TrainingProgress) -> Callable[[str | None], int]:
        return lambda version: self.production.age(version, place.version)

    async def _release(self) -> None:
        await self._show()
