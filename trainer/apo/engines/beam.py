"""`beam`: critique, then edit, and a beam of the best, as Agent Lightning 0.3 does it (`algorithm/apo`).

A round takes the prompts of the beam as parents, each `BRANCH` times (in turn where the beam is short). For each branch
a few rollouts of the parent are criticised, and the parent is written anew after the critique. The beam and what is new
are then run on one batch of tasks, and those with the highest mean stay. Unlike there, branches run at the same time, a
text that has lost a slot is dropped, and a rollout without a reward is left out instead of counted as 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.protocol import Evidence
from penstock.trainer.apo.reflection import fenced, shown
from penstock.trainer.apo.trials import Pool

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


class Beam:
    """The engine of one run. `final`: the beam keeps its own winner, by the batch that it was compared on."""

    def __init__(self) -> None:
        self._beam: list[Candidate] = []
        self._round = 0
        self._scores: dict[str, float] = {}

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """One round; none after the last."""
        if self._round >= ROUNDS:
            return []
        self._round += 1
        self._beam = self._beam or [pool.seed]
        parents = [self._beam[at % len(self._beam)] for at in range(WIDTH)]
        names = [task.id for task in evidence.tasks]
        branches = [
            (parent, evidence.random.sample(names, min(GRADIENT, len(names))))
            for parent in parents
            for _ in range(BRANCH)
        ]
        children = await asyncio.gather(*(self._child(parent, tasks, pool, evidence) for parent, tasks in branches))
        tasks = evidence.random.sample(names, min(BATCH, len(names)))
        runners = list({one.id: one for one in (*self._beam, *filter(None, children))}.values())
        trials = await evidence.run([(one, task) for one in runners for task in tasks])
        rewards = {
            one.id: [t.reward for t in trials if t.candidate == one.id and t.reward is not None] for one in runners
        }
        scores = {name: sum(found) / len(found) for name, found in rewards.items() if found}
        self._scores |= scores
        self._beam = sorted(runners, key=lambda one: -scores.get(one.id, 0.0))[:WIDTH]
        return self._beam

    async def _child(self, parent: Candidate, tasks: Sequence[str], pool: Pool, evidence: Evidence) -> Candidate | None:
        """The parent, written anew after a critique of some of its rollouts. One text of it, in turn."""
        trials = await evidence.run([(parent, task) for task in tasks])
        names = sorted(parent.texts)
        name = names[self._round % len(names)]
        said = "\n".join(shown(trial, at) for at, trial in enumerate(trials, 1))
        critique = await evidence.reflect(CRITIQUE % (parent.texts[name], said))
        text = fenced(await evidence.reflect(EDIT % (parent.texts[name], critique)))
        return Candidate({**parent.texts, name: text}, parent.id, critique, tuple(trial.rollout for trial in trials))

    def finalists(self, pool: Pool) -> list[Candidate]:
        """The best of the beam."""
        return self._beam[:1]
