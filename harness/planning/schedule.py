"""Learning-rate schedules: pure functions from a global step to a multiplier of the peak learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.common.errors import UserError
from harness.runs.train_config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """A schedule with its lengths resolved to global steps."""

    shape: str
    total_steps: int
    warmup_steps: int
    decay_steps: int
    min_ratio: float

    def multiplier(self, step: int) -> float:
        """Fraction of the peak learning rate at the 0-based global `step`."""
        if step < self.warmup_steps:
            return warmup(step, self.warmup_steps)
        if self.shape == "cosine":
            return cosine(step - self.warmup_steps, self.total_steps - self.warmup_steps, self.min_ratio)
        if self.shape == "linear":
            return linear(step - self.warmup_steps, self.total_steps - self.warmup_steps, self.min_ratio)
        if self.shape == "wsd":
            return linear_decay(step - (self.total_steps - self.decay_steps), self.decay_steps, self.min_ratio)
        return 1.0


def warmup(step: int, steps: int) -> float:
    """Linear from 1/steps at step 0 to 1 at step `steps - 1`: no step is wasted at a learning rate of zero."""
    return (step + 1) / steps


def cosine(step: int, steps: int, min_ratio: float) -> float:
    """Half a cosine from 1 at step 0 to `min_ratio` at the last of `steps` (Loshchilov & Hutter, arXiv:1608.03983)."""
    progress = min(step / max(steps - 1, 1), 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(step: int, steps: int, min_ratio: float) -> float:
    """Linear from 1 at step 0 to `min_ratio` where step `steps` would be: no step is wasted at a learning rate of zero.
    To zero: "D2Z" of Bergsma et al., arXiv:2502.15938."""
    progress = min(step / max(steps, 1), 1.0)
    return 1 - (1 - min_ratio) * progress


def linear_decay(step: int, steps: int, min_ratio: float) -> float:
    """1 before step 0, then linear to `min_ratio` at the last of `steps`: the decay of warm-up-stable-decay
    (Hu et al., arXiv:2404.06395)."""
    progress = min(max((step + 1) / max(steps, 1), 0.0), 1.0)
    return 1 - (1 - min_ratio) * progress


def build_schedule(config: TrainConfig, total_steps: int) -> Schedule:
    """Resolve train.json's schedule for a run of `total_steps`. Raises UserError if the warm-up outlasts the run.

    A warm-up in percent is rounded down to whole steps, as the lab notebook's program has it; a decay to the nearest.
    """
    warmup_steps = config.warmup_steps or 0
    if config.warmup_period_percent is not None:
        warmup_steps = int(total_steps * config.warmup_period_percent // 100)
    if warmup_steps > total_steps:
        raise UserError(
            f'train.json: key "warmup_steps": {warmup_steps} steps of warm-up are longer than the run of '
            f"{total_steps} global steps; shorten the warm-up or raise {config.budget}"
        )
    decay_steps = round(total_steps * (config.decay_period_percent or 0) / 100)
    if warmup_steps + decay_steps > total_steps:
        raise UserError(
            f'train.json: keys "warmup_steps" and "decay_period_percent": {warmup_steps} + {decay_steps} steps are '
            f"longer than the run of {total_steps} global steps"
        )
    return Schedule(config.lr_schedule, total_steps, warmup_steps, decay_steps, config.min_lr_ratio)
