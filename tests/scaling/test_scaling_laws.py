"""L(N, D) = E + A/N^alpha + B/D^beta: fits find known and published laws, and refuse points that determine no law."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import scipy

from harness.common.statistics import Inconclusive
from harness.scaling import laws
from harness.scaling.data import CostLaw, Points
from harness.scaling.laws import HUBER_DELTA, LawFit, Plan, best_split, fit_law, predict
from tests.scaling.scaling import LAW, best_size, ladder, points_of

KNOWN = {name: float(value) for name, value in LAW.coefficients().items()}


def fitted(points: Points, resamples: int = 10) -> LawFit:
    fit = fit_law(points, resamples=resamples, seed=0)
    assert isinstance(fit, LawFit), fit
    return fit


@cache
def of_ladder(seed: int) -> tuple[Points, LawFit]:
    """Return twenty points with a noise of 0.4 %, and the law fitted to them."""
    points = ladder(0.004, seed=seed)
    return points, fitted(points, 120)


def test_a_law_without_noise_comes_back_exactly() -> None:
    coefficients = fitted(ladder()).coefficients()
    for name, value in KNOWN.items():
        assert coefficients[name].value == pytest.approx(value, rel=2e-3), name


@pytest.mark.slow
def test_the_intervals_of_a_noisy_law_hold_it() -> None:
    """At most 3 of 20 intervals of 95 % (five coefficients, four seeds) do not contain the true coefficient."""
    missed = 0
    for seed in range(4):
        coefficients = of_ladder(seed)[1].coefficients()
        missed += sum(not coefficients[name].low <= value <= coefficients[name].high for name, value in KNOWN.items())
        assert all(0 < each.standard_error < abs(10 * each.value) for each in coefficients.values())
    assert missed <= 3


@pytest.mark.slow
def test_the_fit_has_the_least_huber_loss_of_all_that_another_search_finds() -> None:
    points, fit = of_ladder(3)

    def error(x: np.ndarray) -> float:
        """Return the sum of the Huber losses of ln L for the coefficients x = (E, ln A, ln B, alpha, beta)."""
        loss = x[0] + np.exp(x[1] - x[3] * np.log(points.parameters)) + np.exp(x[2] - x[4] * np.log(points.tokens))
        residuals = np.log(loss) - np.log(points.loss)
        return float(scipy.special.huber(HUBER_DELTA, residuals).sum())

    e, a, b, alpha, beta = (each.value for each in fit.coefficients().values())
    ours = error(np.array([e, np.log(a), np.log(b), alpha, beta]))
    starts = np.random.default_rng(1).uniform([1, 4, 5, 0.2, 0.2], [2, 8, 9, 0.5, 0.5], (3, 5))
    options = {"maxiter": 3000, "maxfev": 3000, "xatol": 1e-8, "fatol": 1e-8}
    theirs = [scipy.optimize.minimize(error, x, method="Nelder-Mead", options=options).fun for x in starts]
    assert ours <= min(theirs) * (1 + 1e-6)


def test_an_outlier_moves_the_fit_little() -> None:
    """The Huber loss limits the effect of an outlier that least squares would follow."""
    points = ladder(0.002)
    points.loss[7] *= 1.3
    coefficients = fitted(points).coefficients()
    assert coefficients["α"].value == pytest.approx(0.35, abs=0.06)
    assert coefficients["E"].value == pytest.approx(1.8, abs=0.12)


# Predictions


@pytest.mark.parametrize("cost", [CostLaw(), CostLaw(25.0, 0.93)])
def test_the_best_split_has_the_lowest_loss_of_all(cost: CostLaw) -> None:
    flops = 3e19
    size = float(LAW.best_size(flops, cost))

    def loss(log_size: float) -> float:
        return float(LAW.loss(np.exp(log_size), float(cost.tokens(flops, np.exp(log_size)))))

    theirs = scipy.optimize.minimize_scalar(loss, bounds=(np.log(1e6), np.log(1e12)), method="bounded")
    assert np.log(size) == pytest.approx(theirs.x, abs=1e-3)
    if cost.is_rule_of_thumb:
        assert size == pytest.approx(best_size(flops), rel=1e-9)
    assert cost.flops(size, float(cost.tokens(flops, size))) == pytest.approx(flops)


@pytest.mark.slow
def test_predictions_hold_new_runs() -> None:
    """The prediction intervals of 4 experiments contain about 95 % of new runs, 2,000 in each experiment."""
    size, noise, held = best_size(2e19), 0.004, []
    random = np.random.default_rng(0)
    for seed in range(4):
        points, fit = of_ladder(seed)
        prediction = predict(fit, points, Plan("", size, 2e19 / 6 / size, 2e19))
        new = LAW.loss(size, 2e19 / 6 / size) * np.exp(random.normal(0, noise, 2000))
        held.append(np.mean((prediction.loss.low < new) & (new < prediction.loss.high)))
    assert 0.88 < np.mean(held) < 0.99


def test_a_prediction_says_where_it_extrapolates() -> None:
    points, fit = of_ladder(1)
    size = best_size(2e19)
    inside = predict(fit, points, Plan("", size, 2e19 / 6 / size, 2e19))
    assert not inside.beyond_the_points
    beyond = predict(fit, points, Plan("", points.parameters.max() * 3, points.tokens.min() / 2, 1e21))
    assert beyond.beyond_the_points == [
        "parameters 3 times the largest",
        "tokens 2 times smaller than the smallest",
        "FLOPs 15.6 times the largest",
    ]
    assert beyond.loss.high - beyond.loss.low > inside.loss.high - inside.loss.low


def test_a_best_split_has_intervals_that_belong_together() -> None:
    points, fit = of_ladder(1)
    split = best_split(fit, points, CostLaw(), 2e19)
    assert split.parameters.low < best_size(2e19) < split.parameters.high
    assert 6 * split.parameters.value * split.tokens.value == pytest.approx(2e19)
    assert 6 * split.parameters.low * split.tokens.high == pytest.approx(2e19, rel=1e-3)


# Points that determine no law


def grid(sizes: int = 4, tokens: int = 4) -> tuple[np.ndarray, np.ndarray]:
    n, d = np.meshgrid(np.geomspace(1e8, 1e10, sizes), np.geomspace(1e9, 1e11, tokens))
    return n.ravel(), d.ravel()


N, D = grid()
RAY = np.geomspace(1e8, 1e10, 12)
NOISE = np.random.default_rng(0).normal(0, 0.02, 16)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        (points_of(N[:8], D[:8], LAW.loss(N, D)[:8]), "its 5 coefficients need at least 9 points (given: 8)"),
        (points_of(N, D, np.full(16, 3.0)), "the loss does not change with parameters or tokens: neither exponent"),
        (points_of(N, D, 2 + 400 / D**0.3), "not show how the loss falls with parameters"),
        (points_of(*grid(2, 8), LAW.loss(*grid(2, 8))), "it needs at least 3 different sizes (given: 2)"),
        (points_of(*grid(8, 2), LAW.loss(*grid(8, 2))), "it needs at least 3 different numbers of tokens (given: 2)"),
        (points_of(RAY, 20 * RAY, LAW.loss(RAY, 20 * RAY)), "size determines the number of tokens in all points"),
        (points_of(N, D, 2 + 0.1 * np.log(N) + 400 / D**0.3), "parameters: the best fit's exponent is -"),
        pytest.param(points_of(N, D, 3 * np.exp(NOISE)), "exponent", marks=pytest.mark.slow),
    ],
)
def test_what_the_points_do_not_tell_is_refused_with_the_reason(
    points: Points, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laws, "FLOORS", (0.5, 0.95))  # 8 starts in place of 48
    monkeypatch.setattr(laws, "PARTS", (0.5,))
    answer = fit_law(points, resamples=50, seed=0)
    assert isinstance(answer, Inconclusive), answer
    assert reason in str(answer)
    assert str(answer).startswith("inconclusive, because ")
