"""Trees of dicts, lists and tuples, as states of optimizers are, with their tensors taken out of them and put back.

What is left is small and travels pickled; each tensor travels by itself, as bytes. For World.broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Leaf = TypeVar("Leaf")


@dataclass(frozen=True)
class TensorSlot:
    """Placeholder for a tensor in a tree: its index, shape and dtype."""

    index: int  # among all tensors, in the order of the tree
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        """Room on the CPU for such a tensor."""
        return torch.empty(self.shape, dtype=self.dtype)


def take_out_tensors(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree with a TensorSlot in each tensor's place, and the tensors, on the CPU."""
    tensors: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> TensorSlot:
        tensors.append(tensor.cpu())
        return TensorSlot(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

    return _replace_leaves(tree, torch.Tensor, take_out), tensors


def fill_slots(tree: Any, fill: Callable[[TensorSlot], torch.Tensor]) -> Any:
    """The tree with `fill` of each TensorSlot in its place; called in the order of the tree."""
    return _replace_leaves(tree, TensorSlot, fill)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in a row: its own memory if it is contiguous, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _replace_leaves(tree: Any, kind: type[Leaf], function: Callable[[Leaf], Any]) -> Any:
    """Replace every leaf of type `kind` by `function` of it, in the order of the tree; returns a new tree."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _replace_leaves(value, kind, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replace_leaves(value, kind, function) for value in tree)
    return tree
