"""Scripted worlds: an agent that follows the instructions in its prompt, noisily, on tasks that call for some of them.

A world has rules, such as "name the article in full". A rule has a right instruction in a few wordings, a wrong one,
and a sentence that the grader says when it was broken. The agent reads its prompt line by line. For each rule that a
task calls for, it follows the rule with a probability: high where the prompt asks for it, lower where it does not, low
where the prompt asks for the opposite, and everything a little lower with each useless line. So the value of a prompt
is known exactly (`World.value`), while an engine sees draws of it only.

Six families, drawn from a seed:

    headroom   several independent rules are missing in the seed
    none       the seed has them all
    broken     as headroom, and a line of the seed spoils everything
    noisy      the grader is noisy, in rewards and in reasons
    leaking    tasks are of customers; lines that help one customer alone hurt the others
    long       a long seed of which little is wrong
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from penstock.trainer.apo.protocol import AgentTask

Family = Literal["headroom", "none", "broken", "noisy", "leaking", "long"]
FAMILIES: Final[tuple[Family, ...]] = ("headroom", "none", "broken", "noisy", "leaking", "long")
HEADROOM: Final[tuple[Family, ...]] = ("headroom", "broken", "noisy", "leaking", "long")
"""Families with something to gain."""
RULES: Final = 10
CUSTOMERS: Final = 30
TASKS: Final = 240
POISON: Final = "Answer with one word only."
SPOILED: Final = 0.45
"""Factor of every probability while the poison is in the prompt."""
TIRING: Final = 0.006
"""Reduction of every probability by each useless line."""
THEMES: Final = (
    "article", "price", "greeting", "date", "units", "sources", "sums", "currency", "table", "summary", "order number",
    "delivery day", "address", "discount", "warranty", "language", "tone", "length", "links", "names", "rounding",
    "headings", "questions", "apology",
)  # fmt: skip
VAGUE: Final = (
    "Be careful and thorough.", "Always do your best work.", "Think before you answer.", "Pay attention to detail.",
    "Quality matters in every answer.", "Consider what the customer wants.", "Be accurate at all times.",
    "Double-check everything twice.",
)  # fmt: skip


def right(theme: str, wording: int) -> str:
    """Return an instruction that makes the agent follow a rule."""
    ways = ("State the {} explicitly in every answer.", "In every answer, state the {} explicitly.",
            "Every answer must state the {} explicitly.")  # fmt: skip
    return ways[wording % len(ways)].format(theme)


def wrong(theme: str) -> str:
    """Return an instruction that makes the agent do the opposite."""
    return f"Leave the {theme} out unless the customer insists."


def broken(theme: str) -> str:
    """Return the grader's sentence for a broken rule."""
    return f"the answer does not state the {theme}"


def special(customer: str) -> str:
    """Return a line that helps one customer alone."""
    return f"For customer {customer}, use the answer that was right before."


@dataclass(frozen=True)
class Rule:
    """A property of a good answer, and the probabilities around it."""

    theme: str
    default: float
    """Probability that the agent follows it without an instruction."""
    followed: float
    """Probability that the agent follows it with an instruction."""
    called: float
    """Share of the tasks that call for it."""
    understood: float
    """Probability that a reflection which names it gives the right instruction."""


@dataclass(frozen=True)
class Reading:
    """The agent's understanding of a prompt."""

    chances: tuple[float, ...]
    """Probability of following each rule."""
    customers: frozenset[str]
    """Customers that lines of the prompt help."""


@dataclass
class World:
    """A scripted agent, its tasks and its grader."""

    family: Family
    rules: tuple[Rule, ...]
    tasks: list[AgentTask]
    calls: dict[str, tuple[int, ...]]
    """Rules that a task calls for, by task."""
    seed: str
    passing: float | None
    """Share of a task's rules above which its reward is 1, and 0 below; None: the share is the reward."""
    noise: float
    """Probability that a reward is random, and its reason another's."""
    placebo: bool = False
    """True if every candidate is rewarded like the seed."""
    _readings: dict[str, Reading] = field(default_factory=dict[str, Reading])

    def reading(self, prompt: str) -> Reading:
        """Return the agent's understanding of a prompt."""
        found = self._readings.get(prompt)
        if found is None:
            found = self._readings[prompt] = self._read(prompt)
        return found

    def _read(self, prompt: str) -> Reading:
        lines = {line.strip() for line in prompt.split("\n") if line.strip()}
        says = [
            (any(right(rule.theme, way) in lines for way in range(3)), wrong(rule.theme) in lines)
            for rule in self.rules
        ]
        useful = sum(good + bad for good, bad in says)
        idle = max(0, len(lines) - useful - len(self._own_lines & lines))
        factor = max(0.3, 1 - TIRING * idle) * (SPOILED if POISON in lines else 1.0)
        chances = tuple(
            factor * (rule.followed if good and not bad else rule.default * (0.25 if bad and not good else 1.0))
            for rule, (good, bad) in zip(self.rules, says, strict=True)
        )
        names = (task.key for task in self.tasks)
        return Reading(chances, frozenset(name for name in names if special(name) in lines))

    @property
    def _own_lines(self) -> set[str]:
        """Lines of the seed that do not count as useless, besides its instructions, which are counted by rule."""
        asked = {right(rule.theme, way) for rule in self.rules for way in range(3)}
        return _lines(self.seed) - asked - {wrong(rule.theme) for rule in self.rules}

    def draw(self, prompt: str, task: AgentTask, random: random.Random) -> tuple[float, str]:
        """Return (reward, reason) of a rollout."""
        reading = self.reading(self.seed if self.placebo else prompt)
        helped = task.key in reading.customers
        called = self.calls[task.id]
        missed = [one for one in called if random.random() > (0.97 if helped else reading.chances[one])]
        share = 1 - len(missed) / len(called)
        reward = share if self.passing is None else float(share >= self.passing)
        if random.random() < self.noise:
            reward = random.choice((0.0, 1.0))
            missed = random.sample(range(len(self.rules)), 1)
        told = random.sample(missed, min(2, len(missed)))
        return reward, "; ".join(broken(self.rules[one].theme) for one in told) or "nothing is missing"

    def value(self, prompt: str) -> float:
        """Return the expected reward on unseen customers, without noise of the grader."""
        reading = self.reading(prompt)
        return sum(
            _expected([reading.chances[one] for one in self.calls[task.id]], self.passing) for task in self.tasks
        ) / len(self.tasks)

    @property
    def ceiling(self) -> float:
        """The value of the best prompt: every rule, and nothing else."""
        return self.value("\n".join(right(rule.theme, 0) for rule in self.rules))


@lru_cache(maxsize=64)
def _lines(text: str) -> set[str]:
    return {line.strip() for line in text.split("\n") if line.strip()} - {POISON}


def _expected(chances: list[float], passing: float | None) -> float:
    if passing is None:
        return sum(chances) / len(chances)
    counts = [1.0]
    for chance in chances:
        counts = [
            (counts[at] if at < len(counts) else 0.0) * (1 - chance) + (counts[at - 1] * chance if at else 0.0)
            for at in range(len(counts) + 1)
        ]
    return sum(part for kept, part in enumerate(counts) if kept / len(chances) >= passing)


def world(family: Family, seed: int, placebo: bool = False) -> World:
    """Return the world of a family and a seed."""
    draw = random.Random(f"{family}-{seed}")
    rules = tuple(
        Rule(
            theme,
            draw.uniform(0.2, 0.7),
            draw.uniform(0.88, 0.98),
            draw.uniform(0.25, 0.8),
            draw.choice((0.35, 0.6, 0.8)),
        )
        for theme in draw.sample(THEMES, RULES)
    )
    names = [f"c{number:02}" for number in range(CUSTOMERS)]
    tasks = [AgentTask(f"t{number:03}", f"question {number}", names[number % CUSTOMERS]) for number in range(TASKS)]
    calls: dict[str, tuple[int, ...]] = {}
    for task in tasks:
        found = tuple(at for at, rule in enumerate(rules) if draw.random() < rule.called)
        calls[task.id] = found or (draw.randrange(RULES),)
    passing = draw.choice((None, 0.75))
    noise = 0.4 if family == "noisy" else 0.0
    return World(family, rules, tasks, calls, _seed(family, rules, draw), passing, noise, placebo)


def _seed(family: Family, rules: tuple[Rule, ...], draw: random.Random) -> str:
    """Return the seed's prompt for a family."""
    has = {"none": RULES, "long": RULES - 4}.get(family, 2)
    lines = ["You answer customers of a shop.", *(right(rule.theme, 0) for rule in rules[:has])]
    if family == "broken":
        lines += [POISON, wrong(rules[-1].theme)]
    if family == "long":
        lines += [f"Policy {number}: see section {draw.randrange(100)} of the handbook." for number in range(40)]
        lines += [wrong(rule.theme) for rule in rules[-2:]]
        draw.shuffle(lines)
    return "\n".join(lines)
