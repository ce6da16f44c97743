"""Noise in measured losses, and the differences that stand out from it.

Two kinds: of the text that a loss was measured on, estimated from the losses of its windows; and of training, estimated
from runs that differ in `random_seed` alone (the order of the data is the same in all of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from harness.comparison.inconclusive import Inconclusive

ALPHA = 0.05  # one minus the level of intervals, and the family-wise error rate
POWER = 0.8
DIFFERENCE_TO_DETECT = 0.01  # nats
MOST_SEEDS = 10_000  # of an arm; above, nobody trains them
BATCHES = 8  # of windows: more of them would be too short to be independent
FEWEST_WINDOWS = 50


class Variance(NamedTuple):
    """An estimated variance, nats², and its degrees of freedom."""

    value: float
    df: float


@dataclass(frozen=True)
class Estimate:
    """A loss or difference of losses, in nats per token, with its standard error, whose estimate has `df` degrees of
    freedom."""

    value: float
    error: float
    df: float

    @property
    def p(self) -> float:
        """Two-sided p-value of the value against 0."""
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * float(special.stdtr(self.df, -abs(self.value) / self.error))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Low and high end of the confidence interval at level 1 − alpha, by Student's t."""
        reach = float(special.stdtrit(self.df, 1 - alpha / 2)) * self.error if self.error else 0.0
        return self.value - reach, self.value + reach


def text_noise(values: np.ndarray) -> Estimate | Inconclusive:
    """The mean of one value a window, [windows] in the order of the text, and its standard error over other text of the
    kind: by the means of 8 contiguous batches (Schmeiser 1982, Operations Research 30: 556). Neighbouring windows
    resemble each other, being of one document, and long batches hardly do."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        return Inconclusive("the loss of a window is not finite")
    if len(values) < FEWEST_WINDOWS:
        return Inconclusive(f"{len(values)} windows of text are too few for an interval, which takes {FEWEST_WINDOWS}")
    means = [batch.mean() for batch in np.array_split(values, BATCHES)]
    return Estimate(float(values.mean()), float(np.std(means, ddof=1)) / math.sqrt(BATCHES), BATCHES - 1)


def pooled_variance(arms: Sequence[Sequence[float]]) -> Variance | None:
    """The variance of a run within arms, each around its own mean: Σ squares / Σ (n − 1), which assumes that seeds
    spread each arm alike. None if no arm has two runs."""
    df = sum(len(losses) - 1 for losses in arms if len(losses))
    squares = sum(float(np.var(losses)) * len(losses) for losses in arms if len(losses))
    return Variance(squares / df, df) if df > 0 else None


def variance_of_mean(losses: Sequence[float]) -> Variance:
    """The variance of the mean of an arm with at least two runs, from these runs alone, as Welch's test has it."""
    return Variance(float(np.var(losses, ddof=1)) / len(losses), len(losses) - 1)


def combine(value: float, parts: Sequence[Variance]) -> Estimate:
    """A difference whose variance is the sum of these parts: degrees of freedom by Satterthwaite (1946, Biometrics
    Bulletin 2: 110); with the variance of each of two arms' means, that is Welch's t test (1947, Biometrika 34: 28)."""
    variance = sum(part.value for part in parts)
    if variance == 0:
        return Estimate(value, 0.0, min(part.df for part in parts))
    return Estimate(value, math.sqrt(variance), variance**2 / sum(part.value**2 / part.df for part in parts))


def holm(p_values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Control the family-wise error rate at ALPHA (Holm 1979, Scandinavian Journal of Statistics 6: 65): the adjusted
    p-value of each comparison, and the alpha of its interval, which excludes zero where that p-value is below ALPHA."""
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


def seeds_needed(
    spread: Variance, difference: float = DIFFERENCE_TO_DETECT
) -> tuple[int | None, int | None, int | None]:
    """Runs in each of two arms for a two-sided t test at 5 % to detect `difference` nats with a power of 80 %: by the
    spread of a run over seeds, and by the low and high end of that spread's 95 % chi-squared interval. None: more than
    MOST_SEEDS."""
    low, high = (spread.df / float(special.chdtri(spread.df, tail)) for tail in (ALPHA / 2, 1 - ALPHA / 2))
    likely, fewest, most = (_runs_for(difference, math.sqrt(factor * spread.value)) for factor in (1, low, high))
    return likely, fewest, most


def _runs_for(difference: float, deviation: float) -> int | None:
    """The smallest number of runs in each arm with that power, by bisection."""
    if deviation == 0:
        return 2
    low, high = 1, 2
    while _power(difference / deviation, high) < POWER:
        low, high = high, high * 2
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(difference / deviation, middle) >= POWER else (middle, high)
    return high


def _power(shift: float, runs: int) -> float:
    """Power of the two-sided t test of two arms with so many runs each, whose means lie `shift` standard deviations of
    a run apart: its statistic is noncentral t."""
    df, noncentrality = 2 * runs - 2, shift * math.sqrt(runs / 2)
    critical = special.stdtrit(df, 1 - ALPHA / 2)
    within = special.nctdtr(df, noncentrality, critical) - special.nctdtr(df, noncentrality, -critical)
    return float(1 - np.nan_to_num(within))  # NaN at single points far out, where it is next to nothing
