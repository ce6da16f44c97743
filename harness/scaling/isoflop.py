"""IsoFLOP profiles: among runs of equal compute, which size is best, and how that size grows with compute.

Approach 2 of Hoffmann et al. (arXiv:2203.15556): in each profile a parabola of the loss over ln N, and through the
lowest points of the parabolas straight lines in logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.common.statistics import Estimate, estimate
from harness.comparison.inconclusive import Inconclusive
from harness.scaling.data import CostLaw, Points, different

LEAST_PROFILES = 3
OWN_SCATTER_POINTS = 8  # a profile of fewer points is judged by the scatter about all such profiles together
NEGLIGIBLE_SPREAD = 0.005  # of ln FLOPs in a profile
UNDETERMINED = 0.025  # of the draws of a profile may have no lowest point


@dataclass(frozen=True)
class Optimum:
    """The lowest point of a profile's parabola."""

    parameters: Estimate
    tokens: Estimate
    loss: Estimate


@dataclass(frozen=True)
class Profile:
    """Points of nearly equal compute."""

    flops: float  # their geometric mean
    members: np.ndarray  # indices of its points
    parabola: np.ndarray  # the loss is c0 + c1 x + c2 x^2 of x = ln N - middle
    middle: float
    scatter: float  # nats: the points' standard deviation about the parabola; 0 where three fix it
    optimum: Optimum | Inconclusive

    def loss(self, parameters: np.ndarray) -> np.ndarray:
        """Loss of the parabola at these numbers of parameters."""
        return np.polynomial.polynomial.polyval(np.log(parameters) - self.middle, self.parabola)


@dataclass(frozen=True)
class PowerLaw:
    """A quantity that is proportional to a power of the FLOPs."""

    exponent: Estimate
    log_values: np.ndarray  # [2]: slope and intercept of ln quantity over ln FLOPs
    drawn: np.ndarray  # [B, 2], the same of each draw

    def at(self, flops: np.ndarray) -> np.ndarray:
        return np.exp(self.log_values[1] + self.log_values[0] * np.log(flops))

    def interval_at(self, flops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The 95 % interval at each of these FLOPs."""
        drawn = self.drawn[:, 1, None] + self.drawn[:, :1] * np.log(flops)
        low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
        return np.exp(low), np.exp(high)


@dataclass(frozen=True)
class PowerLaws:
    """Power laws in compute of the best size, its tokens and its loss."""

    parameters: PowerLaw
    tokens: PowerLaw
    loss: PowerLaw


@dataclass(frozen=True)
class IsoFlop:
    """The profiles found, and what they say together."""

    profiles: list[Profile]
    alone: int  # points that belong to no profile
    laws: PowerLaws | Inconclusive


@dataclass(frozen=True)
class Grouping:
    """Criteria of a profile: points whose FLOPs lie within `tolerance` (a fraction) of a common middle, of at least
    `least_sizes` different sizes."""

    tolerance: float = 0.05
    least_sizes: int = 4


def group_by_compute(points: Points, grouping: Grouping) -> list[np.ndarray]:
    """Indices of the points of each profile, by rising FLOPs.

    The profile with the most different sizes is taken first, then the next of what is left.
    """
    width = 2 * np.log1p(grouping.tolerance)
    log_flops, left, groups = np.log(points.flops), np.arange(len(points)), []
    while left.size:
        left = left[np.argsort(log_flops[left], kind="stable")]
        ends = np.searchsorted(log_flops[left], log_flops[left] + width, side="right")
        sizes = [different(points.parameters[left[begin:end]]) for begin, end in enumerate(ends)]
        begin = int(np.argmax(sizes))
        if sizes[begin] < grouping.least_sizes:
            break
        groups.append(left[begin : ends[begin]])
        left = np.concatenate([left[:begin], left[ends[begin] :]])
    return sorted(groups, key=lambda members: float(log_flops[members].mean()))


@dataclass(frozen=True)
class _Parabola:
    """A least-squares parabola, [3], with what its uncertainty is worked out from."""

    middle: float
    coefficients: np.ndarray
    root: np.ndarray  # [3, 3]: root @ root.T is the covariance for residuals of variance 1
    squares: float  # sum of the squared residuals
    freedom: int
    has_own_scatter: bool


def _fit_parabola(points: Points, members: np.ndarray) -> _Parabola:
    x, y = np.log(points.parameters[members]), points.loss[members]
    middle = float((x.min() + x.max()) / 2)
    design = np.vander(x - middle, 3, increasing=True)
    compute = np.log(points.flops[members])
    is_large = len(members) >= OWN_SCATTER_POINTS
    if is_large and np.ptp(compute) > NEGLIGIBLE_SPREAD:
        # More compute is a lower loss: without a term for it, the sizes that happened to get more would look better.
        design = np.column_stack([design, compute - compute.mean()])
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    covariance = np.linalg.pinv(design.T @ design)[:3, :3]
    freedom = len(members) - design.shape[1]
    squares = float(np.sum((y - design @ coefficients) ** 2)) if freedom else 0.0
    return _Parabola(middle, coefficients[:3], np.linalg.cholesky(covariance), squares, freedom, is_large)


def fit_isoflop(
    points: Points, cost: CostLaw, resamples: int, grouping: Grouping, *, seed: int = 0
) -> IsoFlop | Inconclusive:
    """The profiles among the points, and their power laws; or why there are none."""
    groups = group_by_compute(points, grouping)
    if not groups:
        return Inconclusive(
            f"no {grouping.least_sizes} sizes (--least-sizes) were trained with FLOPs within {grouping.tolerance:.0%} "
            "of a common value (--tolerance)"
        )
    parabolas = [_fit_parabola(points, members) for members in groups]
    drawn = _draw(parabolas, resamples, seed)
    profiles, lowest = [], []
    for members, parabola, draws_Bx3 in zip(groups, parabolas, drawn, strict=True):
        flops = float(np.exp(np.log(points.flops[members]).mean()))
        minima_Bx3 = None if draws_Bx3 is None else _minima(draws_Bx3, parabola.middle, flops, cost)
        optimum = _optimum(points.parameters[members], flops, parabola, cost, minima_Bx3)
        scatter = float(np.sqrt(parabola.squares / parabola.freedom)) if parabola.freedom else 0.0
        profiles.append(Profile(flops, members, parabola.coefficients, parabola.middle, scatter, optimum))
        if not isinstance(optimum, Inconclusive):
            lowest.append((profiles[-1], minima_Bx3))
    alone = len(points) - sum(map(len, groups))
    return IsoFlop(profiles, alone, _power_laws(lowest))


def _draw(parabolas: list[_Parabola], resamples: int, seed: int) -> list[np.ndarray | None]:
    """Coefficients [B, 3] of each parabola as the scatter of its points allows them, None where nothing is known of
    that.

    A parametric bootstrap: normal residuals, with the uncertainty of their variance, so that the coefficients have
    their t distribution (which drawing from five points with replacement would miss by far).
    """
    generator = np.random.default_rng(seed)
    small = [each for each in parabolas if not each.has_own_scatter]
    freedom, squares = sum(each.freedom for each in small), sum(each.squares for each in small)
    common = np.sqrt(squares / generator.chisquare(freedom, resamples)) if freedom else None
    drawn: list[np.ndarray | None] = []
    for each in parabolas:
        deviation = common
        if each.has_own_scatter:
            deviation = np.sqrt(each.squares / generator.chisquare(each.freedom, resamples))
        noise_Bx3 = generator.standard_normal((resamples, 3)) @ each.root.T
        drawn.append(None if deviation is None else each.coefficients + deviation[:, None] * noise_Bx3)
    return drawn


def _minima(draws_Bx3: np.ndarray, middle: float, flops: float, cost: CostLaw) -> np.ndarray:
    """ln of size, tokens and loss at the lowest point of each parabola, [B, 3]; NaN where it has none."""
    c0, c1, c2 = draws_Bx3.T
    with np.errstate(all="ignore"):
        x = np.where(c2 > 0, -c1 / (2 * c2), np.nan)
        loss = np.where(c2 > 0, c0 - c1**2 / (4 * c2), np.nan)
        log_parameters = x + middle
        log_tokens = np.log(flops / cost.coefficient) - cost.exponent * log_parameters
        return np.stack([log_parameters, log_tokens, np.log(loss)], axis=1)


def _optimum(
    sizes: np.ndarray, flops: float, parabola: _Parabola, cost: CostLaw, minima_Bx3: np.ndarray | None
) -> Optimum | Inconclusive:
    """The lowest point with its intervals, or why there is none to tell."""
    if parabola.coefficients[2] <= 0:
        return Inconclusive("its losses do not curve upwards from a lowest one")
    value = _minima(parabola.coefficients[None], parabola.middle, flops, cost)[0]
    if not np.log(sizes.min()) <= value[0] <= np.log(sizes.max()):
        side = "smaller" if value[0] < np.log(sizes.min()) else "larger"
        return Inconclusive(f"the lowest loss lies outside the sizes; train {side} ones")
    if minima_Bx3 is None:
        return Inconclusive("3 sizes fix a parabola and leave nothing to judge it by; train a 4th")
    is_there = np.isfinite(minima_Bx3).all(axis=1)
    if np.mean(~is_there) > UNDETERMINED:
        return Inconclusive("its losses scatter too much to show where the lowest is")
    estimates = [estimate(*(np.exp(each) for each in pair)) for pair in zip(value, minima_Bx3[is_there].T, strict=True)]
    return Optimum(*estimates)


def _power_laws(lowest: list[tuple[Profile, np.ndarray | None]]) -> PowerLaws | Inconclusive:
    """Straight lines through the lowest points, those of each draw for the intervals."""
    if len(lowest) < LEAST_PROFILES:
        return Inconclusive(
            f"{len(lowest)} profile{'s have' if len(lowest) != 1 else ' has'} an optimum, and a power law needs "
            f"{LEAST_PROFILES}"
        )
    log_flops = np.log([profile.flops for profile, _ in lowest])
    design = np.vander(log_flops, 2)
    inverse_2xK = np.linalg.pinv(design)
    drawn_KxBx3 = np.array([minima for _, minima in lowest])
    drawn_KxBx3 = drawn_KxBx3[:, np.isfinite(drawn_KxBx3).all(axis=(0, 2))]
    laws = []
    for column, name in enumerate(("parameters", "tokens", "loss")):
        values = [np.log(getattr(profile.optimum, name).value) for profile, _ in lowest]
        line = inverse_2xK @ np.array(values)
        lines_Bx2 = (inverse_2xK @ drawn_KxBx3[:, :, column]).T
        laws.append(PowerLaw(estimate(float(line[0]), lines_Bx2[:, 0]), line, lines_Bx2))
    return PowerLaws(*laws)
