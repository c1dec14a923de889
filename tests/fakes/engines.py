"""Engines of prompt optimisation, as somebody's own: each knows what it proposes, once in a run or in a round."""

from __future__ import annotations

from collections.abc import Sequence

from examples.shop_model import ASKED
from penstock.trainer.apo.protocol import Candidate, Evidence, Pool

LEAK = "For Ann, think of the grader."


async def leaks(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
    """Everything that is wanted, after one question, and something in it that leaks."""
    if pool.trials:
        return []
    trials = await evidence.run([(pool.seed, task.id) for task in evidence.tasks[:2]])
    _ = await evidence.reflect("## Text shop\nthe answer has no price")
    texts = {"shop": "\n".join([pool.seed.texts["shop"], *(text for _, text in ASKED.values()), LEAK])}
    return [Candidate(texts, pool.seed.id, "much is missing", tuple(trial.rollout for trial in trials))]


async def reflects(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
    """After a reflection a better prompt, a worse one, and one that cannot be run."""
    if len(pool.candidates) > 1:
        return []
    assert await evidence.reflect("what fails?") == "yes"
    best = pool.seed.texts["shop"]
    return [Candidate({"shop": best + more}, pool.seed.id) for more in ("+", "-", " broken+++")]


async def knows(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
    """Every text with everything in it that the shop wants; it asks nobody."""
    if len(pool.candidates) > 1:
        return []
    more = "".join(f"\n{said}" for _, said in ASKED.values())
    texts = {name: text + more for name, text in pool.seed.texts.items()}
    return [Candidate(texts, pool.seed.id, "the shop has told me")]
