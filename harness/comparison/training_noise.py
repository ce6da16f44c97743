"""Noise in a training run's loss by chance alone: its spread over seeds, and the differences that stand out from it.

A loss here is one run's, in nats per token; an arm is all runs that differ in `random_seed` alone. The spread over
seeds is that of initial weights and dropout: the order of the data is the same in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

FALSE_ALARMS = 0.05  # one minus the level of intervals
POWER = 0.8
DIFFERENCE_TO_TELL = 0.01  # nats
MOST_SEEDS = 10_000  # of an arm; above, nobody trains them


@dataclass(frozen=True)
class Spread:
    """Standard deviation of a run's loss over seeds, in nats, and the degrees of freedom that it was estimated with."""

    deviation: float
    df: int


@dataclass(frozen=True)
class Part:
    """An independent part of a difference's variance, and the degrees of freedom of its estimate."""

    variance: float
    df: float


@dataclass(frozen=True)
class Uncertain:
    """A difference of losses in nats with its standard error, whose estimate has `df` degrees of freedom."""

    value: float
    error: float
    df: float

    @property
    def p(self) -> float:
        """Probability that chance alone makes a difference at least as large, on either side, where there is none."""
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * float(special.stdtr(self.df, -abs(self.value) / self.error))

    def interval(self, false_alarms: float = FALSE_ALARMS) -> tuple[float, float]:
        """Low and high end; it misses the true difference in `false_alarms` of all experiments."""
        reach = float(special.stdtrit(self.df, 1 - false_alarms / 2)) * self.error if self.error else 0.0
        return self.value - reach, self.value + reach


@dataclass(frozen=True)
class SeedsNeeded:
    """Runs in each of two arms; low and high are those at both ends of the spread's own 95 % interval. None: more than
    MOST_SEEDS."""

    likely: int | None
    low: int | None
    high: int | None


def pooled_spread(arms: Sequence[Sequence[float]]) -> Spread | None:
    """The spread within arms, each around its own mean: √(Σ squares / Σ (n − 1)). None if no arm has two runs.

    It assumes that chance does as much in each arm.
    """
    df = sum(len(losses) - 1 for losses in arms if len(losses))
    if df < 1:
        return None
    squares = sum(float(np.var(losses)) * len(losses) for losses in arms if len(losses))
    return Spread(math.sqrt(squares / df), df)


def own_part(losses: Sequence[float]) -> Part:
    """The variance of the mean of an arm with at least two runs, from these runs alone, as Welch's test has it."""
    return Part(float(np.var(losses, ddof=1)) / len(losses), len(losses) - 1)


def shared_part(spread: Spread, *runs: int) -> Part:
    """The variance of the difference of arms with so many runs each, from a spread over other runs."""
    return Part(spread.deviation**2 * sum(1 / n for n in runs), spread.df)


def combine(value: float, parts: Sequence[Part]) -> Uncertain:
    """A difference whose variance has these parts: degrees of freedom by Satterthwaite (1946, Biometrics Bulletin 2:
    110); with one `own_part` for each of two arms, that is Welch's t test (1947, Biometrika 34: 28)."""
    variance = sum(part.variance for part in parts)
    if variance == 0:
        return Uncertain(value, 0.0, min(part.df for part in parts))
    df = variance**2 / sum(part.variance**2 / part.df for part in parts)
    return Uncertain(value, math.sqrt(variance), df)


def holm(p_values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Holm's correction (1979, Scandinavian Journal of Statistics 6: 65) for several comparisons with one baseline.

    Gives for each comparison its adjusted p-value, which is below FALSE_ALARMS where a difference is told, and the
    rate of false alarms that its interval is for, so that the interval leaves out zero exactly there. Chance alone
    makes one or more false alarms in all of them in at most FALSE_ALARMS of all experiments.
    """
    adjusted, rates = [1.0] * len(p_values), [FALSE_ALARMS] * len(p_values)
    highest, first_kept = 0.0, None
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda each: p_values[each])):
        left = len(p_values) - place
        highest = max(highest, min(1.0, left * p_values[index]))
        adjusted[index] = highest
        if first_kept is None and highest > FALSE_ALARMS:
            first_kept = FALSE_ALARMS / left
        rates[index] = first_kept or FALSE_ALARMS / left
    return adjusted, rates


def seeds_needed(spread: Spread, difference: float = DIFFERENCE_TO_TELL) -> SeedsNeeded:
    """Number of runs in each of two arms for a t test to detect `difference` nats in 80 % of experiments, two-sided at
    5 %; the same for the ends of the spread's chi-squared interval, since few seeds hardly know the spread."""
    quantiles = [float(special.chdtri(spread.df, tail)) for tail in (FALSE_ALARMS / 2, 1 - FALSE_ALARMS / 2)]
    low, high = (spread.deviation * math.sqrt(spread.df / quantile) for quantile in quantiles)
    return SeedsNeeded(*(_runs_to_tell(difference, deviation) for deviation in (spread.deviation, low, high)))


def _runs_to_tell(difference: float, deviation: float) -> int | None:
    if deviation == 0:
        return 2
    shift = difference / deviation
    # The smallest number by bisection: power grows with runs.
    low, high = 1, 2
    while _power(shift, high) < POWER:
        low, high = high, high * 2
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        enough = _power(shift, middle) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return high


def _power(shift: float, runs: int) -> float:
    """Return how often the two-sided t test of two arms with so many runs each tells a difference of `shift` standard
    deviations of a run; the test's statistic is noncentral t."""
    df, noncentrality = 2 * runs - 2, shift * math.sqrt(runs / 2)
    critical = special.stdtrit(df, 1 - FALSE_ALARMS / 2)
    within = special.nctdtr(df, noncentrality, critical) - special.nctdtr(df, noncentrality, -critical)
    return float(1 - np.nan_to_num(within))  # NaN at single points far out, where it is next to nothing
