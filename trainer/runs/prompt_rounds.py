"""Prompts of a run that trains weights too: the rounds that look for them between its steps (Fast-Slow Training,
arXiv:2605.12484), the front of the best, and at the end the cells that compare old and new.

A round has `prompts.rollouts` rollouts, all with the newest weights, and two parts:

1. An engine (`trainer.apo.protocol`) begins from the leader of the front and proposes candidates, on one half of the
   tasks. It is a new one in each round: its results hold for the weights of its round only.
2. The front and the best candidates run on the other half, each on the same tasks; the best of them are the new front
   (`PromptFront`). `CHOICE` of the rollouts are reserved for this.

Everything follows from the front, the number of the round and the rollouts on the tape, so an interrupted round is
repeated and comes to the same front without running anything twice.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Final, Literal, NamedTuple, Self, cast

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig, ApoRolloutSettings, ApoRunSettings
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory
from penstock.trainer.apo.protocol import (
    AgentTask,
    Candidate,
    Evidence,
    Laboratory,
    Pool,
    PromptEngine,
    SearchBudget,
    Trial,
    TrialSpec,
)
from penstock.trainer.apo.report import t_quantile
from penstock.trainer.apo.search import FINALISTS, best, run_engine
from penstock.trainer.config import PromptSettings, TrainConfig
from penstock.trainer.data.collector import Variant

FRONT: Final = 3
"""Most prompts that the rollouts of a group are spread over, the one that the run began with included."""
CHOICE: Final = 0.4
LaboratoryFactory = Callable[[str], "PinnedLaboratory"]
"""Returns the laboratory with the newest weights, for rollouts of a label."""


class PromptRounds:
    """The rounds of one run. `front` is their result."""

    def __init__(
        self, prompts: PromptSettings, settings: ApoConfig, tasks: Sequence[AgentTask], front: PromptFront
    ) -> None:
        self.front = front
        self._prompts, self._settings, self._tasks = prompts, settings, tasks

    async def run_round(self, at: LaboratoryFactory) -> None:
        """Hold the next round, with the laboratory of `at`; replace the front."""
        number = self.front.rounds + 1
        draw = random.Random(f"round-{self._settings.run.seed}-{number}")
        shuffled = draw.sample(self._tasks, len(self._tasks))
        half = len(shuffled) // 2
        seen, unseen = (shuffled[:half], shuffled[half:]) if half else (shuffled, shuffled)
        kept = round(CHOICE * self._prompts.rollouts)
        pool, spent = await self._search(number, seen, self._prompts.rollouts - kept, at(f"round-{number}"))
        finalists = [FrontMember(one, {}) for one in self._finalists(*pool)]
        members = await self._compared(finalists, unseen, kept, at(f"choice-{number}"))
        self.front = PromptFront(self.front.seed, members, number, spent)

    async def compare_front(self, at: LaboratoryFactory) -> None:
        """Compare the front once more, with the last weights, without new candidates."""
        kept = round(CHOICE * self._prompts.rollouts)
        draw = random.Random(f"settle-{self._settings.run.seed}")
        tasks = draw.sample(self._tasks, len(self._tasks))
        members = await self._compared([], tasks, kept, at("choice-last"))
        self.front = PromptFront(self.front.seed, members, self.front.rounds, self.front.spent)

    # -- the search ----------------------------------------------------------------------------------------------------

    async def _search(
        self, number: int, tasks: Sequence[AgentTask], rollouts: int, laboratory: Laboratory
    ) -> tuple[tuple[PromptEngine, Pool, Laboratory], dict[str, float]]:
        """Return (an engine after it has used the rollouts, with its pool; the use of reflections)."""
        wanted, used = self._settings.budget, self.front.spent
        budget = SearchBudget(rollouts, wanted.reflections, wanted.tokens, wanted.money)
        budget.used_reflections = int(used.get("reflections", 0))
        budget.used_tokens, budget.used_money = int(used.get("tokens", 0)), used.get("money", 0.0)
        engine, pool = make_engine(self._settings.engine), Pool(self.front.leader.candidate)
        evidence = Evidence(laboratory, pool, tasks, budget, self._settings.run.seed * 10_000 + number)
        _ = await run_engine(engine, pool, evidence)
        spent = {"reflections": float(budget.used_reflections), "tokens": float(budget.used_tokens)}
        return (engine, pool, laboratory), {**spent, "money": budget.used_money}

    def _finalists(self, engine: PromptEngine, pool: Pool, laboratory: Laboratory) -> list[Candidate]:
        """Return the best candidates of a search that are not in the front yet."""
        named = cast(Callable[[Pool], Sequence[Candidate]] | None, getattr(engine, "finalists", None))
        found = best(pool) if named is None else named(pool)
        known = {one.candidate.id for one in self.front.members}
        return [one for one in found if one.id not in known and not laboratory.problem(one)][:FINALISTS]

    # -- the comparison ------------------------------------------------------------------------------------------------

    async def _compared(
        self, finalists: Sequence[FrontMember], tasks: Sequence[AgentTask], rollouts: int, laboratory: PinnedLaboratory
    ) -> list[FrontMember]:
        """Return the new front: the best of the old front and these finalists."""
        contestants = [*self.front.members, *finalists]
        candidates = [one.candidate for one in contestants]
        each = max(1, rollouts // len(contestants))
        orders = [
            TrialSpec(one.id, tasks[at % len(tasks)].id, at // len(tasks)) for at in range(each) for one in candidates
        ]
        trials = await laboratory.run(candidates, orders)
        found = [
            FrontMember(one, await laboratory.versions(one), _mean([it for it in trials if it.candidate == one.id]))
            for one in candidates
        ]
        return choose_front(self.front.seed, found, FRONT)


def _mean(trials: Sequence[Trial]) -> float | None:
    """Return the mean reward; None without one."""
    rewards = [trial.reward for trial in trials if trial.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


# The front of a run that trains prompts and weights together: the few prompts of its rollouts. Pure.
#
# The prompt that the run began with is always a member. The *leader* has the highest mean reward of the last
# comparison; it is evaluated, and released at the end.


@dataclass(frozen=True, slots=True)
class FrontMember:
    """A prompt of the front: the texts of all optimised resources."""

    candidate: Candidate
    """The texts, and their origin."""
    versions: Mapping[str, str]
    """Versions of the texts, by resource."""
    mean: float | None = None
    """Mean reward, between 0 and 1, at the choice of the front; None before."""

    @property
    def variant(self) -> Variant:
        return Variant(self.candidate.id, self.versions)


@dataclass(frozen=True, slots=True)
class PromptFront:
    """All prompts of the front, and the state of the rounds."""

    seed: str
    """Id of the prompt that the run began with."""
    members: Sequence[FrontMember]
    """The prompts, best first; the seed is one of them."""
    rounds: int = 0
    """Number of rounds held."""
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """Use of the run's budget by reflections: `reflections`, `tokens`, `money`."""

    @property
    def leader(self) -> FrontMember:
        """The first member, which is the best."""
        return self.members[0]

    @property
    def first(self) -> FrontMember:
        """The prompt that the run began with."""
        return next(one for one in self.members if one.candidate.id == self.seed)

    @property
    def labels(self) -> Mapping[str, str]:
        """Names of the prompts in metrics, by id: `seed`, and the others `1`, `2` ... by their rank."""
        others = [one.candidate.id for one in self.members if one.candidate.id != self.seed]
        return {self.seed: "seed"} | {name: str(rank) for rank, name in enumerate(others, 1)}

    def figures(self, rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return metrics: the means of a step's rewards, which are given by id."""
        found = {"front/size": float(len(self.members))}
        for name, place in self.labels.items():
            if mine := rewards.get(name):
                found[f"front/{place}"] = sum(mine) / len(mine)
        return found

    def state(self) -> dict[str, Any]:
        """Return the front for a checkpoint."""
        return {
            "seed": self.seed,
            "rounds": self.rounds,
            "spent": dict(self.spent),
            "members": list(map(_kept, self.members)),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptFront:
        """Return the front of a checkpoint."""
        return cls(state["seed"], list(map(_read, state["members"])), state["rounds"], state["spent"])


def _kept(one: FrontMember) -> dict[str, Any]:
    about = one.candidate
    made = {"texts": dict(about.texts), "parent": about.parent, "claim": about.claim, "causes": list(about.causes)}
    return {**made, "versions": dict(one.versions), "mean": one.mean}


def _read(kept: Mapping[str, Any]) -> FrontMember:
    about = Candidate(kept["texts"], kept["parent"], kept["claim"], tuple(kept["causes"]))
    return FrontMember(about, kept["versions"], kept["mean"])


def choose_front(seed: str, contestants: Sequence[FrontMember], most: int) -> list[FrontMember]:
    """Return at most `most` contestants, best first; of equal ones the shorter first. The seed is always among them;
    prompts that are worse than the seed or have no mean are not."""
    ranked = sorted(contestants, key=lambda one: (-_front_mean(one), one.candidate.length, one.candidate.id))
    first = next(one for one in ranked if one.candidate.id == seed)
    others = [one for one in ranked if one is not first and one.mean is not None and one.mean >= _front_mean(first)]
    kept = {one.candidate.id for one in (first, *others[: most - 1])}
    return [one for one in ranked if one.candidate.id in kept]


def _front_mean(one: FrontMember) -> float:
    return float("-inf") if one.mean is None else one.mean


# The laboratory of `trainer.apo` in a run that trains weights too: its rollouts are pinned to weights as well.
#
# Each set of trials has a label, such as `round-3`, which is in its rollout ids: the same prompt is tried again with
# other weights, and trials that are repeated after a crash find their rollouts on the tape.


class PinnedLaboratory(GatewayLaboratory):
    """The laboratory of one run. Call `with_pins` before use."""

    _label = ""
    _pins: Mapping[str, str] = {}
    _step = 0

    def with_pins(self, label: str, step: int, pins: Mapping[str, str]) -> Self:
        """Return a copy for rollouts of this label and step, which get these versions besides those of the texts."""
        made = copy.copy(self)
        made._label, made._step, made._pins = label, step, pins
        return made

    def _spec(self, order: TrialSpec, versions: Mapping[str, str], mode: Mode) -> RolloutSpec:
        spec = super()._spec(order, {**versions, **self._pins}, mode)
        run = self._config.run.name
        names = {
            "id": f"{run}.{self._label}.{order.candidate}.{order.task}.{order.number}",
            "group": f"{run}.{self._label}.{order.task}",
            "metadata": {**(spec.metadata or {}), "penstock.step": self._step},
        }
        return spec.model_copy(update=names)


def settings_of(prompts: ApoConfig, config: TrainConfig) -> ApoConfig:
    """Return the settings of `--prompts` for a run: name, seed and time limit of rollouts are those of the run. Raises
    `ConfigError`."""
    if config.model.name in (*prompts.texts.prompts, *prompts.texts.tools):
        raise ConfigError(f"model.name: {config.model.name!r} is the name of a text too; give one of them another name")
    run = ApoRunSettings(name=config.run.name, directory=config.run.directory, seed=config.run.seed)
    rollouts = ApoRolloutSettings(attempt_timeout=config.rollouts.timeout)
    return prompts.model_copy(update={"run": run, "rollouts": rollouts})


async def versions_of(client: Client, names: Mapping[str, str]) -> dict[str, Resource]:
    """Return these versions of resources. Raises `ConfigError` if one does not exist."""
    found: dict[str, Resource] = {}
    for name, version in names.items():
        try:
            versions = (await client.resource(name)).versions
        except ClientError as error:
            raise ConfigError(f"{name!r}, which the checkpoint names: {error}") from None
        one = next((one for one in versions if one.version == version), None)
        if one is None:
            raise ConfigError(f"the checkpoint names {name}@{version}, which the gateway does not have")
        found[name] = one
    return found


# The four cells of a pair: old and new prompt with old and new weights, on held-out tasks. Pure.
#
# A cell is a mean over tasks of the mean over a task's rollouts, because rollouts of one task are alike. The means,
# and their differences on the same tasks, have intervals of Student's t over tasks: they hold for other tasks of the
# same kind.

Age = Literal["old", "new"]
Cell = tuple[Age, Age]
"""(prompt, weights)."""
CELLS: Final[Sequence[Cell]] = (("old", "old"), ("new", "old"), ("old", "new"), ("new", "new"))
TITLES: Final[Mapping[Cell, str]] = {
    ("old", "old"): "old prompt, old weights",
    ("new", "old"): "new prompt, old weights",
    ("old", "new"): "old prompt, new weights",
    ("new", "new"): "new prompt, new weights",
}
Rewards = Mapping[str, Sequence[float]]
"""Rewards by task."""


class TaskMean(NamedTuple):
    """A mean over tasks with its interval of 95 %; with one task the interval has no width."""

    value: float
    low: float
    high: float
    tasks: int


def task_mean(values: Sequence[float]) -> TaskMean:
    """Return the mean of values, one for each task; at least one."""
    centre = fmean(values)
    spread = t_quantile(0.975, len(values) - 1) * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return TaskMean(centre, centre - spread, centre + spread, len(values))


def by_task(rewards: Rewards) -> dict[str, float]:
    """Return the mean reward of each task that has one."""
    return {task: fmean(values) for task, values in rewards.items() if values}


def task_difference(one: Rewards, other: Rewards) -> TaskMean | None:
    """Return the mean of `one` less `other`, on tasks that both have; None without any."""
    mine, theirs = by_task(one), by_task(other)
    pairs = [mine[task] - theirs[task] for task in mine if task in theirs]
    return task_mean(pairs) if pairs else None


def cell_lines(cells: Mapping[Cell, Rewards]) -> list[str]:
    """Return a line for each cell that has rewards: its mean and its difference from the first cell, with their
    intervals."""
    base, found = cells.get(CELLS[0], {}), list[str]()
    for cell in CELLS:
        values = list(by_task(cells.get(cell, {})).values())
        if not values:
            continue
        told = f"{TITLES[cell]}: {format_mean(task_mean(values))}"
        apart = None if cell == CELLS[0] else task_difference(cells[cell], base)
        found.append(told if apart is None else f"{told}, {format_mean(apart, '+')} against both old")
    return found


def format_mean(one: TaskMean, sign: str = "") -> str:
    """Return a mean as text: 0.512 [0.480, 0.544]."""
    return f"{one.value:{sign}.3f} [{one.low:{sign}.3f}, {one.high:{sign}.3f}]"


def cell_metrics(cells: Mapping[Cell, Rewards]) -> dict[str, float]:
    """Return the cells as metrics: `cells/PROMPT_WEIGHTS`, and its `_low` and `_high`."""
    found: dict[str, float] = {}
    for cell, rewards in cells.items():
        if values := list(by_task(rewards).values()):
            one, name = task_mean(values), f"cells/{cell[0]}_{cell[1]}"
            found |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
    return found
