"""Shows production the weights of a run that goes on and on: one release after the other.

While one is live, training goes on as far as `rollouts.staleness` allows. When it has ended, the newest weights are
released next. So not each step has a canary of its own, and production never tries two at a time. A version with a low
evaluation is not released. A release that is rolled back ends the run: its weights have done harm, or could not be
served, and all later ones are made from them. When the gateway refuses something, such as a release beside one that a
person has started, the run says so once and tries again when some release changes.
"""

from __future__ import annotations

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.audit import Said
from penstock.gateway.model.policy import Policy
from penstock.gateway.model.release import Release
from penstock.gateway.model.run import Level
from penstock.trainer.runs.best_weights import Place
from penstock.trainer.runs.ending import Halted
from penstock.trainer.runs.report import Reporter
from penstock.trainer.serving.pruning import step_of
from penstock.trainer.serving.publish import CONFLICT, PRODUCTION, Publisher, PublishError


class Showing:
    """Releases the weights of one run to production."""

    def __init__(
        self, client: Client, publisher: Publisher, reporter: Reporter, model: str, run: str, policy: Policy
    ) -> None:
        self._client, self._publisher, self._reporter = client, publisher, reporter
        self._model, self._run, self._policy = model, run, policy
        self._said = ""

    async def look(self, place: Place, low: bool) -> None:
        """Starts the next release, if it is time. `low`: the newest weights are not to be shown. Raises `Halted`
        when one was rolled back."""
        mine = await self._mine()
        for release in mine:
            if release.stage == "rolled_back":
                raise Halted(f"release {release.id} of {release.candidate} was rolled back: {release.reason}")
        if mine and mine[0].live:
            return
        shown = max((self._step(release) for release in mine), default=0)
        if place.version > shown and not low:
            await self._start(place)

    async def hold(self, why: str) -> None:
        """Holds its live release for a person."""
        for release in await self._mine():
            if release.live and release.stage != "held":
                try:
                    await self._client.decide(release.id, "hold", Said(who=self._run, why=why))
                except ClientError as error:
                    # It has ended meanwhile, or waits already.
                    if error.status != CONFLICT:
                        raise

    async def _mine(self) -> list[Release]:
        """The run's own, newest first."""
        every = await self._client.releases(self._model)
        return [one for one in every if one.author == self._run and one.only == PRODUCTION and self._step(one) > 0]

    def _step(self, release: Release) -> int:
        """The step that its candidate is of; 0 where a person took the run's name."""
        return step_of(self._run, release.candidate) or 0

    async def _start(self, place: Place) -> None:
        version = f"{self._run}.{place.version}"
        try:
            release = await self._publisher.release(version, self._policy)
        except PublishError as error:
            await self._say(place, f"production does not see {version} yet: {error}", "warning")
            return
        await self._say(place, f"release {release.id} shows {version} to production", "info")

    async def _say(self, place: Place, text: str, level: Level) -> None:
        """Reports something once."""
        if text != self._said:
            self._said = text
            await self._reporter.event(place.step, text, level)
