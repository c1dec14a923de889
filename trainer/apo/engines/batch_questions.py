"""Batches of requests to the evidence: rollouts of which all are needed, and several reflections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.trainer.apo.budget import BudgetExhausted
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import Evidence
from penstock.trainer.apo.trials import Trial


async def run_all(evidence: Evidence, pairs: Sequence[tuple[Candidate, str]]) -> list[Trial]:
    """Run all of these rollouts whose candidates can be run. If the budget does not cover all, none begins: a part
    would compare candidates on different tasks, and the rest of the budget goes into the race. Raises
    `BudgetExhausted`."""
    if len(pairs) > evidence.budget.left:
        left, whole = evidence.budget.left, evidence.budget.rollouts
        raise BudgetExhausted(
            f"{left:,} of {whole:,} rollouts are left for the search, and its next step takes {len(pairs):,}"
        )
    return await evidence.run(pairs)


async def ask_all(evidence: Evidence, prompts: Sequence[str]) -> list[str | None]:
    """Return the answers, in the order of the questions; None for those that the budget did not allow, which are the
    last. No question is under way when it returns or raises. Raises `BudgetExhausted` when there is no
    answer at all."""
    answers = await asyncio.gather(*map(evidence.reflect, prompts), return_exceptions=True)
    failed = [one for one in answers if isinstance(one, BaseException)]
    for error in failed:
        if not isinstance(error, BudgetExhausted) or len(failed) == len(answers):
            raise error
    return [one if isinstance(one, str) else None for one in answers]
