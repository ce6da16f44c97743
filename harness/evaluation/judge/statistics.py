"""Uncertainty of a comparison of models by scores: means, and every pair, over the same questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.common.statistics import Estimate, estimate, question_means, resampled_means

TIE = 1e-9  # means over repeats that differ by less differ by rounding


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
    means = tuple(estimate(value, resampled) for value, resampled in zip(values, resampled_BxM.T, strict=True))
    return Comparison(len(scores_QxM), means, tuple(ranking), tuple(pairs))


def win_rate(first_Q: np.ndarray, second_Q: np.ndarray) -> float:
    """The share of questions on which the first scores higher; a tie is half a win for either."""
    difference_Q = first_Q - second_Q
    wins, ties = (difference_Q > TIE).mean(), (np.abs(difference_Q) <= TIE).mean()
    return float(wins + ties / 2)


def _pair(first: int, second: int, scores_QxM: np.ndarray, resampled_BxM: np.ndarray) -> Pair:
    value = (scores_QxM[:, first] - scores_QxM[:, second]).mean()
    difference = estimate(value, resampled_BxM[:, first] - resampled_BxM[:, second])
    return Pair(first, second, win_rate(scores_QxM[:, first], scores_QxM[:, second]), difference)
