"""Finding the largest microbatch: the search and the line through what it measured. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

GUESSES = 4


def largest_that_fits(fits: Callable[[int], bool], ceiling: int, guess: Callable[[], int | None] = lambda: None) -> int:
    """The largest n of 1 .. ceiling for which `fits(n)`, or 0: doubles until one does not fit, then bisects.

    `fits` must be true up to some n and false beyond; it is asked about each n at most once, and never about more than
    twice what fits. `guess` may say, from what was measured so far, what the answer will be: it and its neighbour are
    then tried first, and a few wrong guesses do no harm.
    """
    good, bad, guesses = 0, ceiling + 1, GUESSES
    while bad - good > 1:
        attempt = (good + bad) // 2 if bad <= ceiling else max(1, min(2 * good, ceiling))
        guessed = guess() if guesses else None
        if guessed is not None and (guessed < attempt or bad <= ceiling):
            guesses -= 1
            attempt = min(max(guessed, good + 1), bad - 1, max(1, 2 * good))
        if fits(attempt):
            good = attempt
        else:
            bad = attempt
    return good


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Slope and intercept of the least-squares line through (x, y) points; None for fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return slope, mean_y - slope * mean_x
