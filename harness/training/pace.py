"""The ranks that take longer than the others for their own part of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

SLOWER_BY = 0.1  # fraction by which a rank's time must exceed the median to count as slow
REPORTS, LEAST_STEPS = 3, 20  # reports in a row, and steps between the first and the last, before a rank is named
LEAST_SECONDS = 0.005  # smallest median at which a rank counts as slow; shorter times vary too much


class SlowRanks:
    """The ranks that have been slower than the others in the last reports."""

    def __init__(self) -> None:
        # By rank: step of the first slow report, number of slow reports, and whether the rank was named.
        self._found: dict[int, tuple[int, int, bool]] = {}

    def name(self, seconds: Sequence[float], step: int, name_of: Callable[[int], str]) -> Iterator[str]:
        """Yield a note for each rank as soon as it has been slow in at least REPORTS reports in a row, with at least
        LEAST_STEPS steps between the first and the last. Must be called for each report. `seconds` are
        `Watchdog.own_seconds`, by rank. `name_of` returns a rank's name, which says on which machine it is."""
        usual = statistics.median_low(seconds)  # of two ranks, the faster
        for rank, own in enumerate(seconds):
            if usual < LEAST_SECONDS or own <= usual * (1 + SLOWER_BY):
                self._found.pop(rank, None)
                continue
            since, reports, is_named = self._found.get(rank, (step, 0, False))
            is_due = not is_named and reports + 1 >= REPORTS and step - since >= LEAST_STEPS
            self._found[rank] = since, reports + 1, is_named or is_due
            if is_due:
                more = f"{own / usual - 1:.0%} longer than the median, and has been slow since global step {since:,}"
                yield f"note: {name_of(rank)} takes {more}; the others wait for it; check_machine.py tests its device"
