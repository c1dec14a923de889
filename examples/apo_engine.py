"""An engine of `penstock train apo`: edits of the best text so far, each tried by itself."""

from collections.abc import Sequence

from penstock.trainer.apo.protocol import Candidate, Evidence, Pool
from penstock.trainer.apo.reflection import applied, ask_hypotheses, read_hypotheses


async def propose(pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
    """One round: runs the best text on a few tasks, and asks what would mend the failures."""
    best = max(pool.candidates.values(), key=lambda one: pool.mean(one.id) or 0.0)
    tasks = evidence.random.sample([task.id for task in evidence.tasks], 8)
    trials = await evidence.run([(best, task) for task in tasks])
    failed = [trial for trial in trials if trial.reward is not None and trial.reward < 1]
    if not failed:
        return []
    answer = await evidence.reflect(ask_hypotheses(best.texts, failed, most=3))
    edits = [one.edit for one in read_hypotheses(answer, best.texts)]
    return [Candidate(applied(best.texts, [edit]), best.id, edit.text) for edit in edits] or [best]
