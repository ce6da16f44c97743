"""Searches for minima: against closed forms and scipy."""

from __future__ import annotations

import numpy as np
import scipy

from harness.scaling.bfgs import minimize

RANDOM = np.random.default_rng(0)


def rosenbrock(x_RxP: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([scipy.optimize.rosen(x) for x in x_RxP])
    return values, np.array([scipy.optimize.rosen_der(x) for x in x_RxP])


def test_every_start_ends_in_a_curved_valley() -> None:
    found = minimize(rosenbrock, RANDOM.uniform(-2, 2, (20, 2)))
    assert np.allclose(found.x_SxP, 1, atol=1e-4)
    assert found.value_S.max() < 1e-8


def test_each_search_has_its_own_function() -> None:
    targets = RANDOM.normal(size=(7, 3))
    scales = np.array([1.0, 30.0, 1000.0])

    def bowls(x_RxP: np.ndarray, rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        away = x_RxP - targets[rows_R]
        return 3 + (scales * away**2).sum(axis=1), 2 * scales * away

    found = minimize(bowls, np.zeros((7, 3)))
    assert np.allclose(found.x_SxP, targets, atol=1e-5)
    assert np.allclose(found.value_S, 3)


def test_a_huber_loss_of_small_delta_is_least_where_scipy_finds_it() -> None:
    """Nearly absolute values, whose kinks end other searches early: a line through points with outliers."""
    x, delta = np.linspace(0, 1, 41), 1e-3
    y = 2 + 3 * x + RANDOM.standard_t(2, 41) * 0.05

    def huber(line_RxP: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        error = line_RxP[:, :1] + line_RxP[:, 1:] * x - y
        slope = np.clip(error, -delta, delta)
        return (slope * (error - slope / 2)).sum(axis=1), np.stack([slope.sum(axis=1), slope @ x], axis=1)

    found = minimize(huber, RANDOM.uniform(-5, 5, (10, 2)))
    theirs = scipy.optimize.minimize(
        lambda line: huber(line[None], line)[0][0], [2, 3], method="Nelder-Mead", tol=1e-12
    )
    assert np.allclose(found.value_S, theirs.fun, rtol=1e-5)


def test_a_start_that_cannot_be_evaluated_harms_no_other() -> None:
    def logarithms(x_RxP: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x_RxP[:, 0] - np.log(x_RxP[:, 0]), 1 - 1 / x_RxP

    found = minimize(logarithms, np.array([[-1.0], [5.0], [np.nan]]))
    assert np.isinf(found.value_S[[0, 2]]).all()
    assert abs(found.x_SxP[1, 0] - 1) < 1e-4
