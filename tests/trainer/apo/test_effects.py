"""Effects of edits are found from prompts that have several of them; without rollouts nothing is claimed."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.apo.engines.pooled_edits import EFFECT_SD, TASK_SD, DesignRow, EffectPosterior, estimate_effects

rows = st.lists(
    st.builds(
        DesignRow,
        st.sampled_from(["t0", "t1", "t2"]),
        st.floats(0, 1) | st.sampled_from([0.0, 1.0]),
        st.frozensets(st.integers(0, 3)),
    ),
    max_size=30,
)


def drawn(true: list[float], count: int, noise: float, seed: int = 0, tasks: int = 8) -> list[DesignRow]:
    """Rollouts of prompts with half of the edits each."""
    source = np.random.default_rng(seed)
    hard = source.normal(0, TASK_SD / 2, tasks)
    found: list[DesignRow] = []
    for at in range(count):
        edits = frozenset(int(one) for one in np.flatnonzero(source.random(len(true)) < 0.5))
        reward = 0.5 + hard[at % tasks] + sum(true[one] for one in edits) + source.normal(0, noise)
        found.append(DesignRow(f"t{at % tasks}", float(reward), edits))
    return found


def sd(found: EffectPosterior) -> np.ndarray:
    return np.sqrt(np.diag(found.covariance))


def known(found: EffectPosterior) -> None:
    """It is a distribution."""
    assert np.isfinite(found.mean).all()
    assert np.allclose(found.covariance, found.covariance.T, atol=1e-12)
    assert np.linalg.eigvalsh(found.covariance).min() > 0
    assert (sd(found) <= EFFECT_SD * (1 + 1e-9)).all(), "rollouts do not make it less certain"


@given(st.lists(st.floats(-0.5, 0.5), max_size=5))
def test_without_rollouts_what_was_believed_before_stays(prior: list[float]) -> None:
    found = estimate_effects([], prior)
    assert found.mean.tolist() == prior
    assert sd(found).tolist() == pytest.approx([EFFECT_SD] * len(prior))


def test_without_edits_there_is_nothing_to_believe() -> None:
    found = estimate_effects([DesignRow("t0", 1.0, frozenset())], [])
    assert (found.mean.shape, found.covariance.shape) == ((0,), (0, 0))


@given(rows=rows, prior=st.lists(st.floats(-0.3, 0.3), min_size=4, max_size=4))
def test_any_rollouts_give_a_distribution_that_is_no_wider_than_before(
    rows: list[DesignRow], prior: list[float]
) -> None:
    found = estimate_effects(rows, prior)
    known(found)
    assert np.isfinite(found.draw(np.random.default_rng(0))).all()


@pytest.mark.parametrize(
    "rows",
    [
        [DesignRow("t0", 0.0, frozenset({0, 1, 2, 3}))] * 400,
        [DesignRow(f"t{at}", float(at % 2), frozenset({0})) for at in range(300)],
        [DesignRow("t0", 1e6 * (at % 2), frozenset({at % 4})) for at in range(40)],
        [DesignRow("t0", float(at % 2), frozenset({0, 1} if at % 2 else ())) for at in range(1000)],
    ],
)
def test_extreme_rollouts_give_a_distribution_too(rows: list[DesignRow]) -> None:
    known(estimate_effects(rows, [0.0] * 4))


def test_known_effects_are_found() -> None:
    true = [0.15, -0.1, 0.0, 0.08, -0.15, 0.0]
    found = estimate_effects(drawn(true, 600, 0.2), [0.0] * len(true))
    assert found.mean.tolist() == pytest.approx(true, abs=0.05)
    assert (sd(found) < 0.03).all()


def test_what_is_believed_is_as_sure_as_it_says() -> None:
    true = [0.1, -0.1, 0.05, 0.0]
    off: list[float] = []
    for seed in range(60):
        found = estimate_effects(drawn(true, 48, 0.4, seed), [0.0] * len(true))
        off += ((found.mean - np.array(true)) / sd(found)).tolist()
    # Shrunk means are a little nearer than their intervals say.
    assert np.mean(np.abs(off) < 1.96) >= 0.93
    assert np.std(off) >= 0.6


def test_every_rollout_says_something_of_each_edit() -> None:
    # Six edits from the rollouts that two would need, if each prompt had one edit: the screening design.
    together = sd(estimate_effects(drawn([0.1] * 6, 96, 0.3), [0.0] * 6)).max()
    alone = sd(estimate_effects(drawn([0.1], 96 // 6, 0.3), [0.0])).max()
    assert together < alone


def test_what_was_believed_before_gives_way_to_rollouts() -> None:
    wrong = [0.3, -0.3]
    found = [estimate_effects(drawn([0.0, 0.0], count, 0.2), wrong).mean for count in (4, 40, 800)]
    distance = [float(np.abs(one).max()) for one in found]
    assert distance[0] > distance[1] > distance[2]
    assert distance[2] < 0.06


def test_a_task_that_is_hard_is_not_the_fault_of_the_edit_that_was_tried_on_it() -> None:
    rows = [DesignRow("hard", 0.1, frozenset())] * 20 + [DesignRow("hard", 0.1, frozenset({0}))] * 20
    rows += [DesignRow("easy", 0.9, frozenset())] * 5
    assert estimate_effects(rows, [0.0]).mean[0] == pytest.approx(0.0, abs=0.02)


def test_draws_follow_the_distribution() -> None:
    found = estimate_effects(drawn([0.1, -0.1], 60, 0.3), [0.0, 0.0])
    source = np.random.default_rng(1)
    draws = np.array([found.draw(source) for _ in range(4000)])
    assert draws.mean(axis=0) == pytest.approx(found.mean, abs=4 * sd(found).max() / 4000**0.5)
    assert np.cov(draws.T) == pytest.approx(found.covariance, abs=0.1 * found.covariance.max())
