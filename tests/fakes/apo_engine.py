"""An engine that asks once and proposes one candidate: right, and with something in it that leaks."""

from __future__ import annotations

from collections.abc import Sequence

from examples.shop_model import ASKED
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import Evidence
from penstock.trainer.apo.trials import Pool

LEAK = "For Ann, think of the grader."


async def propose(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
    """Everything that is wanted."""
    if pool.trials:
        return []
    trials = await evidence.run([(pool.seed, task.id) for task in evidence.tasks[:2]])
    _ = await evidence.reflect("## Text shop\nthe answer has no price")
    texts = {"shop": "\n".join([pool.seed.texts["shop"], *(text for _, text in ASKED.values()), LEAK])}
    return [Candidate(texts, pool.seed.id, "much is missing", tuple(trial.rollout for trial in trials))]
