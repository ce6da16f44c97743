"""What the choice of the text does to a measured loss: intervals from the losses of its windows.

Neighbouring windows belong to the same document and resemble each other, so that they are resampled in blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 20_261_122  # of the resamples: the same windows always have the same interval
FEWEST_WINDOWS = 50
FEWEST_BLOCKS = 10
LARGEST_LAG_SHARE = 0.25
RESAMPLED_AT_ONCE = 4_000_000  # blocks; memory, not time
LEVEL = 95.0  # per cent


@dataclass(frozen=True)
class MeanEstimate:
    """The mean of window losses, or of their differences, in nats per token, with its 95 % interval over other text of
    the kind. `variance` is that of the mean, estimated with `df` degrees of freedom."""

    value: float
    low: float
    high: float
    variance: float
    df: float
    block_length: int  # windows that were resampled together


@dataclass(frozen=True)
class NoEstimate:
    """An interval that cannot be told, and the reason, which continues "because"."""

    reason: str


def difference_noise(first: np.ndarray, second: np.ndarray) -> MeanEstimate | NoEstimate:
    """By how much the first model's loss is above the second's, both [windows] of the same text: paired by window."""
    if first.shape != second.shape:
        return NoEstimate(f"they were measured on {first.size:,} and {second.size:,} windows of text")
    return mean_noise(first.astype(np.float64) - second)


def mean_noise(values: np.ndarray) -> MeanEstimate | NoEstimate:
    """The mean of one value a window, [windows] in the order of the text, with an interval by the circular block
    bootstrap (Politis & Romano 1992), studentised (Götze & Künsch 1996)."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        return NoEstimate("the loss of a window is not finite")
    if len(values) < FEWEST_WINDOWS:
        return NoEstimate(f"{len(values)} windows of text are too few for an interval, which takes {FEWEST_WINDOWS}")
    mean = float(values.mean())
    length = block_length(values)
    if len(values) < FEWEST_BLOCKS * length:
        return NoEstimate(
            f"losses of neighbouring windows depend on each other over {length:,} windows, and {len(values):,} are too "
            f"few for that"
        )
    variance = variance_of_mean(values, length)
    df = 0.75 * len(values) / length
    if variance == 0:
        return MeanEstimate(mean, mean, mean, 0.0, df, length)
    t = _studentised_resamples(values, length)
    low, high = np.percentile(t, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    error = math.sqrt(variance)
    return MeanEstimate(mean, mean - float(high) * error, mean - float(low) * error, variance, df, length)


def block_length(values: np.ndarray) -> int:
    """How many neighbouring windows to resample together: the rule of Politis & White (2004, Econometric Reviews 23:
    53, with the correction of Patton, Politis & White 2009) for the circular bootstrap, and at least the cube root of
    the number of windows, the order of the best length, since a rule that looks at data may see too little."""
    count = len(values)
    least = math.ceil(count ** (1 / 3))
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
    return max(least, math.ceil(best))


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
    """At lags 0 to `most`, each divided by the number of values; by the Fourier transform."""
    centred = values - values.mean()
    size = 1 << (2 * len(values) - 1).bit_length()
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    return np.fft.irfft(power, size)[: most + 1] / len(values)


def variance_of_mean(values: np.ndarray, length: int) -> float:
    """That of the mean of correlated values: 2 V(b) − V(b / 2), where V(b) comes of the means of all circular blocks of
    b values. V alone leaves out what is correlated across the ends of blocks, and that halves as blocks double (Vats &
    Flegal 2022, Biometrika 109: 735). Not below V(b), since the correction may overshoot."""
    whole, half = _block_variance(values, length), _block_variance(values, max(1, length // 2))
    return max(whole, 2 * whole - half) if length > 1 else whole


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
    blocks = math.ceil(len(values) / length)
    means = _block_sums(values - values.mean(), length) / length
    generator = np.random.default_rng(SEED)
    at_once = max(1, RESAMPLED_AT_ONCE // blocks)
    parts = []
    for begin in range(0, RESAMPLES, at_once):
        starts = generator.integers(0, len(values), size=(min(at_once, RESAMPLES - begin), blocks), dtype=np.int32)
        drawn = means[starts]
        parts.append(drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / math.sqrt(blocks)))
    return np.concatenate(parts)
