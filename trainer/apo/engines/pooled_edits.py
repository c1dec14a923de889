"""`ours`: many reflections are pooled, and every rollout tests several edits at once.

A round asks `REFLECTIONS` times for hypotheses, each time with other rollouts of the best prompt so far: failures, and,
if there are any, better rollouts of the same tasks to compare with. Hypotheses with the same edit become one edit with
several votes. Of the lines that are added for one failure a prompt has one at most: a second would only make it longer.
An edit that names the key of a task, such as a customer, is left out: it cannot help others.

Then several prompts (`ARMS`) are run, each with a subset of the edits: for each arm the effects are drawn from their
posterior (Thompson 1933), and the edits with an effect above 0 are made. So edits that are likely to help are in most
prompts, doubtful ones in half of them, and harmful ones soon in none. The effects are estimated together from all
rollouts of the run. The best prompt so far is the seed with the edits whose mean effect is above 0 and worth their
length.

Every rollout of a prompt with a subset of the edits is evidence about each of them. The reward is modelled as a sum,

    reward = task + sum of the effects of the edits in the prompt + noise

with normal priors on every term (a Bayesian linear regression with random effects of tasks; Gelman et al., Bayesian
Data Analysis). So N rollouts measure each of K edits as well as N / 2 pairs of prompts with and without it would,
instead of N / 2K: a screening design (Plackett & Burman 1946). The model need not be exact: the race at the end decides
about whole prompts.

A seed that fails nearly always may have errors that no reflection names. Then whole texts are written from scratch too.
Each counts as one more edit, of which a prompt has at most one; lines that the other edits delete or replace are not in
it.

The search ends when `BARREN` rounds in a row have brought no new edit that is worth making, or the best prompt no
longer fails.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.apo.protocol import Candidate, Evidence, Pool, Trial
from penstock.trainer.apo.reflection import (
    Edit,
    Hypothesis,
    applied,
    ask_hypotheses,
    ask_scratch,
    exclude,
    read_hypotheses,
    read_texts,
    words,
)

SLOT: Final = re.compile(r"(?<!\{)\{[A-Za-z_]\w*\}(?!\})")
REFLECTIONS: Final = 6
MINIBATCH: Final = 6
CONTRASTS: Final = 2
"""Better rollouts of the same tasks that a reflection sees besides."""
HYPOTHESES: Final = 3
FIRST: Final = 24
ARMS: Final = (8, 14)
"""Fewest and most prompts of a round."""
ROUND: Final = 0.3
"""Share of the remaining rollouts that limits the number of prompts of a round."""
TASKS: Final = 4
DONE: Final = 0.97
"""Mean reward above which nothing needs to be improved."""
LOST: Final = 0.15
"""Mean reward of the seed below which texts are also written from scratch."""
RESTARTS: Final = 2
LENGTH: Final = 0.0002
"""Effect that an edit must have for each character that it adds."""
SAME: Final = 0.6
"""Share of weighted words above which two hypotheses are the same."""
MENDED: Final = 0.15
"""Prior effect of an edit that makes its failure as rare as possible, before rewards show it."""
HOPE: Final = 0.03
"""Prior effect of an edit because a reflection has named it."""
VOTE: Final = 0.01
"""Prior effect for each further reflection that names an edit."""
NAMED: Final = 0.7
"""Share of a failure's weighted words that a reason must have to be about this failure."""
DOUBT: Final = 10
"""Weight of the prior that a failure is as frequent with an edit as without, in rollouts."""
SURE: Final = 12
"""Rollouts of the best prompt above which its mean shows that nothing fails any more."""
BARREN: Final = 6
"""Rounds in a row without a new edit that is worth making after which the search ends."""
Array = NDArray[np.float64]
EFFECT_SD: Final = 0.08
TASK_SD: Final = 0.25
LEAST_NOISE: Final = 0.1


class DesignRow(NamedTuple):
    task: str
    reward: float
    edits: frozenset[int]


@dataclass(frozen=True)
class EffectPosterior:
    mean: Array
    covariance: Array

    def draw(self, source: np.random.Generator) -> Array:
        return source.multivariate_normal(self.mean, self.covariance, method="cholesky")


def estimate_effects(rows: Sequence[DesignRow], prior: Sequence[float]) -> EffectPosterior:
    """Return the posterior. `prior`: mean of each edit's effect before any rollout."""
    count = len(prior)
    start = EffectPosterior(np.array(prior, dtype=np.float64), np.eye(count) * EFFECT_SD**2)
    if not rows or not count:
        return start
    tasks: Mapping[str, int] = {task: at for at, task in enumerate(dict.fromkeys(row.task for row in rows))}
    design = np.zeros((len(rows), count + len(tasks) + 1))
    for at, row in enumerate(rows):
        design[at, list(row.edits)] = 1.0
        design[at, count + tasks[row.task]] = 1.0
    design[:, -1] = 1.0
    rewards = np.array([row.reward for row in rows])
    centre = np.concatenate([start.mean, np.zeros(len(tasks)), [0.5]])
    spread = np.concatenate([np.full(count, EFFECT_SD), np.full(len(tasks), TASK_SD), [0.5]])
    noise = max(LEAST_NOISE, float(np.std(rewards)))
    first, _ = regress(design, rewards, centre, spread, noise**2)
    noise = max(LEAST_NOISE, float(np.sqrt(np.mean((rewards - design @ first) ** 2))))
    mean, covariance = regress(design, rewards, centre, spread, noise**2)
    return EffectPosterior(mean[:count], covariance[:count, :count])


def regress(design: Array, rewards: Array, centre: Array, spread: Array, noise: float) -> tuple[Array, Array]:
    """Return (mean, covariance) of all terms. `centre`, `spread`: of their priors; `noise`: variance of a reward."""
    precision = np.diag(spread**-2.0) + design.T @ design / noise
    covariance: Array = np.linalg.inv(precision).astype(np.float64)
    return centre + covariance @ (design.T @ (rewards - design @ centre)) / noise, covariance


def slots(texts: Mapping[str, str]) -> list[str]:
    return [slot for text in texts.values() for slot in SLOT.findall(text)]


def common(
    one: frozenset[str], other: frozenset[str], texts: Sequence[frozenset[str]], unweighted: float = 1.0
) -> float:
    """Return the share of weighted words that both texts have (Jaccard); `unweighted` if no word has a weight."""
    weights = _weights(one | other, texts)
    whole = sum(weights.values())
    return sum(weights[word] for word in one & other) / whole if whole else unweighted


def _weights(of: Iterable[str], texts: Sequence[frozenset[str]]) -> dict[str, float]:
    """Return the weights of words: a word that is in many texts weighs little."""
    return {word: log((len(texts) + 1) / (1 + sum(word in text for text in texts))) for word in of}


@dataclass(slots=True)
class EditProposal:
    """An edit, or whole texts, and the reflections that named it."""

    edit: Edit | None
    failure: str
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """The new texts of a proposal written from scratch."""
    votes: int = 1
    causes: list[str] = field(default_factory=list[str])
    """Rollouts that were shown to the reflections which named it."""

    @property
    def price(self) -> float:
        """The effect that it must have because it makes the text longer."""
        return 0.0 if self.edit is None else LENGTH * self.edit.length

    @property
    def lines(self) -> list[str]:
        if self.edit is None:
            return [line for text in self.texts.values() for line in text.split("\n")]
        return [self.edit.text] if self.edit.kind == "add" else [self.edit.line, self.edit.text]


class PooledEditEngine:
    def __init__(self) -> None:
        self._proposals: list[EditProposal] = []
        self._made: dict[str, frozenset[int]] = {}
        self._said: list[frozenset[str]] = []
        """Words of every edit that a reflection named."""
        self._failures: list[frozenset[str]] = []
        self._restarted = False
        self._barren = 0
        self._chosen: frozenset[int] = frozenset()
        self._believed: tuple[tuple[int, int], EffectPosterior] | None = None
        """The last posterior, with the numbers of trials and proposals that it is from."""
        self._source = np.random.default_rng(0)
        self._arms = ARMS[0]

    async def propose(self, pool: Pool, evidence: Evidence) -> Sequence[Candidate]:
        """Do one round; return the best prompt before it."""
        if not pool.trials:
            self._source = np.random.default_rng(evidence.random.getrandbits(32))
            self._made[pool.seed.id] = frozenset()
            self._arms = min(ARMS[1], max(ARMS[0], int(ROUND * evidence.budget.left / TASKS)))
            await evidence.run([(pool.seed, name) for name in self._tasks(evidence, FIRST)])
        best = self._best(pool)
        if self._barren >= BARREN or (len(pool.of(best.id)) >= SURE and (pool.mean(best.id) or 0.0) >= DONE):
            return []
        # These rollouts keep the workers busy while the model reflects.
        again = [(best, task) for task in self._tasks(evidence)] if self._proposals else []
        await asyncio.gather(self._reflect(best, pool, evidence), evidence.run(again))
        if not self._restarted and (pool.mean(pool.seed.id) or 0.0) < LOST:
            self._restarted = True
            await self._restart(pool, evidence)
        await self._experiment(pool, evidence)
        before, self._chosen = self._chosen, self._choice(pool)
        self._barren = 0 if self._chosen - before else self._barren + 1
        return [best]

    def finalists(self, pool: Pool) -> list[Candidate]:
        return [self._best(pool)]

    async def _reflect(self, best: Candidate, pool: Pool, evidence: Evidence) -> None:
        batches = [self._minibatch(best, pool, evidence) for _ in range(REFLECTIONS)]
        asked = [ask_hypotheses(best.texts, batch, HYPOTHESES) for batch in batches if batch]
        # An edit that names a customer cannot help others.
        keys = {task.key.lower() for task in evidence.tasks}
        found = [
            (hypothesis, [trial.rollout for trial in batch])
            for answer, batch in zip(await evidence.reflect_all(asked), batches, strict=False)
            if answer is not None
            for hypothesis in read_hypotheses(answer, best.texts)
            if not evidence.problem(Candidate(applied(best.texts, [hypothesis.edit])))
            if not words(hypothesis.edit.text) & keys
        ]
        self._said += [words(hypothesis.edit.text) for hypothesis, _ in found]
        self._failures += [words(hypothesis.failure) for hypothesis, _ in found]
        for hypothesis, causes in found:
            self._pool(hypothesis, causes)

    async def _restart(self, pool: Pool, evidence: Evidence) -> None:
        """Ask for texts that do not begin from a seed that fails nearly always."""
        batches = [self._minibatch(pool.seed, pool, evidence) for _ in range(RESTARTS)]
        asked = [ask_scratch(pool.seed.texts, slots(pool.seed.texts), batch) for batch in batches if batch]
        for answer, batch in zip(await evidence.reflect_all(asked), batches, strict=False):
            texts = None if answer is None else read_texts(answer, pool.seed.texts)
            if texts is not None and not evidence.problem(Candidate(texts)):
                causes = [trial.rollout for trial in batch]
                self._proposals.append(EditProposal(None, "written from scratch", texts, causes=causes))

    def _minibatch(self, best: Candidate, pool: Pool, evidence: Evidence) -> list[Trial]:
        """Return failures of the best prompt, or of similar ones if it has few, and better rollouts of their tasks."""
        mine = self._made[best.id]
        near = sorted(pool.trials, key=lambda trial: len(mine ^ self._made.get(trial.candidate, frozenset())))
        seen = [trial for trial in near if trial.reward is not None][: 4 * MINIBATCH]
        failed = [trial for trial in seen if (trial.reward or 0.0) < DONE]
        worse = evidence.random.sample(failed, min(MINIBATCH, len(failed)))
        better: list[Trial] = []
        for one in worse:
            same = [trial for trial in pool.trials if trial.task == one.task and trial.reward is not None]
            top = max(same, key=lambda trial: trial.reward or 0.0)
            better += [top] if (top.reward or 0.0) > (one.reward or 0.0) else []
        better = better[:CONTRASTS]
        return sorted([*worse, *better], key=lambda one: one.task)

    def _pool(self, hypothesis: Hypothesis, causes: Sequence[str]) -> None:
        known = next((one for one in self._proposals if self._same(one.edit, hypothesis.edit)), None)
        if known is None:
            self._proposals.append(EditProposal(hypothesis.edit, hypothesis.failure, causes=list(causes)))
        else:
            known.votes += 1
            known.causes += causes

    def _same(self, one: Edit | None, other: Edit) -> bool:
        if one is None or (one.resource, one.kind) != (other.resource, other.kind):
            return False
        if one.kind != "add" and one.line.strip() != other.line.strip():
            return False
        return common(words(one.text), words(other.text), self._said) >= SAME

    def _effects(self, pool: Pool) -> EffectPosterior:
        stand = (len(pool.trials), len(self._proposals))
        if self._believed is None or self._believed[0] != stand:
            trials = [trial for trial in pool.trials if trial.reward is not None and trial.candidate in self._made]
            rows = [DesignRow(trial.task, trial.reward or 0.0, self._made[trial.candidate]) for trial in trials]
            prior = [
                HOPE + VOTE * (one.votes - 1) + MENDED * self._mended(at, trials)
                for at, one in enumerate(self._proposals)
            ]
            self._believed = stand, estimate_effects(rows, prior)
        return self._believed[1]

    def _mended(self, at: int, trials: Sequence[Trial]) -> float:
        """Return how much rarer an edit's failure is with the edit than without it, in the graders' reasons."""
        failure = words(self._proposals[at].failure)
        weights = _weights(failure, self._failures)
        whole = sum(weights.values())
        if not whole:
            return 0.0
        named = {
            reason: sum(weights[word] for word in failure & words(reason)) / whole >= NAMED
            for reason in {trial.reason for trial in trials}
        }
        found: tuple[list[bool], list[bool]] = [], []
        for trial in trials:
            found[at in self._made[trial.candidate]].append(named[trial.reason])
        few = min(map(len, found))
        return (sum(found[0]) / len(found[0]) - sum(found[1]) / len(found[1])) * few / (few + DOUBT) if few else 0.0

    async def _experiment(self, pool: Pool, evidence: Evidence) -> None:
        """Run prompts with subsets of the edits, in turn on one and the other half of the drawn tasks."""
        if self._proposals:
            believed = self._effects(pool)
            arms = [self._candidate(pool, self._making(believed.draw(self._source))) for _ in range(self._arms)]
            tasks = self._tasks(evidence)
            await evidence.run([(arm, task) for at, arm in enumerate(arms) for task in tasks[at % 2 :: 2]])

    def _tasks(self, evidence: Evidence, most: int = 2 * TASKS) -> list[str]:
        names = [task.id for task in evidence.tasks]
        return evidence.random.sample(names, min(most, len(names)))

    def _making(self, worth: np.ndarray) -> frozenset[int]:
        """Return the edits that are worth making with these effects; of those that exclude each other the best."""
        chosen: list[int] = []
        for at in sorted(range(len(self._proposals)), key=lambda at: -worth[at]):
            if worth[at] > self._proposals[at].price and not any(self._exclude(at, one) for one in chosen):
                chosen.append(at)
        return frozenset(chosen)

    def _exclude(self, one: int, other: int) -> bool:
        """True if both rewrite everything, change the same line, or add a line for the same failure."""
        a, b = self._proposals[one], self._proposals[other]
        if a.edit is None or b.edit is None:
            return a.edit is None and b.edit is None
        both = a.edit.kind == b.edit.kind == "add" and a.edit.resource == b.edit.resource
        return exclude(a.edit, b.edit) or (both and a.failure == b.failure)

    def _choice(self, pool: Pool) -> frozenset[int]:
        return self._making(self._effects(pool).mean)

    def _best(self, pool: Pool) -> Candidate:
        return self._candidate(pool, self._choice(pool) if self._proposals else frozenset())

    def _candidate(self, pool: Pool, making: frozenset[int]) -> Candidate:
        chosen = [self._proposals[at] for at in sorted(making)]
        claim = "; ".join(dict.fromkeys(one.failure for one in chosen if one.failure))
        causes = tuple(dict.fromkeys(cause for one in chosen for cause in one.causes))
        start = next((one.texts for one in chosen if one.edit is None), pool.seed.texts)
        texts = applied(start, (one.edit for one in chosen if one.edit))
        made = Candidate(texts, pool.seed.id, claim, causes, _line_causes(chosen))
        self._made.setdefault(made.id, making)
        return pool.candidates.get(made.id, made)


def _line_causes(chosen: Iterable[EditProposal]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for one in chosen:
        for line in filter(None, map(str.strip, one.lines)):
            found[line] = tuple(dict.fromkeys((*found.get(line, ()), *one.causes)))
    return found
