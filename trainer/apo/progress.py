"""What a run says while it goes on: points and events of its run on the tape, and lines for whoever watches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.gateway.model.run import Level
from penstock.trainer.apo.search import Result
from penstock.trainer.apo.trials import Trial
from penstock.trainer.runs.report import Reporter

CLAIM: Final = 160
"""Characters of a candidate's claim that are said."""


class Progress:
    """Of one run. Steps are rollouts that were used."""

    def __init__(self, reporter: Reporter, result: Result) -> None:
        self._reporter, self._result = reporter, result
        self._said: dict[str, str] = {result.pool.seed.id: ""}

    async def look(self) -> None:
        """Says what is new: candidates, and where the race stands."""
        result, step = self._result, self._result.budget.used_rollouts
        pool = result.pool
        for name, candidate in list(pool.candidates.items()):
            if name not in self._said and pool.of(name):
                self._said[name] = "proposed"
                parent = candidate.parent or ""
                claim = candidate.claim[:CLAIM] or "no claim"
                await self._reporter.event(step, f"candidate {name} of {parent}: {claim}")
        for racer in result.racers:
            if self._said.get(racer.candidate) != racer.state:
                self._said[racer.candidate] = racer.state
                text = (
                    f"candidate {racer.candidate} is {racer.state}: {racer.gain:+.3f} on {len(racer.differences)} tasks"
                )
                await self._reporter.event(step, f"{text}, e-value {racer.evidence:.3g} of {racer.needed:.3g}")
        await self._reporter.point(step, self._figures())

    def _figures(self) -> dict[str, float]:
        result = self._result
        pool = result.pool
        found = {
            "candidates": float(len(pool.candidates)),
            "reflections": float(result.budget.used_reflections),
            "reflection_tokens": float(result.budget.used_tokens),
        }
        if (mean := pool.mean(pool.seed.id)) is not None:
            found["seed/reward"] = mean
        recent = [trial.reward for trial in pool.trials[-32:] if trial.reward is not None]
        if recent:
            found["reward"] = sum(recent) / len(recent)
        for place, racer in enumerate(result.racers, 1):
            found[f"race/{place}/gain"] = racer.gain
            found[f"race/{place}/e_value"] = racer.evidence
        return found

    async def tell(self, text: str, level: Level = "info") -> None:
        """Something that happened."""
        await self._reporter.event(self._result.budget.used_rollouts, text, level)

    async def test(self, trials: Sequence[Trial], result: Result) -> None:
        """What the test has said."""
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
