"""Finishes a run after the search: the test, the leak test, the release, the result and the report."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.gateway.client.client import Client
from penstock.gateway.model.run import EventLevel
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory
from penstock.trainer.apo.progress import SearchProgress
from penstock.trainer.apo.report import report_text
from penstock.trainer.apo.report.page import page
from penstock.trainer.apo.report.result import CandidateTexts, Leak, RunResult
from penstock.trainer.apo.report.result_builder import RunIdentity, RunOutcome, build_result, winner_leaks
from penstock.trainer.apo.run_directory import RunDirectory, digest
from penstock.trainer.apo.search import SearchResult
from penstock.trainer.apo.splits import Splits
from penstock.trainer.apo.trials import Trial
from penstock.trainer.apo.winner_release import release_texts

PAGE = "report.html"
"""Name of the report in a run's directory."""


class RunFinaliser:
    """The steps of one run after its search."""

    def __init__(
        self,
        config: ApoConfig,
        laboratory: GatewayLaboratory,
        splits: Splits,
        directory: RunDirectory,
        progress: SearchProgress,
    ) -> None:
        self._config, self._laboratory = config, laboratory
        self._splits, self._directory, self._progress = splits, directory, progress

    async def finish(self, client: Client, result: SearchResult) -> RunResult:
        """Do test, leak test and release; write and return the result. It is written after the release, because a run
        with a result is over."""
        tests = await self._test(result)
        await self._progress.report_test(tests, result)
        found = winner_leaks(result, self._splits)
        for one in found:
            await self._progress.tell(f"leak test: {one.resource}: {report_text.leak(one)}, in {one.line!r}", "warning")
        every = [result.pool.seed, *([result.winner] if result.winner else [])]
        versions = {one.id: await self._laboratory.versions(one) for one in every}
        config = self._config
        settings = RunIdentity(config.run.name, config.engine, digest(config), config.run.seed, config.run.placebo)
        ended = RunOutcome(settings, result, tests, self._splits, versions)
        kept = build_result(ended, found, (), time.time_ns())
        kept.published = [text for text, _ in await self._published(client, kept)]
        self._directory.write_result(kept)
        self._directory.write(PAGE, page([kept]))
        return kept

    async def _published(self, client: Client, kept: RunResult) -> Sequence[tuple[str, EventLevel]]:
        told = await publish_winner(client, self._config, kept)
        for text, level in told:
            await self._progress.tell(text, level)
        return told

    async def _test(self, result: SearchResult) -> Sequence[Trial]:
        """Return the trials of the test split, with the seed and with the winner; none without a winner."""
        if result.winner is None or not self._config.test.repeats:
            return []
        self._directory.open_test(self._config, result.winner.id)
        runners = [result.pool.seed, result.winner]
        tasks = [task.id for task in self._splits.test] * self._config.test.repeats
        orders = [result.pool.next_trial(one.id, task) for task in tasks for one in runners]
        return await self._laboratory.run(runners, orders, "test")


async def publish_winner(client: Client, config: ApoConfig, kept: RunResult) -> list[tuple[str, EventLevel]]:
    """Release the winner of a run to production, as `publish.release` says; return the results for a person. The winner
    of a placebo is never released."""
    if kept.winner is None or kept.placebo:
        return []
    wanted, warned = require_approval(config, kept.leaks)
    seed, winner = _candidate(kept.seed), _candidate(kept.winner)
    return [*warned, *await release_texts(client, wanted, seed, winner, kept.winner.versions)]


def require_approval(config: ApoConfig, found: Sequence[Leak]) -> tuple[ApoConfig, list[tuple[str, EventLevel]]]:
    """Return the configuration and warnings. If something leaks, a release that would promote itself becomes one that
    waits for a person."""
    if not found or config.publish.release != "auto":
        return config, []
    publish = config.publish.model_copy(update={"release": "canary"})
    said = f"the leak test has found {len(found):,}: publish.release = auto counts as canary, and waits for a person"
    return config.model_copy(update={"publish": publish}), [(said, "warning")]


def _candidate(kept: CandidateTexts) -> Candidate:
    return Candidate(kept.texts)
