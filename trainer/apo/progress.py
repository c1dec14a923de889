"""Reports a run while it goes on: points, events and the tree of candidates on the tape, and lines for a person who
watches.

A round is one point, which is one line in a log. Events are news for a person: another best candidate, a finalist that
is better or out, the test. All candidates are in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.console.views.text import abbreviate
from penstock.gateway.model.run import EventLevel, RunChange
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.gate import Racer
from penstock.trainer.apo.report.tree import candidate_tree
from penstock.trainer.apo.search import SearchResult, best
from penstock.trainer.apo.trials import Trial
from penstock.trainer.runs.report import RunReporter

CLAIM: Final = 160
"""Most characters of a candidate's claim in an event."""


class SearchProgress:
    """The reports of one run. Steps are rollouts that were used."""

    def __init__(self, reporter: RunReporter, result: SearchResult) -> None:
        self._reporter, self._result = reporter, result
        self._best = result.pool.seed.id
        self._states: dict[str, str] = {}

    async def report_changes(self) -> None:
        """Report news since the last look, and the present figures."""
        result = self._result
        leading = best(result.pool)[:1]
        if leading and leading[0].id != self._best:
            self._best = leading[0].id
            await self.tell(self._leads(leading[0]))
        for racer in result.racers:
            if self._states.get(racer.candidate) != racer.state:
                self._states[racer.candidate] = racer.state
                await self.tell(_stands(racer))
        await self._reporter.point(result.budget.used_rollouts, self._figures(leading))
        await self._reporter.change(RunChange(tree=candidate_tree(result)))

    async def report_decision(self) -> None:
        """Report the result of the race."""
        await self._reporter.change(RunChange(tree=candidate_tree(self._result)))
        await self.tell(self._result.why)

    def _leads(self, candidate: Candidate) -> str:
        pool = self._result.pool
        mean, seed = pool.mean(candidate.id) or 0.0, pool.mean(pool.seed.id) or 0.0
        figures = f"{mean:.3f} on {len(pool.of(candidate.id))} rollouts, the seed {seed:.3f}"
        return f"best so far: {candidate.id} ({figures}): {abbreviate(candidate.claim, CLAIM) or 'no claim'}"

    def _figures(self, leading: Sequence[Candidate]) -> dict[str, float]:
        result = self._result
        pool = result.pool
        found = {
            "candidates": float(len(pool.candidates)),
            "reflections": float(result.budget.used_reflections),
            "reflection_tokens": float(result.budget.used_tokens),
        }
        means = {"seed/reward": pool.mean(pool.seed.id), "best/reward": pool.mean((*leading, pool.seed)[0].id)}
        found |= {name: mean for name, mean in means.items() if mean is not None}
        recent = [trial.reward for trial in pool.trials[-32:] if trial.reward is not None]
        if recent:
            found["reward"] = sum(recent) / len(recent)
        for place, racer in enumerate(result.racers, 1):
            found[f"race/{place}/gain"] = racer.gain
            found[f"race/{place}/e_value"] = racer.evidence
        return found

    async def tell(self, text: str, level: EventLevel = "info") -> None:
        """Report an event at the present step."""
        await self._reporter.event(self._result.budget.used_rollouts, text, level)

    async def report_test(self, trials: Sequence[Trial], result: SearchResult) -> None:
        """Report the result of the test."""
        if result.winner is None:
            await self.tell("the texts stay as they are; the test stays sealed")
            return
        means = {
            name: [trial.reward for trial in trials if trial.candidate == name and trial.reward is not None]
            for name in (result.pool.seed.id, result.winner.id)
        }
        before, after = (sum(found) / len(found) if found else None for found in means.values())
        if before is None or after is None:
            await self.tell("the test was left out" if not trials else "no rollout of the test has a reward", "warning")
            return
        step = result.budget.used_rollouts
        await self._reporter.point(step, {"test/seed": before, "test/winner": after})
        await self.tell(
            f"test, on tasks that nobody has seen: {before:.3f} before, {after:.3f} with {result.winner.id}"
        )


def _stands(racer: Racer) -> str:
    figures = f"{racer.gain:+.3f} on {len(racer.differences)} tasks, e-value {racer.evidence:.3g} of {racer.needed:.3g}"
    return f"finalist {racer.candidate} is {racer.state}: {figures}"
