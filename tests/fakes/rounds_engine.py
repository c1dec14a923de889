"""An engine of tests: after a reflection it proposes a better prompt, a worse one, and one that cannot be run."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import Evidence
from penstock.trainer.apo.trials import Pool


async def propose(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
    """Once in a round."""
    if len(pool.candidates) > 1:
        return []
    assert await evidence.reflect("what fails?") == "yes"
    best = pool.seed.texts["shop"]
    return [Candidate({"shop": best + more}, pool.seed.id) for more in ("+", "-", " broken+++")]
