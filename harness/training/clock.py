"""The seconds of a run, by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from harness.runs.metrics import PHASES


@dataclass
class Clock:
    """Seconds spent in each phase, over all parts of a run that was continued."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _phase: str = "setup"
    _since: float = field(default_factory=time.perf_counter)

    def add(self, earlier: dict[str, float]) -> None:
        """Count the seconds that earlier parts of the run took, too."""
        for phase in self.seconds:
            self.seconds[phase] += earlier.get(phase, 0.0)

    def enter(self, phase: str) -> str:
        """Count time for `phase` from now on; the phase that ends."""
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
        """Seconds by phase up to this moment."""
        self.enter(self._phase)
        return dict(self.seconds)

    @property
    def total(self) -> float:
        return sum(self.now().values())
