"""Means with bootstrap intervals, and `Inconclusive`, the result if data cannot answer a question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 200
FEW = 5  # fewer values than this may be equal by chance
ROUNDING = 1e-9  # larger than rounding errors of means
HIGH_END = 0.975  # quantile at the high end of a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % interval: the middle 95 % of its bootstrap resamples (Efron & Tibshirani 1993, An
    Introduction to the Bootstrap, section 13.3). `estimate_of_mean` widens the interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Inconclusive:
    """Reason why the data cannot answer a question, such as too few points for a fit. It is returned, not raised."""

    reason: str

    def __str__(self) -> str:
        return f"inconclusive, because {self.reason}"


def question_means(scores_QxRxM: np.ndarray) -> np.ndarray:
    """Return each model's mean score on each question over the repeats, QxM.

    If a model's score is missing (NaN), that repeat of the question is left out for all models. A question without a
    complete repeat is left out.
    """
    is_there_QxR = ~np.isnan(scores_QxRxM).any(axis=2)
    whole_QxRxM = np.where(is_there_QxR[:, :, None], scores_QxRxM, np.nan)
    return np.nanmean(whole_QxRxM[is_there_QxR.any(axis=1)], axis=1)


def resampled_means(scores_QxM: np.ndarray, seed: int) -> np.ndarray:
    """Return each model's mean (BxM) over each of B resamples of the questions, drawn with replacement. All models have
    the same resamples, so that differences between models are paired."""
    questions = len(scores_QxM)
    generator = np.random.default_rng(seed)
    blocks: list[np.ndarray] = []
    # A mean depends only on how often each question is drawn, so these counts are drawn directly.
    for _ in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        counts_BxQ = generator.multinomial(questions, np.full(questions, 1 / questions), size=RESAMPLES_AT_ONCE)
        blocks.append(counts_BxQ @ scores_QxM / questions)
    return np.concatenate(blocks)


def estimate_of_mean(value: float, resampled: np.ndarray, *, count: int, bounds: tuple[float, float]) -> Estimate:
    """Return `value`, the mean of `count` values, with its 95 % interval, widened for few values (Hesterberg 2015, The
    American Statistician 69:371).

    `resampled` has the means of the resamples. The interval is cut at `bounds`, the smallest and the largest possible
    mean. A single value, and fewer than FEW equal values, have the interval `bounds`.
    """
    from scipy import special

    if count < 2 or (count < FEW and np.ptp(resampled) < ROUNDING):
        return Estimate(float(value), *bounds)
    student, normal = special.stdtrit(count - 1, HIGH_END), special.ndtri(HIGH_END)
    wider = student / normal * math.sqrt(count / (count - 1))
    narrow = estimate(value, resampled)
    low, high = (value + wider * (end - value) for end in (narrow.low, narrow.high))
    return Estimate(float(value), max(bounds[0], float(low)), min(bounds[1], float(high)))


def estimate(value: float, resampled: Sequence[float] | np.ndarray) -> Estimate:
    """Return `value` with its interval. `resampled` has the same quantity, computed on each resample."""
    low, high = np.quantile(resampled, [1 - HIGH_END, HIGH_END])
    return Estimate(float(value), float(low), float(high))
