"""Scripted worlds with a known right verdict, for `bench.apo.advising`.

Each kind has a right verdict, because its world is made so (`the grader`: is too noisy):

    headroom, broken, long   rules are missing, or spoiled, in the prompt (`bench.apo.worlds`)       prompts
    none                     the prompt has every rule                                               nothing
    noise                    as headroom; most rewards are drawn by a coin                           the grader
    capped                   the agent follows a rule as often without an instruction as with it:
                             no prompt changes that                                                  weights
    tools                    the prompt has every rule; a tool that most tasks need is called with
                             wrong arguments, because its description misleads                       tool texts

Three more kinds are hard, and their verdict is a matter of degree: a grader that is noisy, but not so noisy that a
race could not decide (`some noise`); an agent that follows only a part of its instructions (`half capped`); tools that
fail now and then where the prompt lacks rules (`some tools`). The right verdict is named, and they are counted apart.

In every world a few tool calls fail without doing harm.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from bench.apo.laboratory import NAME
from bench.apo.reflector import FORGETS, Reflector
from bench.apo.worlds import VAGUE, World, broken, right, world
from penstock.gateway.model.base import Mode
from penstock.trainer.apo.advice.decision import Verdict
from penstock.trainer.apo.advice.estimates import Observation
from penstock.trainer.apo.protocol import AgentTask, Candidate, Reflection, Trial, TrialSpec

Kind = Literal["headroom", "broken", "long", "none", "noise", "capped", "tools"]
Hard = Literal["some noise", "half capped", "some tools"]
RIGHT: Final[dict[str, Verdict]] = {
    "headroom": "prompts", "broken": "prompts", "long": "prompts", "none": "nothing",
    "noise": "the grader is too noisy", "capped": "weights", "tools": "tool texts",
}  # fmt: skip
HARD: Final[dict[str, Verdict]] = {"some noise": "prompts", "half capped": "prompts", "some tools": "prompts"}
HARMLESS: Final = 0.08
"""Probability of a tool call that fails and does no harm."""
TOKENS: Final = 900
"""Tokens of a rollout."""


@dataclass(frozen=True)
class AdviceWorld:
    """A world with its grader and its tools."""

    world: World
    """Its rules, tasks and prompt."""
    noise: float = 0.0
    """Share of the rewards that are drawn at random."""
    misuse: float = 0.0
    """Probability that a call of the tool fails, if a task needs it."""
    needy: frozenset[str] = frozenset()
    """Tasks that need the tool."""
    judged_again: bool = True
    """True if the grader can be asked again."""

    def observe(self, text: str, task: AgentTask, draw: random.Random, prompt: str) -> Observation:
        """Run a rollout; return its observation."""
        chances = self.world.reading(text).chances
        called = self.world.calls[task.id]
        failed = task.id in self.needy and draw.random() < self.misuse
        missed = tuple(one for one in called if failed or draw.random() > chances[one])
        reward, reason = self.judge(task.id, missed, draw)
        misused = int(failed) + (draw.random() < HARMLESS)
        return Observation(prompt, task.id, reward, reason, json.dumps(missed), (), 1, misused, 0, TOKENS)

    def judge(self, task: str, missed: Sequence[int], draw: random.Random) -> tuple[float, str]:
        """Return (reward, reason) of a judgement."""
        called = self.world.calls[task]
        share = 1 - len(missed) / len(called)
        reward = share if self.world.passing is None else float(share >= self.world.passing)
        if draw.random() < self.noise:
            reward = draw.choice((0.0, 1.0))
            missed = draw.sample(range(len(self.world.rules)), 1)
        told = draw.sample(list(missed), min(2, len(missed)))
        return reward, "; ".join(broken(self.world.rules[one].theme) for one in told) or "nothing is missing"


def advice_world(kind: str, seed: int, judged_again: bool = True) -> AdviceWorld:
    """Return the world of a kind and a seed."""
    draw = random.Random(f"advice-{kind}-{seed}")
    if kind in ("noise", "some noise"):
        noise = draw.uniform(0.88, 0.98) if kind == "noise" else draw.uniform(0.3, 0.5)
        return AdviceWorld(world("headroom", seed), noise, judged_again=judged_again)
    if kind in ("capped", "half capped"):
        return AdviceWorld(_capped(world("headroom", seed), kind == "capped", draw), judged_again=judged_again)
    if kind in ("tools", "some tools"):
        base = world("none" if kind == "tools" else "headroom", seed)
        share = draw.uniform(0.6, 0.95)
        needy = frozenset(task.id for task in base.tasks if draw.random() < share)
        misuse = draw.uniform(0.45, 0.85) if kind == "tools" else draw.uniform(0.05, 0.15)
        return AdviceWorld(base, misuse=misuse, needy=needy, judged_again=judged_again)
    families = {"headroom", "broken", "long", "none"}
    if kind not in families:
        raise ValueError(f"kind: {kind!r} is none of {', '.join([*RIGHT, *HARD])}")
    return AdviceWorld(world(kind, seed), judged_again=judged_again)  # pyright: ignore[reportArgumentType]


def _capped(base: World, wholly: bool, draw: random.Random) -> World:
    """Return a world whose agent gains nothing, or only half of the usual, from instructions."""
    rules = tuple(
        replace(rule, default=(cap := draw.uniform(0.35, 0.8)), followed=cap)
        if wholly
        else replace(rule, followed=(rule.default + rule.followed) / 2)
        for rule in base.rules
    )
    return replace(base, rules=rules, _readings={})


class AdviceReflector(Reflector):
    """The scripted reflecting model, which also rewords prompts."""

    def answer(self, question: str, draw: random.Random) -> str:
        if "Write these texts of an AI agent anew" in question:
            return self._reworded(question, draw)
        return super().answer(question, draw)

    def _reworded(self, question: str, draw: random.Random) -> str:
        """Return the lines in other words; now and then one is lost, and a checking step is a vague line."""
        text = question.partition(f"## Text {NAME}\n")[2].partition("\nAnswer with JSON alone")[0].strip()
        lines = [self._other_words(line, draw) for line in text.split("\n") if draw.random() >= FORGETS]
        lines += [draw.choice(VAGUE)] if "checks the answer" in question else []
        return json.dumps({"texts": {NAME: "\n".join(lines)}})

    def _other_words(self, line: str, draw: random.Random) -> str:
        for rule in self._world.rules:
            ways = [right(rule.theme, way) for way in range(3)]
            if line in ways:
                return draw.choice(ways)
        return line


class AdviceLaboratory:
    """A world as a laboratory, and as the reader of its tape."""

    def __init__(self, world: AdviceWorld, draw: int) -> None:
        self._world, self._draw = world, draw
        self._reflector = AdviceReflector(world.world)
        self._tasks = {task.id: task for task in world.world.tasks}
        self._observed: dict[TrialSpec, Observation] = {}

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        texts = {candidate.id: candidate.texts[NAME] for candidate in candidates}
        return [self._trial(texts[order.candidate], order) for order in orders]

    def _trial(self, text: str, order: TrialSpec) -> Trial:
        task = self._tasks[order.task]
        draw = random.Random(f"{self._draw}-{order.candidate}-{order.task}-{order.number}")
        seen = self._observed[order] = self._world.observe(text, task, draw, order.candidate)
        return Trial(*order, seen.reward, seen.reason, f"customer {task.key} asks {task.input}")

    async def read(self, trials: Sequence[Trial]) -> list[Observation]:
        return [self._observed[TrialSpec(one.candidate, one.task, one.number)] for one in trials]

    async def regrade(self, observations: Sequence[Observation]) -> list[Observation]:
        return [self._again(one) if self._world.judged_again else one for one in observations]

    def _again(self, one: Observation) -> Observation:
        draw = random.Random(f"{self._draw}-{one.prompt}-{one.task}-{one.output}-again")
        reward, _ = self._world.judge(one.task, json.loads(one.output), draw)
        return replace(one, judged=(one.reward or 0.0, reward))

    async def reflect(self, prompt: str, number: int) -> Reflection:
        draw = random.Random(f"{self._draw}-{number}-{prompt}")
        return Reflection(self._reflector.answer(prompt, draw), len(prompt) // 4 + 200)

    def most(self, prompt: str) -> tuple[int, float]:
        return len(prompt) // 4 + 200, 0.0

    def problem(self, candidate: Candidate) -> str:
        """Return nothing: every text can be run."""
        return ""
