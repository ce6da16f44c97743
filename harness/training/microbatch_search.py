"""The search for the largest microbatch that fits, as an algorithm: it asks, and need not know what is answered how."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

GUESSES = 4  # of a search by the memory that was measured; after them it goes by halves alone


@dataclass(frozen=True)
class Pace:
    """How a search goes: by the defaults it doubles from 1, and finds the very largest."""

    first: int = 1  # what is smaller is taken to fit
    growth: int = 2
    fineness: float = math.inf  # the answer may be too small by its `fineness`-th part, if that is more than nothing
    most: float = math.inf  # sizes that are asked about

    def is_near(self, good: int, bad: int) -> bool:
        """Whether what lies between the two is not worth another question."""
        return bad - good <= max(1, good // self.fineness)


def largest_that_fits(
    fits: Callable[[int], bool], ceiling: int, guess: Callable[[], int | None] = lambda: None, pace: Pace = Pace()
) -> int:
    """The largest n of 1 .. ceiling for which `fits(n)`, or 0: grows until one does not fit, then bisects.

    `fits` must be true up to some n and false beyond; it is asked about each n at most once, and never about more than
    `pace.growth` times what fits. `guess` may say, from what was measured so far, what the answer will be: it and its
    neighbour are then tried first, and a few wrong guesses do no harm.
    """
    good, bad, guesses, asked = pace.first - 1, ceiling + 1, GUESSES, 0
    while not pace.is_near(good, bad) and asked < pace.most:
        furthest = pace.growth * good if good >= pace.first else pace.first
        attempt = (good + bad) // 2 if bad <= ceiling else min(furthest, ceiling)
        guessed = guess() if guesses else None
        if guessed is not None and (guessed < attempt or bad <= ceiling):
            guesses -= 1
            attempt = min(max(guessed, good + 1), bad - 1, furthest)
        asked += 1
        if fits(attempt):
            good = attempt
        else:
            bad = attempt
    return good
