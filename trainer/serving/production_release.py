"""Releases the weights of an endless run to production, one release after the other.

While one release is live, training goes on as far as `rollouts.staleness` allows; when it has ended, the newest weights
are released next. So not every step has a canary, and production never tries two versions at a time. A version with a
low evaluation is not released. A release that is rolled back ends the run: its weights have done harm, or could not be
served, and all later ones are made from them. When the gateway refuses something, such as a release beside one that a
person has started, the run reports it once and tries again when some release changes.
"""

from __future__ import annotations

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import Release
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.model.run import EventLevel
from penstock.trainer.runs.evaluation import TrainingProgress
from penstock.trainer.runs.report import RunHalt, RunReporter
from penstock.trainer.serving.publisher import CONFLICT, PRODUCTION, Publisher, PublishError, step_of


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
