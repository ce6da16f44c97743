"""Noise in measured losses, and estimates of differences with their uncertainty.

- Text noise is due to the choice of the text. It is estimated from the losses of windows (sequences of context length).
- Training noise is due to the seeds. It is estimated from runs that differ only in their seeds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

ALPHA = 0.05  # one minus the level of intervals, and the family-wise error rate
POWER = 0.8
DIFFERENCE_TO_DETECT = 0.01  # nats
MOST_SEEDS = 10_000  # per arm; nobody trains more
BATCHES = 8  # of windows; more batches would be too short to be independent of each other
FEWEST_WINDOWS = 50


class Variance(NamedTuple):
    """An estimated variance in nats², and its degrees of freedom."""

    value: float
    df: float


@dataclass(frozen=True)
class LossEstimate:
    """A loss or a difference of losses in nats per token, and its standard error, which has `df` degrees of freedom."""

    value: float
    error: float
    df: float

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the true value is 0."""
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * float(special.stdtr(self.df, -abs(self.value) / self.error))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the low and high end of the confidence interval at level 1 − alpha, by Student's t."""
        reach = float(special.stdtrit(self.df, 1 - alpha / 2)) * self.error if self.error else 0.0
        return self.value - reach, self.value + reach

    def may_be_zero(self, alpha: float = ALPHA) -> bool:
        """Return True if the interval at level 1 − alpha contains 0."""
        low, high = self.interval(alpha)
        return low <= 0 <= high


def text_noise(values: np.ndarray) -> LossEstimate | None:
    """Return the mean of `values` with its error by batch means (Schmeiser 1982, Operations Research 30: 556), or None
    for fewer than FEWEST_WINDOWS. `values` has a loss, or a difference of losses, for each window in the order of the
    text, [windows]."""
    if len(values) < FEWEST_WINDOWS:
        return None
    # Batches are contiguous, because neighboring windows are often from one document.
    means = [batch.mean() for batch in np.array_split(values, BATCHES)]
    return LossEstimate(float(values.mean()), float(np.std(means, ddof=1)) / math.sqrt(BATCHES), BATCHES - 1)


def variance_of(losses: Sequence[float]) -> float:
    """Return the unbiased variance of two losses or more. It is exactly 0 if they are equal."""
    return float(np.var(np.subtract(losses, losses[0]), ddof=1))


def pooled_variance(arms: Sequence[Sequence[float]]) -> Variance | None:
    """Return the variance of a run's loss over seeds, Σ (loss − mean of its arm)² / Σ (n − 1), or None if no arm has
    two runs. Each of the `arms` has the losses of n runs. The arms' true variances are assumed to be equal."""
    df = sum(len(losses) - 1 for losses in arms if len(losses))
    squares = sum(variance_of(losses) * (len(losses) - 1) for losses in arms if len(losses) > 1)
    return Variance(squares / df, df) if df > 0 else None


def satterthwaite(value: float, parts: Sequence[Variance]) -> LossEstimate:
    """Return the estimate of a difference `value` whose variance is the sum of the `parts`. The degrees of freedom are
    Satterthwaite's (1946, Biometrics Bulletin 2: 110). For two mean losses, this is Welch's t test (1947, Biometrika
    34: 28)."""
    total = sum(part.value for part in parts)
    if total == 0:
        return LossEstimate(value, 0.0, min(part.df for part in parts))
    return LossEstimate(value, math.sqrt(total), total**2 / sum(part.value**2 / part.df for part in parts))


def holm(p_values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the adjusted p-values and the alphas of the intervals, by Holm's method (1979, Scandinavian Journal of
    Statistics 6: 65). The family-wise error rate is at most ALPHA. An interval excludes 0 if its adjusted p-value is
    below ALPHA."""
    adjusted, alphas = [1.0] * len(p_values), [ALPHA] * len(p_values)
    highest, first_kept = 0.0, None
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda each: p_values[each])):
        left = len(p_values) - place
        highest = max(highest, min(1.0, left * p_values[index]))
        adjusted[index] = highest
        if first_kept is None and highest > ALPHA:
            first_kept = ALPHA / left
        alphas[index] = first_kept or ALPHA / left
    return adjusted, alphas


def seeds_needed(spread: Variance, difference: float) -> list[int | None]:
    """Return the likely, the low and the high number of seeds per arm with which a two-sided t test at 5 % detects
    `difference` nats with a power of POWER. A number above MOST_SEEDS is None.

    The likely number is for the variance `spread` over seeds, the others for the ends of its 95 % chi-squared interval.
    """
    low, high = (spread.df / float(special.chdtri(spread.df, tail)) for tail in (ALPHA / 2, 1 - ALPHA / 2))
    return [_runs_for(difference, math.sqrt(factor * spread.value)) for factor in (1, low, high)]


def _runs_for(difference: float, deviation: float) -> int | None:
    """Return the smallest number of runs per arm with which a t test detects `difference` nats, or None if it is above
    MOST_SEEDS. `deviation` is the standard deviation of a run's loss over seeds."""

    def power(runs: int) -> float:
        """Return the probability that the test statistic, which has a noncentral t distribution, is significant."""
        df, noncentrality = 2 * runs - 2, difference / deviation * math.sqrt(runs / 2)
        critical = special.stdtrit(df, 1 - ALPHA / 2)
        within = special.nctdtr(df, noncentrality, critical) - special.nctdtr(df, noncentrality, -critical)
        return float(1 - np.nan_to_num(within))  # far out, where `within` is nearly 0, scipy gives NaN at single points

    numbers = range(2, MOST_SEEDS + 1)
    place = bisect_left(numbers, POWER, key=power) if deviation else 0
    return numbers[place] if place < len(numbers) else None
