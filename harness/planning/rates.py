"""The learning rate and weight decay of every step: train.json's values, scaled for another batch or depth than they
were tuned with, times a schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.common.errors import UserError
from harness.runs.train_config import TrainConfig

# The schedule: pure functions from a global step to a fraction of the peak learning rate


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
        assert self.shape == "constant", self.shape
        return 1.0


def build_schedule(config: TrainConfig, total_steps: int) -> Schedule:
    """Resolve train.json's schedule for a run of `total_steps`. Raises UserError if the warm-up outlasts the run.

    A warm-up in percent is rounded down to whole steps, as upstream does; a decay to the nearest.
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


# Rules that carry rates and weight decay over to another batch or depth


@dataclass(frozen=True)
class ScaledSettings:
    """The keys of train.json that rules have changed, with their new values, and the arithmetic of each in words."""

    values: dict[str, float]
    explained: tuple[str, ...] = ()

    def apply(self, config: TrainConfig) -> TrainConfig:
        """train.json with the scaled values."""
        return config.model_copy(update=self.values) if self.values else config


UNSCALED = ScaledSettings({})


def batch_factor(batch_tokens: int, reference_tokens: int) -> float:
    """√(B / B_ref), of learning rates and of weight decay.

    The square-root rule for Adam (Malladi et al., arXiv:2205.10320), of which only the rate is taken over, not the
    changes of betas and eps. Decoupled decay forgets over 1/(η·λ) steps (Wang & Aitchison, arXiv:2405.13698), B/(η·λ)
    tokens: that stays as it was, where η grows by √(B/B_ref), if λ does, too.
    """
    return math.sqrt(batch_tokens / reference_tokens)


def scale_settings(config: TrainConfig, *, batch_tokens: int, train_tokens: int, layers: int) -> ScaledSettings:
    """Scale all learning rates and weight decays (keys with these endings) by `scale_with_batch` and
    `scale_with_depth`, for a global batch (the largest of a ramp) and a run of so many tokens, and so many layers.

    Raises UserError where one of them overflows.
    """
    rate_factors: list[tuple[str, float]] = []
    decay_factors: list[tuple[str, float]] = []
    batch, depth = config.scale_with_batch, config.scale_with_depth
    if batch is not None:
        said = f"sqrt({batch_tokens:,} / {batch.reference_tokens:,})"
        rate_factors.append((said, batch_factor(batch_tokens, batch.reference_tokens)))
        decay_factors += rate_factors
        if batch.reference_train_tokens is not None:
            # B/(η·λ) tokens are then the same part of a run of D tokens as they were of one of D_ref: B/(η·λ·D) is
            # kept, as in nanochat (scripts/base_train.py).
            said = f"{batch.reference_train_tokens:,} / {train_tokens:,}"
            decay_factors.append((said, batch.reference_train_tokens / train_tokens))
    if depth is not None:
        # The rule of nanochat's first depth knob, tuned at 12 layers. Learning rates stay: its "fixed rates" were found
        # to hold from 6 to 20 layers.
        decay_factors.append((f"({depth.reference_layers} / {layers})^2", (depth.reference_layers / layers) ** 2))
    values: dict[str, float] = {}
    explained = []
    for key in TrainConfig.model_fields:
        factors = rate_factors if key.endswith("learning_rate") else decay_factors
        value = getattr(config, key)
        if not key.endswith(("learning_rate", "weight_decay")) or value is None or not factors:
            continue
        product = f"{value:g} x {' x '.join(said for said, _ in factors)}"
        values[key] = value * math.prod(factor for _, factor in factors)
        if not math.isfinite(values[key]):
            raise UserError(f'train.json: key "{key}": {product} overflows; check the key and its scale factors')
        explained.append(f"{key} {product} = {values[key]:.4g}")
    return ScaledSettings(values, tuple(explained))


# The two together


@dataclass(frozen=True)
class Rates:
    """The factors of train.json's (scaled) learning rates and weight decays in each step."""

    schedule: Schedule
    ramp_tokens: int | None  # of the largest global batch, where `scale_with_batch` meets a ramp

    @classmethod
    def of(cls, config: TrainConfig, total_steps: int, largest_batch_tokens: int) -> Rates:
        """Raises UserError as `build_schedule` does."""
        return cls(build_schedule(config, total_steps), largest_batch_tokens if config.scale_with_batch else None)

    def at(self, step: int, batch_tokens: int) -> tuple[float, float]:
        """Factors of the learning rates and of the weight decays in a global step of so many tokens.

        The scaled settings are those of a ramp's largest batch, and the rule holds for the batch of each step: decay
        then forgets over as many tokens, B/(η·λ), in each part of the ramp.
        """
        ramp = 1.0 if self.ramp_tokens is None else batch_factor(batch_tokens, self.ramp_tokens)
        return self.schedule.multiplier(step) * ramp, ramp
