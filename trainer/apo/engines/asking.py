"""Several reflections at once, of which the budget may allow some only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.trainer.apo.budget import Spent
from penstock.trainer.apo.protocol import Evidence


async def ask_all(evidence: Evidence, prompts: Sequence[str]) -> list[str | None]:
    """The answers, in the order of the questions; None for those that the budget did not allow, which are the last.
    Nothing is under way any more when it returns or raises. Raises `Spent` when there is no answer at all."""
    answers = await asyncio.gather(*map(evidence.reflect, prompts), return_exceptions=True)
    failed = [one for one in answers if isinstance(one, BaseException)]
    for error in failed:
        if not isinstance(error, Spent) or len(failed) == len(answers):
            raise error
    return [one if isinstance(one, str) else None for one in answers]
