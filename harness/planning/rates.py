"""The learning rate and weight decay of every step: train.json's values, scaled if they were tuned with another batch,
length of run or depth, and multiplied by the factors of a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.common.errors import UserError
from harness.runs.train_config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """A schedule of the learning rates and weight decays, with its lengths resolved to global steps."""

    shape: str
    total_steps: int
    warmup_steps: int
    decay_steps: int
    min_ratio: float
    ramp_tokens: int | None = None  # tokens of the largest global batch; None without `scale_with_batch`

    def at(self, step: int, batch_tokens: int) -> tuple[float, float]:
        """Return the factors of the learning rates and of the weight decays in a global step of `batch_tokens` tokens.

        They apply to train.json's values after scaling (`scale_settings`). With `scale_with_batch`, they are smaller
        for the smaller batches of a `batch_ramp` (`batch_factor`).
        """
        ramp = 1.0 if self.ramp_tokens is None else batch_factor(batch_tokens, self.ramp_tokens)
        return self.multiplier(step) * ramp, ramp

    def multiplier(self, step: int) -> float:
        """Return the fraction of the peak learning rate at the 0-based global `step`.

        - warm-up of W steps: linear from 1/W at step 0 to 1 at step W - 1
        - "constant": 1
        - "cosine": half a cosine over the steps after the warm-up, from 1 to `min_ratio`
        - "linear": from 1 after the warm-up to `min_ratio` at the step after the last
        - "wsd": 1, then linear in the last `decay_steps` steps, to `min_ratio` at the last one
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps  # not step / warmup_steps: a step with a rate of 0 is wasted
        falling, since = self.total_steps - self.warmup_steps, step - self.warmup_steps
        # cosine: Loshchilov & Hutter, arXiv:1608.03983. linear, with a min_ratio of 0: "D2Z" of Bergsma et al.,
        # arXiv:2502.15938. wsd (warm-up-stable-decay): Hu et al., arXiv:2404.06395.
        if self.shape == "cosine":
            progress = min(since / max(falling - 1, 1), 1.0)
            return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        if self.shape == "linear":
            progress = min(since / max(falling, 1), 1.0)
        elif self.shape == "wsd":
            since = step - (self.total_steps - self.decay_steps)
            progress = min(max((since + 1) / max(self.decay_steps, 1), 0.0), 1.0)
        else:
            assert self.shape == "constant"
            progress = 0.0
        return 1 - (1 - self.min_ratio) * progress


def build_schedule(config: TrainConfig, total_steps: int, largest_batch_tokens: int) -> Schedule:
    """Return train.json's schedule for a run of `total_steps` global steps.

    `largest_batch_tokens` is the number of tokens of the run's largest global batch. Raises UserError if warm-up and
    decay together are longer than the run.
    """
    warmup_steps = config.warmup_steps or 0
    if config.warmup_period_percent is not None:
        # rounded down, as in the lab notebook's training program (harness/runs/upstream.py)
        warmup_steps = int(total_steps * config.warmup_period_percent // 100)
    decay_steps = round(total_steps * (config.decay_period_percent or 0) / 100)
    if config.decay_period_percent and total_steps > warmup_steps + 1:  # the rate falls, but not in the first step
        decay_steps = max(1, decay_steps)
    if warmup_steps + decay_steps > total_steps:
        decay = f' and {decay_steps} of decay ("decay_period_percent")' if decay_steps else ""
        raise UserError(
            f'train.json: key "warmup_steps": {warmup_steps} steps of warm-up{decay} are longer than the run of '
            f"{total_steps} global steps; shorten the warm-up or make the run longer"
        )
    ramp_tokens = largest_batch_tokens if config.scale_with_batch else None
    return Schedule(config.lr_schedule, total_steps, warmup_steps, decay_steps, config.min_lr_ratio, ramp_tokens)


# Rules that scale learning rates and weight decays for another batch or depth


@dataclass(frozen=True)
class ScaledSettings:
    """The keys of train.json to which scaling rules apply, with their new values, and the calculations as text."""

    values: dict[str, float]
    explained: tuple[str, ...] = ()


UNSCALED = ScaledSettings({})


def batch_factor(batch_tokens: int, reference_tokens: int) -> float:
    """Return √(B / B_ref), the factor of learning rates and weight decays for a global batch of B instead of B_ref
    tokens.

    For learning rates, this is the square-root rule for Adam (Malladi et al., arXiv:2205.10320), without that rule's
    changes of betas and eps.
    """
    # With decoupled weight decay λ, a weight's past is forgotten over 1/(η·λ) steps (Wang & Aitchison,
    # arXiv:2405.13698), or B/(η·λ) tokens. Since the learning rate η grows by √(B/B_ref), that number of tokens is
    # unchanged if λ grows by the same factor.
    return math.sqrt(batch_tokens / reference_tokens)


def scale_settings(config: TrainConfig, *, batch_tokens: int, train_tokens: int, layers: int) -> ScaledSettings:
    """Return the learning rates and weight decays of train.json, scaled by `scale_with_batch` and `scale_with_depth`.

    Keys to which no rule applies are left out. `batch_tokens` is the run's largest global batch, `train_tokens` the
    whole run, `layers` the model's depth. Raises UserError if a scaled value overflows.
    """
    rate_factors: list[tuple[str, float]] = []
    decay_factors: list[tuple[str, float]] = []
    batch, depth = config.scale_with_batch, config.scale_with_depth
    if batch is not None:
        said = f"sqrt({batch_tokens:,} / {batch.reference_tokens:,})"
        rate_factors.append((said, batch_factor(batch_tokens, batch.reference_tokens)))
        decay_factors += rate_factors
        if batch.reference_train_tokens is not None:
            # This keeps B/(η·λ·D), as nanochat does (scripts/base_train.py). Weight decay then forgets over the same
            # part of a run of D tokens as of a run of D_ref tokens.
            said = f"{batch.reference_train_tokens:,} / {train_tokens:,}"
            decay_factors.append((said, batch.reference_train_tokens / train_tokens))
    if depth is not None:
        # nanochat's earlier rule for the number of layers, with a decay tuned at 12. Learning rates are not scaled,
        # because nanochat's were found to suit 6 to 20 layers.
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
            raise UserError(f'train.json: key "{key}": {product} overflows; correct it or the scale_with_ keys')
        explained.append(f"{key} {product} = {values[key]:.4g}")
    return ScaledSettings(values, tuple(explained))
