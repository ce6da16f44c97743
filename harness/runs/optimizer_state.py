"""What an optimizer keeps besides the weights, computes and sends, as far as plans and estimated speeds need to know it
without torch; harness/training/ has the optimizers themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.model.config import ModelConfig
from harness.model.tensor_names import public_shapes
from harness.runs.train_config import TrainConfig

# By optimizer: the tensors that it keeps of each of its parameters, of the parameter's own shape, in fp32.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
MOMENT_BYTES = 4
NEWTON_SCHULZ_STEPS = 5  # Muon's: harness/training/newton_schulz.py
# Numbers below which parts of parameters that ranks have updated travel together: each exchange takes some time,
# however small it is.
SMALL_PIECE = 2**18


def is_muons(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor, by its name here or in a checkpoint, is one that Muon updates: a matrix of a block's attention
    or feed-forward layers."""
    return name.startswith("trf_blocks.") and len(shape) == 2 and (".att." in name or ".ff." in name)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """For a matrix of M <= N: each step multiplies X·Xᵀ, that by itself, and the sum by X; 4·M²·N + 2·M³ (Keller
    Jordan, https://kellerjordan.github.io/posts/muon/, who bounds it by 6·N·M²)."""
    low, high = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * low**2 * high + 2 * low**3)


def moment_bytes(optimizer: str, parameters: int) -> int:
    """Bytes of what an optimizer keeps of so many parameters of its own."""
    return len(MOMENTS[optimizer]) * MOMENT_BYTES * parameters


def optimizer_state_bytes(config: TrainConfig, model: ModelConfig) -> int:
    """Bytes of the state of train.json's optimizer, over all ranks together."""
    muons = 0
    if config.optimizer == "muon":
        muons = sum(math.prod(shape) for name, shape in public_shapes(model).items() if is_muons(name, shape))
    return moment_bytes("muon", muons) + moment_bytes("adamw", model.parameters - muons)
