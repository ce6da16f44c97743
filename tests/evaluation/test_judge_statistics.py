"""Means, intervals and win rates of judged models, checked against closed forms and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy

from harness.evaluation.judge.report import Comparison, compare

RANDOM = np.random.default_rng(7)


def compared(scores: np.ndarray, seed: int = 0) -> Comparison:
    comparison = compare(scores, seed=seed)
    assert comparison is not None
    return comparison


def test_questions_without_answers_count_for_no_model() -> None:
    nothing = [math.nan, math.nan]
    scores = np.array([[[10, 20], [30, 20]], [nothing, [50, 60]], [nothing, nothing]])
    comparison = compared(scores)
    assert comparison.questions == 2
    assert [mean.value for mean in comparison.means] == [35, 40]
    assert comparison.ranking == (1, 0)
    assert compare(scores[2:], seed=0) is None


def test_models_share_their_resamples() -> None:
    """A model that is 5 points better at every question is 5 points better in every resample, however much the
    questions differ."""
    scores = RANDOM.integers(0, 95, size=(40, 1, 1)).astype(float)
    comparison = compared(np.concatenate([scores, scores + 5], axis=2))
    (pair,) = comparison.pairs
    assert (pair.first, pair.second, pair.win_rate) == (1, 0, 1.0)
    difference = pair.difference
    assert [difference.value, difference.low, difference.high] == pytest.approx([5, 5, 5])
    assert comparison.means[0].high - comparison.means[0].low > 5


def test_intervals_are_those_of_scipy() -> None:
    first, second = RANDOM.normal(50, 15, size=(2, 200))
    scores = np.stack([first, second], axis=1)[:, None, :]
    comparison = compared(scores, seed=3)
    assert comparison == compare(scores, seed=3) != compare(scores, seed=4)
    options = {"method": "percentile", "n_resamples": 20_000, "rng": np.random.default_rng(0)}
    theirs = scipy.stats.bootstrap((first,), np.mean, **options).confidence_interval
    ours = comparison.means[0]
    assert [ours.low, ours.high] == pytest.approx([theirs.low, theirs.high], abs=0.12)  # a ninth of a standard error
    theirs = scipy.stats.bootstrap((first - second,), np.mean, **options).confidence_interval
    (pair,) = comparison.pairs
    sign = 1 if pair.first == 0 else -1
    ends = sorted([sign * pair.difference.low, sign * pair.difference.high])
    assert ends == pytest.approx([theirs.low, theirs.high], abs=0.17)


@pytest.mark.slow
@pytest.mark.parametrize("questions", [1, 3, 5])
def test_few_questions_give_wide_intervals(questions: int) -> None:
    """The 95 % interval of the difference leaves out 0 in about 5 % of 400 pairs of equal models. Without a correction
    for few questions, it does in 15 to 97 %."""
    random = np.random.default_rng(0)
    found = [compared(random.normal(50, 10, size=(questions, 1, 2))) for _ in range(400)]
    differences = [each.pairs[0].difference for each in found]
    assert sum(not each.low <= 0 <= each.high for each in differences) <= 0.08 * 400


def test_two_equal_differences_prove_nothing() -> None:
    alone = np.array([[70.0], [80.0]])
    repeated = np.array([[55.0, 74.0, 62.0], [41.0, 70.0, 69.0]])  # the means are thirds: they are rounded
    for score in (alone, repeated):
        assert compared(np.stack([score + 10, score], axis=2)).pairs[0].difference.low < 0


def test_win_rate_counts_ties_as_half() -> None:
    """A tie counts as half a win. Of the four questions, one is won, one is lost, one is a tie, and one is a tie except
    for rounding."""
    scores = np.array([[3.0, 2.0], [1.0, 2.0], [2.0, 2.0], [0.1 + 0.2, 0.3]])
    assert compared(scores[:, None, :]).pairs[0].win_rate == 0.5
    assert compared(scores[[0, 2], None, :]).pairs[0].win_rate == 0.75
