"""Normalisation by the last dimension, with the parameter names of this model family: scale and shift."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.model.config import ModelConfig

EPSILON = 1e-5


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al., arXiv:1607.06450)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        return F.layer_norm(x_BxTxC, self.scale.shape, self.scale, self.shift, eps=EPSILON)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε), times a learned gain if there is one (Zhang & Sennrich, arXiv:1910.07467).

    In fp32 if the input is of half precision, and returned in the input's dtype.
    """

    def __init__(self, dim: int, *, gain: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim)) if gain else None

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        normal = rms_normalised(x_BxTxC)
        return (normal if self.scale is None else normal * self.scale).to(x_BxTxC.dtype)


def rms_normalised(x_BxTxC: Tensor) -> Tensor:
    """Root mean square 1 over the last dimension; at least fp32. Written out: a kernel of torch's own is no faster on
    the CPU, and refuses gains of another precision than the input's on a GPU."""
    x = x_BxTxC if x_BxTxC.dtype == torch.float64 else x_BxTxC.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def build_norm(config: ModelConfig) -> LayerNorm | RMSNorm:
    """The norm of a block's inputs and of the last block's output, by model.json's `norm` and `norm_gain`."""
    if config.norm == "layernorm":
        return LayerNorm(config.emb_dim)
    return RMSNorm(config.emb_dim, gain=bool(config.norm_gain))
