"""What is measured in a run: losses in a window of steps, time by phase, speed, dollars, and the file they go to."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.errors import RunError
from harness.step import StepResult
from harness.world import World

PHASES = ("setup", "training", "validation", "checkpointing")

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


def peak_flops(device: torch.device) -> float | None:
    """The device's peak FLOP/s, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


@dataclass(frozen=True)
class Report:
    """What happened on all ranks since the last report."""

    loss: float
    loss_min: float
    loss_max: float
    microbatches: int
    gradient_norm: float
    skipped_steps: int
    skipped_in_a_row: int


class LossWindow:
    """Gathers steps' results on the device, without waiting for any of them, until a report asks."""

    # Columns of the tensor that holds it all, fp64.
    SUM, COUNT, MIN, MAX, NORM, SKIPPED, ROW, LONGEST_ROW = range(8)

    def __init__(self, device: torch.device) -> None:
        self._values = self._empty().to(device)

    @classmethod
    def _empty(cls) -> Tensor:
        values = torch.zeros(8, dtype=torch.float64)
        values[cls.MIN], values[cls.MAX] = math.inf, -math.inf
        return values

    def add(self, step: StepResult) -> None:
        values, losses, skipped = self._values, step.losses_A, step.skipped.double()
        row = (values[self.ROW] + skipped) * skipped
        self._values = torch.stack(
            [
                values[self.SUM] + losses.sum(),
                values[self.COUNT] + len(losses),
                torch.minimum(values[self.MIN], losses.min()),
                torch.maximum(values[self.MAX], losses.max()),
                torch.maximum(values[self.NORM], step.gradient_norm.double()),
                values[self.SKIPPED] + skipped,
                row,
                torch.maximum(values[self.LONGEST_ROW], row),
            ]
        )

    def report(self, world: World) -> Report:
        """Wait for the device, combine all ranks' windows and begin a new one; the same report on every rank."""
        ranks = world.gather(self._values.tolist())
        sums, counts, minima, maxima, norms, skipped, rows, longest = zip(*ranks, strict=True)
        following = self._empty()
        following[self.ROW] = rows[0]
        self._values = following.to(self._values.device)
        # A gradient is the same on every rank, so that rank 0 speaks for its norm and for what was skipped.
        return Report(
            loss=_total(sums) / sum(counts),
            loss_min=math.nan if math.isnan(_total(sums)) else min(minima),
            loss_max=math.nan if math.isnan(_total(sums)) else max(maxima),
            microbatches=int(sum(counts)),
            gradient_norm=norms[0],
            skipped_steps=int(skipped[0]),
            skipped_in_a_row=int(longest[0]),
        )

    def state(self) -> list[float]:
        """This rank's unreported part, for a checkpoint between two reports."""
        return self._values.tolist()

    def load_state(self, values: list[float]) -> None:
        self._values = torch.tensor(values, dtype=torch.float64, device=self._values.device)

    def load_merged(self, ranks: list[list[float]]) -> None:
        """Take over the unreported parts of ranks of a world of another size."""
        sums, counts, minima, maxima, *_ = zip(*ranks, strict=True)
        self.load_state([math.fsum(sums), sum(counts), min(minima), max(maxima), *ranks[0][self.NORM :]])


def _total(sums: tuple[float, ...]) -> float:
    return math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan


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

    def cut(self, size: int, aside: Path) -> None:
        """Shorten the file to its first `size` bytes, keeping the rest as a file in the folder `aside`."""
        if self.size() <= size:
            return
        content = self.path.read_bytes()
        aside.mkdir(parents=True, exist_ok=True)
        (aside / self.path.name).write_bytes(content[size:])
        os.truncate(self.path, size)


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


def report_values(report: Report) -> dict[str, Any]:
    """A report as metrics.jsonl has it."""
    values = asdict(report)
    del values["microbatches"], values["skipped_in_a_row"]
    return values
