"""`edits`: a few edits at a time, kept if they help, as SkillOpt 0.2 does it.

A round runs the current text on a batch of tasks. Reflections on groups of the failures propose edits: a line added,
deleted or replaced. The edits that most reflections name are made together, at most as many as the round allows: this
*edit budget* is the learning rate, and falls from `RATE` to `SLOW` along a cosine. The new text is run on the held-out
tasks (half of the train split at most). It becomes the current text if its mean there is higher than that of the text
before, on the same tasks. Otherwise its edits go into a buffer. Reflections are shown the buffer, and its edits are not
made again until all tasks of the train split were seen once more.

In contrast to SkillOpt, edits are ranked by counting and not by further calls of a model, rollouts with the best reward
are not reflected on, and there is no slow update that compares epochs. The search ends when `BARREN` rounds in a row
have brought no edit to try.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import cos, pi
from typing import Final

from penstock.trainer.apo.protocol import Candidate, Evidence, Pool, Trial, hold_out, means
from penstock.trainer.apo.reflection import Edit, applied, ask_hypotheses, exclude, read_hypotheses, words

RATE: Final = 4
SLOW: Final = 2
MINIBATCH: Final = 8
SHARE: Final = 24
"""A round's batch, and the held-out part, have one task for so many rollouts of the budget."""
FEWEST: Final = 16
MOST: Final = 40
"""Fewest and most tasks of a batch, and of the held-out part."""
BARREN: Final = 3
"""Rounds in a row without an edit to try after which the search ends."""
REJECTED: Final = """

These edits have been tried, and have not helped. Do not propose them again:
"""

Key = tuple[str, str, str, frozenset[str]]


class EditEngine:
    def __init__(self) -> None:
        self._held: Candidate | None = None
        self._mean = 0.0
        self._learn: list[str] = []
        self._choose: list[str] = []
        self._batch = 0
        self._order: list[str] = []
        self._rejected: dict[Key, Edit] = {}
        self._barren = 0

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """Do one round; return the new text, or the current one if there was nothing to try."""
        held = self._held or await self._begin(pool, evidence)
        trials = await evidence.run_all([(held, task) for task in self._next(evidence)])
        edits = await self._edits(held, trials, evidence)
        causes = tuple(trial.rollout for trial in trials)
        tried = Candidate(applied(held.texts, edits), held.id, "; ".join(map(format_edit, edits)), causes)
        if not edits or tried.id == held.id or evidence.problem(tried):
            self._barren += 1
            self._reject(edits)
            return [held] if self._barren < BARREN else []
        self._barren = 0
        mean = await self._measured(tried, evidence)
        if mean > self._mean:
            self._held, self._mean = tried, mean
        else:
            self._reject(edits)
        return [tried]

    def finalists(self, pool: Pool) -> list[Candidate]:
        return [] if self._held is None else [self._held]

    async def _begin(self, pool: Pool, evidence: Evidence) -> Candidate:
        self._batch = min(MOST, max(FEWEST, evidence.budget.left // SHARE))
        self._learn, self._choose = hold_out(evidence, self._batch)
        self._mean = await self._measured(pool.seed, evidence)
        self._held = pool.seed
        return pool.seed

    async def _measured(self, candidate: Candidate, evidence: Evidence) -> float:
        trials = await evidence.run_all([(candidate, task) for task in self._choose])
        return means(("", trial.reward) for trial in trials).get("", 0.0)

    async def _edits(self, held: Candidate, trials: Sequence[Trial], evidence: Evidence) -> list[Edit]:
        failed = [trial for trial in trials if trial.reward is not None and trial.reward < 1.0]
        if not failed:
            return []
        batches = [failed[start : start + MINIBATCH] for start in range(0, len(failed), MINIBATCH)]
        done = evidence.budget.used_rollouts / evidence.budget.rollouts
        rate = round(SLOW + (RATE - SLOW) * (1 + cos(pi * min(1.0, done))) / 2)
        shown = REJECTED + "\n".join(map(format_edit, self._rejected.values())) if self._rejected else ""
        asked = [ask_hypotheses(held.texts, batch, rate) + shown for batch in batches]
        answers = [answer for answer in await evidence.reflect_all(asked) if answer]
        named = [one.edit for answer in answers for one in read_hypotheses(answer, held.texts)]
        votes = Counter(map(edit_key, named))
        found: list[Edit] = []
        for edit in sorted({edit_key(edit): edit for edit in named}.values(), key=lambda edit: -votes[edit_key(edit)]):
            if edit_key(edit) not in self._rejected and not any(exclude(edit, one) for one in found):
                found.append(edit)
        return found[:rate]

    def _reject(self, edits: Sequence[Edit]) -> None:
        self._rejected |= {edit_key(edit): edit for edit in edits}

    def _next(self, evidence: Evidence) -> list[str]:
        """Return the tasks of a batch. Once all are drawn, the buffer is emptied, and they are drawn again."""
        if not self._order:
            self._order = evidence.random.sample(self._learn, len(self._learn))
            self._rejected.clear()
        found, self._order = self._order[: self._batch], self._order[self._batch :]
        return found


def edit_key(edit: Edit) -> Key:
    return edit.resource, edit.kind, edit.line.strip(), words(edit.text)


def format_edit(edit: Edit) -> str:
    """Return an edit as text for the reflecting model and for a person."""
    return f"{edit.resource}: {edit.kind} {edit.line!r} {edit.text!r}"
