"""State tensors and FLOPs of optimizers, for plans and speed estimates. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

# The state tensors, besides step counts, that each optimizer keeps for each parameter that it updates. They have the
# parameter's shape and are fp32.
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
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
