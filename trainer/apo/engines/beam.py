"""`beam`: critique, then edit, and a beam of the best, as Agent Lightning 0.3 does it (`algorithm/apo`).

A round takes the prompts of the beam as parents, each `BRANCH` times (in turn where the beam is short). For each branch
a few rollouts of the parent are criticised, and the parent is written anew after the critique. The beam and what is new
are then run on one batch of tasks, and those with the highest mean stay. Unlike there, branches run at the same time, a
text that has lost a slot is dropped, and a rollout without a reward is left out instead of counted as 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import Evidence
from penstock.trainer.apo.reflection import fenced, shown
from penstock.trainer.apo.trials import Pool, Trial

WIDTH: Final = 4
BRANCH: Final = 4
ROUNDS: Final = 3
GRADIENT: Final = 4
"""Rollouts that a critique sees."""
BATCH: Final = 16
"""Tasks that the beam is compared on."""

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


class Branch(NamedTuple):
    """A parent, and some of its rollouts that are criticised."""

    parent: Candidate
    trials: Sequence[Trial]


class Beam:
    """The engine of one run. It keeps its own winner, by the batch that it was compared on."""

    def __init__(self) -> None:
        self._beam: list[Candidate] = []
        self._round = 0

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """One round; none after the last."""
        if self._round >= ROUNDS:
            return []
        self._round += 1
        self._beam = self._beam or [pool.seed]
        children = await self._children(await self._branches(evidence), evidence)
        able = [child for child in children if not evidence.problem(child)]
        runners = list({one.id: one for one in (*self._beam, *able)}.values())
        # Task by task, so that what is left of the budget compares all of them alike.
        pairs = [(one, task) for task in self._sample(BATCH, evidence) for one in runners]
        trials = await evidence.run(pairs)
        rewards = {
            one.id: [t.reward for t in trials if t.candidate == one.id and t.reward is not None] for one in runners
        }
        scores = {name: sum(found) / len(found) for name, found in rewards.items() if found}
        self._beam = sorted(runners, key=lambda one: -scores.get(one.id, -1.0))[:WIDTH]
        return self._beam

    async def _branches(self, evidence: Evidence) -> list[Branch]:
        """The parents, each `BRANCH` times, with rollouts of their own. Raises `Spent` where they are not all left."""
        parents = [self._beam[at % len(self._beam)] for at in range(WIDTH) for _ in range(BRANCH)]
        samples = [self._sample(GRADIENT, evidence) for _ in parents]
        pairs = [(parent, task) for parent, tasks in zip(parents, samples, strict=True) for task in tasks]
        trials = await evidence.run(pairs)
        trials += await evidence.run(pairs[len(trials) :])
        rest = iter(trials)
        return [Branch(parent, [next(rest) for _ in tasks]) for parent, tasks in zip(parents, samples, strict=True)]

    async def _children(self, branches: Sequence[Branch], evidence: Evidence) -> list[Candidate]:
        """The parents, written anew after a critique of their rollouts: one text of each, in turn. All critiques are
        there before the first is followed, so that nothing hangs on which of them came first."""
        names = sorted(branches[0].parent.texts)
        name = names[self._round % len(names)]
        said = ["\n".join(shown(trial, at) for at, trial in enumerate(one.trials, 1)) for one in branches]
        olds = [one.parent.texts[name] for one in branches]
        asked = [CRITIQUE % (old, rollouts) for old, rollouts in zip(olds, said, strict=True)]
        critiques = await asyncio.gather(*map(evidence.reflect, asked))
        asked = [EDIT % (old, critique) for old, critique in zip(olds, critiques, strict=True)]
        texts = map(fenced, await asyncio.gather(*map(evidence.reflect, asked)))
        return [
            Candidate({**parent.texts, name: text}, parent.id, critique, tuple(trial.rollout for trial in trials))
            for (parent, trials), critique, text in zip(branches, critiques, texts, strict=True)
            if text
        ]

    def _sample(self, most: int, evidence: Evidence) -> list[str]:
        names = [task.id for task in evidence.tasks]
        return evidence.random.sample(names, min(most, len(names)))

    def finalists(self, pool: Pool) -> list[Candidate]:
        """The best of the beam."""
        return self._beam[:1]
