"""Whether the ranks' weights are still the same: they must be, bit for bit, since all apply the same gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

PIECE = 2**22  # numbers at a time: torch widens a whole operand before it sums


@torch.no_grad()
def fingerprint(model: nn.Module) -> list[int]:
    """For each parameter (fp32), in order, the sum of its numbers' bit patterns. Waits for the device."""
    return torch.stack([_sum_of_bits(parameter) for parameter in model.parameters()]).tolist()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    pieces = tensor.detach().reshape(-1).view(torch.int32).split(PIECE)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def describe_divergence(fingerprints: Sequence[list[int]], model: nn.Module) -> str | None:
    """Which ranks' weights differ from those of most, and in which tensor first; None if all are equal."""
    counts = Counter(tuple(each) for each in fingerprints)
    if len(counts) == 1:
        return None
    usual = counts.most_common(1)[0][0]
    odd = [rank for rank, each in enumerate(fingerprints) if tuple(each) != usual]
    first = next(index for index, value in enumerate(fingerprints[odd[0]]) if value != usual[index])
    tensor = [name for name, _ in model.named_parameters()][first]
    ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    if list(counts.values()).count(counts[usual]) > 1:
        return f"the weights of {ranks} differ from those of the others, as many (first in {tensor})"
    return f"the weights of {ranks} differ from those of the other {counts[usual]} ranks (first in {tensor})"
