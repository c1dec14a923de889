"""The protocol of engines, on one page.

An engine is a function or an object with one method:

    async def propose(pool: Pool, evidence: Evidence) -> Sequence[Candidate]

It is called repeatedly until it returns nothing, or the budget of the search is used up. It sees the tasks of the
train split only. It may run rollouts (`evidence.run`), let a model reflect (`evidence.reflect`), and draw random
numbers (`evidence.random`). The returned candidates join the pool: the runner runs each new one on `SCREEN` tasks
beside its parent, so that an engine that only writes texts still sees their rewards. When an engine has ended, the
runner takes the finalists: those that the engine names, if it has a method `finalists(pool)`, else the best of the
pool.

The runner keeps everything else: budgets, splits, names of rollouts, the race of the finalists, the audit, the resume.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.gateway.model.base import Mode
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.budget import BudgetExhausted, SearchBudget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.reflection import without_surrogates
from penstock.trainer.apo.trials import Pool, Trial, TrialSpec

T = TypeVar("T")


class AgentTask(NamedTuple):
    """A task with its id and key."""

    id: str
    """Id within the run."""
    input: Any
    """Input of its rollouts."""
    key: str
    """Tasks of one key belong together: they are in one split."""


class Reflection(NamedTuple):
    """An answer of the reflecting model."""

    text: str
    tokens: int = 0
    """Tokens in and out, hidden reasoning counted."""
    money: float = 0.0


class Laboratory(Protocol):
    """Runs candidates: with agents behind a gateway, or in a simulation."""

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        """Run rollouts of a mode, as many at once as there are workers; return the results in the order of the
        orders."""
        ...

    async def reflect(self, prompt: str, number: int) -> Reflection:
        """Ask the reflecting model; `number`: how many times the same was asked before."""
        ...

    def most(self, prompt: str) -> tuple[int, float]:
        """Return the most tokens, and the most money, that a question can use."""
        ...

    def problem(self, candidate: Candidate) -> str:
        """Return why a candidate cannot be run, such as a slot that it has lost; empty when it can."""
        ...


class Evidence:
    """The view and the tools of an engine: tasks, rollouts, reflections, random numbers."""

    def __init__(
        self, laboratory: Laboratory, pool: Pool, tasks: Sequence[AgentTask], budget: SearchBudget, seed: int
    ) -> None:
        self.tasks = tasks
        """Tasks of the train split."""
        self.random = random.Random(f"engine-{seed}")
        """Random numbers, which are the same when a run is resumed."""
        self.budget = budget
        """Budget of the search."""
        self._laboratory, self._pool = laboratory, pool
        self._asked: dict[str, int] = {}
        self._under_way: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._taking, self._given_back, self._reflecting = asyncio.Lock(), asyncio.Event(), 0

    async def run(self, pairs: Sequence[tuple[Candidate, str]]) -> list[Trial]:
        """Run a rollout for each pair of a candidate and a task id: as many as the budget has left. Pairs of candidates
        that cannot be run are left out; `problem` says why. Raises `BudgetExhausted`, and `ConfigError` for a task
        that is not of the train split."""
        known = {task.id for task in self.tasks}
        for _, task in pairs:
            if task not in known:
                raise ConfigError(f"engine: it wants to run task {task!r}, which is not in evidence.tasks")
        possible = [(candidate, task) for candidate, task in pairs if not self.problem(candidate)]
        self._check_open()
        possible = possible[: self.budget.take_rollouts(len(possible))]
        candidates = {candidate.id: self._pool.add(candidate) for candidate, _ in possible}
        orders = [self._pool.next_trial(candidate.id, task) for candidate, task in possible]
        return await self._begin(self._run(list(candidates.values()), orders))

    async def _run(self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec]) -> list[Trial]:
        trials = await self._laboratory.run(candidates, orders)
        self._pool.keep(trials)
        return trials

    def problem(self, candidate: Candidate) -> str:
        """Return why a candidate cannot be run, such as a slot that it has lost; empty when it can."""
        wanted = self._pool.seed.texts.keys()
        if candidate.texts.keys() != wanted:
            return f"it has texts for {', '.join(sorted(candidate.texts))}, and needs {', '.join(sorted(wanted))}"
        broken = [name for name, text in candidate.texts.items() if text != without_surrogates(text)]
        if broken:
            return f"{broken[0]}: it has half a character, which cannot be sent"
        return self._laboratory.problem(candidate)

    async def reflect(self, prompt: str) -> str:
        """Return the reflecting model's answer. Raises `BudgetExhausted`."""
        self._check_open()
        prompt = without_surrogates(prompt)
        tokens, money = await self._take_reflection(prompt)
        number = self._asked.get(prompt, 0)
        self._asked[prompt] = number + 1
        return await self._begin(self._reflect(prompt, number, tokens, money))

    async def _reflect(self, prompt: str, number: int, tokens: int, money: float) -> str:
        try:
            found = await self._laboratory.reflect(prompt, number)
            self.budget.give_back(tokens - found.tokens, money - found.money)
        finally:
            self._reflecting -= 1
            self._given_back.set()
        return without_surrogates(found.text)

    async def close(self) -> None:
        """Refuse new work, and wait for work that the engine began and no longer awaits, as when one of several
        reflections has raised `BudgetExhausted`: so the pool is the same however long each took. Raises the errors of
        that work.
        """
        self._closed = True
        _ = await asyncio.gather(*self._under_way)

    def _check_open(self) -> None:
        if self._closed:
            raise BudgetExhausted("the search has ended")

    async def _begin(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work in a task of its own, which goes on when the engine no longer awaits it."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _take_reflection(self, prompt: str) -> tuple[int, float]:
        """Take the most that a question can use. If that is not left, wait for other questions to give back, one after
        the other in the order of asking, so that the speed of answers decides nothing."""
        most = self._laboratory.most(prompt)
        async with self._taking:
            while True:
                self._check_open()
                self._given_back.clear()
                try:
                    self.budget.take_reflection(*most)
                except BudgetExhausted:
                    if not self._reflecting:
                        raise
                    await self._given_back.wait()
                else:
                    self._reflecting += 1
                    return most


class PromptEngine(Protocol):
    """An object that proposes candidates."""

    def propose(self, pool: Pool, evidence: Evidence, /) -> Awaitable[Sequence[Candidate]]:
        """Return candidates that may be better than those of the pool; none to end the search."""
        ...
