"""State, operations and traffic of optimizers, as far as plans and estimated speeds need them without torch; the
optimizers themselves are in harness/training/."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig

# By optimizer: the tensors that it keeps of each of its parameters, of the parameter's own shape, in fp32.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
MOMENT_BYTES = 4
NEWTON_SCHULZ_STEPS = 5  # Muon's: harness/training/muon.py
# Numbers below which parts of parameters that ranks have updated travel together: each exchange takes some time,
# however small it is.
SMALL_PIECE = 2**18


def is_muons(name: str, shape: Sequence[int]) -> bool:
    """True if Muon updates a tensor, named as here or in a checkpoint: a matrix of a block's attention or feed-forward
    layers."""
    return name.startswith("trf_blocks.") and len(shape) == 2 and (".att." in name or ".ff." in name)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """FLOPs of Muon's iteration for a matrix of M <= N: each step multiplies X·Xᵀ, X·Xᵀ by itself, and the sum by X;
    4·M²·N + 2·M³ (Keller Jordan, https://kellerjordan.github.io/posts/muon/, with the bound 6·N·M²)."""
    low, high = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * low**2 * high + 2 * low**3)


def moment_bytes(optimizer: str, parameters: int) -> int:
    """Bytes of what an optimizer keeps of so many parameters of its own."""
    return len(MOMENTS[optimizer]) * MOMENT_BYTES * parameters


def optimizer_state_bytes(config: TrainConfig, model: ModelConfig) -> int:
    """Bytes of the state of train.json's optimizer, over all ranks together."""
    if config.optimizer != "muon":
        return moment_bytes(config.optimizer, model.parameters)
    muons = sum(math.prod(shape) for name, shape in model.tensor_shapes().items() if is_muons(name, shape))
    return moment_bytes("muon", muons) + moment_bytes("adamw", model.parameters - muons)
