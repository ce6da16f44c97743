"""Orthogonalisation by Newton and Schulz's iteration, as Muon has it."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.runs.optimizer_state import NEWTON_SCHULZ_STEPS

# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/),
# and torch.optim.Muon: the quintic a·x + b·x³ + c·x⁵ whose slope at zero is largest among those that keep singular
# values near 1. Five steps take all that are not tiny to between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalise(matrices_GxMxN: Tensor, dtype: torch.dtype) -> Tensor:
    """Map each matrix U·S·Vᵀ of a batch to about U·Vᵀ, computed and returned in `dtype`. M is at most N: the products
    are of the smaller side. A matrix of zeros stays so."""
    a, b, c = COEFFICIENTS
    x_GxMxN = matrices_GxMxN.to(dtype)
    norms_Gx1x1 = torch.linalg.vector_norm(x_GxMxN, dim=(-2, -1), keepdim=True)
    x_GxMxN = x_GxMxN / norms_Gx1x1.clamp(min=EPSILON)  # no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_GxMxM = x_GxMxN @ x_GxMxN.mT
        update_GxMxM = torch.baddbmm(gram_GxMxM, gram_GxMxM, gram_GxMxM, beta=b, alpha=c)
        x_GxMxN = torch.baddbmm(x_GxMxN, update_GxMxM, x_GxMxN, beta=a)
    return x_GxMxN
