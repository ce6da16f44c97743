"""How sure a comparison of models by scores is: means, and every pair, over the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 200
INTERVAL_PERCENT = 95.0
TIE = 1e-9  # means over repeats that differ by less differ by rounding


@dataclass(frozen=True)
class Estimate:
    """A value, and the interval that holds the middle 95 % of its bootstrap resamples (Efron & Tibshirani 1993, An
    Introduction to the Bootstrap, section 13.3)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """Two models by index, on the same questions. `win_rate` is the share of questions, ties as half ones, on which
    `first` has the higher score; `difference` is its score less that of `second`."""

    first: int
    second: int
    win_rate: float
    difference: Estimate


@dataclass(frozen=True)
class Comparison:
    """`ranking` has the models' indices, best mean first; `pairs` have the better one first."""

    questions: int
    means: tuple[Estimate, ...]
    ranking: tuple[int, ...]
    pairs: tuple[Pair, ...]


def compare(scores_QxRxM: np.ndarray, seed: int) -> Comparison | None:
    """Scores of M models on Q questions in R repeats; NaN where there is none, then for all models.

    A question's score is the mean of its repeats; questions without any are left out. None if none is left.
    """
    scores_QxM = question_means(scores_QxRxM)
    if not len(scores_QxM):
        return None
    resampled_BxM = resampled_means(scores_QxM, seed)
    values = scores_QxM.mean(axis=0)
    ranking = sorted(range(len(values)), key=lambda model: -values[model])
    pairs = [
        _pair(first, second, scores_QxM, resampled_BxM)
        for place, first in enumerate(ranking)
        for second in ranking[place + 1 :]
    ]
    means = tuple(_estimate(value, resampled) for value, resampled in zip(values, resampled_BxM.T, strict=True))
    return Comparison(len(scores_QxM), means, tuple(ranking), tuple(pairs))


def question_means(scores_QxRxM: np.ndarray) -> np.ndarray:
    """Means over repeats, QxM, without the questions that have no score."""
    is_there_QxR = ~np.isnan(scores_QxRxM).any(axis=2)
    repeats_Q = is_there_QxR.sum(axis=1)
    answered = repeats_Q > 0
    sums_QxM = np.where(is_there_QxR[:, :, None], scores_QxRxM, 0.0).sum(axis=1)
    return sums_QxM[answered] / repeats_Q[answered, None]


def resampled_means(scores_QxM: np.ndarray, seed: int) -> np.ndarray:
    """Means, BxM, over B resamples of the questions, drawn with replacement. All models have the same resamples, so
    that differences between them are paired."""
    questions = len(scores_QxM)
    generator = np.random.default_rng(seed)
    blocks: list[np.ndarray] = []
    # How often each question is drawn is all that a mean needs to know.
    for _ in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        counts_BxQ = generator.multinomial(questions, np.full(questions, 1 / questions), size=RESAMPLES_AT_ONCE)
        blocks.append(counts_BxQ @ scores_QxM / questions)
    return np.concatenate(blocks)


def win_rate(first_Q: np.ndarray, second_Q: np.ndarray) -> float:
    """The share of questions on which the first scores higher; a tie is half a win for either."""
    difference_Q = first_Q - second_Q
    wins, ties = (difference_Q > TIE).mean(), (np.abs(difference_Q) <= TIE).mean()
    return float(wins + ties / 2)


def _pair(first: int, second: int, scores_QxM: np.ndarray, resampled_BxM: np.ndarray) -> Pair:
    value = (scores_QxM[:, first] - scores_QxM[:, second]).mean()
    difference = _estimate(value, resampled_BxM[:, first] - resampled_BxM[:, second])
    return Pair(first, second, win_rate(scores_QxM[:, first], scores_QxM[:, second]), difference)


def _estimate(value: float, resampled: Sequence[float] | np.ndarray) -> Estimate:
    outside = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(resampled, [outside, 100 - outside])
    return Estimate(float(value), float(low), float(high))
