"""Rounds: what they spend, which tasks they use, what they come to; and that they can be held again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from penstock.gateway.model.base import Mode
from penstock.trainer.apo.config import ApoConfig as Settings
from penstock.trainer.apo.protocol import AgentTask, Candidate, Reflection, Trial, TrialSpec
from penstock.trainer.config import PromptSettings
from penstock.trainer.runs.prompt_rounds import FrontMember, PinnedLaboratory, PromptFront, PromptRounds

TASKS = [AgentTask(f"t{at}", at, f"t{at}") for at in range(10)]
SEED = Candidate({"shop": "seed"})
ENGINE = "fakes.engines:reflects"


class Scripted:
    """A laboratory whose rewards follow from the text: a plus is good and a minus bad."""

    def __init__(self) -> None:
        self.orders: dict[str, list[TrialSpec]] = {}
        self.asked = 0
        self._label = ""

    def at(self, label: str) -> PinnedLaboratory:
        made = Scripted()
        made.orders, made._label = self.orders, label
        self.orders.setdefault(label, [])
        return cast(PinnedLaboratory, made)

    async def versions(self, candidate: Candidate) -> dict[str, str]:
        return {"shop": candidate.id}

    def problem(self, candidate: Candidate) -> str:
        return "it has lost a slot" if "broken" in candidate.texts["shop"] else ""

    def most(self, prompt: str) -> tuple[int, float]:
        return 10, 0.0

    async def reflect(self, prompt: str, number: int) -> Reflection:
        return Reflection("yes", 5)

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        texts = {one.id: one.texts["shop"] for one in candidates}
        self.orders[self._label] += orders
        return [
            Trial(*one, 0.5 + 0.1 * (texts[one.candidate].count("+") - texts[one.candidate].count("-")))
            for one in orders
        ]


def rounds(**budget: Any) -> PromptRounds:
    settings = Settings.model_validate(
        {"engine": ENGINE, "texts": {"prompts": ["shop"]}, "reflection": {"model": "m"}, "budget": budget}
    )
    front = PromptFront(SEED.id, [FrontMember(SEED, {"shop": "v1"})])
    return PromptRounds(PromptSettings(rollouts=60), settings, TASKS, front)


def texts(front: PromptFront) -> list[str]:
    return [one.candidate.texts["shop"] for one in front.members]


async def test_a_round_begins_from_the_leader_and_keeps_the_best() -> None:
    made, laboratory = rounds(), Scripted()
    await made.run_round(laboratory.at)
    assert texts(made.front) == ["seed+", "seed"]
    await made.run_round(laboratory.at)
    assert texts(made.front) == ["seed++", "seed+", "seed"]
    assert made.front.leader.versions == {"shop": made.front.leader.candidate.id}
    assert made.front.spent == {"reflections": 2.0, "tokens": 10.0, "money": 0.0}


async def test_a_round_spends_what_it_may_and_compares_on_tasks_that_the_engine_has_not_seen() -> None:
    made, laboratory = rounds(), Scripted()
    await made.run_round(laboratory.at)
    await made.run_round(laboratory.at)
    for number in (1, 2):
        searched, compared = laboratory.orders[f"round-{number}"], laboratory.orders[f"choice-{number}"]
        assert len(searched) + len(compared) <= 60
        assert not {one.task for one in searched} & {one.task for one in compared}
        by_candidate = Counter(one.candidate for one in compared)
        assert len(set(by_candidate.values())) == 1
        assert len(set(compared)) == len(compared)


async def test_the_budget_of_reflections_is_of_the_whole_run() -> None:
    made, laboratory = rounds(reflections=1), Scripted()
    await made.run_round(laboratory.at)
    await made.run_round(laboratory.at)
    assert made.front.spent["reflections"] == 1
    assert texts(made.front) == ["seed+", "seed"]


async def test_a_round_that_is_held_again_orders_the_same() -> None:
    found: list[dict[str, list[TrialSpec]]] = []
    for _ in range(2):
        made, laboratory = rounds(), Scripted()
        await made.run_round(laboratory.at)
        await made.compare_front(laboratory.at)
        found.append(laboratory.orders)
    assert found[0] == found[1]
    assert list(found[0]) == ["round-1", "choice-1", "choice-last"]
