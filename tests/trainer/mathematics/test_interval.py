"""Wilson's interval is that of the books, and covers what it says."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.trainer.runs.evaluation import wilson


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3: 81/263, 15/148, 0/20, 1/29.
    [
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_it_is_what_was_published(share: float, count: int, low: float, high: float) -> None:
    assert wilson(share, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("true", [0.02, 0.3, 0.5, 0.9, 0.99])
def test_it_covers_the_truth_about_as_often_as_it_says(true: float) -> None:
    """Also a mean of rewards between 0 and 1 that are not only 0 and 1, more often."""
    draw = np.random.default_rng(7)
    found = draw.binomial(104, true, 2000) / 104
    inside = [low <= true <= high for low, high in (wilson(float(share), 104) for share in found)]
    assert np.mean(inside) > 0.92
    means = draw.beta(4 * true, 4 * (1 - true), (2000, 104)).mean(axis=1)
    assert np.mean([low <= true <= high for low, high in (wilson(float(mean), 104) for mean in means)]) > 0.98


def test_a_share_that_cannot_be_is_refused() -> None:
    for share, count in ((1.2, 10), (-0.1, 10), (0.5, 0)):
        with pytest.raises(ValueError, match="cannot be"):
            wilson(share, count)
