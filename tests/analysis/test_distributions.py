"""Quantiles and power: against scipy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy

from harness.analysis.distributions import chi_squared_quantile, student_quantile, student_tail, t_test_power

DEGREES = [1.0, 1.3, 2.0, 3.7, 10.0, 123.4, 1e4, 1e6]
PROBABILITIES = [1e-6, 0.003125, 0.025, 0.4, 0.5, 0.8, 0.975, 0.999, 1 - 1e-7]


@pytest.mark.parametrize("df", DEGREES)
def test_student_is_that_of_scipy(df: float) -> None:
    for t in (-30.0, -1.5, 0.0, 0.2, 2.0, 6.0, 40.0):
        assert student_tail(t, df) == pytest.approx(scipy.stats.t.sf(t, df), rel=1e-8, abs=1e-300)
    for probability in PROBABILITIES:
        theirs = scipy.stats.t.ppf(probability, df)
        assert student_quantile(probability, df) == pytest.approx(theirs, rel=1e-7, abs=1e-12)


def test_student_with_one_degree_of_freedom_is_cauchy() -> None:
    assert student_quantile(0.75, 1) == pytest.approx(1)
    assert student_quantile(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475))


@pytest.mark.parametrize("df", [1, 2, 5, 40, 500])
def test_chi_squared_is_that_of_scipy(df: int) -> None:
    for probability in (0.001, 0.025, 0.5, 0.975, 0.9999):
        assert chi_squared_quantile(probability, df) == pytest.approx(scipy.stats.chi2.ppf(probability, df), rel=1e-9)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, math.nan])
def test_there_are_no_quantiles_outside(probability: float) -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        student_quantile(probability, 3)
    with pytest.raises(ValueError, match="above 0 and below 1"):
        chi_squared_quantile(probability, 3)


@pytest.mark.parametrize("runs", [2, 3, 5, 17, 100])
@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0])
def test_power_is_that_of_the_noncentral_t(runs: int, shift: float) -> None:
    df, delta = 2 * runs - 2, shift * math.sqrt(runs / 2)
    critical = scipy.stats.t.ppf(0.975, df)
    theirs = scipy.stats.nct.sf(critical, df, delta) + scipy.stats.nct.cdf(-critical, df, delta)
    assert t_test_power(shift, runs, false_alarms=0.05) == pytest.approx(theirs, abs=1e-6)


def test_power_without_a_difference_is_the_rate_of_false_alarms() -> None:
    powers = [t_test_power(0, runs, false_alarms=0.01) for runs in (2, 3, 30)]
    assert np.allclose(powers, 0.01, atol=1e-7)
