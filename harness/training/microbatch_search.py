"""The search for the largest microbatch that fits, as an algorithm: it asks, and need not know what is answered how."""

from __future__ import annotations

import math
from collections.abc import Callable

GUESS_GROWTH = 4  # by so much further each guess after the second keeps from what is known


def largest_that_fits(
    fits: Callable[[int], bool],
    ceiling: int,
    guess: Callable[[], int | None] = lambda: None,
    *,
    first: int = 1,
    growth: int = 2,
    fineness: float = math.inf,
    most: float = math.inf,
) -> int:
    """Return the largest n of 1 .. ceiling for which `fits(n)`, or 0: grow until one does not fit, then bisect.

    `fits` must be true up to some n and false beyond; it is asked about each n at most once, and never about more than
    `growth` times what fits. Sizes below `first` are taken to fit. The answer may be too small by its `fineness`-th
    part, if that is more than nothing, and by more after `most` questions.

    `guess` may say, from what was measured so far, what the answer will be. The guess is tried, then its neighbour,
    then what is 4, 16, ... away from the known sizes, up to the middle; a guess that is further off than that is not
    believed. So a right guess ends the search, and wrong ones add at most two questions and half of what bisecting asks.
    """
    good, bad, asked, guesses = first - 1, ceiling + 1, 0, 0
    while bad - good > max(1, good // fineness) and asked < most:
        attempt, beyond = (good + bad) // 2, bad
        if bad > ceiling:
            attempt = min(growth * good if good >= first else first, ceiling)
            beyond = attempt + 1
        guessed, distance = guess(), GUESS_GROWTH ** max(0, guesses - 1)
        is_near = guessed is not None and good - distance <= guessed <= bad + distance
        if is_near and (guessed < attempt or bad <= ceiling) and beyond - good >= 2 * distance:
            attempt = min(max(guessed, good + distance), beyond - distance)
            guesses += 1
        asked += 1
        if fits(attempt):
            good = attempt
        else:
            bad = attempt
    return good
