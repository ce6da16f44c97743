"""Measured speeds of training, and their conversion into MFU and dollars. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.runs.train_config import Affects, keys_affecting

# Keys of train.json that decide, with the model, the device and the number of ranks, how long a step takes.
BATCH_KEYS, KERNEL_KEYS = keys_affecting(Affects.BATCH), keys_affecting(Affects.SPEED)
# A speed is used for other runs only if it was measured over at least this many steps and seconds. The first steps of a
# process are slower than the rest, and their times vary.
BELIEVED_STEPS = 20
BELIEVED_SECONDS = 10.0


class Measured(BaseModel):
    """Steps, tokens and seconds of training over which a speed was measured. The machine and train.json's keys for
    batch and kernels did not change during them."""

    model_config = ConfigDict(strict=True, frozen=True)

    global_steps: int
    tokens: int
    seconds: float  # of training alone: no validation, no checkpoints, no set-up

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all ranks per second of training, or None if nothing was measured."""
        return self.tokens / self.seconds if self.tokens > 0 and self.seconds > 0 else None

    @property
    def shortfall(self) -> str:
        """The minimums (BELIEVED_STEPS, BELIEVED_SECONDS) that the measurement does not reach, as text. The text is
        empty if it reaches both. Only then is the speed used for other runs."""
        steps = [f"{BELIEVED_STEPS} steps"] if self.global_steps < BELIEVED_STEPS else []
        seconds = [f"{BELIEVED_SECONDS:.0f} s"] if self.seconds < BELIEVED_SECONDS else []
        return " and ".join(steps + seconds)


def same_kernels(then: Mapping[str, Any], now: Mapping[str, Any], *, same_batch: bool = False) -> bool:
    """Return True if two train.json agree in KERNEL_KEYS, which affect a step's time, and in `batch_ramp`. With
    `same_batch`, they must agree in BATCH_KEYS, too. A key that `then` or `now` lacks is not compared."""
    # A speed that was measured during a ramp includes that of smaller batches.
    keys = (*KERNEL_KEYS, *(BATCH_KEYS if same_batch else ("batch_ramp",)))
    return all(then[key] == now[key] for key in keys if key in then and key in now)


# Peak FLOP/s of dense 16-bit matrix products with fp32 accumulation, from NVIDIA's data sheets. A device's peak is that
# of the first entry whose words are all in the device's name.
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
    """Return the peak FLOP/s of a device in dense 16-bit matrix products, or None if it is not known. `device_name` is
    the name that the driver reports."""
    words = re.split(r"[ -]", device_name)
    # A slice of a GPU, or a variant with fewer or more units
    if not {"MIG", "Laptop", "D", "Ti"}.isdisjoint(words):
        return None
    return next((peak for known, peak in PEAK_FLOPS.items() if set(known.split()) <= set(words)), None)


def unknown_peak(device_name: str) -> str | None:
    """Return a remark if the peak FLOP/s of a GPU is unknown, else None. A CPU gets no remark, because nobody expects
    its MFU."""
    is_known = device_name.endswith(" CPU") or peak_flops(device_name) is not None
    return None if is_known else f"MFU unknown: this program does not know the peak FLOP/s of {device_name}"


def mfu(tokens_per_second: float, flops_per_token: int, device_name: str) -> float | None:
    """Return the model FLOPs utilization (PaLM, arXiv:2204.02311): the FLOP/s that the model needs at this speed, over
    the device's peak. `tokens_per_second` is that of one device. Returns None if the peak is unknown."""
    peak = peak_flops(device_name)
    return None if peak is None else tokens_per_second * flops_per_token / peak


def cost(seconds: float, price_per_hour: float) -> float:
    """Return the dollars that a machine costs for this many seconds."""
    return seconds * price_per_hour / 3600


def cost_by_phase(seconds: Mapping[str, float], price_per_hour: float | None) -> dict[str, float] | None:
    """Return the dollars of each phase, rounded to a millionth, given its seconds. Return None if there is no price."""
    if price_per_hour is None:
        return None
    return {phase: round(cost(spent, price_per_hour), 6) for phase, spent in seconds.items()}
