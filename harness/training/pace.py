"""Time of each rank's own part of a step, and the ranks that are slower than the others."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

SLOWER_BY = 0.1
REPORTS, LEAST_STEPS = 3, 20  # reports in a row, and steps between the first and the last, before a rank is named
LEAST_SECONDS = 0.005  # of a step; shorter times vary too much
LONGEST_WINDOW = 64  # steps; of more steps between two reports, only the newest are kept


class OwnTime:
    """Seconds from the beginning of a step to this rank's last gradient. What follows waits for other ranks, so the
    step's end says nothing about a single rank. On CUDA the times are those of the device, by events in its queue.
    Nothing here waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._begun: Any = None
        self._marked: Any = None
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=LONGEST_WINDOW)  # begin and last mark

    def begin(self) -> None:
        """Record that a step begins."""
        self._begun, self._marked = self._now(), None

    def mark(self) -> None:
        """Record that this rank has finished a part of the step. The last mark of a step counts."""
        self._marked = self._now()

    def end(self) -> None:
        """Record that the step has ended."""
        if self._marked is not None:
            self._steps.append((self._begun, self._marked))

    def take(self) -> float:
        """Return the median seconds of the steps since the last call (of the newest LONGEST_WINDOW at most), or 0 if
        there were none. The device must have finished these steps."""
        if self._is_cuda:
            seconds = [begun.elapsed_time(marked) / 1000 for begun, marked in self._steps]
        else:
            seconds = [marked - begun for begun, marked in self._steps]
        self._steps.clear()
        return statistics.median(seconds) if seconds else 0.0

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class SlowRanks:
    """The ranks that have been slower than the others in the last reports."""

    def __init__(self) -> None:
        # By rank: step of the first slow report, number of slow reports, and whether the rank was named.
        self._found: dict[int, tuple[int, int, bool]] = {}

    def name(self, seconds: Sequence[float], step: int) -> Iterator[str]:
        """Yield a note for each rank that was slow in at least REPORTS reports in a row, over at least LEAST_STEPS
        steps. A rank is named once, and again only after a report in which it was not slow. It is slow in a report if
        its own time is above the median by more than SLOWER_BY (a fraction), unless the median is below LEAST_SECONDS.
        `seconds` are those of `OwnTime.take`, by rank; `step` is the report's global step."""
        usual = statistics.median_low(seconds)  # of two ranks, the faster
        for rank, own in enumerate(seconds):
            if usual < LEAST_SECONDS or own <= usual * (1 + SLOWER_BY):
                self._found.pop(rank, None)
                continue
            since, reports, is_named = self._found.get(rank, (step, 0, False))
            is_due = not is_named and reports + 1 >= REPORTS and step - since >= LEAST_STEPS
            self._found[rank] = since, reports + 1, is_named or is_due
            if is_due:
                more = f"{own / usual - 1:.0%} longer than the median since global step {since:,}"
                yield f"note: rank {rank} takes {more}; the others wait for it; check_machine.py tests its device"
