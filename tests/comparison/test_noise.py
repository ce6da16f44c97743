"""Evaluation noise: against closed forms, scipy, and simulated texts whose mean is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
import scipy

from harness.comparison import noise
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.noise import (
    MeanEstimate,
    MeanVariance,
    difference_noise,
    mean_noise,
    variance_of_mean,
)

Text = Callable[[np.random.Generator, int], np.ndarray]


def correlated(by: float, *, is_skewed: bool = False) -> Text:
    """Losses of windows with mean 0, each keeping the fraction `by` of the one before."""

    def draw(generator: np.random.Generator, windows: int) -> np.ndarray:
        size = windows + 100  # by then nothing is left of the beginning
        shocks = generator.exponential(size=size) - 1 if is_skewed else generator.normal(size=size)
        return scipy.signal.lfilter([1], [1, -by], shocks)[100:]

    return draw


def documents(windows_each: float) -> Text:
    """Documents of random length, each with a mean of its own; the same variance between them and within."""

    def draw(generator: np.random.Generator, windows: int) -> np.ndarray:
        lengths = generator.geometric(1 / windows_each, size=windows)
        return np.repeat(generator.normal(size=windows), lengths)[:windows] + generator.normal(size=windows)

    return draw


def coverage(text: Text, windows: int, experiments: int) -> float:
    """Percentage of the intervals that hold the true mean, 0."""
    generator = np.random.default_rng(windows)
    estimates = [mean_noise(text(generator, windows)) for _ in range(experiments)]
    intervals = [each for each in estimates if isinstance(each, MeanEstimate)]
    assert len(intervals) >= 0.99 * experiments
    return 100 * sum(each.low <= 0 <= each.high for each in intervals) / len(intervals)


@pytest.mark.parametrize(("windows", "by"), [(500, 0.0), (500, 0.5), (2000, 0.3), (19200, 0.5)])
def test_intervals_cover_as_they_say(windows: int, by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 %, within what so few experiments can tell; `-m slow` has more of both."""
    monkeypatch.setattr(noise, "RESAMPLES", 1000)
    assert coverage(correlated(by), windows, 600) == pytest.approx(95, abs=2.3)


SIMULATED = {
    "independent": correlated(0),
    "independent, skewed": correlated(0, is_skewed=True),
    "correlated by 0.3": correlated(0.3),
    "correlated by 0.5": correlated(0.5),
    "correlated by 0.5, skewed": correlated(0.5, is_skewed=True),
    "correlated by 0.7": correlated(0.7),
    "documents of 4 windows": documents(4),
}


@pytest.mark.slow
@pytest.mark.parametrize("windows", [500, 2000, 19200])
@pytest.mark.parametrize("name", SIMULATED)
def test_intervals_cover_their_share_of_many_simulated_texts(
    name: str, windows: int, exhaustive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share is taken over thousands of experiments with --exhaustive, else over hundreds in a tenth of the time."""
    monkeypatch.setattr(noise, "RESAMPLES", 2000 if exhaustive else 1000)  # for time; of 10,000 the same share covers
    experiments = (3000 if windows < 10_000 else 2000) if exhaustive else (900 if windows < 10_000 else 300)
    covered = coverage(SIMULATED[name], windows, experiments)
    print(f"{name}, {windows:,} windows: {covered:.2f} %")
    by_chance = 0.0 if exhaustive else 3 * 100 * math.sqrt(0.05 * 0.95 / experiments)
    assert 95 - max(1.5, by_chance) <= covered <= 95 + max(1.5, by_chance)


def test_resamples_are_quick() -> None:
    values = correlated(0.3)(np.random.default_rng(0), 19_200)
    noise._block_starts.cache_clear()
    start = time.thread_time()
    mean_noise(values)
    first, start = time.thread_time() - start, time.thread_time()
    mean_noise(values)
    assert first < 1
    assert time.thread_time() - start < 0.1


def test_the_same_windows_have_the_same_interval() -> None:
    values = correlated(0.3)(np.random.default_rng(0), 500)
    first = mean_noise(values)
    noise._block_starts.cache_clear()
    assert mean_noise(values) == first


@pytest.mark.parametrize("by", [0.0, 0.3, 0.6])
def test_the_variance_of_the_mean_is_that_of_the_closed_form(by: float) -> None:
    """The variance for a stationary chain is 1 / (1 − by)² / windows, with shocks of variance 1."""
    windows = 100_000
    found = variance_of_mean(correlated(by)(np.random.default_rng(5), windows))
    assert isinstance(found, MeanVariance)
    # Its own standard deviation is √(2 / df) of it, here 12 %.
    assert found.variance == pytest.approx(1 / (1 - by) ** 2 / windows, rel=0.3)


def test_degrees_of_freedom_are_those_of_the_estimates_own_spread() -> None:
    """The variance of a variance with df degrees of freedom is 2 / df of its square."""
    generator = np.random.default_rng(6)
    found = [variance_of_mean(generator.normal(size=1000)) for _ in range(1500)]
    estimates = [each for each in found if isinstance(each, MeanVariance)]
    variances = np.array([each.variance for each in estimates])
    spread = 2 * variances.mean() ** 2 / variances.var()
    # Fewer than the spread says, as an estimate that is never below V(b) varies less than the formula's.
    assert 0.9 * estimates[0].df < spread < 1.6 * estimates[0].df


def test_blocks_are_as_long_as_windows_resemble_each_other() -> None:
    generator = np.random.default_rng(7)
    texts = (correlated(0), correlated(0.7), documents(40))
    lengths = [noise.block_length(text(generator, 2000)) for text in texts]
    assert lengths[0] == 13, "the cube root"
    assert lengths[0] < lengths[1] < lengths[2]


def test_block_sums_go_around_the_end() -> None:
    assert noise._block_sums(np.array([1.0, 2.0, 4.0, 8.0]), 3).tolist() == [7, 14, 13, 11]


def test_autocovariances_are_sums_of_products() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    centred = values - 4
    expected = [centred @ centred / 4, centred[1:] @ centred[:-1] / 4, centred[2:] @ centred[:-2] / 4]
    assert noise._autocovariances(values, 2) == pytest.approx(expected)


def test_differences_are_paired_by_window() -> None:
    """Hard windows are hard for both models: the difference is known far better than either loss."""
    generator = np.random.default_rng(8)
    text = generator.gamma(4, size=3000)
    first, second = text + 0.02 + 0.05 * generator.normal(size=3000), text
    paired, alone = difference_noise(first, second), mean_noise(first)
    assert isinstance(paired, MeanEstimate)
    assert isinstance(alone, MeanEstimate)
    assert paired.value == pytest.approx(float(np.mean(first - second)))
    assert paired.low < 0.02 < paired.high
    assert (alone.high - alone.low) > 20 * (paired.high - paired.low)


def test_a_model_and_itself() -> None:
    losses = np.full(100, 2.5, np.float32)
    assert difference_noise(losses, losses) == MeanEstimate(0, 0, 0, MeanVariance(0, 15, 5))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros(49), "49 windows of text are too few for an interval, which takes 50"),
        (np.array([1.0, np.nan] * 50), "the loss of a window is not finite"),
        (np.arange(200.0), "losses of neighbouring windows depend on each other over"),
    ],
)
def test_what_has_no_interval(values: np.ndarray, reason: str) -> None:
    found = mean_noise(values)
    assert isinstance(found, Inconclusive)
    assert found.reason.startswith(reason)


def test_other_windows_have_no_difference() -> None:
    found = difference_noise(np.zeros(60), np.zeros(70))
    assert found == Inconclusive("they were measured on 60 and 70 windows of text")
