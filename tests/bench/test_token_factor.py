"""How many times as many tokens a setting needs: known where both losses are powers of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.token_factor import factors, mean_factor
from harness.common.errors import UserError


def test_a_setting_that_needs_a_third_of_the_tokens() -> None:
    """Losses are straight over the logarithm of tokens, as they are read."""
    tokens = [1000, 2000, 4000, 8000]
    first = {each: 10 - math.log(each) for each in tokens}
    second = {each: 10 - math.log(3 * each) for each in tokens}
    needed, k = factors(first, second)
    assert needed == pytest.approx([3000, 6000]), "the others are beyond what the first setting has reached"
    assert k == pytest.approx([3, 3])


def test_the_mean_and_its_interval() -> None:
    """Of ln k = 0, 1 and 2: mean 1, standard error 1 / √3, Student's 97.5 % with 2 degrees of freedom."""
    half = 4.3026527 / math.sqrt(3)
    assert mean_factor(np.exp([0.0, 1.0, 2.0])) == pytest.approx([math.e, math.exp(1 - half), math.exp(1 + half)])
    with pytest.raises(UserError, match="at least two"):
        mean_factor(np.array([2.0]))
