"""A rank's progress, its device included: the main thread runs ahead of a device that hangs.

On CUDA the main thread only enqueues work. So with each milestone that it passes it records an event behind that work,
and the milestone counts once the device has got to the event. On the CPU it counts at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Milestone:
    """A point in the work of a step that a rank passes."""

    place: str
    progress: list[int]  # the rank with less of it is behind
    is_guarded: bool  # whether this rank may not stand still here
    at: float  # when the main thread got there, by time.monotonic


@dataclass(frozen=True)
class Standing:
    """The place and progress of a rank, main thread and device together."""

    place: str
    progress: list[int]
    stalled: float | None  # seconds without progress; None where the rank may take its time


class Progress:
    """The milestones of one rank. Any thread may call any method."""

    def __init__(self, record: Callable[[], Callable[[], bool]] | None = None) -> None:
        """`record` marks the end of what the device has been given so far, and returns a function that says whether
        the device has got there; None where the main thread itself computes."""
        self._record = record
        self._lock = threading.RLock()  # a signal's handler may come in between
        self._reached = Milestone("the start", [-1, 0], False, time.monotonic())
        self._since = self._reached.at  # of the last progress
        self._ahead: deque[tuple[Milestone, Callable[[], bool]]] = deque()  # the device has not got there yet

    def reach(self, place: str, progress: list[int], *, is_guarded: bool) -> None:
        """The main thread passes a milestone."""
        milestone = Milestone(place, progress, is_guarded, time.monotonic())
        is_done = self._record() if self._record else None
        with self._lock:
            if is_done is None:
                self._reached, self._since = milestone, milestone.at
            else:
                self._ahead.append((milestone, is_done))

    def standing(self) -> Standing:
        """The place and progress of this rank now."""
        with self._lock:
            now = time.monotonic()
            while self._ahead and self._ahead[0][1]():
                self._reached, self._since = self._ahead.popleft()[0], now
            reached = self._reached
            if not self._ahead:
                return Standing(reached.place, reached.progress, now - self._since if reached.is_guarded else None)
            following = self._ahead[0][0]
            return Standing(following.place, reached.progress, now - max(self._since, following.at))

    def forgive(self) -> None:
        """This process was frozen: what stood still meanwhile counts from now on."""
        with self._lock:
            self._since = time.monotonic()


def device_progress(device: torch.device) -> Progress:
    """The progress of a rank that computes on `device`."""
    return Progress(lambda: record_event(device)) if device.type == "cuda" else Progress()


def record_event(device: torch.device) -> Callable[[], bool]:
    """Put an event behind the work of the calling thread's stream; the function says whether the device is there, also
    in another thread."""
    import torch

    event = torch.cuda.Event()
    event.record()

    def is_done() -> bool:
        torch.cuda.set_device(device)  # each thread has a current device, and another rank's is not to be touched
        try:
            return event.query()
        except RuntimeError:  # the device has failed: the main thread meets the same error, and tells it
            return False

    return is_done
