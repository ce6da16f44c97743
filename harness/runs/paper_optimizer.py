"""What an optimizer's step takes on a GPU that nobody has measured yet, by arithmetic: harness/runs/paper_speed.py has
the rest of a token's work, and the devices. Without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.model.config import ModelConfig
from harness.model.tensor_names import public_shapes
from harness.runs.optimizer_state import NEWTON_SCHULZ_STEPS, SMALL_PIECE, is_muons

# Bytes per parameter. Every rank reads all gradients for their norm, and forgets them (4 each). AdamW, fused: reads
# weight, gradient and two averages (16) and writes all but the gradient (12). Muon, in kernels of torch's own: the
# gradient where it is finite (8), the average's and Nesterov's sums (24), stacked (8), in bf16 (6), their norm (2) and
# division by it (4), decay (8), the update in fp32 (6), times its rate (8), taken off the weight (12).
GRADIENT_BYTES = 8
ADAMW_BYTES = 28
MUON_BYTES = 86
# A matrix product hands out its result by tiles of so many rows and columns, each to one of the device's processors,
# so that a small one leaves most of them idle.
TILE = 128
MUON_LAUNCHES = 45  # kernels for a matrix: 5 x (3 products, 2 copies) and 20 besides
WEIGHT_BYTES = 4  # of those that ranks share out, which travel tensor by tensor
MESSAGE_SECONDS = 20e-6  # before the first byte has come: assumed


@dataclass(frozen=True)
class OptimizerWork:
    """One step's, on the rank that has most of it."""

    muon_matrices: list[tuple[int, int]]  # that Muon orthogonalises, the smaller side first
    parameters: int
    large_tensors: int
    sharers: int  # ranks that share the optimizer's state out; 1 where each has all of it

    @classmethod
    def of(cls, model: ModelConfig, train: Mapping[str, Any], world_size: int) -> OptimizerWork:
        """Of what train.json says, AdamW's if it says nothing."""
        shapes = public_shapes(model)
        with_muon = train.get("optimizer", "adamw") == "muon"
        matrices = [shape for name, shape in shapes.items() if with_muon and is_muons(name, shape)]
        return cls(
            muon_matrices=[(min(shape), max(shape)) for shape in matrices],
            parameters=model.parameters,
            large_tensors=sum(math.prod(shape) >= SMALL_PIECE for shape in shapes.values()),
            sharers=world_size if train.get("shard_optimizer") else 1,
        )

    @property
    def bytes(self) -> float:
        """Read and written, but for what the matrix products take."""
        muons = sum(rows * columns for rows, columns in self.muon_matrices)
        own = ADAMW_BYTES * (self.parameters - muons) + MUON_BYTES * muons
        return GRADIENT_BYTES * self.parameters + own / self.sharers

    @property
    def own_matrices(self) -> int:
        """How many of Muon's matrices a rank orthogonalises: they cannot be cut."""
        return math.ceil(len(self.muon_matrices) / self.sharers)

    @property
    def launches(self) -> int:
        """Kernels of Muon's; AdamW's are a handful."""
        return MUON_LAUNCHES * self.own_matrices

    def newton_schulz_seconds(self, flops_per_second: float, processors: int) -> float:
        """Of products that reach `flops_per_second` where they occupy the whole device."""
        if not self.muon_matrices:
            return 0.0
        each = [_newton_schulz_seconds(*sides, flops_per_second, processors) for sides in self.muon_matrices]
        return sum(each) / len(each) * self.own_matrices

    def exchange_seconds(self, bytes_per_second: float) -> float:
        """Of giving all ranks the weights that each has updated."""
        if self.sharers == 1:
            return 0.0
        messages = self.large_tensors + self.sharers
        return self.parameters * WEIGHT_BYTES / bytes_per_second + messages * MESSAGE_SECONDS


def _newton_schulz_seconds(low: int, high: int, flops_per_second: float, processors: int) -> float:
    """Of `newton_schulz_flops`, each product at the part of the device's speed that its tiles reach."""
    tall, wide = math.ceil(low / TILE), math.ceil(high / TILE)
    square = (2 * low**2 * high + 2 * low**3) / _occupied(tall * tall, processors)
    return NEWTON_SCHULZ_STEPS * (square + 2 * low**2 * high / _occupied(tall * wide, processors)) / flops_per_second


def _occupied(tiles: int, processors: int) -> float:
    """The part of the device that so many tiles keep busy."""
    return min(1.0, tiles / processors)
