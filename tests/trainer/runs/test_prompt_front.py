"""The front: who is in it, who leads, and that a checkpoint keeps all of it."""

from __future__ import annotations

from dataclasses import replace

from penstock.trainer.apo.protocol import Candidate
from penstock.trainer.runs.prompt_rounds import FrontMember, PromptFront, choose_front


def member(text: str, mean: float | None) -> FrontMember:
    return FrontMember(Candidate({"shop": text}, "p", f"claim of {text}", ("r1", "r2")), {"shop": f"v-{text}"}, mean)


SEED = member("seed", 0.5)
NAME = SEED.candidate.id


def texts(members: list[FrontMember]) -> list[str]:
    return [one.candidate.texts["shop"] for one in members]


def test_the_best_lead_and_the_first_prompt_stays() -> None:
    others = [member("good", 0.7), member("better", 0.9), member("best", 0.95)]
    assert texts(choose_front(NAME, [SEED, *others], 3)) == ["best", "better", "seed"]
    assert texts(choose_front(NAME, [*others, replace(SEED, mean=None)], 2)) == ["best", "seed"]


def test_what_is_below_the_first_prompt_or_was_not_judged_leaves() -> None:
    assert texts(choose_front(NAME, [SEED, member("bad", 0.4), member("unknown", None)], 3)) == ["seed"]


def test_of_equal_ones_the_shorter_leads() -> None:
    assert texts(choose_front(NAME, [member("a long one", 0.5), SEED, member("x", 0.5)], 3)) == [
        "x",
        "seed",
        "a long one",
    ]


def test_places_are_stable_names() -> None:
    front = PromptFront(NAME, choose_front(NAME, [SEED, member("good", 0.7), member("better", 0.9)], 3))
    assert front.leader.candidate.texts == {"shop": "better"}
    rewards = {member("better", 0).candidate.id: [1.0, 0.5], NAME: [0.25], "gone": [1.0]}
    assert front.figures(rewards) == {"front/size": 3.0, "front/1": 0.75, "front/seed": 0.25}


def test_a_checkpoint_keeps_all_of_it() -> None:
    front = PromptFront(NAME, [member("good", 0.7), SEED], 3, {"reflections": 7.0, "tokens": 100.0, "money": 0.5})
    assert PromptFront.from_state(front.state()) == front
