"""The parametric scaling law L(N, D) = E + A / N^alpha + B / D^beta: its fit, its predictions, the best split of FLOPs.

N are parameters, D tokens, L the final loss in nats per token (Hoffmann et al., arXiv:2203.15556, section 3.3).
Intervals come from fits to resamples of the points (Besiroglu et al., arXiv:2404.10102).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from harness.common.statistics import Estimate, Inconclusive, estimate
from harness.scaling.data import CostLaw, Points, different

PARAMETERS = 5
# In simulations, 95 % intervals hold the true value in 95 % to 100 % of experiments with 9 points or more, but in 65 %
# to 75 % with 6. Nearly all resamples of 6 points have at most 5 distinct points, which 5 coefficients fit exactly.
LEAST_POINTS = 9
TRIMMED_PERCENT = 0.5  # of resamples dropped at each end for a standard error; unbounded ones would dominate it
HUBER_DELTA = 1e-3
# Starting points of the fit: every combination of the floor E (as a part of the lowest loss), the part of the median
# loss above the floor that is due to size, and both exponents. Hoffmann et al. start from a grid, too.
FLOORS, PARTS, EXPONENTS = (0.2, 0.5, 0.8, 0.95), (0.1, 0.5, 0.9), (0.2, 0.6)
STARTS = len(FLOORS) * len(PARTS) * len(EXPONENTS) ** 2
LEAST_FLOOR = 1e-3  # as a fraction of the lowest loss; a smaller E counts as no floor
# Standard deviation of ln tokens about a line in ln parameters. If it is less, the law's two terms cannot be separated.
LEAST_SPREAD = 0.05
LEAST_EXPONENT, LARGEST_EXPONENT = 0.005, 5.0
LARGEST = 1e300  # a larger number counts as unbounded
LEAST_CHANGE = 1e-9  # of ln L between the points; a smaller range is rounding error


@dataclass(frozen=True)
class Coefficient(Estimate):
    """An estimate with its standard error."""

    standard_error: float


@dataclass(frozen=True)
class Law:
    """Coefficients of one law, or arrays of them for several laws. A and B are stored as logarithms, since they may
    overflow a float."""

    e: np.ndarray
    log_a: np.ndarray
    log_b: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def loss(self, parameters: np.ndarray | float, tokens: np.ndarray | float) -> np.ndarray:
        """Return the loss of a model of this size trained on these tokens; infinite if it overflows."""
        with np.errstate(over="ignore", divide="ignore"):
            by_size = np.exp(self.log_a - self.alpha * np.log(parameters))
            return np.asarray(self.e + by_size + np.exp(self.log_b - self.beta * np.log(tokens)))

    def best_size(self, flops: float, cost: CostLaw) -> np.ndarray:
        """Return the number of parameters with the lowest loss among all splits of these FLOPs into size and tokens. If
        alpha is not positive, the result is 0. If only beta is not positive, the result is infinite."""
        # With FLOPs = c N^p D, the derivative of L with respect to ln N is zero at N^(alpha + p beta) = (alpha A / (p
        # beta B)) (FLOPs / c)^beta. For c = 6 and p = 1 this is equation 4 of Hoffmann et al.
        with np.errstate(all="ignore"):  # the exponents of resamples may have any sign, and be near zero
            power = self.alpha + cost.exponent * self.beta
            log_ratio = self.log_a - self.log_b + np.log(self.alpha) - np.log(cost.exponent * self.beta)
            size = np.exp((log_ratio + self.beta * np.log(flops / cost.coefficient)) / power)
        # In some resamples, the loss does not fall with parameters, or not with tokens.
        return np.where(self.alpha <= 0, 0.0, np.where(self.beta <= 0, np.inf, size))

    def coefficients(self) -> dict[str, np.ndarray]:
        """Return the coefficients by their printed names; A and B are infinite if they overflow."""
        with np.errstate(over="ignore"):
            a, b = np.exp(self.log_a), np.exp(self.log_b)
        return {"E": self.e, "A": a, "B": b, "α": self.alpha, "β": self.beta}


@dataclass(frozen=True)
class LawFit:
    """The law that is fitted to all points, and the laws that are fitted to the resamples."""

    law: Law
    resampled: Law  # [B]
    residuals: np.ndarray  # [n], of ln L

    def coefficients(self) -> dict[str, Coefficient]:
        """Return the coefficients of the law, with intervals and standard errors from the resamples, by their printed
        names: E, A, B, α and β."""
        values, drawn = self.law.coefficients(), self.resampled.coefficients()
        return {name: _coefficient(values[name], drawn[name]) for name in values}

    def size_exponent(self, cost: CostLaw) -> Coefficient:
        """Return the exponent a: the compute-optimal number of parameters is proportional to FLOPs^a."""
        with np.errstate(divide="ignore"):
            value, drawn = (law.beta / (law.alpha + cost.exponent * law.beta) for law in (self.law, self.resampled))
        return _coefficient(value, drawn)

    def best(self, flops: float, cost: CostLaw) -> dict[str, Estimate]:
        """Return the best number of "parameters" and the best number of "tokens" for these FLOPs, with their
        intervals."""
        value, drawn = (law.best_size(flops, cost) for law in (self.law, self.resampled))
        tokens = bounded(cost.tokens(flops, value), cost.tokens(flops, drawn))
        return {"parameters": bounded(value, drawn), "tokens": tokens}


@dataclass(frozen=True)
class Plan:
    """Size, tokens and FLOPs of a training whose loss is to be predicted. `name` may be ""."""

    name: str
    parameters: float
    tokens: float
    flops: float


@dataclass(frozen=True)
class Prediction(Plan):
    """A plan, and the predicted loss of a run that is trained like the runs of the fit."""

    loss: Estimate
    beyond_the_points: list[str]  # each quantity of the plan that is outside the range of the points, and by how much


@dataclass(frozen=True)
class Split:
    """The compute-optimal size and number of tokens for some FLOPs. `loss` and `beyond_the_points` are those of a
    Prediction."""

    flops: float
    parameters: Estimate
    tokens: Estimate
    loss: Estimate
    beyond_the_points: list[str]


def _coefficient(value: np.ndarray, drawn: np.ndarray) -> Coefficient:
    interval, drawn = bounded(value, drawn), np.clip(drawn, -LARGEST, LARGEST)
    low, high = np.percentile(drawn, [TRIMMED_PERCENT, 100 - TRIMMED_PERCENT])
    middle = drawn[(low <= drawn) & (drawn <= high)]
    scale = float(np.abs(middle).max()) or 1.0  # squares of large numbers would overflow
    error = float(np.std(middle / scale, ddof=1)) * scale
    # In a normal distribution the standard error is a quarter of the 95 % interval. A standard error larger than the
    # whole interval comes from a few extreme resamples.
    is_bounded = error <= interval.high - interval.low
    return Coefficient(interval.value, interval.low, interval.high, error if is_bounded else math.inf)


def bounded(value: np.ndarray | float, drawn: np.ndarray) -> Estimate:
    """Return `value` as an estimate with the interval of the resampled values `drawn`, which must not contain NaN. An
    interval end that overflows is infinite."""
    found = estimate(float(value), np.clip(drawn, -LARGEST, LARGEST))
    # LARGEST / 10, because an end that is interpolated between two resamples is rounded.
    low, high = (end if abs(end) < LARGEST / 10 else math.copysign(math.inf, end) for end in (found.low, found.high))
    return Estimate(found.value, low, high)


def fit_law(points: Points, *, resamples: int, seed: int) -> LawFit | Inconclusive:
    """Return the law with the least sum of Huber losses of ln L, or the reason why the points do not determine a law.
    `resamples` is the number of further fits, to points drawn with replacement."""
    if reason := _too_little(points):
        return Inconclusive(reason)
    log_n, log_d, log_l = np.log(points.parameters), np.log(points.tokens), np.log(points.loss)
    # The search is over (ln a, ln b, ln E, alpha, beta), where a and b are the law's two terms at the middle of the
    # points. A and alpha are so strongly correlated that a search over them would be long.
    data = (log_n - log_n.mean(), log_d - log_d.mean(), log_l)

    def law_of(x: np.ndarray) -> Law:
        """Return the law with the coefficients `x` [5], or several laws for [5, B]."""
        log_a, log_b, log_e, alpha, beta = x
        return Law(np.exp(log_e), log_a + alpha * log_n.mean(), log_b + beta * log_d.mean(), alpha, beta)

    losses, fits = np.exp(log_l), []
    for floor, part, alpha, beta in itertools.product(FLOORS, PARTS, EXPONENTS, EXPONENTS):
        e = floor * losses.min()
        rest = np.median(losses) - e
        start = np.array([np.log(part * rest), np.log((1 - part) * rest), np.log(e), alpha, beta])
        fits.append(_minimum(start, np.ones(len(points)), *data))
    value, best = min(fits, key=lambda fit: fit[0])
    if not math.isfinite(value):
        return Inconclusive("every search for the least error overflowed; check the points for a wrong value")
    law = law_of(best)
    if reason := _implausible(law, points):
        return Inconclusive(reason)
    generator = np.random.default_rng(seed)
    weights_BxN = generator.multinomial(len(points), np.full(len(points), 1 / len(points)), size=resamples)
    drawn_Bx5 = np.array([_minimum(best, weights.astype(float), *data)[1] for weights in weights_BxN])
    fit = LawFit(law, law_of(drawn_Bx5.T), log_l - np.log(law.loss(points.parameters, points.tokens)))
    for name, of in (("α", "parameters"), ("β", "tokens")):
        if (low := fit.coefficients()[name].low) <= 0:
            return Inconclusive(
                f"the exponent of {of} is not certain to be positive: its 95 % interval begins at {low:.2g}"
            )
    return fit


def _too_little(points: Points) -> str | None:
    """Return the reason why the points do not suffice for five coefficients, or None if they suffice."""
    if len(points) < LEAST_POINTS:
        return f"its {PARAMETERS} coefficients need at least {LEAST_POINTS} points (given: {len(points)})"
    for values, what in ((points.parameters, "sizes"), (points.tokens, "numbers of tokens")):
        if (count := different(values)) < 3:
            return f"it needs at least 3 different {what} (given: {count})"
    if np.ptp(np.log(points.loss)) < LEAST_CHANGE:
        return "the loss does not change with parameters or tokens: neither exponent is determined"
    x, y = np.log(points.parameters), np.log(points.tokens)
    slope, intercept = np.polyfit(x - x.mean(), y, 1)
    if np.std(y - intercept - slope * (x - x.mean())) < LEAST_SPREAD:
        return (
            "size determines the number of tokens in all points, so that the effects of the two cannot be told apart; "
            "train one size on different numbers of tokens"
        )
    return None


def _implausible(law: Law, points: Points) -> str | None:
    """Return the reason why the best fit is not credible, or None if it is credible."""
    for value, of in ((law.alpha, "parameters"), (law.beta, "tokens")):
        if not LEAST_EXPONENT <= value <= LARGEST_EXPONENT:
            why = f"the points do not show how the loss falls with {of}"
            return f"{why}: the best fit's exponent is {value:.2g}, not {LEAST_EXPONENT} to {LARGEST_EXPONENT:g}"
    if law.e < LEAST_FLOOR * points.loss.min():
        return "the best fit has no floor E: the points do not show how the loss levels off"
    if not all(np.isfinite(value) for value in law.coefficients().values()):
        return "the best fit has coefficients that overflow"
    return None


def _minimum(
    start: np.ndarray, weights: np.ndarray, u: np.ndarray, v: np.ndarray, y: np.ndarray
) -> tuple[float, np.ndarray]:
    """Search from `start` for the coefficients [5] with the least error. Returns the error and the coefficients, or
    infinity and `start` if the search overflows.

    The error is the sum of the points' Huber losses times `weights` [n], divided by HUBER_DELTA. `u` and `v` [n] are
    ln N and ln D minus their means. `y` [n] is ln L.
    """
    from scipy.optimize import minimize

    def error(x: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the error and its gradient [5] at the coefficients `x` [5]."""
        log_a, log_b, log_e, alpha, beta = x
        by_size, by_tokens, floor = np.exp(log_a - alpha * u), np.exp(log_b - beta * v), np.exp(log_e)
        loss = by_size + by_tokens + floor
        residuals = np.log(loss) - y
        clipped = np.clip(residuals, -HUBER_DELTA, HUBER_DELTA)
        slope = weights * clipped / loss
        size_slope, tokens_slope = slope * by_size, slope * by_tokens
        gradient = [size_slope.sum(), tokens_slope.sum(), slope.sum() * floor, -size_slope @ u, -tokens_slope @ v]
        return weights * clipped @ (residuals - clipped / 2) / HUBER_DELTA, np.array(gradient) / HUBER_DELTA

    with np.errstate(all="ignore"):  # a step that is too long may overflow; the search then tries a shorter one
        found = minimize(error, start, jac=True, method="BFGS")
    if not math.isfinite(found.fun) or not np.isfinite(found.x).all():
        return math.inf, start
    return float(found.fun), found.x


def predict(fit: LawFit, points: Points, plan: Plan) -> Prediction:
    """Predict the loss of one more run. `points` are those of the fit. The interval includes the uncertainty of the law
    and the scatter of single runs about the law."""
    drawn = fit.resampled.loss(plan.parameters, plan.tokens)
    generator = np.random.default_rng(0)
    # Residuals of fitted points are smaller than those of a new run, so they are enlarged. A few residuals can be
    # lopsided by chance, so their signs are drawn at random.
    enlarged = fit.residuals * np.sqrt(len(points) / (len(points) - PARAMETERS))
    scatter = generator.choice(enlarged, size=len(drawn)) * generator.choice([-1, 1], size=len(drawn))
    with np.errstate(over="ignore"):
        drawn = drawn * np.exp(scatter)
    beyond = []
    for name, value, there, tolerance in (
        ("parameters", plan.parameters, points.parameters, 1.001),
        ("tokens", plan.tokens, points.tokens, 1.001),
        ("FLOPs", plan.flops, points.flops, 1.1),  # often computed from the other two by an approximate law
    ):
        if value > there.max() * tolerance:
            beyond.append(f"{name} {value / there.max():.3g} times the largest")
        if value < there.min() / tolerance:
            beyond.append(f"{name} {there.min() / value:.3g} times smaller than the smallest")
    loss = bounded(fit.law.loss(plan.parameters, plan.tokens), drawn)
    return Prediction(**vars(plan), loss=loss, beyond_the_points=beyond)


def best_split(fit: LawFit, points: Points, cost: CostLaw, flops: float) -> Split:
    """Return the best split of FLOPs between size and tokens, by the law."""
    best = fit.best(flops, cost)
    predicted = predict(fit, points, Plan("", best["parameters"].value, best["tokens"].value, flops))
    return Split(flops, **best, loss=predicted.loss, beyond_the_points=predicted.beyond_the_points)
