"""Seconds of a run by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness.runs.metrics import PHASES


@dataclass
class Clock:
    """Seconds that a run has spent in each phase, including the time before it was resumed."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _phase: str = "setup"
    _since: float = field(default_factory=time.perf_counter)

    def add(self, earlier: dict[str, float]) -> None:
        """Add the seconds by phase that the run took before it was resumed."""
        for phase in self.seconds:
            self.seconds[phase] += earlier.get(phase, 0.0)

    def enter(self, phase: str) -> str:
        """Count time for `phase` from now on. Returns the previous phase."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        ended, self._phase, self._since = self._phase, phase, now
        return ended

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def now(self) -> dict[str, float]:
        """Return the seconds of each phase up to now."""
        self.enter(self._phase)
        return dict(self.seconds)

    @property
    def total(self) -> float:
        return sum(self.now().values())
