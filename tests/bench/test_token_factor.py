"""How many times as many tokens a setting needs: known where both losses are powers of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.token_factor import factors, line_at


def test_a_setting_that_needs_a_third_of_the_tokens() -> None:
    """Losses are straight over the logarithm of tokens, as they are read."""
    tokens = [1000, 2000, 4000, 8000]
    first = {each: 10 - math.log(each) for each in tokens}
    second = {each: 10 - math.log(3 * each) for each in tokens}
    needed, k = factors(first, second)
    assert needed == pytest.approx([3000, 6000]), "the others are beyond what the first setting has reached"
    assert k == pytest.approx([3, 3])


def test_the_line_and_its_interval() -> None:
    """Against the textbook's formulas, by matrices: intercept and slope with the covariance of both."""
    random = np.random.default_rng(1)
    x = np.linspace(0, 3, 6)
    y = 1 + 0.5 * x + random.normal(0, 0.1, 6)
    design = np.column_stack([np.ones(6), x])
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ y
    variance = np.sum((y - design @ coefficients) ** 2) / 4
    at = np.array([1.0, 10.0])
    middle, half = line_at(x, y, 10.0)
    assert middle == pytest.approx(at @ coefficients)
    assert half == pytest.approx(2.7764451 * math.sqrt(variance * at @ inverse @ at))  # Student's, 4 degrees, 97.5 %
