"""Means with bootstrap intervals, and the reason why a question has no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 200
INTERVAL_PERCENT = 95.0


@dataclass(frozen=True)
class Estimate:
    """Value with the interval that holds the middle 95 % of its bootstrap resamples (Efron & Tibshirani 1993, An
    Introduction to the Bootstrap, section 13.3)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Inconclusive:
    """The reason why the data cannot answer a question, such as an interval from too few windows or a fit to too few
    points. Functions return an object of this class instead of raising an error, so that other results can be shown
    beside it. As text, it is "inconclusive, because" and the reason."""

    reason: str

    def __str__(self) -> str:
        return f"inconclusive, because {self.reason}"


def question_means(scores_QxRxM: np.ndarray) -> np.ndarray:
    """Return the mean score of each question and model (QxM) over the repeats, from the scores (QxRxM: questions,
    repeats, models). A repeat of a question counts only if all models have a score in it. Questions without such a
    repeat are left out of Q."""
    is_there_QxR = ~np.isnan(scores_QxRxM).any(axis=2)
    repeats_Q = is_there_QxR.sum(axis=1)
    answered = repeats_Q > 0
    sums_QxM = np.where(is_there_QxR[:, :, None], scores_QxRxM, 0.0).sum(axis=1)
    return sums_QxM[answered] / repeats_Q[answered, None]


def resampled_means(scores_QxM: np.ndarray, seed: int) -> np.ndarray:
    """Return each model's mean over each of B resamples of the questions, drawn with replacement (BxM). All models have
    the same resamples, so that differences between models are paired."""
    questions = len(scores_QxM)
    generator = np.random.default_rng(seed)
    blocks: list[np.ndarray] = []
    # A mean depends only on how often each question is drawn, so these counts are drawn directly.
    for _ in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        counts_BxQ = generator.multinomial(questions, np.full(questions, 1 / questions), size=RESAMPLES_AT_ONCE)
        blocks.append(counts_BxQ @ scores_QxM / questions)
    return np.concatenate(blocks)


def estimate(value: float, resampled: Sequence[float] | np.ndarray) -> Estimate:
    """Return `value` with its interval, from the same quantity computed on each resample."""
    outside = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(resampled, [outside, 100 - outside])
    return Estimate(float(value), float(low), float(high))
