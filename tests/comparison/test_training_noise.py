"""Noise of seeds alone: against scipy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy

from harness.comparison.training_noise import (
    FALSE_ALARMS,
    SeedsNeeded,
    Spread,
    combine,
    holm,
    own_part,
    pooled_spread,
    seeds_needed,
    shared_part,
)

FIRST, SECOND = [3.41, 3.44, 3.40], [3.47, 3.455, 3.46, 3.5, 3.44]


def test_welch_is_that_of_scipy() -> None:
    difference = combine(float(np.mean(FIRST) - np.mean(SECOND)), [own_part(FIRST), own_part(SECOND)])
    theirs = scipy.stats.ttest_ind(FIRST, SECOND, equal_var=False)
    assert difference.p == pytest.approx(theirs.pvalue)
    assert difference.df == pytest.approx(theirs.df)
    for level in (0.95, 0.995):
        assert difference.interval(1 - level) == pytest.approx(tuple(theirs.confidence_interval(level)))


def test_a_borrowed_spread_makes_the_pooled_t_test() -> None:
    """A spread borrowed from the two arms themselves gives Student's test."""
    spread = pooled_spread([FIRST, SECOND])
    assert spread is not None
    difference = combine(float(np.mean(FIRST) - np.mean(SECOND)), [shared_part(spread, 3, 5)])
    theirs = scipy.stats.ttest_ind(FIRST, SECOND)
    assert difference.p == pytest.approx(theirs.pvalue)
    assert difference.interval() == pytest.approx(tuple(theirs.confidence_interval()))


def test_the_pooled_spread_is_around_each_arms_own_mean() -> None:
    assert pooled_spread([[1.0, 3.0], [11.0, 13.0], [100.0]]) == Spread(pytest.approx(math.sqrt(2)), 2)  # type: ignore[arg-type]
    assert pooled_spread([[1.0], [2.0], []]) is None


def test_holm_is_stepwise() -> None:
    adjusted, rates = holm([0.03, 0.001, 0.02, 0.4])
    assert adjusted == pytest.approx([0.06, 0.004, 0.06, 0.4])
    # 0.001 passes at 5 % / 4; 0.02 is above 5 % / 3, and no later one is looked at.
    assert rates == pytest.approx([0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])
    assert holm([0.01, 0.02]) == ([0.02, 0.02], [0.025, 0.05])
    assert holm([0.04]) == ([0.04], [0.05])
    assert holm([]) == ([], [])


def test_under_holm_an_interval_leaves_out_zero_where_a_difference_is_told() -> None:
    generator = np.random.default_rng(3)
    told = 0
    for _ in range(200):
        values = generator.normal(0, 4, 6)
        differences = [combine(value, [shared_part(Spread(1, 8), 2, 2)]) for value in values]
        adjusted, rates = holm([each.p for each in differences])
        for difference, p, rate in zip(differences, adjusted, rates, strict=True):
            low, high = difference.interval(rate)
            assert (p < FALSE_ALARMS) == (not low <= 0 <= high)
            told += p < FALSE_ALARMS
    assert 100 < told < 1100, "both happen"


def test_a_difference_without_noise() -> None:
    assert combine(0.0, [own_part([2.0, 2.0])]).p == 1
    certain = combine(0.5, [own_part([2.0, 2.0])])
    assert (certain.p, certain.interval()) == (0, (0.5, 0.5))


def test_seeds_needed_are_the_fewest_with_that_power() -> None:
    """The number agrees with scipy's noncentral t. Cohen (1988) has 17 for a difference of one standard deviation."""
    needed = seeds_needed(Spread(0.01, 10), 0.01).likely
    assert needed == 17

    def power(runs: int) -> float:
        df, delta = 2 * runs - 2, math.sqrt(runs / 2)
        critical = scipy.stats.t.ppf(0.975, df)
        return scipy.stats.nct.sf(critical, df, delta) + scipy.stats.nct.cdf(-critical, df, delta)

    assert power(16) < 0.8 <= power(17)


def test_seeds_needed_say_how_little_a_few_runs_know() -> None:
    """The ends are those of the chi-squared interval of the spread: with 2 degrees of freedom 0.52 and 6.28 of it."""
    needed = seeds_needed(Spread(0.01, 2))
    low, high = (0.01 * math.sqrt(2 / scipy.stats.chi2.ppf(p, 2)) for p in (0.975, 0.025))
    assert needed == SeedsNeeded(17, seeds_needed(Spread(low, 2)).likely, seeds_needed(Spread(high, 2)).likely)
    assert needed.low is not None
    assert needed.high is not None
    assert needed.low < 10 < 400 < needed.high


def test_seeds_that_nobody_trains() -> None:
    assert seeds_needed(Spread(10.0, 5)) == SeedsNeeded(None, None, None)
    assert seeds_needed(Spread(1e-9, 5)).likely == 2
