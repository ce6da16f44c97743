"""Rotary position embedding (RoPE; Su et al., arXiv:2104.09864).

The pairs that are turned together are dimension i of a head and i + D / 2, as in Llama of transformers, so that weights
move between the two unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of each position's angles: BxTxD/2, or TxD/2 where all rows have the same positions."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_width: int, base: float, dtype: torch.dtype) -> Rotation:
    """Position p turns pair i of a head D wide by p·base^(-2i/D). Angles are worked out in fp32 at least: `dtype` is
    the weights', and counts if it is fp64."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_width, 2, device=positions.device, dtype=exact) / head_width
    angles = positions.to(exact)[..., None] * base**-exponents
    return Rotation(angles.cos(), angles.sin())


def rotated(x_BxHxTxD: Tensor, by: Rotation) -> Tensor:
    """Queries or keys turned by their positions' angles; at least fp32."""
    cos, sin = (each if each.dim() == 2 else each[:, None] for each in by)
    first, second = x_BxHxTxD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
