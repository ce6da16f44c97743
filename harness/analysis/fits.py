"""Least-squares curves through few points: a parabola in the logarithm of a quantity, and a line.

What the points cannot tell is said in words (`Inconclusive`), and is no number: a parabola through two points, a lowest
point of a curve that has none, or one that lies beyond the points.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.inconclusive import Inconclusive
from harness.common.statistics import fit_line
from harness.runs.search_results import MicrobatchSearch

COLUMNS = 79
PARABOLA_PARAMETERS, LINE_PARAMETERS = 3, 2

Point = tuple[float, float]


@dataclass(frozen=True)
class Parabola:
    """y = a·x² + b·x + c for the natural logarithm x of a quantity, fitted to points of that quantity and y."""

    a: float
    b: float
    c: float
    points: tuple[Point, ...]

    def at(self, quantity: float) -> float:
        """The curve's y."""
        x = math.log(quantity)
        return (self.a * x + self.b) * x + self.c

    @property
    def lowest(self) -> float | Inconclusive:
        """The quantity at which the curve is lowest, if the points enclose it."""
        if self.a <= 0:
            return Inconclusive("the curve bends downwards: it has no lowest point")
        quantities = [quantity for quantity, _ in self.points]
        exponent = -self.b / (2 * self.a)
        if not math.log(min(quantities)) <= exponent <= math.log(max(quantities)):
            return Inconclusive(
                f"the curve is lowest outside of the points, which reach from {min(quantities):,.6g} to "
                f"{max(quantities):,.6g}"
            )
        return math.exp(exponent)

    @property
    def largest_miss(self) -> float:
        """How far the point that is furthest from the curve is above or below it."""
        return max(abs(y - self.at(quantity)) for quantity, y in self.points)

    def __str__(self) -> str:
        return f"{self.a:.4f} x² {_signed(self.b)} x {_signed(self.c)}"


@dataclass(frozen=True)
class Line:
    """y = slope·x + intercept."""

    slope: float
    intercept: float
    points: tuple[Point, ...]

    def at(self, x: float) -> float:
        """The line's y."""
        return self.slope * x + self.intercept

    def most_below(self, y: float) -> int | None:
        """The largest whole x at which the line is not above y; None if it does not rise, or is above from 1 on."""
        if self.slope <= 0 or self.at(1) > y:
            return None
        return math.floor((y - self.intercept) / self.slope * (1 + 1e-12))

    @property
    def largest_miss(self) -> float:
        """How far the point that is furthest from the line is above or below it."""
        return max(abs(y - self.at(x)) for x, y in self.points)


def _signed(number: float) -> str:
    return f"{'−' if number < 0 else '+'} {abs(number):.4f}"


def fit_parabola(points: Sequence[Point]) -> Parabola | Inconclusive:
    """The least-squares parabola of y over the natural logarithm of the points' first number, which must be above 0."""
    if wrong := _unusable(points, PARABOLA_PARAMETERS, "a parabola"):
        return wrong
    if min(quantity for quantity, _ in points) <= 0:
        return Inconclusive("only numbers above 0 have a logarithm")
    x = np.log([quantity for quantity, _ in points])
    # Centred, since x² and x are nearly proportional far from 0; then written for x itself.
    middle = float(np.mean(x))
    a, slope, height = (float(each) for each in np.polyfit(x - middle, [y for _, y in points], 2))
    return Parabola(a, slope - 2 * a * middle, height - slope * middle + a * middle**2, tuple(points))


def fit_straight(points: Sequence[Point]) -> Line | Inconclusive:
    """The least-squares line."""
    if wrong := _unusable(points, LINE_PARAMETERS, "a line"):
        return wrong
    found = fit_line(points)
    assert found is not None, "there are two different x"
    return Line(*found, tuple(points))


def _unusable(points: Sequence[Point], parameters: int, curve: str) -> Inconclusive | None:
    """Why there is no such curve through the points; None if there is."""
    if not all(math.isfinite(number) for point in points for number in point):
        return Inconclusive("a point is not a finite number")
    places = {x for x, _ in points}
    if len(points) < parameters:
        return Inconclusive(f"{curve} needs {parameters} points, and there {_count(len(points))}")
    if len(places) == 1:
        return Inconclusive(f"all {len(points)} points are at {points[0][0]:,.6g}")
    if len(places) < parameters:
        return Inconclusive(f"{curve} needs points at {parameters} places, and theirs are {len(places)}")
    return None


def _count(number: int) -> str:
    return {0: "is none", 1: "is one"}.get(number, f"are {number}")


def smallest_at_each_memory(points: Sequence[Point]) -> list[Point]:
    """Of (microbatch, GiB) points at one memory the one with the smallest microbatch: what fits on all such devices."""
    smallest: dict[float, float] = {}
    for microbatch, gib in points:
        smallest[gib] = min(microbatch, smallest.get(gib, math.inf))
    return sorted((microbatch, gib) for gib, microbatch in smallest.items())


def fit_search(search: MicrobatchSearch) -> Line | Inconclusive:
    """GiB over the microbatch by the peaks of one search of -f."""
    return fit_straight([(each.microbatch_size, each.gib) for each in search.tried])


def describe_batch_fit(fit: Parabola | Inconclusive) -> list[str]:
    """Loss over the global batch, in lines for a terminal."""
    title = "Loss over the global batch"
    if isinstance(fit, Inconclusive):
        return _wrapped(f"{title}: {fit}")
    lowest = fit.lowest
    said = f"lowest near {lowest:.0f} sequences" if isinstance(lowest, float) else f"where it is lowest {lowest}"
    if len(fit.points) == PARABOLA_PARAMETERS:
        error = "exactly through its 3 points: its error is unknown"
    else:
        error = f"{len(fit.points)} points, each within {fit.largest_miss:.3f} of it"
    return _wrapped(f"{title}: {fit}, x = ln(sequences)", f"{said} ({error})")


def describe_memory_fit(fit: Line | Inconclusive) -> list[str]:
    """Memory of a device over the microbatch, in GiB, in lines for a terminal."""
    title = "Memory over the microbatch"
    if isinstance(fit, Inconclusive):
        return _wrapped(f"{title}: {fit}")
    sign = "+" if fit.intercept >= 0 else "-"
    error = f"{len(fit.points)} points, each within {fit.largest_miss:.2f} GiB of it"
    return _wrapped(f"{title}: {fit.slope:.3f} GiB a sequence {sign} {abs(fit.intercept):.2f} GiB", f"({error})")


def _wrapped(first: str, *others: str) -> list[str]:
    """The first line to the left, all others indented."""
    lines = textwrap.wrap(first, COLUMNS, subsequent_indent="  ")
    for other in others:
        lines += textwrap.wrap(other, COLUMNS, initial_indent="  ", subsequent_indent="  ")
    return lines
