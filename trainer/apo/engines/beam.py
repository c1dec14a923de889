"""`beam`: critique, then edit, and a beam of the best, as Agent Lightning 0.3 does it (`algorithm/apo`).

First the seed is run on all held-out tasks (half of the train split at most). A round takes the prompts of the beam as
parents, each `branch` times (in turn if the beam is short). For each branch a few rollouts of the parent are
criticised, and the parent is rewritten after the critique. The beam and its children are then run on one batch of the
held-out tasks, and those with the highest mean stay. The first of them is run on all held-out tasks. The engine's
finalist is the text with the highest mean there; the seed is one of them.

In contrast to Agent Lightning, branches run at the same time, a text that has lost a slot is dropped, a rollout without
a reward is left out instead of counted as 0, and of several texts one is rewritten, in turn. Width, branches and rounds
are the largest of `SIZES` that the budget covers: the first are Agent Lightning's defaults, the last those of its
guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.trainer.apo.protocol import Candidate, Evidence, Pool, hold_out, means
from penstock.trainer.apo.reflection import fenced, format_trials

GRADIENT: Final = 4
BATCH: Final = 16
HELD_OUT: Final = (32, 16)
"""Held-out tasks on which the first of the beam is run; the second if the budget is too small for the first."""

CRITIQUE: Final = """\
Describe what is wrong with the text that an AI agent is given, from these rollouts of it. Say in a few sentences what \
the text should say and does not, or says and should not.

```
%s
```

%s"""
EDIT: Final = """\
Write this text anew, so that the critique is met. Keep every {slot} as it is.

```
%s
```

Critique: %s

Answer with the new text within ``` fences."""


class BeamSize(NamedTuple):
    """The size of a search: parents of a round, children of each, rounds."""

    width: int
    branch: int
    rounds: int

    def rollouts(self, held_out: int) -> int:
        batch = min(BATCH, held_out)
        children = self.width * self.branch
        compared = self.rounds * (children + self.width) - (self.width - 1)
        return self.rounds * children * GRADIENT + compared * batch + (self.rounds + 1) * held_out


SIZES: Final = (BeamSize(4, 4, 3), BeamSize(3, 3, 3), BeamSize(2, 2, 3), BeamSize(2, 2, 2))


class BeamEngine:
    def __init__(self) -> None:
        self._beam: list[Candidate] = []
        self._size = SIZES[-1]
        self._learn: list[str] = []
        self._choose: list[str] = []
        self._round = 0
        self._order: list[str] = []
        self._best: tuple[float, Candidate] | None = None

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """Do one round; return the beam. None after the last round, or when no rollout of the seed has a reward."""
        if not self._beam:
            await self._begin(pool, evidence)
        if self._best is None or self._round >= self._size.rounds:
            return []
        self._round += 1
        children = await self._children(evidence)
        runners = list({one.id: one for one in (*self._beam, *children)}.values())
        tasks = evidence.random.sample(self._choose, min(BATCH, len(self._choose)))
        trials = await evidence.run_all([(one, task) for one in runners for task in tasks])
        scores = means((trial.candidate, trial.reward) for trial in trials)
        self._beam = sorted(runners, key=lambda one: -scores.get(one.id, 0.0))[: self._size.width]
        await self._lead(self._beam[0], evidence)
        return self._beam

    def finalists(self, pool: Pool) -> list[Candidate]:
        return [] if self._best is None else [self._best[1]]

    async def _begin(self, pool: Pool, evidence: Evidence) -> None:
        self._beam = [pool.seed]
        left = evidence.budget.left
        self._learn, self._choose = hold_out(
            evidence, HELD_OUT[0] if SIZES[-1].rollouts(HELD_OUT[0]) <= left else HELD_OUT[1]
        )
        held_out = len(self._choose)
        self._size = next((one for one in SIZES if one.rollouts(held_out) <= left), SIZES[-1])
        await self._lead(pool.seed, evidence)

    async def _lead(self, candidate: Candidate, evidence: Evidence) -> None:
        trials = await evidence.run_all([(candidate, task) for task in self._choose])
        mean = means((candidate.id, trial.reward) for trial in trials).get(candidate.id)
        if mean is not None and (self._best is None or mean > self._best[0]):
            self._best = mean, candidate

    async def _children(self, evidence: Evidence) -> list[Candidate]:
        parents = [self._beam[at % len(self._beam)] for at in range(self._size.width)]
        branches = [parent for parent in parents for _ in range(self._size.branch)]
        pairs = [(parent, task) for parent in branches for task in self._next(evidence)]
        trials = await evidence.run_all(pairs)
        each = len(pairs) // len(branches)
        seen = [trials[start : start + each] for start in range(0, len(trials), each)]
        texts = sorted(branches[0].texts)
        names = [texts[(self._round + at) % len(texts)] for at in range(len(branches))]
        every = list(zip(branches, names, seen, strict=True))
        critiques = await evidence.reflect_all(
            [CRITIQUE % (one.texts[name], format_trials(some)) for one, name, some in every]
        )
        given = [(*branch, critique) for branch, critique in zip(every, critiques, strict=True) if critique]
        answers = await evidence.reflect_all([EDIT % (one.texts[name], critique) for one, name, _, critique in given])
        children = [
            Candidate({**one.texts, name: fenced(answer)}, one.id, critique, tuple(trial.rollout for trial in some))
            for (one, name, some, critique), answer in zip(given, answers, strict=True)
            if answer and fenced(answer)
        ]
        return [child for child in children if not evidence.problem(child)]

    def _next(self, evidence: Evidence) -> list[str]:
        """Return the tasks of a critique; every task is drawn before one is drawn again."""
        count = min(GRADIENT, len(self._learn))
        if len(self._order) < count:
            self._order = evidence.random.sample(self._learn, len(self._learn))
        found, self._order = self._order[:count], self._order[count:]
        return found
