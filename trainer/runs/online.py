"""`penstock train grpo --online`: an endless run that learns from production.

    rollouts      production's own, as their rewards come (`data.production`), instead of queued ones
    a step        as in `runs.grpo`: credit, update, publish to the modes of training, evaluate, report, save
    production    gets the weights by one release after the other, with its canary (`ProductionReleaser`)
    its end       the last step; or it stops itself when evaluation falls (`EvaluationHistory`) or a release of its
                  is rolled back. Production's stable weights stay as they are, and its live release is held for a
person

A run that has stopped itself stops again when it is started again, because its last weights are bad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import Release
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.model.run import EventLevel
from penstock.trainer.config import TrainConfig
from penstock.trainer.data.collector import RolloutBatch, RolloutCollector
from penstock.trainer.data.production import ConsumedLog, ProductionRollouts
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.update import Metrics
from penstock.trainer.runs.evaluation import (
    EvaluationHistory,
    EvaluationSuite,
    PendingEvaluation,
    TrainingProgress,
    suite_reward,
)
from penstock.trainer.runs.grpo import TrainingLoop
from penstock.trainer.runs.supervision import RunHalt, RunReporter
from penstock.trainer.serving.publisher import CONFLICT, PRODUCTION, Publisher, PublishError, release_policy, step_of
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
        value = values.get(suite_reward(self.config.evaluate.suite[0])) if self.config.evaluate.suite else None
        if value is not None:
            self._evaluations.add(step, value)

    def _staleness(self, place: TrainingProgress) -> Callable[[str | None], int]:
        return lambda version: self.production.age(version, place.version)

    async def _release(self) -> None:
        await self._show()


# Releases the weights of an endless run to production, one release after the other.
#
# While one release is live, training goes on as far as `rollouts.staleness` allows; when it has ended, the newest
# weights are released next. So not every step has a canary, and production never tries two versions at a time. A
# version with a low evaluation is not released. A release that is rolled back ends the run: its weights have done
# harm, or could not be served, and all later ones are made from them. When the gateway refuses something, such as a
# release beside one that a person has started, the run reports it once and tries again when some release changes.


class ProductionReleaser:
    """Releases the weights of one run to production."""

    def __init__(
        self, client: Client, publisher: Publisher, reporter: RunReporter, model: str, run: str, policy: ReleasePolicy
    ) -> None:
        self._client, self._publisher, self._reporter = client, publisher, reporter
        self._model, self._run, self._policy = model, run, policy
        self._said = ""

    async def release_next(self, place: TrainingProgress, low: bool) -> None:
        """Start the next release, if it is time. `low`: the evaluation of the newest weights is low, do not release
        them. Raises `RunHalt` when a release was rolled back."""
        mine = await self._mine()
        for release in mine:
            if release.stage == "rolled_back":
                raise RunHalt(f"release {release.id} of {release.candidate} was rolled back: {release.reason}")
        if mine and mine[0].live:
            return
        shown = max((self._step(release) for release in mine), default=0)
        if place.version > shown and not low:
            await self._start(place)

    async def hold(self, why: str) -> None:
        """Hold the run's live release for a person."""
        for release in await self._mine():
            if release.live and release.stage != "held":
                try:
                    await self._client.decide(release.id, "hold", ActionRequest(who=self._run, why=why))
                except ClientError as error:
                    # It has ended or was held meanwhile.
                    if error.status != CONFLICT:
                        raise

    async def _mine(self) -> list[Release]:
        """Return the run's own releases to production, newest first."""
        every = await self._client.releases(self._model)
        return [one for one in every if one.author == self._run and one.only == PRODUCTION and self._step(one) > 0]

    def _step(self, release: Release) -> int:
        """Return the step that made the candidate; 0 if it is not a version of the run (a person used the run's
        name)."""
        return step_of(self._run, release.candidate) or 0

    async def _start(self, place: TrainingProgress) -> None:
        version = f"{self._run}.{place.version}"
        try:
            release = await self._publisher.release(version, self._policy)
        except PublishError as error:
            await self._say(place, f"production does not see {version} yet: {error}", "warning")
            return
        await self._say(place, f"release {release.id} shows {version} to production", "info")

    async def _say(self, place: TrainingProgress, text: str, level: EventLevel) -> None:
        """Report a text unless it was the last one reported."""
        if text != self._said:
            self._said = text
            await self._reporter.event(place.step, text, level)
