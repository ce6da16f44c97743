"""Memory and FLOPs of optimizers, for plans and speed estimates. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig

# The state tensors, besides step counts, that each optimizer keeps for each parameter that it updates. They have the
# parameter's shape and are fp32.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
MOMENT_BYTES = 4
NEWTON_SCHULZ_STEPS = 5  # used by harness/training/muon.py


def is_muons(name: str, shape: Sequence[int]) -> bool:
    """Return True if Muon updates the tensor `name`: a matrix of a block's attention or feed-forward layers. The name
    may be the one in gpt.py or the one in checkpoints."""
    return name.startswith("trf_blocks.") and len(shape) == 2 and (".att." in name or ".ff." in name)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of Muon's Newton-Schulz iterations for a matrix X, whose sides may be given in either order.

    With sides M <= N, each iteration takes 4·M²·N + 2·M³ FLOPs for X·Xᵀ, the square of X·Xᵀ, and a product with X.
    Keller Jordan (https://kellerjordan.github.io/posts/muon/) gives the bound 6·N·M².
    """
    low, high = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * low**2 * high + 2 * low**3)


def optimizer_state_bytes(config: TrainConfig, model: ModelConfig) -> int:
    """Return the bytes of the optimizer's state tensors (MOMENTS) for a whole model: with `shard_optimizer`, those of
    all ranks together."""
    assert config.optimizer in MOMENTS
    by_muon = 0
    if config.optimizer == "muon":
        by_muon = sum(math.prod(shape) for name, shape in model.tensor_shapes().items() if is_muons(name, shape))
    by_adamw = model.parameters - by_muon
    return MOMENT_BYTES * (len(MOMENTS["muon"]) * by_muon + len(MOMENTS["adamw"]) * by_adamw)
