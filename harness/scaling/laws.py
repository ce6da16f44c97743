"""The parametric scaling law L(N, D) = E + A / N^alpha + B / D^beta: its fit, its predictions, the best split of FLOPs.

N are parameters, D tokens, L the final loss in nats per token (Hoffmann et al., arXiv:2203.15556, section 3.3). The
intervals are those of Besiroglu et al. (arXiv:2404.10102): the points are drawn anew with replacement, and the law is
fitted to each draw.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from harness.common.statistics import Estimate, estimate
from harness.comparison.inconclusive import Inconclusive
from harness.scaling.bfgs import Function, minimize
from harness.scaling.data import CostLaw, Points, different

PARAMETERS = 5
# In simulations, intervals of 95 % hold the truth in 95 % to 100 % of experiments with 9 points or more, but in 65 % to
# 75 % with 6: most of the resamples of so few then have hardly more points than coefficients, and fit anything.
LEAST_POINTS = 9
TRIMMED_PERCENT = 0.5  # of the resamples, at each end, for standard errors: a few without bound would be all of it
HUBER_DELTA = 1e-3
DRAWN_AT_ONCE = 2**16  # points in all resamples that are fitted together: what the processor's caches hold
# Starts: every combination of a floor E, as a part of the lowest loss, of the part of the rest that is due to size at
# the middle of the points, and of both exponents. Hoffmann et al. have a grid, too.
FLOORS, PARTS, EXPONENTS = (0.2, 0.5, 0.8, 0.95), (0.1, 0.5, 0.9), (0.1, 0.3, 0.6, 1.0)
STARTS = len(FLOORS) * len(PARTS) * len(EXPONENTS) ** 2
LEAST_FLOOR = 1e-3  # of the lowest loss: an E below it is none
LEAST_SPREAD = 0.05  # of tokens about a power of the parameters: less, and the law's two terms are one
LEAST_EXPONENT, LARGEST_EXPONENT = 0.005, 5.0
LARGEST = 1e300  # what is above is beyond all bounds
LEAST_CHANGE = 1e-9  # of ln L between the points: less is rounding


@dataclass(frozen=True)
class Coefficient:
    """An estimate with its standard error, and its 95 % interval."""

    value: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """One law, or several at once: each coefficient is a number, or an array [B]."""

    e: np.ndarray
    a: np.ndarray
    b: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    logs: tuple[np.ndarray, np.ndarray] | None = None  # ln A and ln B, where A and B may be beyond what numbers hold

    @property
    def _log_terms(self) -> tuple[np.ndarray, np.ndarray]:
        return self.logs or (np.log(self.a), np.log(self.b))

    def loss(self, parameters: np.ndarray | float, tokens: np.ndarray | float) -> np.ndarray:
        """Loss of a model of this size on these tokens; infinite where it overflows."""
        log_a, log_b = self._log_terms
        with np.errstate(over="ignore", divide="ignore"):
            by_size = np.exp(log_a - self.alpha * np.log(parameters))
            return np.asarray(self.e + by_size + np.exp(log_b - self.beta * np.log(tokens)))

    def best_size(self, flops: float, cost: CostLaw) -> np.ndarray:
        """The parameters with the lowest loss among all splits of these FLOPs.

        With FLOPs c N^p D, the derivative of L over ln N is zero at N^(alpha + p beta) = (alpha A / p beta B)
        (FLOPs / c)^beta; for c = 6 and p = 1 it is equation 4 of Hoffmann et al. Where the loss does not fall with
        parameters, as in some resamples, the best size is 0; else, where it does not fall with tokens, infinite.
        """
        log_a, log_b = self._log_terms
        with np.errstate(all="ignore"):  # the exponents of resamples may have any sign, and be near zero
            power = self.alpha + cost.exponent * self.beta
            log_ratio = log_a - log_b + np.log(self.alpha) - np.log(cost.exponent * self.beta)
            size = np.exp((log_ratio + self.beta * np.log(flops / cost.coefficient)) / power)
        return np.where(self.alpha <= 0, 0.0, np.where(self.beta <= 0, np.inf, size))


@dataclass(frozen=True)
class LawFit:
    """The law of all points, and of each resample."""

    law: Law
    resampled: Law  # [B]
    residuals: np.ndarray  # [n], of ln L
    delta: float

    def coefficients(self) -> dict[str, Coefficient]:
        """Coefficients by the names they have in print."""
        names = {"E": "e", "A": "a", "B": "b", "α": "alpha", "β": "beta"}
        return {name: _coefficient(getattr(self.law, key), getattr(self.resampled, key)) for name, key in names.items()}

    def size_exponent(self, cost: CostLaw) -> Coefficient:
        """The power of FLOPs that the compute-optimal number of parameters grows with."""
        with np.errstate(divide="ignore"):
            value, drawn = (law.beta / (law.alpha + cost.exponent * law.beta) for law in (self.law, self.resampled))
        return _coefficient(value, drawn)


@dataclass(frozen=True)
class Plan:
    """A run that has not been trained."""

    name: str
    parameters: float
    tokens: float
    flops: float


@dataclass(frozen=True)
class Prediction:
    """A loss, expected of one more run like those of the points."""

    plan: Plan
    loss: Estimate
    beyond: list[str]  # in what it lies beyond the points, and how far


@dataclass(frozen=True)
class Split:
    """The compute-optimal size and number of tokens for some FLOPs."""

    flops: float
    parameters: Estimate
    tokens: Estimate
    prediction: Prediction


def _coefficient(value: np.ndarray, drawn: np.ndarray) -> Coefficient:
    interval, drawn = bounded(value, drawn), np.clip(drawn, -LARGEST, LARGEST)
    low, high = np.percentile(drawn, [TRIMMED_PERCENT, 100 - TRIMMED_PERCENT])
    middle = drawn[(low <= drawn) & (drawn <= high)]
    scale = float(np.abs(middle).max()) or 1.0  # squares of large numbers would overflow
    error = float(np.std(middle / scale, ddof=1)) * scale
    # A normal distribution's is a quarter of the interval: one above all of it is that of a few resamples.
    is_bounded = error <= interval.high - interval.low
    return Coefficient(interval.value, error if is_bounded else math.inf, interval.low, interval.high)


def bounded(value: np.ndarray | float, drawn: np.ndarray) -> Estimate:
    """Estimate whose ends are infinite where they lie beyond all bounds. None of `drawn` is NaN."""
    found = estimate(float(value), np.clip(drawn, -LARGEST, LARGEST))
    # Not quite: an end between two resamples is rounded.
    low, high = (end if abs(end) < LARGEST / 10 else math.copysign(math.inf, end) for end in (found.low, found.high))
    return Estimate(found.value, low, high)


def fit_law(points: Points, resamples: int, *, seed: int = 0, delta: float = HUBER_DELTA) -> LawFit | Inconclusive:
    """The law with the least sum of Huber losses of ln L, or why the points do not give one."""
    reason = why_not(points)
    if reason:
        return Inconclusive(reason)
    problem = _Problem.of(points, delta)
    one = np.ones((1, len(points)))
    starts = problem.starts()
    minima = minimize(problem.objective(np.repeat(one, len(starts), axis=0)), starts)
    best = minima.x_SxP[np.argmin(minima.value_S)]
    if not np.isfinite(minima.value_S.min()):
        return Inconclusive("no search for the least error came to an end: look at the points for a wrong one")
    law = problem.law(best)
    reason = _implausible(law, points)
    if reason:
        return Inconclusive(reason)
    resampled = problem.law(_fit_resamples(problem, best, resamples, seed))
    residuals = problem.y - np.log(law.loss(points.parameters, points.tokens))
    fit = LawFit(law, resampled, residuals, delta)
    coefficients = fit.coefficients()
    for name, of in (("α", "parameters"), ("β", "tokens")):
        if coefficients[name].low <= 0:
            return Inconclusive(
                f"the exponent of {of} is not certain to be positive: its 95 % interval begins at "
                f"{coefficients[name].low:.2g}"
            )
    return fit


def why_not(points: Points) -> str | None:
    """The reason why the points do not suffice for five coefficients, or None."""
    if len(points) < LEAST_POINTS:
        are = "point is" if len(points) == 1 else "points are"
        return f"{len(points)} {are} too few for {PARAMETERS} coefficients with intervals; {LEAST_POINTS} will do"
    for values, what, several in (
        (points.parameters, "size", "sizes"),
        (points.tokens, "number of tokens", "numbers of tokens"),
    ):
        count = different(values)
        if count < 3:
            there = f"all points have the same {what}" if count == 1 else f"there are {count} different {several}"
            return f"{there}; the law needs 3 at least"
    if np.ptp(np.log(points.loss)) < LEAST_CHANGE:
        return "the loss does not change with parameters or tokens: no exponent of either can be told"
    x, y = np.log(points.parameters), np.log(points.tokens)
    slope, intercept = np.polyfit(x - x.mean(), y, 1)
    if np.std(y - intercept - slope * (x - x.mean())) < LEAST_SPREAD:
        return "tokens go with parameters in all points, so that the effects of the two cannot be told apart"
    return None


def _implausible(law: Law, points: Points) -> str | None:
    """The reason why the best fit is not credible, or None."""
    for value, of in ((law.alpha, "parameters"), (law.beta, "tokens")):
        if abs(value) < LEAST_EXPONENT:
            return f"the loss does not change with {of} in the best fit: no exponent of them can be told"
        if value <= 0:
            return f"the best fit has a negative exponent of {of} ({value:.2f}): the loss does not fall with them"
        if value > LARGEST_EXPONENT:
            return f"the best fit has an exponent of {of} of {value:.1f}: the points do not show how the loss falls"
    if law.e < LEAST_FLOOR * points.loss.min():
        return "the best fit has no floor E: the points do not show how the loss levels off"
    if not all(np.isfinite(value) for value in (law.a, law.b)):
        return "the best fit has coefficients beyond what numbers can hold"
    return None


def _fit_resamples(problem: _Problem, best: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """The fits of draws with replacement, [B, 5], each searched for from the fit of all points."""
    generator = np.random.default_rng(seed)
    count = len(problem.y)
    at_once = max(1, DRAWN_AT_ONCE // count)
    fitted = []
    for begin in range(0, resamples, at_once):
        size = min(at_once, resamples - begin)
        weights_BxN = generator.multinomial(count, np.full(count, 1 / count), size=size).astype(float)
        fitted.append(minimize(problem.objective(weights_BxN), np.repeat(best[None], size, axis=0)).x_SxP)
    return np.concatenate(fitted)


@dataclass(frozen=True)
class _Problem:
    """The least-error problem in (ln a, ln b, ln E, alpha, beta), where a and b are the law's terms at the middle of
    the points: A and alpha by themselves are so closely tied that every search would be long."""

    u: np.ndarray  # [n], ln N about its mean
    v: np.ndarray  # [n], ln D about its mean
    y: np.ndarray  # [n], ln L
    mean_u: float
    mean_v: float
    delta: float

    @classmethod
    def of(cls, points: Points, delta: float) -> _Problem:
        u, v = np.log(points.parameters), np.log(points.tokens)
        return cls(u - u.mean(), v - v.mean(), np.log(points.loss), float(u.mean()), float(v.mean()), delta)

    def starts(self) -> np.ndarray:
        """Starting points of the fit, [192, 5]."""
        losses = np.exp(self.y)
        rows = []
        for floor, part, alpha, beta in itertools.product(FLOORS, PARTS, EXPONENTS, EXPONENTS):
            e = floor * losses.min()
            rest = np.median(losses) - e
            rows.append([np.log(part * rest), np.log((1 - part) * rest), np.log(e), alpha, beta])
        return np.array(rows)

    def objective(self, weights_SxN: np.ndarray) -> Function:
        """A function of all searches: the sum of the Huber losses of a search's points, each counted as often as its
        weight says, over delta; and the gradient."""

        def function(x_RxP: np.ndarray, rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            log_a, log_b, log_e, alpha, beta = (x_RxP[:, index, None] for index in range(PARAMETERS))
            size_RxN, tokens_RxN = np.exp(log_a - alpha * self.u), np.exp(log_b - beta * self.v)
            floor_Rx1 = np.exp(log_e)
            loss_RxN = size_RxN + tokens_RxN + floor_Rx1
            error_RxN = np.log(loss_RxN) - self.y
            weights_RxN = weights_SxN[rows_R]
            clipped_RxN = np.clip(error_RxN, -self.delta, self.delta)
            value_R = np.sum(weights_RxN * clipped_RxN * (error_RxN - clipped_RxN / 2), axis=1)
            slope_RxN = weights_RxN * clipped_RxN / loss_RxN
            by_size_RxN, by_tokens_RxN = slope_RxN * size_RxN, slope_RxN * tokens_RxN
            by_floor_R = np.sum(slope_RxN, axis=1) * floor_Rx1[:, 0]
            sums = [by_size_RxN.sum(axis=1), by_tokens_RxN.sum(axis=1), by_floor_R]
            return value_R / self.delta, np.stack(
                [*sums, -(by_size_RxN @ self.u), -(by_tokens_RxN @ self.v)], axis=1
            ) / self.delta

        return function

    def law(self, x: np.ndarray) -> Law:
        """Law or laws of coefficients [5] or [B, 5]."""
        log_a, log_b, log_e, alpha, beta = np.moveaxis(x, -1, 0)
        with np.errstate(over="ignore"):
            a, b = np.exp(log_a + alpha * self.mean_u), np.exp(log_b + beta * self.mean_v)
        return Law(np.exp(log_e), a, b, alpha, beta, (log_a + alpha * self.mean_u, log_b + beta * self.mean_v))


def predict(fit: LawFit, points: Points, plan: Plan) -> Prediction:
    """The loss of one more run: its interval has the law's uncertainty, and how far single runs lie from the law."""
    parameters, tokens = plan.parameters, plan.tokens
    value = float(fit.law.loss(parameters, tokens))
    drawn = fit.resampled.loss(parameters, tokens)
    with np.errstate(over="ignore"):
        drawn = drawn * np.exp(_scatter(fit.residuals, len(drawn)))
    given = {"parameters": parameters, "tokens": tokens, "FLOPs": plan.flops}
    there = {"parameters": points.parameters, "tokens": points.tokens, "FLOPs": points.flops}
    beyond = [text for key in given if (text := _beyond(key, given[key], there[key]))]
    return Prediction(plan, bounded(value, drawn), beyond)


def _scatter(residuals: np.ndarray, count: int) -> np.ndarray:
    """Draw distances of single runs from the law, in ln L: residuals of either sign (few of them are lopsided by
    chance), enlarged, since the law has been fitted to them."""
    generator = np.random.default_rng(0)
    enlarged = residuals * np.sqrt(len(residuals) / (len(residuals) - PARAMETERS))
    return generator.choice(enlarged, size=count) * generator.choice([-1, 1], size=count)


def _beyond(name: str, value: float, points: np.ndarray) -> str | None:
    if value > points.max() * 1.001:
        return f"{name} {value / points.max():.3g} times the largest"
    if value < points.min() / 1.001:
        return f"{name} {points.min() / value:.3g} times below the smallest"
    return None


def best_split(fit: LawFit, points: Points, cost: CostLaw, flops: float) -> Split:
    """Best division of FLOPs between size and tokens, by the law."""
    value, drawn = (law.best_size(flops, cost) for law in (fit.law, fit.resampled))
    parameters = bounded(value, drawn)
    with np.errstate(divide="ignore", over="ignore"):  # of a size of 0
        tokens = bounded(cost.tokens(flops, value), cost.tokens(flops, drawn))
    plan = Plan(f"{flops:.3g} FLOPs", parameters.value, tokens.value, flops)
    return Split(flops, parameters, tokens, predict(fit, points, plan))
