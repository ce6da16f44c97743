"""IsoFLOP profiles: the best size among runs of equal compute, and its growth with compute. A parabola over ln
parameters is fitted to the losses of each profile, and power laws to the parabolas' lowest points (approach 2 of
Hoffmann et al., arXiv:2203.15556)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from harness.common.statistics import Estimate, Inconclusive, estimate
from harness.scaling.data import CostLaw, Points, different

LEAST_PROFILES = 3
OWN_SCATTER_POINTS = 8  # profiles of fewer points share one estimate of the scatter
NEGLIGIBLE_SPREAD = 0.005  # range of ln FLOPs in a profile; if it is at most this, FLOPs count as equal
NOT_COMPUTED = Inconclusive("the intervals have not been computed")
UNDETERMINED = 0.025  # largest fraction of a profile's bootstrap draws that may have no lowest point


@dataclass(frozen=True)
class Optimum:
    """Lowest point of a profile's parabola: size, tokens and loss of the best model for the profile's FLOPs."""

    parameters: Estimate
    tokens: Estimate
    loss: Estimate


@dataclass(frozen=True)
class Profile:
    """A group of points with nearly equal compute, and the least-squares parabola of their losses."""

    flops: float  # geometric mean of the points' FLOPs
    members: np.ndarray  # indices of the group's points
    parabola: np.ndarray  # [3]: the loss is c0 + c1 x + c2 x^2 with x = ln N - middle
    middle: float
    root: np.ndarray  # [3, 3]: root @ root.T is the covariance of the coefficients for residuals of variance 1
    squares: float  # sum of the squared residuals
    freedom: int  # degrees of freedom of the residuals
    optimum: Optimum | Inconclusive = NOT_COMPUTED

    @property
    def scatter(self) -> float:
        """The points' standard deviation about the parabola in nats; 0 for three points, which determine a parabola
        exactly."""
        return float(np.sqrt(self.squares / self.freedom)) if self.freedom else 0.0

    def loss(self, parameters: np.ndarray) -> np.ndarray:
        """Return the loss on the parabola at these numbers of parameters."""
        return np.polynomial.polynomial.polyval(np.log(parameters) - self.middle, self.parabola)


@dataclass(frozen=True)
class PowerLaw:
    """A quantity that is proportional to a power of the FLOPs."""

    exponent: Estimate
    line: np.ndarray  # [2]: slope and intercept of ln quantity over ln FLOPs
    drawn: np.ndarray  # [B, 2]: slope and intercept of each bootstrap draw in which all profiles have optima

    def at(self, flops: np.ndarray) -> np.ndarray:
        return np.exp(np.polyval(self.line, np.log(flops)))

    def interval_at(self, flops: np.ndarray) -> np.ndarray:
        """Return the 95 % interval of the quantity at each of n `flops`: its two ends, [2, n]."""
        drawn = self.drawn[:, 1, None] + self.drawn[:, :1] * np.log(flops)
        return np.exp(np.percentile(drawn, [2.5, 97.5], axis=0))


@dataclass(frozen=True)
class IsoFlop:
    """IsoFLOP profiles, and power laws of the best size, its number of tokens and its loss over FLOPs."""

    profiles: list[Profile]
    alone: int  # number of points that belong to no profile
    laws: dict[str, PowerLaw] | Inconclusive  # by "parameters", "tokens" and "loss"


def group_by_compute(points: Points, *, tolerance: float, least_sizes: int) -> list[np.ndarray]:
    """Return the indices of the points of each profile, by ascending FLOPs. A profile has at least `least_sizes`
    different sizes, and FLOPs within `tolerance` (a fraction) of a common middle."""
    width = 2 * np.log1p(tolerance)
    log_flops, left, groups = np.log(points.flops), np.argsort(points.flops, kind="stable"), []
    while left.size:
        ends = np.searchsorted(log_flops[left], log_flops[left] + width, side="right")
        sizes = [different(points.parameters[left[begin:end]]) for begin, end in enumerate(ends)]
        begin = int(np.argmax(sizes))
        if sizes[begin] < least_sizes:
            break
        groups.append(left[begin : ends[begin]])
        left = np.concatenate([left[:begin], left[ends[begin] :]])
    return sorted(groups, key=lambda members: float(log_flops[members].mean()))


def _fit_parabola(points: Points, members: np.ndarray) -> Profile:
    """Return the profile of the points with the indices `members`. Its optimum is not computed yet."""
    x, compute, y = np.log(points.parameters[members]), np.log(points.flops[members]), points.loss[members]
    middle = float((x.min() + x.max()) / 2)
    design = np.vander(x - middle, 3, increasing=True)
    if len(members) >= OWN_SCATTER_POINTS and np.ptp(compute) > NEGLIGIBLE_SPREAD:
        # More compute lowers the loss. Without a term for it, sizes that happen to get more compute look better.
        design = np.column_stack([design, compute - compute.mean()])
    coefficients, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    root = np.linalg.cholesky(np.linalg.pinv(design.T @ design)[:3, :3])
    # The rank is less than the number of columns if the FLOPs follow from the size.
    freedom = len(members) - int(rank)
    squares = float(np.sum((y - design @ coefficients) ** 2)) if freedom else 0.0
    return Profile(float(np.exp(compute.mean())), members, coefficients[:3], middle, root, squares, freedom)


def fit_isoflop(
    points: Points, cost: CostLaw, *, tolerance: float, least_sizes: int, resamples: int, seed: int
) -> IsoFlop | Inconclusive:
    """Return the profiles and the power laws of their lowest points, or the reason why there are no profiles.

    `tolerance` and `least_sizes` are those of `group_by_compute`. Intervals come from a parametric bootstrap with
    `resamples` draws.
    """
    groups = group_by_compute(points, tolerance=tolerance, least_sizes=least_sizes)
    if not groups:
        return Inconclusive(
            f"no group of {least_sizes} sizes (--least-sizes) was trained with FLOPs within {100 * tolerance:g}% of a "
            "common value (--tolerance)"
        )
    fits = [_fit_parabola(points, members) for members in groups]
    generator = np.random.default_rng(seed)
    small = [each for each in fits if len(each.members) < OWN_SCATTER_POINTS]
    freedom, squares = sum(each.freedom for each in small), sum(each.squares for each in small)
    common = np.sqrt(squares / generator.chisquare(freedom, resamples)) if freedom else None
    profiles, lowest = [], []
    for fit in fits:
        deviation = common
        if len(fit.members) >= OWN_SCATTER_POINTS:
            deviation = np.sqrt(fit.squares / generator.chisquare(fit.freedom, resamples))
        # In each draw the coefficients get noise with a t distribution. Resampling the few points of a profile with
        # replacement would give a very different distribution.
        noise_Bx3 = generator.standard_normal((resamples, 3)) @ fit.root.T
        minima_Bx3 = None
        if deviation is not None:
            minima_Bx3 = _minima(fit, fit.parabola + deviation[:, None] * noise_Bx3, cost)
        optimum = _optimum(fit, points.parameters[fit.members], cost, minima_Bx3)
        profiles.append(replace(fit, optimum=optimum))
        if isinstance(optimum, Optimum) and minima_Bx3 is not None:
            lowest.append((fit.flops, optimum, minima_Bx3))
    return IsoFlop(profiles, len(points) - sum(map(len, groups)), _power_laws(lowest))


def _minima(profile: Profile, parabolas_Bx3: np.ndarray, cost: CostLaw) -> np.ndarray:
    """Return ln of size, tokens and loss at the lowest point of each of these parabolas, [B, 3]. A parabola without a
    lowest point gives NaN."""
    c0, c1, c2 = parabolas_Bx3.T
    with np.errstate(all="ignore"):
        c2 = np.where(c2 > 0, c2, np.nan)
        log_parameters = profile.middle - c1 / (2 * c2)
        log_tokens = np.log(profile.flops / cost.coefficient) - cost.exponent * log_parameters
        return np.stack([log_parameters, log_tokens, np.log(c0 - c1**2 / (4 * c2))], axis=1)


def _optimum(
    profile: Profile, sizes: np.ndarray, cost: CostLaw, minima_Bx3: np.ndarray | None
) -> Optimum | Inconclusive:
    """Return the lowest point of a profile with its intervals, or the reason why the point is not determined.
    `minima_Bx3` are the lowest points of the bootstrap draws, or None if the scatter of the losses is unknown."""
    if profile.parabola[2] <= 0:
        return Inconclusive("its losses do not curve upwards, so that their parabola has no lowest point")
    value = _minima(profile, profile.parabola[None], cost)[0]
    if not np.log(sizes.min()) <= value[0] <= np.log(sizes.max()):
        side = "smaller" if value[0] < np.log(sizes.min()) else "larger"
        return Inconclusive(f"the parabola's lowest point is outside the range of sizes; train {side} models")
    if minima_Bx3 is None:
        return Inconclusive(
            "3 sizes determine a parabola exactly, so that its uncertainty is unknown; train a 4th size"
        )
    is_there = np.isfinite(minima_Bx3).all(axis=1)
    if np.mean(~is_there) > UNDETERMINED:
        return Inconclusive("its losses scatter too much to show where the lowest is")
    return Optimum(*map(estimate, np.exp(value), np.exp(minima_Bx3[is_there]).T))


def _power_laws(lowest: list[tuple[float, Optimum, np.ndarray]]) -> dict[str, PowerLaw] | Inconclusive:
    """Return the power laws of the best size, its tokens and its loss over FLOPs, or the reason why there are none.
    `lowest` has (FLOPs, optimum, `_minima` of its bootstrap draws) for each profile with an optimum."""
    if len(lowest) < LEAST_PROFILES:
        return Inconclusive(f"a power law needs {LEAST_PROFILES} profiles with a best size (given: {len(lowest)})")
    inverse_2xK = np.linalg.pinv(np.vander(np.log([flops for flops, _, _ in lowest]), 2))
    drawn_KxBx3 = np.array([minima for _, _, minima in lowest])
    drawn_KxBx3 = drawn_KxBx3[:, np.isfinite(drawn_KxBx3).all(axis=(0, 2))]
    laws = {}
    for column, name in enumerate(("parameters", "tokens", "loss")):
        line = inverse_2xK @ np.log([getattr(optimum, name).value for _, optimum, _ in lowest])
        lines_Bx2 = (inverse_2xK @ drawn_KxBx3[:, :, column]).T
        laws[name] = PowerLaw(estimate(float(line[0]), lines_Bx2[:, 0]), line, lines_Bx2)
    return laws
