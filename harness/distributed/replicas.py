"""Check that the weights of all ranks are still equal, bit for bit. They must be equal, because all ranks apply the
same gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

PIECE = 2**22  # elements summed at a time, because torch converts a whole operand to int64 before it sums


@torch.no_grad()
def weight_checksums(model: nn.Module) -> list[int]:
    """Return, for each parameter in order, the sum of the bit patterns of its fp32 elements. Waits for the device."""
    sums = []
    for parameter in model.parameters():
        pieces = parameter.detach().reshape(-1).view(torch.int32).split(PIECE)
        sums.append(torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum())
    return torch.stack(sums).tolist()


def describe_divergence(checksums: Sequence[list[int]], model: nn.Module) -> str | None:
    """Return a text that names the ranks whose weights differ from the majority's, and the first tensor that differs,
    or None if the weights of all ranks are equal. `checksums` has the `weight_checksums` of each rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, each in enumerate(checksums):
        groups.setdefault(tuple(each), []).append(rank)
    if len(groups) == 1:
        return None
    (usual, most), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    first = min(next(at for at, value in enumerate(odd) if value != usual[at]) for odd, _ in others)
    tensor = [name for name, _ in model.named_parameters()][first]
    if len(most) == len(others[0][1]):
        sides = " and ".join(_ranks(ranks) for ranks in groups.values())
        return f"the weights of {sides} differ, first in {tensor}; there is no majority to say which are right"
    odd_ranks = sorted(rank for _, ranks in others for rank in ranks)
    return f"the weights of {_ranks(odd_ranks)} differ from those of the other {len(most)} ranks, first in {tensor}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
