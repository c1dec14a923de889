"""Reports as early as possible why a run can learn nothing. Pure.

The first rollouts show errors that make every later one worthless: an agent that always fails, calls that do not reach
the gateway or have other prompts, or missing rewards. At the end the figures show why a search found nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.trainer.apo.search import SearchResult

FIRST_ROLLOUTS: Final = 8
"""Rollouts after which their common problem is reported."""
RESTART_HINT: Final = "Mend that, and take another run.name: rollouts that were run stay as they are"


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """The facts about an ended rollout that show such problems."""

    rollout: str
    """Rollout id."""
    calls: int
    """Number of its calls of a model."""
    versions: Collection[str]
    """Resources that were found in its calls."""
    rewarded: bool
    """True if it has a reward."""
    failure: str = ""
    """How it failed; empty if it succeeded."""


class FirstRolloutCheck:
    """Checks the first rollouts of a run. `wanted`: the resources whose texts are tried."""

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = wanted
        self._seen: list[RolloutFacts] = []
        self._told = False

    @property
    def done(self) -> bool:
        """True once the first rollouts were checked."""
        return self._told

    def problem(self, new: Sequence[RolloutFacts]) -> str:
        """Add rollouts; return what makes the run worthless, for a person. Empty without a problem, and while there are
        too few."""
        self._seen += new
        if self._told or len(self._seen) < FIRST_ROLLOUTS:
            return ""
        self._told = True
        return self._problem()

    def missing(self) -> list[str]:
        """Return the resources that none of them had in its calls."""
        return sorted(set(self._wanted) - {name for one in self._seen for name in one.versions})

    def _problem(self) -> str:
        seen, first, count = self._seen, self._seen[0], len(self._seen)
        if all(one.failure and not one.rewarded for one in seen):
            failed = f"all of the first {count} rollouts have failed, such as {first.rollout}"
            return f"{failed}: {first.failure}. {RESTART_HINT}"
        if not any(one.calls for one in seen):
            return (
                f"none of the first {count} rollouts has made a call of a model through the gateway; an agent must use "
                f"the base URL that its runner gives it, see `penstock show {first.rollout}`. {RESTART_HINT}"
            )
        if set(self.missing()) == set(self._wanted):
            return (
                f"{' and '.join(self.missing())}: not found in any call of the first {count} rollouts, so every "
                "candidate would be the same. `penstock prompts discover` shows what agents send, `penstock prompts "
                f"check FILE` which prompt a text is. {RESTART_HINT}"
            )
        if not any(one.rewarded for one in seen):
            return (
                f"none of the first {count} rollouts has a reward. Give `penstock run` a judge (--reward, "
                f"--reward-command), or let the agent or your application give one. {RESTART_HINT}"
            )
        return ""


def search_warnings(result: SearchResult, run: str) -> list[str]:
    """Return why a search has found nothing, for a person; empty if nothing was wrong with it."""
    pool, found = result.pool, list[str]()
    rewards = [trial.reward for trial in pool.trials if trial.reward is not None]
    without = len(pool.trials) - len(rewards)
    if without:
        found.append(f"{without:,} of {len(pool.trials):,} rollouts of the search had no reward and were left out")
    if result.winner is not None:
        return found
    if len(rewards) > 1 and len(set(rewards)) == 1:
        found.append(
            f"all {len(rewards):,} rewards were {rewards[0]:g}: they do not tell a better prompt from a worse one"
        )
    if result.budget.used_reflections and len(pool.candidates) == 1:
        found.append(
            f"none of {result.budget.used_reflections:,} reflections has led to another text; `penstock show "
            f"{run}.reflections` has what the model said"
        )
    return found
