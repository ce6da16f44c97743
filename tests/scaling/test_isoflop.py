"""Fits of profiles of equal FLOPs find the known optima and exponents of the points, and the intervals of the fits
contain these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.common.statistics import Inconclusive
from harness.scaling.data import CostLaw, Point, Points
from harness.scaling.isoflop import IsoFlop, Optimum, Profile, fit_isoflop, group_by_compute
from tests.scaling.scaling import BUDGETS, LAW, best_size, ladder, points_with_flops

SIZES = (0.35, 0.6, 1.0, 1.7, 2.9)


def best_of(flops: float) -> float:
    return float(0.1 * flops**0.49)


def parabolas(noise: float = 0.0, *, seed: int = 0, sizes: tuple[float, ...] = SIZES, curve: float = 0.06) -> Points:
    """Return points whose losses are parabolas in ln N, with the best size 0.1 C^0.49."""
    random = np.random.default_rng(seed)
    points = []
    for flops in BUDGETS:
        for part in sizes:
            size = best_of(flops) * part
            loss = 3.0 * (flops / 1e18) ** -0.05 + curve * np.log(part) ** 2 + random.normal(0, noise)
            points.append(Point("", size, flops / 6 / size, flops, loss))
    return Points(points)


def fitted(points: Points, resamples: int = 400, **options: Any) -> IsoFlop:
    asked = {"tolerance": 0.05, "least_sizes": 4, "resamples": resamples, "seed": 0} | options
    isoflop = fit_isoflop(points, CostLaw.of(points), **asked)
    assert isinstance(isoflop, IsoFlop), isoflop
    return isoflop


def optimum_of(profile: Profile) -> Optimum:
    assert isinstance(profile.optimum, Optimum), profile.optimum
    return profile.optimum


def test_parabolas_without_noise_come_back_exactly() -> None:
    isoflop = fitted(parabolas())
    assert [profile.flops for profile in isoflop.profiles] == pytest.approx(BUDGETS)
    for profile in isoflop.profiles:
        assert optimum_of(profile).parameters.value == pytest.approx(best_of(profile.flops))
        assert optimum_of(profile).tokens.value == pytest.approx(profile.flops / 6 / best_of(profile.flops))
        assert optimum_of(profile).loss.value == pytest.approx(3.0 * (profile.flops / 1e18) ** -0.05)
    assert not isinstance(isoflop.laws, Inconclusive)
    assert isoflop.laws["parameters"].exponent.value == pytest.approx(0.49)
    assert isoflop.laws["tokens"].exponent.value == pytest.approx(0.51)
    assert isoflop.laws["loss"].exponent.value == pytest.approx(-0.05)
    assert isoflop.laws["parameters"].at(np.array([1e21])) == pytest.approx([best_of(1e21)])


def test_flops_that_follow_from_the_size_take_no_degree_of_freedom() -> None:
    random, points = np.random.default_rng(0), []
    for flops in BUDGETS:
        for number, part in enumerate((0.35, 1.0, 2.9)):
            size, own = best_of(flops) * part, flops * 1.01**number
            points += [
                Point("", size, own / 6 / size, own, 3.0 + 0.06 * np.log(part) ** 2 + random.normal(0, 0.01))
                for _ in range(3)
            ]
    assert {profile.freedom for profile in fitted(Points(points), least_sizes=3).profiles} == {9 - 3}


def test_the_best_sizes_of_a_known_law_come_back() -> None:
    """The fitted best sizes are within 6 % of the law's. The profiles have sizes from a quarter to four times the best.
    The fit is not exact because the law's profiles are not parabolas."""
    isoflop = fitted(ladder())
    for profile in isoflop.profiles:
        assert optimum_of(profile).parameters.value == pytest.approx(best_size(profile.flops), rel=0.06)
    assert not isinstance(isoflop.laws, Inconclusive)
    exponent = float(LAW.beta / (LAW.alpha + LAW.beta))
    assert isoflop.laws["parameters"].exponent.value == pytest.approx(exponent, abs=0.01)


@pytest.mark.slow
def test_the_intervals_hold_what_they_promise() -> None:
    """In 300 noisy experiments, 95 % of the intervals contain the best size, and 95 % the exponent."""
    held, experiments = np.zeros(2), 300
    for seed in range(experiments):
        isoflop = fitted(parabolas(0.004, seed=seed), 200, seed=seed)
        size = optimum_of(isoflop.profiles[1]).parameters
        assert not isinstance(isoflop.laws, Inconclusive)
        exponent = isoflop.laws["parameters"].exponent
        held += [size.low <= best_of(BUDGETS[1]) <= size.high, exponent.low <= 0.49 <= exponent.high]
    # Three standard deviations of a binomial share of 95 %, and one percent because intervals are of 200 resamples.
    assert held / experiments == pytest.approx(0.95, abs=0.048)


# Which points are a profile


def test_points_are_grouped_by_compute_within_the_tolerance() -> None:
    flops = np.array([1.0, 1.04, 1.08, 1.02, 2.0, 2.1, 1.98, 2.05, 4.0, 4.0, 4.0])
    sizes = np.array([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 2.001]) * 1e6
    points = points_with_flops(sizes, flops / 6 / sizes, flops, np.ones(11))
    groups = group_by_compute(points, tolerance=0.05, least_sizes=3)
    assert [sorted(group.tolist()) for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert group_by_compute(points, tolerance=0.01, least_sizes=3) == []
    answer = fit_isoflop(points, CostLaw(), tolerance=0.01, least_sizes=3, resamples=100, seed=0)
    assert isinstance(answer, Inconclusive)
    assert "no group of 3 sizes (--least-sizes) was trained with FLOPs within 1%" in answer.reason


def test_compute_that_differs_within_a_profile_is_allowed_for() -> None:
    """If larger models got more FLOPs, their lower loss is ascribed to the FLOPs, not to the size."""
    sizes = best_of(1e19) * np.geomspace(0.25, 4, 12)
    random = np.random.default_rng(0)
    flops = 1e19 * (1 + 0.04 * np.clip(np.log(sizes / best_of(1e19)) + random.normal(0, 0.5, 12), -1, 1))
    loss = 3.0 + 0.03 * np.log(sizes / best_of(1e19)) ** 2 - 0.4 * np.log(flops / 1e19)
    points = points_with_flops(sizes, flops / 6 / sizes, flops, loss)
    (profile,) = fitted(points).profiles
    assert optimum_of(profile).parameters.value == pytest.approx(best_of(1e19), rel=1e-3)


# Points that determine no optimum


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sizes": (1.5, 2, 3, 4)}, "outside the range of sizes; train smaller models"),
        ({"sizes": (0.2, 0.3, 0.4, 0.5)}, "outside the range of sizes; train larger models"),
        ({"curve": -0.02}, "do not curve upwards"),
    ],
)
def test_a_profile_without_a_lowest_loss_inside_is_refused(options: dict[str, Any], reason: str) -> None:
    optimum = fitted(parabolas(**options)).profiles[0].optimum
    assert isinstance(optimum, Inconclusive)
    assert reason in optimum.reason


def test_profiles_of_mere_noise_are_refused() -> None:
    """All profiles of mere noise are refused except about 2.5 %, which look curved by chance."""
    told = 0
    for seed in range(60):
        profiles = fitted(parabolas(0.05, seed=seed, curve=0.0001), 200).profiles
        told += sum(isinstance(profile.optimum, Optimum) for profile in profiles)
    assert told / (60 * len(BUDGETS)) < 0.05


def test_three_sizes_alone_leave_nothing_to_judge_by() -> None:
    points = parabolas(sizes=(0.5, 1, 2))
    isoflop = fitted(points, least_sizes=3)
    assert "train a 4th" in str(isoflop.profiles[0].optimum)
    assert str(isoflop.laws) == "inconclusive, because a power law needs 3 profiles with a best size (given: 0)"
