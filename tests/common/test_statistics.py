"""Bootstrap resamples and intervals equal closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.common.statistics import RESAMPLES, estimate, resampled_means


def test_means_of_resamples_have_their_exact_distribution() -> None:
    """A resample of two questions has the first one twice with probability 1/4, both with 1/2, and the second one twice
    with 1/4."""
    resampled = resampled_means(np.array([[0.0, 7.0], [100.0, 7.0]]), seed=1)
    assert resampled.shape == (RESAMPLES, 2)
    values, counts = np.unique(resampled[:, 0], return_counts=True)
    assert values.tolist() == [0, 50, 100]
    deviation = math.sqrt(RESAMPLES * 0.25 * 0.75)
    assert abs(counts - RESAMPLES * np.array([0.25, 0.5, 0.25])).max() < 5 * deviation
    assert (resampled[:, 1] == 7).all()


def test_an_interval_holds_the_middle_of_the_resamples() -> None:
    interval = estimate(3, np.arange(1001.0))
    assert (interval.value, interval.low, interval.high) == pytest.approx((3, 25, 975))
