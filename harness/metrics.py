"""What is measured in a run: time by phase, speed, dollars, and the file it goes to."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import RunError

PHASES = ("setup", "training", "validation", "benchmarks", "checkpointing")

# Dense peak in 16-bit matrix products with fp32 accumulation, FLOP/s, from NVIDIA's data sheets; the first name found
# in the device's name counts.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A6000": 154.8e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """The peak FLOP/s of a device, by the name its driver gives it; None where it is not known."""
    return next((peak for known, peak in PEAK_FLOPS.items() if known in device_name), None)


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


@dataclass(frozen=True)
class Speed:
    """Turns tokens and seconds into the numbers people compare."""

    flops_per_token: int
    peak_flops: float | None
    price_per_hour: float | None

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation (PaLM, arXiv:2204.02311): of all devices' peak, the fraction the model needed."""
        return tokens_per_second * self.flops_per_token / self.peak_flops if self.peak_flops else None

    def dollars(self, seconds: float) -> float | None:
        return seconds * self.price_per_hour / 3600 if self.price_per_hour is not None else None


class MetricsFile:
    """metrics.jsonl: one JSON object a line, only ever appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, event: str, **values: Any) -> None:
        """Write one line; numbers that JSON cannot say (NaN, infinity) become null. Raises RunError if it cannot."""
        line = json.dumps({"event": event, **{key: finite(value) for key, value in values.items()}}, allow_nan=False)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.path}: cannot write metrics: {error.strerror}") from None

    def size(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int, make_aside: Callable[[], Path]) -> None:
        """Shorten the file to its first `size` bytes, keeping the rest, if any, as a file in a folder made for it.
        Raises RunError if the rest cannot be written there; the file is then as it was."""
        if self.size() > size:
            rest = make_aside() / self.path.name
            try:
                rest.write_bytes(self.path.read_bytes()[size:])
            except OSError as error:
                raise RunError(f"{rest}: cannot set later metrics aside: {error.strerror}") from None
            os.truncate(self.path, size)

    def go_back_to(self, meta: dict[str, Any], make_aside: Callable[[], Path]) -> None:
        """Cut the file back to where the checkpoint with this meta.json was made; what came after is kept aside."""
        size = meta.get("metrics_bytes", 0)
        own = self.line_at(size) if meta.get("planned") else None
        has_line = own is not None and (own.get("event"), own.get("global_step")) == ("checkpoint", meta["global_step"])
        self.cut(self.end_of_line(size) if has_line else size, make_aside)
        if meta.get("planned") and not has_line:  # the process ended between the checkpoint and its line
            place = {"global_step": meta["global_step"], "tokens_seen": meta.get("tokens_seen", 0)}
            self.append(
                "checkpoint",
                **place,
                seconds=round(sum(meta.get("seconds", {}).values()), 3),
                is_best=meta.get("is_best", False),
            )

    def line_at(self, start: int) -> dict[str, Any] | None:
        """The event whose line begins at byte `start`, if there is a whole one."""
        rest = self.path.read_bytes()[start:] if self.path.exists() else b""
        line, end, _ = rest.partition(b"\n")
        try:
            event = json.loads(line) if end else None
        except (ValueError, RecursionError):
            return None
        return event if isinstance(event, dict) else None

    def end_of_line(self, start: int) -> int:
        """The byte after the line that begins at `start`."""
        return start + self.path.read_bytes()[start:].index(b"\n") + 1


def finite(value: Any) -> Any:
    """`value`, or None for a float that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl; a last line that a crash cut off is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
