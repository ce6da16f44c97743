"""Noise in a loss from the text and from the seeds, checked against scipy, closed forms, and simulated texts whose mean
is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy

from harness.comparison.noise import (
    ALPHA,
    LossEstimate,
    Variance,
    holm,
    pooled_variance,
    satterthwaite,
    seeds_needed,
    text_noise,
)

Text = Callable[[np.random.Generator, int], np.ndarray]


def correlated(by: float, *, is_skewed: bool = False) -> Text:
    """Return a sampler of window losses with mean 0: each loss is `by` times the previous one plus a shock."""

    def draw(generator: np.random.Generator, windows: int) -> np.ndarray:
        size = windows + 100  # the first 100, which still depend on where the chain began, are dropped
        shocks = generator.exponential(size=size) - 1 if is_skewed else generator.normal(size=size)
        return scipy.signal.lfilter([1], [1, -by], shocks)[100:]

    return draw


def documents(generator: np.random.Generator, windows: int) -> np.ndarray:
    """Return window losses from documents of random length (4 windows on average), each with its own mean. The variance
    between documents equals the variance within a document."""
    lengths = generator.geometric(1 / 4, size=windows)
    return np.repeat(generator.normal(size=windows), lengths)[:windows] + generator.normal(size=windows)


SIMULATED = {
    "independent": correlated(0),
    "independent, skewed": correlated(0, is_skewed=True),
    "correlated by 0.3": correlated(0.3),
    "correlated by 0.5": correlated(0.5),
    "correlated by 0.5, skewed": correlated(0.5, is_skewed=True),
    "correlated by 0.7": correlated(0.7),
    "documents of 4 windows": documents,
}


@pytest.mark.parametrize("windows", [500, 2000])
@pytest.mark.parametrize("name", SIMULATED)
def test_intervals_cover_their_share_of_simulated_texts(name: str, windows: int, exhaustive: bool) -> None:
    experiments = 5000 if exhaustive else 500
    generator, hits = np.random.default_rng(windows), 0
    for _ in range(experiments):
        found = text_noise(SIMULATED[name](generator, windows))
        assert isinstance(found, LossEstimate)
        hits += found.may_be_zero()
    covered = 100 * hits / experiments
    print(f"{name}, {windows:,} windows: {covered:.2f} %")
    margin = 300 * math.sqrt(ALPHA * (1 - ALPHA) / experiments)
    assert 94.5 - margin <= covered <= 95.5 + margin


@pytest.mark.parametrize(
    ("values", "found"), [(np.zeros(49), None), (np.zeros(100, np.float32), LossEstimate(0, 0, 7))]
)
def test_texts_without_noise_or_without_an_interval(values: np.ndarray, found: LossEstimate | None) -> None:
    assert text_noise(values) == found


def test_a_difference_without_noise() -> None:
    none = satterthwaite(0.0, [Variance(0.0, 1)])
    certain = satterthwaite(0.5, [Variance(0.0, 1)])
    assert (none.p, none.interval(), certain.p, certain.interval()) == (1, (0, 0), 0, (0.5, 0.5))


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
            assert (p < ALPHA) == (not difference.may_be_zero(alpha))
            significant += p < ALPHA
    assert 100 < significant < 1100, "some differences are significant and some are not"


def test_seeds_needed_are_the_fewest_for_the_spread_and_for_the_ends_of_its_interval() -> None:
    """With the estimated spread, a difference of one standard deviation takes 17 runs of each arm, as in Cohen (1988);
    test_verdicts.py compares such numbers with an independent implementation's. Two more numbers are returned, for the
    two ends of the spread's chi-squared interval. At 2 degrees of freedom this interval is 0.52 to 6.28 times the
    spread."""
    needed = seeds_needed(Variance(0.01**2, 2), 0.01)
    ends = (0.01**2 * 2 / scipy.stats.chi2.ppf(p, 2) for p in (0.975, 0.025))
    assert needed == [17, *(seeds_needed(Variance(value, 2), 0.01)[0] for value in ends)]
    assert needed[1] is not None
    assert needed[2] is not None
    assert needed[1] < 10 < 400 < needed[2]
    assert seeds_needed(Variance(100.0, 5), 0.01) == [None, None, None]
    assert seeds_needed(Variance(1.0, 5), 0.0419)[0] == 8943, "below the limit, and above 8,192"
    assert seeds_needed(Variance(1e-18, 5), 0.01)[0] == seeds_needed(Variance(0.0, 5), 0.01)[0] == 2
