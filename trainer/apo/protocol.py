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
Budgets are never exceeded: the highest possible cost is taken beforehand, and nothing begins that is not covered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from penstock.gateway.model.base import Mode
from penstock.gateway.model.toml import ConfigError

K = TypeVar("K")
T = TypeVar("T")
ROUNDING: Final = 1e-9
"""Tolerance for sums of money, as a share of the budget, because they are rounded."""


def without_surrogates(text: str) -> str:
    """Return the text without halves of characters (lone surrogates), which JSON can spell and nothing can send."""
    return text.encode(errors="ignore").decode()


async def ignore(*_: object) -> None:
    """Do nothing: for callbacks that are not set."""


def means(rewards: Iterable[tuple[K, float | None]]) -> dict[K, float]:
    """Return the mean reward by key; keys without any reward are left out."""
    found: defaultdict[K, list[float]] = defaultdict(list)
    for key, reward in rewards:
        if reward is not None:
            found[key].append(reward)
    return {key: sum(given) / len(given) for key, given in found.items()}


@dataclass(frozen=True)
class Candidate:
    """A text for each optimised resource."""

    texts: Mapping[str, str]
    parent: str | None = None
    """Id of the candidate that it was made from; None for the seed."""
    claim: str = ""
    """The failure that it should fix, or its origin; for a person."""
    causes: tuple[str, ...] = field(default=())
    line_causes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Rollouts that led to a new or removed line, for engines that know; `causes` holds for all other lines."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "claim", without_surrogates(self.claim))

    @cached_property
    def id(self) -> str:
        """12 hex digits of SHA-256 of the texts: the same texts are the same candidate."""
        return hashlib.sha256(json.dumps(dict(self.texts), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def length(self) -> int:
        return sum(map(len, self.texts.values()))


class TrialSpec(NamedTuple):
    candidate: str
    task: str
    number: int
    """Number among the rollouts of this candidate and task, from 0."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A rollout that has ended; its first fields are those of its `TrialSpec`."""

    candidate: str
    task: str
    number: int
    reward: float | None
    """Between 0 and 1; None without one: the trial is then left out, not counted as 0."""
    reason: str = ""
    transcript: str = ""
    steps: int = 0
    rollout: str = ""


class Pool:
    """Candidates and their trials, oldest first. The first candidate is the seed."""

    def __init__(self, seed: Candidate) -> None:
        self.seed = seed
        self.candidates: dict[str, Candidate] = {}
        self.trials: list[Trial] = []
        self._by_candidate: defaultdict[str, list[Trial]] = defaultdict(list)
        self._ordered: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.add(seed)

    def add(self, candidate: Candidate) -> Candidate:
        """Add a candidate and return it; if one has the same texts, return that one."""
        return self.candidates.setdefault(candidate.id, candidate)

    def next_trial(self, candidate: str, task: str) -> TrialSpec:
        self._ordered[candidate, task] += 1
        return TrialSpec(candidate, task, self._ordered[candidate, task] - 1)

    def keep(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self.trials.append(trial)
            self._by_candidate[trial.candidate].append(trial)

    def of(self, candidate: str) -> Sequence[Trial]:
        return [trial for trial in self._by_candidate[candidate] if trial.reward is not None]

    def mean(self, candidate: str) -> float | None:
        return means((candidate, trial.reward) for trial in self._by_candidate[candidate]).get(candidate)


class BudgetExhausted(Exception):
    """A budget is used up; the message says which."""


@dataclass(slots=True)
class SearchBudget:
    """The limits of a run, and how much of them is used. None is no limit."""

    rollouts: int
    reflections: int | None = None
    tokens: int | None = None
    """Limit of tokens of the reflecting model, in and out, hidden reasoning counted."""
    money: float | None = None
    reserved: int = 0
    """Rollouts of the limit that are reserved for later."""
    used_rollouts: int = 0
    used_reflections: int = 0
    used_tokens: int = 0
    used_money: float = 0.0

    @property
    def left(self) -> int:
        """Rollouts that are left, without the reserved ones."""
        return max(0, self.rollouts - self.reserved - self.used_rollouts)

    def take_rollouts(self, wanted: int) -> int:
        """Take rollouts, or as many as are left; return the number. Raises `BudgetExhausted` when none is left."""
        if wanted and not self.left:
            but = f", but for {self.reserved:,} of the race" if self.reserved else ""
            raise BudgetExhausted(f"all {self.rollouts:,} rollouts (budget.rollouts) are used{but}")
        given = min(wanted, self.left)
        self.used_rollouts += given
        return given

    def take_reflection(self, most_tokens: int, most_money: float) -> None:
        """Take a reflection, and the most that it can use. Raises `BudgetExhausted` when not all is left."""
        for name, used, wanted, most in (
            ("reflections", self.used_reflections, 1, self.reflections),
            ("tokens", self.used_tokens, most_tokens, self.tokens),
            ("money", self.used_money, most_money, self.money),
        ):
            if most is not None and used + wanted > most * (1 + ROUNDING):
                said = f"budget.{name}: {round(used, 6):,} of {most:,} are used"
                raise BudgetExhausted(f"{said}, and a reflection may need {round(wanted, 6):,}")
        self.used_reflections += 1
        self.used_tokens += most_tokens
        self.used_money += most_money

    def give_back(self, tokens: int, money: float) -> None:
        self.used_tokens -= tokens
        self.used_money -= money


class AgentTask(NamedTuple):
    id: str
    input: Any
    key: str
    """Tasks of one key belong together: they are in one split."""


class Reflection(NamedTuple):
    text: str
    tokens: int = 0
    money: float = 0.0


class Laboratory(Protocol):
    """Runs candidates: with agents behind a gateway, or in a simulation."""

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        """Run rollouts, as many at once as there are workers; return the results in the order of the orders."""
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
        self._laboratory, self._pool = laboratory, pool
        self._asked: defaultdict[str, int] = defaultdict(int)
        self._under_way: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._taking, self._given_back, self._reflecting = asyncio.Lock(), asyncio.Event(), 0

    async def run(self, pairs: Sequence[tuple[Candidate, str]]) -> list[Trial]:
        """Run a rollout for each pair of a candidate that has no `problem` and a task id: as many as the budget has
        left. Raises `BudgetExhausted`, and `ConfigError` for a task that is not of the train split."""
        known = {task.id for task in self.tasks}
        for _, task in pairs:
            if task not in known:
                raise ConfigError(f"engine: it wants to run task {task!r}, which is not in evidence.tasks")
        possible = [(candidate, task) for candidate, task in pairs if not self.problem(candidate)]
        self._check_open()
        possible = possible[: self.budget.take_rollouts(len(possible))]
        candidates = {candidate.id: self._pool.add(candidate) for candidate, _ in possible}
        orders = [self._pool.next_trial(candidate.id, task) for candidate, task in possible]

        async def work() -> list[Trial]:
            trials = await self._laboratory.run(list(candidates.values()), orders)
            self._pool.keep(trials)
            return trials

        return await self._begin(work())

    async def run_all(self, pairs: Sequence[tuple[Candidate, str]]) -> list[Trial]:
        """`run`, but raise `BudgetExhausted` if the budget does not cover all: a part would compare candidates on
        different tasks, and the rest of the budget goes into the race."""
        left, whole = self.budget.left, self.budget.rollouts
        if len(pairs) > left:
            raise BudgetExhausted(
                f"{left:,} of {whole:,} rollouts are left for the search, and its next step takes {len(pairs):,}"
            )
        return await self.run(pairs)

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
        number = self._asked[prompt]
        self._asked[prompt] += 1

        async def work() -> str:
            try:
                found = await self._laboratory.reflect(prompt, number)
                self.budget.give_back(tokens - found.tokens, money - found.money)
            finally:
                self._reflecting -= 1
                self._given_back.set()
            return without_surrogates(found.text)

        return await self._begin(work())

    async def reflect_all(self, prompts: Sequence[str]) -> list[str | None]:
        """Return the answers, in the order of the questions; None for the last ones, which the budget did not allow. No
        question is under way when it returns or raises. Raises `BudgetExhausted` when there is no answer at all."""
        answers = await asyncio.gather(*map(self.reflect, prompts), return_exceptions=True)
        failed = [one for one in answers if isinstance(one, BaseException)]
        for error in failed:
            if not isinstance(error, BudgetExhausted) or len(failed) == len(answers):
                raise error
        return [one if isinstance(one, str) else None for one in answers]

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
    def propose(self, pool: Pool, evidence: Evidence, /) -> Awaitable[Sequence[Candidate]]:
        """Return candidates that may be better than those of the pool; none to end the search."""
        ...


def hold_out(evidence: Evidence, count: int) -> tuple[list[str], list[str]]:
    """Return two parts of the train split, as task ids: tasks to learn from, and held-out ones to choose by, about
    `count` and at most half. Tasks of one key stay together, unless all have the same key. The order is random."""
    half = len(evidence.tasks) // 2
    most = min(count, half)
    keys = sorted({task.key for task in evidence.tasks})
    evidence.random.shuffle(keys)
    choose: list[str] = []
    for key in keys:
        mine = [task.id for task in evidence.tasks if task.key == key]
        if len(choose) < most and len(choose) + len(mine) <= half:
            choose += mine
    choose = choose or [task.id for task in evidence.tasks[:most]]
    learn = [task.id for task in evidence.tasks if task.id not in set(choose)]
    evidence.random.shuffle(learn)
    return learn, choose
