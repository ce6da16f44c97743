"""Noise of text and of seeds, checked against scipy, closed forms, and simulated texts whose mean is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy

from harness.comparison.inconclusive import Inconclusive
from harness.comparison.noise import (
    ALPHA,
    Estimate,
    Variance,
    holm,
    pooled_variance,
    satterthwaite,
    seeds_needed,
    text_noise,
    variance_of_mean,
)

Text = Callable[[np.random.Generator, int], np.ndarray]
FIRST, SECOND = [3.41, 3.44, 3.40], [3.47, 3.455, 3.46, 3.5, 3.44]


def correlated(by: float, *, is_skewed: bool = False) -> Text:
    """Return a sampler of window losses with mean 0: each loss is `by` times the previous one plus a shock."""

    def draw(generator: np.random.Generator, windows: int) -> np.ndarray:
        size = windows + 100  # the first 100, which still depend on where the chain began, are dropped
        shocks = generator.exponential(size=size) - 1 if is_skewed else generator.normal(size=size)
        return scipy.signal.lfilter([1], [1, -by], shocks)[100:]

    return draw


def documents(windows_each: float) -> Text:
    """Return a sampler of window losses from documents of random length, each with its own mean.

    The variance between documents equals the variance within a document.
    """

    def draw(generator: np.random.Generator, windows: int) -> np.ndarray:
        lengths = generator.geometric(1 / windows_each, size=windows)
        return np.repeat(generator.normal(size=windows), lengths)[:windows] + generator.normal(size=windows)

    return draw


SIMULATED = {
    "independent": correlated(0),
    "independent, skewed": correlated(0, is_skewed=True),
    "correlated by 0.3": correlated(0.3),
    "correlated by 0.5": correlated(0.5),
    "correlated by 0.5, skewed": correlated(0.5, is_skewed=True),
    "correlated by 0.7": correlated(0.7),
    "documents of 4 windows": documents(4),
}


def coverage(text: Text, windows: int, experiments: int) -> float:
    """Return the percentage of intervals that contain the true mean, 0."""
    generator, hits = np.random.default_rng(windows), 0
    for _ in range(experiments):
        found = text_noise(text(generator, windows))
        assert isinstance(found, Estimate)
        low, high = found.interval()
        hits += low <= 0 <= high
    return 100 * hits / experiments


@pytest.mark.parametrize("windows", [500, 2000])
@pytest.mark.parametrize("name", SIMULATED)
def test_intervals_cover_their_share_of_simulated_texts(name: str, windows: int, exhaustive: bool) -> None:
    experiments = 5000 if exhaustive else 500
    covered = coverage(SIMULATED[name], windows, experiments)
    print(f"{name}, {windows:,} windows: {covered:.2f} %")
    margin = 300 * math.sqrt(ALPHA * (1 - ALPHA) / experiments)
    assert 94.5 - margin <= covered <= 95.5 + margin


@pytest.mark.parametrize("by", [0.0, 0.3, 0.6])
def test_the_variance_of_the_mean_is_that_of_the_closed_form(by: float) -> None:
    """The mean of a stationary chain with shocks of variance 1 has the variance 1 / (1 − by)² / windows."""
    generator, windows = np.random.default_rng(5), 4000
    found = [text_noise(correlated(by)(generator, windows)) for _ in range(400)]
    variances = [each.error**2 for each in found if isinstance(each, Estimate)]
    # The mean of 400 variances, each with 7 degrees of freedom, has a relative error of √(2 / 7 / 400), 2.7 %.
    assert np.mean(variances) == pytest.approx(1 / (1 - by) ** 2 / windows, rel=0.1)


def test_differences_are_paired_by_window() -> None:
    """Hard windows are hard for both models, so the difference is known far better than either loss."""
    generator = np.random.default_rng(8)
    text = generator.gamma(4, size=3000)
    first = text + 0.02 + 0.05 * generator.normal(size=3000)
    paired, alone = text_noise(first - text), text_noise(first)
    assert isinstance(paired, Estimate)
    assert isinstance(alone, Estimate)
    assert paired.interval()[0] < 0.02 < paired.interval()[1]
    assert alone.error > 20 * paired.error


def test_a_model_does_not_differ_from_itself() -> None:
    found = text_noise(np.zeros(100, np.float32))
    assert found == Estimate(0, 0, 7)
    assert found.interval() == (0, 0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros(49), "49 windows of text are too few for an interval, which takes 50"),
        (np.array([1.0, np.nan] * 50), "the loss of a window is not finite"),
    ],
)
def test_what_has_no_interval(values: np.ndarray, reason: str) -> None:
    assert text_noise(values) == Inconclusive(reason)


def test_welch_is_that_of_scipy() -> None:
    difference = satterthwaite(
        float(np.mean(FIRST) - np.mean(SECOND)), [variance_of_mean(FIRST), variance_of_mean(SECOND)]
    )
    theirs = scipy.stats.ttest_ind(FIRST, SECOND, equal_var=False)
    assert difference.p == pytest.approx(theirs.pvalue)
    assert difference.df == pytest.approx(theirs.df)
    for level in (0.95, 0.995):
        assert difference.interval(1 - level) == pytest.approx(tuple(theirs.confidence_interval(level)))


def test_a_pooled_spread_makes_students_t_test() -> None:
    pooled = pooled_variance([FIRST, SECOND])
    assert pooled is not None
    part = Variance(pooled.value * (1 / 3 + 1 / 5), pooled.df)
    difference = satterthwaite(float(np.mean(FIRST) - np.mean(SECOND)), [part])
    theirs = scipy.stats.ttest_ind(FIRST, SECOND)
    assert difference.p == pytest.approx(theirs.pvalue)
    assert difference.interval() == pytest.approx(tuple(theirs.confidence_interval()))


def test_the_pooled_spread_is_around_each_arms_own_mean() -> None:
    assert pooled_variance([[1.0, 3.0], [11.0, 13.0], [100.0]]) == Variance(2.0, 2)
    assert pooled_variance([[1.0], [2.0], []]) is None


def test_holm_is_stepwise() -> None:
    adjusted, alphas = holm([0.03, 0.001, 0.02, 0.4])
    assert adjusted == pytest.approx([0.06, 0.004, 0.06, 0.4])
    # 0.001 passes at 5 % / 4; 0.02 is above 5 % / 3, so the larger p-values are not tested.
    assert alphas == pytest.approx([0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])
    assert holm([0.01, 0.02]) == ([0.02, 0.02], [0.025, 0.05])
    assert holm([0.04]) == ([0.04], [0.05])
    assert holm([]) == ([], [])


def test_under_holm_an_interval_excludes_zero_where_a_difference_is_significant() -> None:
    generator = np.random.default_rng(3)
    significant = 0
    for _ in range(200):
        differences = [satterthwaite(value, [Variance(1.0, 8)]) for value in generator.normal(0, 4, 6)]
        adjusted, alphas = holm([each.p for each in differences])
        for difference, p, alpha in zip(differences, adjusted, alphas, strict=True):
            low, high = difference.interval(alpha)
            assert (p < ALPHA) == (not low <= 0 <= high)
            significant += p < ALPHA
    assert 100 < significant < 1100, "some differences are significant and some are not"


def test_a_difference_without_noise() -> None:
    assert satterthwaite(0.0, [variance_of_mean([2.0, 2.0])]).p == 1
    certain = satterthwaite(0.5, [variance_of_mean([2.0, 2.0])])
    assert (certain.p, certain.interval()) == (0, (0.5, 0.5))


def test_seeds_needed_are_the_fewest_with_that_power() -> None:
    """The number agrees with scipy's noncentral t. Cohen (1988) gives 17 for a difference of one standard deviation."""
    assert seeds_needed(Variance(0.01**2, 10), 0.01)[0] == 17

    def power(runs: int) -> float:
        df, delta = 2 * runs - 2, math.sqrt(runs / 2)
        critical = scipy.stats.t.ppf(0.975, df)
        return scipy.stats.nct.sf(critical, df, delta) + scipy.stats.nct.cdf(-critical, df, delta)

    assert power(16) < 0.8 <= power(17)


def test_seeds_needed_have_the_range_of_the_spreads_own_interval() -> None:
    """The range is that of the spread's chi-squared interval: 0.52 to 6.28 times the spread at 2 degrees of freedom."""
    needed = seeds_needed(Variance(0.01**2, 2))
    ends = (0.01**2 * 2 / scipy.stats.chi2.ppf(p, 2) for p in (0.975, 0.025))
    assert needed == (17, *(seeds_needed(Variance(value, 2))[0] for value in ends))
    assert needed[1] is not None
    assert needed[2] is not None
    assert needed[1] < 10 < 400 < needed[2]


def test_seeds_needed_have_a_lower_and_an_upper_limit() -> None:
    assert seeds_needed(Variance(100.0, 5)) == (None, None, None)
    assert seeds_needed(Variance(1e-18, 5))[0] == 2
