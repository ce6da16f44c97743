"""Measured speeds and their basis: how much training, and under which conditions. Without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.runs.train_config import Affects, keys_affecting

# Keys of train.json that decide, with the model and the number of ranks, how long a step takes.
BATCH_KEYS, KERNEL_KEYS = keys_affecting(Affects.BATCH), keys_affecting(Affects.SPEED)
# The first steps of a process are slower than the rest, and their times scatter: memory is being laid out, clocks and
# caches warm up, and a step may have waited for another program.
BELIEVED_STEPS = 20
BELIEVED_SECONDS = 10.0


class Measured(BaseModel):
    """The training behind a speed: only what this program did itself, with one batch on one machine."""

    model_config = ConfigDict(strict=True, frozen=True)

    global_steps: int
    tokens: int
    seconds: float  # of training alone: no validation, no checkpoints, no set-up

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing was measured."""
        return self.tokens / self.seconds if self.tokens > 0 and self.seconds > 0 else None

    @property
    def is_believable(self) -> bool:
        """True if enough training was measured for the speed to hold for another run."""
        return not self.shortfall

    @property
    def shortfall(self) -> str:
        """The limits that it is below; empty if it can be believed."""
        steps = [f"{BELIEVED_STEPS} steps"] if self.global_steps < BELIEVED_STEPS else []
        seconds = [f"{BELIEVED_SECONDS:.0f} s"] if self.seconds < BELIEVED_SECONDS else []
        return " and ".join(steps + seconds)


@dataclass(frozen=True)
class Conditions:
    """Conditions other than the model that decide how long a step takes; None where a record does not say it."""

    world_size: int | None
    device: str | None
    train: Mapping[str, Any]  # train.json, as far as it was recorded


def same_conditions(then: Conditions, now: Conditions) -> bool:
    """True if steps take as long under both, as far as both say."""
    machines = ((then.world_size, now.world_size), (then.device, now.device))
    if any(None not in pair and pair[0] != pair[1] for pair in machines):
        return False
    return _agree(then.train, now.train, (*BATCH_KEYS, *KERNEL_KEYS))


def same_kernels(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """True if a step of the same model and batch takes as long under both train.json, as far as both say. A speed
    measured while the batch grew is one of smaller batches, too."""
    return _agree(then, now, (*KERNEL_KEYS, "batch_ramp"))


def _agree(then: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    return all(then[key] == now[key] for key in keys if key in then and key in now)


# Dense peak in 16-bit matrix products with fp32 accumulation, FLOP/s, from NVIDIA's data sheets; the first name whose
# words are in the device's name counts.
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A6000": 154.8e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """The peak FLOP/s of a device, by the name its driver gives it; None where it is not known, as for a slice of a GPU
    (MIG) or a variant with fewer or more units (Laptop, D, Ti)."""
    words = re.split(r"[ -]", device_name)
    if not {"MIG", "Laptop", "D", "Ti"}.isdisjoint(words):
        return None
    return next((peak for known, peak in PEAK_FLOPS.items() if set(known.split()) <= set(words)), None)


def unknown_peak(device_name: str) -> str | None:
    """A remark for a GPU whose peak is not known; for a CPU nobody expects it."""
    is_known = device_name.endswith(" CPU") or peak_flops(device_name) is not None
    return None if is_known else f"MFU unknown: the peak of {device_name} is in no table of this program"


@dataclass(frozen=True)
class Throughput:
    """Turns tokens and seconds into the numbers people compare."""

    flops_per_token: int
    peak_flops: float | None
    price_per_hour: float | None

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation (PaLM, arXiv:2204.02311): of all devices' peak, the fraction the model needed."""
        return tokens_per_second * self.flops_per_token / self.peak_flops if self.peak_flops else None

    def dollars(self, seconds: float) -> float | None:
        return None if self.price_per_hour is None else cost(seconds, self.price_per_hour)


def cost(seconds: float, price_per_hour: float) -> float:
    """Return the dollars that a machine takes in so many seconds."""
    return seconds * price_per_hour / 3600


def cost_by_phase(seconds: Mapping[str, float], price_per_hour: float | None) -> dict[str, float] | None:
    """Return the dollars of each phase, to a hundredth of a cent as a summary.json has them; None without a price."""
    if price_per_hour is None:
        return None
    return {phase: round(cost(spent, price_per_hour), 6) for phase, spent in seconds.items()}
