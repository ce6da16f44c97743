"""How much an optimizer keeps besides the weights, for what is worked out without torch; harness/training/optimizer.py
has the optimizers themselves."""

from __future__ import annotations

from harness.runs.train_config import TrainConfig

# By train.json's `optimizer`: the tensors that it keeps of each parameter, of the parameter's own shape, in fp32.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq")}
MOMENT_BYTES = 4


def moment_bytes(optimizer: str, parameters: int) -> int:
    """Bytes of the moments of so many parameters."""
    return len(MOMENTS[optimizer]) * MOMENT_BYTES * parameters


def optimizer_state_bytes(config: TrainConfig, parameters: int) -> int:
    """Bytes of the state of train.json's optimizer, over all ranks together, for a model of so many parameters."""
    return moment_bytes(config.optimizer, parameters)
