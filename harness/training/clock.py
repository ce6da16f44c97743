"""Seconds and dollars of a run by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.runs.metrics import PHASES
from harness.runs.throughput import cost
from harness.runs.train_config import TrainConfig


@dataclass
class Clock:
    """Seconds and dollars that a run has spent in each phase, including those before it was resumed. `price_per_hour`
    is today's price of the machine in dollars, or None if not known."""

    price_per_hour: float | None = None
    _since: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _phase: str = "setup"
    # By phase: dollars by which its earlier seconds cost more than at today's price (negative: less).
    _price_changes: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: dict[str, float], dollars: dict[str, float]) -> None:
        """Add the seconds and dollars, by phase, that the run spent before it was resumed. If `dollars` is empty, these
        seconds are counted at today's price."""
        for phase in self.seconds:
            self.seconds[phase] += seconds.get(phase, 0.0)
        for phase, spent in dollars.items():
            self._price_changes[phase] = spent - cost(seconds.get(phase, 0.0), self.price_per_hour or 0.0)

    def enter(self, phase: str) -> str:
        """Count time for `phase` from now on. Returns the previous phase."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        ended, self._phase, self._since = self._phase, phase, now
        return ended

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Context manager that counts the time of its body for `phase`."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def now(self) -> dict[str, float]:
        """Return the seconds of each phase up to now."""
        self.enter(self._phase)
        return dict(self.seconds)

    def spent(self) -> dict[str, Any]:
        """Return {"seconds": ..., "dollars": ...} for a checkpoint's meta.json, each by phase and up to now. If no
        price was ever known, "dollars" is left out."""
        seconds, price, changes = self.now(), self.price_per_hour, self._price_changes
        if price is None and not changes:
            return {"seconds": seconds}
        dollars = {phase: cost(took, price or 0.0) + changes.get(phase, 0.0) for phase, took in seconds.items()}
        return {"seconds": seconds, "dollars": dollars}

    def ceilings(self, config: TrainConfig) -> dict[str, float]:
        """Return the seconds that are left until the run reaches `max_hours` and `max_dollars`, by these keys. A key
        that `config` does not set is left out."""
        spent = self.spent()
        return config.ceilings(sum(spent["seconds"].values()), sum(spent.get("dollars", {}).values()))
