"""Noise in a measured loss from the choice of the text: intervals from the losses of its windows.

Neighbouring windows belong to the same document and resemble each other, so that they are resampled in blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from harness.comparison.inconclusive import Inconclusive

RESAMPLES = 10_000
SEED = 20_261_122  # of the resamples: the same windows always have the same interval
FEWEST_WINDOWS = 50
FEWEST_BLOCKS = 10
MOST_BLOCKS = 200  # more would make an interval no better, only longer in the making
# Than the rule's blocks, which make the variance's squared error least: an interval that covers its share wants less
# bias than that (Sun, Phillips & Jin 2008, Econometrica 76: 175), and documents of very different lengths above all.
LONGER = 1.5
LARGEST_LAG_SHARE = 0.25  # of the windows: correlations further apart are not looked at
LEVEL = 95.0  # per cent


@dataclass(frozen=True)
class MeanVariance:
    """Variance of a mean of window losses, nats², and the degrees of freedom of its estimate."""

    variance: float
    df: float
    block_length: int  # windows that were taken together


@dataclass(frozen=True)
class MeanEstimate:
    """The mean of window losses, or of their differences, in nats per token, with its 95 % interval over other text of
    the kind."""

    value: float
    low: float
    high: float
    noise: MeanVariance


def difference_noise(first: np.ndarray, second: np.ndarray) -> MeanEstimate | Inconclusive:
    """Estimate the first model's loss less the second's, both [windows] of the same text: paired by window."""
    if first.shape != second.shape:
        return Inconclusive(f"they were measured on {first.size:,} and {second.size:,} windows of text")
    return mean_noise(first.astype(np.float64) - second)


def mean_noise(values: np.ndarray) -> MeanEstimate | Inconclusive:
    """The mean of one value a window, [windows] in the order of the text, with an interval by the circular block
    bootstrap (Politis & Romano 1992), studentised (Götze & Künsch 1996) and symmetric (Hall 1988, JRSS B 50: 35),
    which few blocks cannot lead as far astray as one with an end on each side of its own."""
    values = values.astype(np.float64)
    mean, part = float(values.mean()), variance_of_mean(values)
    if isinstance(part, Inconclusive):
        return part
    if part.variance == 0:
        return MeanEstimate(mean, mean, mean, part)
    t = _studentised_resamples(values, part.block_length)
    reach = float(np.percentile(np.abs(t), LEVEL)) * math.sqrt(part.variance)
    return MeanEstimate(mean, mean - reach, mean + reach, part)


def variance_of_mean(values: np.ndarray) -> MeanVariance | Inconclusive:
    """Variance of the mean of correlated values: 2 V(b) − V(b / 2), where V(b) comes of the means of all circular
    blocks of b values. V alone leaves out what is correlated across the ends of blocks, and that halves as blocks
    double (Vats & Flegal 2022, Biometrika 109: 735). Not below V(b), since the correction may overshoot.

    The degrees of freedom follow from the variance of such an estimate, 8/3 · b / windows of its square (Politis &
    Romano 1995, Journal of Time Series Analysis 16: 67, for the equal lag window).
    """
    if not np.isfinite(values).all():
        return Inconclusive("the loss of a window is not finite")
    if len(values) < FEWEST_WINDOWS:
        return Inconclusive(f"{len(values)} windows of text are too few for an interval, which takes {FEWEST_WINDOWS}")
    length = block_length(values)
    if len(values) < FEWEST_BLOCKS * length:
        return Inconclusive(
            f"losses of neighbouring windows depend on each other over {length:,} windows, and {len(values):,} are too "
            f"few for that"
        )
    whole, half = _block_variance(values, length), _block_variance(values, length // 2)
    return MeanVariance(max(whole, 2 * whole - half), 0.75 * len(values) / length, length)


def block_length(values: np.ndarray) -> int:
    """Number of neighbouring windows in a block: the rule of Politis & White (2004, Econometric Reviews 23: 53, with
    the correction of Patton, Politis & White 2009) for the circular bootstrap. At least the cube root of the number of
    windows, which is the order of the best length, since the rule may see too little in few of them; longer than the
    rule has it as long as enough blocks are left."""
    count = len(values)
    least = max(math.ceil(count ** (1 / 3)), math.ceil(count / MOST_BLOCKS))
    covariances = _autocovariances(values, min(count - 1, math.ceil(count * LARGEST_LAG_SHARE)))
    if covariances[0] == 0:
        return least
    lags = _lags_that_matter(covariances / covariances[0], count)
    h = np.arange(1, lags + 1)
    weights = np.minimum(1.0, 2 * (1 - h / lags))  # flat top: Politis & Romano 1995
    g = 2 * float(np.sum(weights * h * covariances[1 : lags + 1]))
    spectrum = float(covariances[0] + 2 * np.sum(weights * covariances[1 : lags + 1]))
    if spectrum <= 0:
        return least
    best = (2 * g**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * count ** (1 / 3)
    longest = max(math.ceil(best), count // FEWEST_BLOCKS)
    return max(least, min(math.ceil(LONGER * best), longest))


def _lags_that_matter(correlations: np.ndarray, count: int) -> int:
    """Twice the lag after which the next few correlations are all within chance, as the rule has it."""
    bound = 2 * math.sqrt(math.log10(count) / count)
    run = max(5, math.ceil(math.sqrt(math.log10(count))))
    small = np.abs(correlations[1:]) < bound
    for lag in range(len(small) - run + 1):
        if small[lag : lag + run].all():
            return min(max(2, 2 * lag), len(correlations) - 1)
    return len(correlations) - 1


def _autocovariances(values: np.ndarray, most: int) -> np.ndarray:
    """Autocovariances at lags 0 to `most`, each divided by the number of values; by the Fourier transform."""
    centred = values - values.mean()
    size = 1 << (2 * len(values) - 1).bit_length()
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    return np.fft.irfft(power, size)[: most + 1] / len(values)


def _block_variance(values: np.ndarray, length: int) -> float:
    means = _block_sums(values, length) / length
    count = len(values)
    return float(np.mean((means - values.mean()) ** 2)) * length / (count - length)


def _block_sums(values: np.ndarray, length: int) -> np.ndarray:
    """Sums of the blocks that begin at each value, around the end: [windows]."""
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[:length]]))])
    return sums[length : length + len(values)] - sums[: len(values)]


def _studentised_resamples(values: np.ndarray, length: int) -> np.ndarray:
    """(Mean of a resample of blocks − mean) / its standard error, [RESAMPLES]."""
    means = _block_sums(values - values.mean(), length) / length
    blocks = math.ceil(len(values) / length)
    drawn = means[_block_starts(RESAMPLES, blocks, len(values))]
    resampled = drawn.mean(axis=1)
    squares = np.einsum("rb,rb->r", drawn, drawn) - blocks * resampled**2
    return resampled / np.sqrt(squares / (blocks - 1) / blocks)


@lru_cache(maxsize=2)
def _block_starts(resamples: int, blocks: int, count: int) -> np.ndarray:
    """First windows of the blocks of each resample of `count` windows, [resamples, blocks]: the same for all models of
    a text, since most of the time is spent on drawing them."""
    starts = np.random.default_rng(SEED).integers(0, count, size=(resamples, blocks))
    starts.flags.writeable = False
    return starts
