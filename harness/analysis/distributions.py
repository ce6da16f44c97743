"""Student's t and chi-squared distributions, and the power of the two-sample t test, without scipy."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

NORMAL = NormalDist()
RELATIVE_PRECISION = 1e-15
MOST_TERMS = 100_000  # far more than any argument needs: a series that stops here has a defect
POWER_NODES = 801  # of the quadrature; 401 give the same twelve digits


def student_tail(t: float, df: float) -> float:
    """P(T > t) of Student's t with `df` degrees of freedom, which need not be whole.

    Abramowitz & Stegun 26.7.1: half the incomplete beta function at df / (df + t²).
    """
    half = 0.5 * _incomplete_beta(df / (df + t * t), df / 2, 0.5)
    return half if t >= 0 else 1 - half


def student_quantile(probability: float, df: float) -> float:
    """The t with P(T <= t) = `probability`, which is above 0 and below 1.

    Newton's steps from the normal quantile: it lies on the near side of Student's, and the tail is convex, so that
    each step goes the right way and none goes too far.
    """
    if not 0 < probability < 1:
        raise ValueError(f"a probability above 0 and below 1 is needed, not {probability}")
    if probability < 0.5:
        return -student_quantile(1 - probability, df)
    t = NORMAL.inv_cdf(probability)
    for _ in range(MOST_TERMS):
        step = (student_tail(t, df) - (1 - probability)) / _student_density(t, df)
        t += step
        if step <= 1e-12 * t:
            break
    return t


def _student_density(t: float, df: float) -> float:
    scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return math.exp(scale - (df + 1) / 2 * math.log1p(t * t / df))


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by the continued fraction 26.5.8 of Abramowitz & Stegun,
    from the side on which it converges quickly."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a / _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 + d1 / (1 + d2 / (1 + …)), by Lentz's method: from the front, as long as a factor still changes the product."""
    value = c = 1.0
    d = 0.0
    for term in range(1, MOST_TERMS):
        m = term // 2
        if term % 2:
            coefficient = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            coefficient = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + coefficient * d)
        c = 1 + coefficient / c
        value *= c * d
        if abs(c * d - 1) < RELATIVE_PRECISION:
            break
    return value


def chi_squared_quantile(probability: float, df: float) -> float:
    """The x with P(X <= x) = `probability`, which is above 0 and below 1; by bisection."""
    if not 0 < probability < 1:
        raise ValueError(f"a probability above 0 and below 1 is needed, not {probability}")
    low, high = 0.0, df + 10.0
    while _chi_squared_cdf(high, df) < probability:
        high *= 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _chi_squared_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def _chi_squared_cdf(x: float, df: float) -> float:
    """The regularised incomplete gamma function P(df / 2, x / 2), by the series 6.5.29 of Abramowitz & Stegun."""
    if x <= 0:
        return 0.0
    a, half = df / 2, x / 2
    term = total = 1 / a
    for count in range(1, MOST_TERMS):
        term *= half / (a + count)
        total += term
        if term < total * RELATIVE_PRECISION:
            break
    return min(1.0, total * math.exp(a * math.log(half) - half - math.lgamma(a)))


def t_test_power(shift: float, runs: int, *, false_alarms: float) -> float:
    """How often the two-sided t test of two arms with `runs` runs each tells a difference of `shift` standard
    deviations of a run.

    The test's statistic is noncentral t: (Z + δ) / S with δ = shift · √(runs / 2) and S = √(χ²/df). This is the
    normal probability of either tail, given S, averaged over the density of S.
    """
    df = 2 * runs - 2
    critical = student_quantile(1 - false_alarms / 2, df)
    delta = shift * math.sqrt(runs / 2)
    # Over log S, where the integrand falls to nothing at both ends, the trapezoidal rule errs by next to nothing.
    width = 10 / math.sqrt(2 * df)  # S is about 1, give or take 1 / √(2 df)
    log_S = np.linspace(-max(width, 36 / df), math.log1p(width), POWER_NODES)
    S = np.exp(log_S)
    log_density = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2) + df * (log_S - S**2 / 2)
    tails = [NORMAL.cdf(delta - critical * s) + NORMAL.cdf(-delta - critical * s) for s in S]
    return float(np.trapezoid(np.exp(log_density) * np.array(tails), log_S))
