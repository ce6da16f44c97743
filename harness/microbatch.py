"""Finding the largest microbatch: the search and the line through what it measured. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def largest_that_fits(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest n of 1 .. ceiling for which `fits(n)`, or 0: doubles until one does not fit, then bisects.

    `fits` must be true up to some n and false beyond; it is asked about each n at most once.
    """
    good, bad = 0, ceiling + 1
    attempt = 1
    while attempt < bad:
        if fits(attempt):
            good = attempt
            attempt = min(2 * attempt, ceiling) if attempt < ceiling else bad
        else:
            bad = attempt
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Slope and intercept of the least-squares line through (x, y) points; None for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y - slope * mean_x
