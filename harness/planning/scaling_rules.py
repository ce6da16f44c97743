"""Rules that carry learning rates and weight decay over to another batch or depth: formulas, and what they make of a
train.json. Nothing is scaled unless train.json asks for it, and says what the values in it were tuned with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from harness.common.errors import UserError
from harness.runs.train_config import TrainConfig

RATE, DECAY = "learning_rate", "weight_decay"


def rate_factor(batch_tokens: int, reference_tokens: int) -> float:
    """√(B / B_ref), of learning rates: the square-root rule for Adam (Malladi et al., arXiv:2205.10320), of which only
    the rate is taken over, not the changes of betas and eps."""
    return math.sqrt(batch_tokens / reference_tokens)


def decay_factor(batch_tokens: int, reference_tokens: int) -> float:
    """√(B / B_ref), of weight decay, with `rate_factor` on the rates.

    Decoupled decay forgets over 1/(η·λ) steps (Wang & Aitchison, arXiv:2405.13698): B/(η·λ) tokens. That stays as it
    was, where η grows by √(B/B_ref), if λ does, too.
    """
    return math.sqrt(batch_tokens / reference_tokens)


def horizon_factor(train_tokens: int, reference_train_tokens: int) -> float:
    """D_ref / D, of weight decay: those B/(η·λ) tokens are then the same part of a run of D tokens as they were of one
    of D_ref. With `decay_factor` it keeps B/(η·λ·D), as nanochat does (scripts/base_train.py)."""
    return reference_train_tokens / train_tokens


def depth_factor(layers: int, reference_layers: int) -> float:
    """(L_ref / L)², of weight decay: the rule of nanochat's first depth knob, tuned at 12 layers, and of the programs
    that took it over. Learning rates stay: they are nanochat's "fixed rates", found to hold from 6 to 20 layers."""
    return (reference_layers / layers) ** 2


@dataclass(frozen=True)
class Setup:
    """Inputs of the rules: tokens of a run's global batch (the largest of a ramp) and in all, and layers."""

    batch_tokens: int
    train_tokens: int
    layers: int


@dataclass(frozen=True)
class ScaledSettings:
    """The keys of train.json that rules have changed, with their new values, and how each came about."""

    values: dict[str, float]
    explained: tuple[str, ...] = ()

    def apply(self, config: TrainConfig) -> TrainConfig:
        """train.json with the scaled values."""
        return config.model_copy(update=self.values) if self.values else config


UNSCALED = ScaledSettings({})


def scale_settings(config: TrainConfig, setup: Setup) -> ScaledSettings:
    """Scale all learning rates and weight decays (keys with these endings) by `scale_with_batch` and
    `scale_with_depth`. Raises UserError where one of them is too large for a number."""
    factors: dict[str, list[tuple[str, float]]] = {RATE: [], DECAY: []}
    batch, depth = config.scale_with_batch, config.scale_with_depth
    if batch is not None:
        said = f"sqrt({setup.batch_tokens:,} / {batch.reference_tokens:,})"
        factors[RATE].append((said, rate_factor(setup.batch_tokens, batch.reference_tokens)))
        factors[DECAY].append((said, decay_factor(setup.batch_tokens, batch.reference_tokens)))
        if batch.reference_train_tokens is not None:
            said = f"{batch.reference_train_tokens:,} / {setup.train_tokens:,}"
            factors[DECAY].append((said, horizon_factor(setup.train_tokens, batch.reference_train_tokens)))
    if depth is not None:
        said = f"({depth.reference_layers} / {setup.layers})^2"
        factors[DECAY].append((said, depth_factor(setup.layers, depth.reference_layers)))
    values: dict[str, float] = {}
    explained = []
    for key, value in config.model_dump(mode="json").items():
        chosen = next((each for suffix, each in factors.items() if key.endswith(suffix)), [])
        if chosen and _is_number(value):
            values[key] = value * math.prod(factor for _, factor in chosen)
            if not math.isfinite(values[key]):
                raise UserError(
                    f'train.json: key "{key}": {value:g} x {" x ".join(said for said, _ in chosen)} is no number any '
                    "more; check it, and what it is scaled by"
                )
            explained.append(f"{key} {value:g} x {' x '.join(said for said, _ in chosen)} = {values[key]:.4g}")
    return ScaledSettings(values, tuple(explained))


@dataclass(frozen=True)
class Multipliers:
    """Factors of the peak learning rates and of the weight decays in one step."""

    rate: float = 1.0
    decay: float = 1.0


def ramp_multipliers(config: TrainConfig, batch_tokens: int, largest_batch_tokens: int) -> Multipliers:
    """Multipliers of a step with such a batch, where `scale_with_batch` meets a ramp: rates and decay of ScaledSettings
    are those of its largest batch, and the rule holds for the batch of each step. Decay then forgets over as many
    tokens, B/(η·λ), in each part of the ramp."""
    if config.scale_with_batch is None or batch_tokens == largest_batch_tokens:
        return Multipliers()
    return Multipliers(
        rate_factor(batch_tokens, largest_batch_tokens), decay_factor(batch_tokens, largest_batch_tokens)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
