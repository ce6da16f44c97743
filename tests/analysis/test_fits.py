"""Curves through few points: the notebook's to the printed digits, closed forms, and what no points can tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.fits import (
    Line,
    Parabola,
    describe_batch_fit,
    describe_memory_fit,
    fit_parabola,
    fit_search,
    fit_straight,
    smallest_at_each_memory,
)
from harness.analysis.inconclusive import Inconclusive
from harness.runs.directory import RunDirectory
from harness.runs.reported import read_reported
from tests.runs.test_search_results import SEARCH
from tests.support.isolation import SHIPPED_RUNS

NOTEBOOK = ["8xa100m40", "8xh100m80", "8xa100m80", "8xb200m160", "original"]


def reported(x: str, y: str, runs: list[str]) -> list[tuple[float, float]]:
    points = []
    for name in runs:
        found = read_reported(RunDirectory(SHIPPED_RUNS / name))
        assert found is not None
        sides = [found.memory_gib if each == "memory_gib" else found.value(each) for each in (x, y)]
        assert sides[0] is not None
        assert sides[1] is not None
        points.append((sides[0], sides[1]))
    return points


def test_the_notebooks_curve_of_loss_over_batch() -> None:
    """Its coefficients, as NumPy printed them there: in the natural logarithm of the batch."""
    points = reported("global_batch_size", "test_loss", NOTEBOOK)
    assert points == [(104, 3.674), (216, 3.725), (224, 3.73), (512, 3.771), (6, 3.944)]
    fit = fit_parabola(points)
    assert isinstance(fit, Parabola)
    assert (fit.a, fit.b, fit.c) == pytest.approx((0.03231264430524897, -0.2957154034594081, 4.368745850428664))
    assert fit.lowest == pytest.approx(97.1, abs=0.05)
    assert describe_batch_fit(fit) == [
        "Loss over the global batch: 0.0323 x² − 0.2957 x + 4.3687, x = ln(sequences)",
        "  lowest near 97 sequences (5 points, each within 0.018 of it)",
    ]


def test_the_notebooks_line_of_memory_over_microbatch() -> None:
    """Of four machines: the second one of 80 GiB, on which 28 fitted, came after it had drawn the line."""
    points = smallest_at_each_memory(reported("microbatch_size", "memory_gib", NOTEBOOK))
    assert points == [(6, 24), (13, 40), (27, 80), (64, 160)]
    fit = fit_straight(points)
    assert isinstance(fit, Line)
    assert (fit.slope, fit.intercept) == pytest.approx((2.3461346633416458, 11.481296758104722))
    assert describe_memory_fit(fit)[0] == "Memory over the microbatch: 2.346 GiB a sequence + 11.48 GiB"
    assert fit.most_below(12) is None, "the notebook: not even one sequence on 12 GiB"
    assert fit.most_below(24) == 5


@given(
    st.floats(-5, 5),
    st.floats(-5, 5),
    st.floats(-5, 5),
    st.lists(st.integers(1, 10**6), min_size=3, max_size=12, unique=True),
)
def test_a_parabola_is_found_again(a: float, b: float, c: float, places: list[int]) -> None:
    true = Parabola(a, b, c, ())
    fit = fit_parabola([(float(place), true.at(place)) for place in places])
    assert isinstance(fit, Parabola)
    assert [fit.at(place) for place in places] == pytest.approx([true.at(place) for place in places], abs=1e-6)


def test_a_fit_is_the_least_of_squares() -> None:
    random = np.random.default_rng(3)
    points = [(float(x), float(y)) for x, y in zip(2.0 ** np.arange(1, 9), random.normal(3, 1, 8), strict=True)]
    fit = fit_parabola(points)
    assert isinstance(fit, Parabola)

    def squares(a: float, b: float, c: float) -> float:
        other = Parabola(a, b, c, ())
        return sum((y - other.at(x)) ** 2 for x, y in points)

    best = squares(fit.a, fit.b, fit.c)
    for step in (1e-3, -1e-3):
        assert best < squares(fit.a + step, fit.b, fit.c)
        assert best < squares(fit.a, fit.b + step, fit.c)
        assert best < squares(fit.a, fit.b, fit.c + step)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "a parabola needs 3 points, and there is none"),
        ([(1, 2)], "a parabola needs 3 points, and there is one"),
        ([(1, 2), (2, 3)], "a parabola needs 3 points, and there are 2"),
        ([(6, 2), (6, 3), (6, 4)], "all 3 points are at 6"),
        ([(6, 2), (6, 3), (7, 4)], "a parabola needs points at 3 places, and theirs are 2"),
        ([(6, 2), (0, 3), (7, 4)], "only numbers above 0 have a logarithm"),
        ([(6, 2), (5, math.nan), (7, 4)], "a point is not a finite number"),
    ],
)
def test_what_points_cannot_tell(points: list[tuple[float, float]], reason: str) -> None:
    fit = fit_parabola(points)
    assert fit == Inconclusive(reason)
    assert " ".join(describe_batch_fit(fit)).startswith("Loss over the global batch: inconclusive, because")


def test_the_line_over_ones_own_machines() -> None:
    """By the peaks of one search."""
    fit = fit_search(SEARCH)
    assert isinstance(fit, Line)
    assert (fit.slope, fit.intercept) == pytest.approx(((36.25 - 4.5) / 12, 4.5 - (36.25 - 4.5) / 12))
    alone = fit_search(SEARCH.model_copy(update={"tried": SEARCH.tried[:1]}))
    assert str(alone) == "inconclusive, because a line needs 2 points, and there is one"


def test_points_that_fix_no_line() -> None:
    assert str(fit_straight([(6, 24)])) == "inconclusive, because a line needs 2 points, and there is one"
    two_at_one = fit_straight([(6, 24), (6, 25)])
    assert describe_memory_fit(two_at_one) == [
        "Memory over the microbatch: inconclusive, because all 2 points are at 6"
    ]
    assert Line(-1.0, 5.0, ()).most_below(3) is None, "it falls: no largest"
    assert Line(2.0, 4.0, ()).most_below(10) == 3
    assert Line(0.1, 0.0, ()).most_below(0.3) == 3, "whatever the rounding of 0.3 / 0.1"


def test_a_lowest_point_that_is_none() -> None:
    bent = fit_parabola([(1, 1), (math.e, 2), (math.e**2, 1)])
    assert isinstance(bent, Parabola)
    assert str(bent.lowest) == "inconclusive, because the curve bends downwards: it has no lowest point"
    beyond = fit_parabola([(2, 5), (4, 3), (8, 2)])
    assert isinstance(beyond, Parabola)
    assert "lowest outside of the points, which reach from 2 to 8" in str(beyond.lowest)
    lines = describe_batch_fit(beyond)
    assert all(len(line) <= 79 for line in lines)
    assert "exactly through its 3 points: its error is unknown" in " ".join(map(str.strip, lines))
