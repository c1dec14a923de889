"""The table: each verdict, the order of its rows, and the words that go with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from penstock.trainer.apo.advice.decision import ProbeFindings, Verdict, derive_findings, why
from penstock.trainer.apo.advice.estimates import (
    Arm,
    Belief,
    NormalEstimate,
    Observation,
    RaceForecast,
    VarianceComponents,
)
from penstock.trainer.apo.protocol import Candidate

SEED, OTHER = Candidate({"p": "seed"}), Candidate({"p": "other"})
SOME = [Observation(SEED.id, "t", reward) for reward in (0.0, 1.0)]
QUIET = VarianceComponents(task=0.02, prompt=0.01, within=0.04, grader=0.0, judgements=16, repeats=20)
NOISY = QUIET.model_copy(update={"within": 0.24, "grader": 0.2})
UNKNOWN = QUIET.model_copy(update={"within": 0.24, "grader": None, "judgements": 0})


def findings(
    seed: float = 0.5,
    gain: tuple[float, float] = (0.0, 0.03),
    tools: tuple[float, float] = (0.0, 0.0),
    split: VarianceComponents = QUIET,
    power: float = 0.9,
) -> ProbeFindings:
    belief = Belief(NormalEstimate(seed, 0.03), {OTHER.id: NormalEstimate(*gain)}, OTHER.id, NormalEstimate(*tools))
    return ProbeFindings([Arm(SEED, "seed"), Arm(OTHER, "mended")], SOME, split, belief, RaceForecast(50, power))


CASES: list[tuple[Verdict, ProbeFindings]] = [
    ("prompts", findings(gain=(0.2, 0.05))),
    ("prompts", findings(seed=0.9, gain=(0.09, 0.02))),
    ("weights", findings()),
    ("weights", findings(gain=(0.06, 0.05))),
    ("weights", findings(split=UNKNOWN, power=0.2)),
    ("nothing", findings(seed=0.92)),
    ("nothing", findings(seed=0.82)),
    ("tool texts", findings(tools=(0.2, 0.05))),
    ("tool texts", findings(tools=(0.2, 0.05), gain=(0.1, 0.02))),
    ("prompts", findings(tools=(0.1, 0.02), gain=(0.2, 0.02))),
    ("weights", findings(tools=(0.03, 0.02))),
    ("the grader is too noisy", findings(split=NOISY, power=0.3)),
    ("the grader is too noisy", findings(split=NOISY, power=0.3, gain=(0.15, 0.1))),
    ("prompts", findings(split=NOISY, power=0.3, gain=(0.3, 0.05))),
    ("prompts", findings(split=NOISY, power=0.8, gain=(0.15, 0.1))),
    ("weights", findings(split=NOISY.model_copy(update={"judgements": 3}), power=0.3)),
    ("tool texts", findings(split=NOISY, power=0.3, tools=(0.2, 0.05))),
]


@pytest.mark.parametrize(("verdict", "found"), CASES)
def test_the_verdict(verdict: Verdict, found: ProbeFindings) -> None:
    assert found.verdict == verdict
    said = why(found, 500)
    assert said
    assert all(sentence.endswith(".") for sentence in said)


def test_a_grader_that_nobody_knows_is_said_to_be_unknown() -> None:
    assert any("asked again" in sentence for sentence in why(findings(split=UNKNOWN), 500))
    assert not any("asked again" in sentence for sentence in why(findings(), 500))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ((None, None), "No rollout has a reward"),
        ((), "No rollout has a reward"),
        ((1.0, 1.0), "nothing is missing"),
        ((0.0, 0.0), "tell nothing apart"),
    ],
)
def test_rewards_without_variation_say_nothing(rewards: tuple[float | None, ...], words: str) -> None:
    found = derive_findings([Arm(SEED, "seed")], [Observation(SEED.id, "t", reward) for reward in rewards], 500)
    assert found.verdict == "nothing"
    (sentence,) = why(found, 500)
    assert words in sentence


def test_tools_that_break_by_themselves_are_named() -> None:
    found = replace(findings(), observations=[*SOME, Observation(SEED.id, "t", 0.0, tools=1, broken=1)])
    assert any("failed by itself" in sentence for sentence in why(found, 500))
