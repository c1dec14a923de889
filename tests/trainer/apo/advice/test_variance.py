"""The split finds the components that rewards were made of, and none where there is none."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.advice.estimates import Observation, VarianceComponents, variance_components

PROMPTS, TASKS, REPEATS, WORLDS = 5, 12, 2, 150


def drawn(source: np.random.Generator, task: float, prompt: float, both: float, within: float) -> list[Observation]:
    """Rewards of every prompt on every task, made of normal terms with these variances; a tenth is left out."""
    of_task, of_prompt = source.normal(0, task**0.5, TASKS), source.normal(0, prompt**0.5, PROMPTS)
    of_both = source.normal(0, both**0.5, (PROMPTS, TASKS))
    return [
        Observation(f"p{p}", f"t{t}", 0.5 + of_prompt[p] + of_task[t] + of_both[p, t] + source.normal(0, within**0.5))
        for p, t, _ in product(range(PROMPTS), range(TASKS), range(REPEATS))
        if source.random() > 0.1
    ]


@pytest.mark.parametrize(
    "parts",
    [(0.04, 0.02, 0.01, 0.03), (0.0, 0.03, 0.0, 0.05), (0.05, 0.0, 0.0, 0.05), (0.0, 0.0, 0.0, 0.08)],
    ids=["all", "prompt", "task", "noise alone"],
)
def test_it_finds_the_components(parts: tuple[float, float, float, float]) -> None:
    source = np.random.default_rng(1)
    found = [variance_components(drawn(source, *parts)) for _ in range(WORLDS)]
    means = [np.mean([getattr(one, name) for one in found]) for name in ("task", "prompt", "task_prompt", "within")]
    for mean, part in zip(means, parts, strict=True):
        # Below 0 is 0, so the mean of what is not there is a little above it.
        assert mean == pytest.approx(part, rel=0.2, abs=0.1 * parts[-1])


def test_judging_again_tells_the_grader_from_the_agent() -> None:
    source = np.random.default_rng(2)
    kept = source.normal(0.5, 0.2, 400)
    judged = [tuple(value + source.normal(0, 0.1, 2)) for value in kept]
    found = variance_components(
        [Observation("p", f"t{at % 20}", pair[0], judged=pair) for at, pair in enumerate(judged)]
    )
    assert found.judgements == 400
    assert found.grader == pytest.approx(0.01, rel=0.2)
    assert found.within == pytest.approx(0.05, rel=0.2)


def test_the_same_output_of_the_same_task_is_the_same_behaviour() -> None:
    same = [Observation("p", "t", reward, output="x") for reward in (0.0, 1.0, 0.0, 1.0)]
    assert variance_components(same).grader == pytest.approx(1 / 3)
    sure = [Observation("p", "t", reward, output=f"{reward}") for reward in (0.0, 1.0, 0.0, 1.0)]
    assert variance_components(sure).grader == 0.0
    assert (
        variance_components([Observation("p", "t", 0.0, output="x"), Observation("p", "u", 1.0, output="x")]).grader
        is None
    )


def test_nothing_comes_of_nothing() -> None:
    assert variance_components([]) == VarianceComponents()
    assert variance_components([Observation("p", "t", None)] * 3) == VarianceComponents()


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(0, 1)), max_size=40)


@given(ROWS)
def test_components_are_never_below_0_and_know_no_names_and_no_level(rows: list[tuple[int, int, float]]) -> None:
    found = variance_components([Observation(f"p{p}", f"t{t}", reward) for p, t, reward in rows])
    parts = (found.task, found.prompt, found.task_prompt, found.within)
    assert min(parts) >= 0
    other = variance_components([Observation(f"t{p}", f"p{t}", 1 - reward) for p, t, reward in reversed(rows)])
    assert (other.task, other.prompt, other.task_prompt, other.within) == pytest.approx(parts, abs=1e-9)
