"""The gradients of all parameters together, alike on all ranks when an optimizer sees them: norm, clipping, zeroing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """The norm over all gradients, and 1.0 if it is not finite, else 0.0 (fp32): scalars on the device."""
    norm = torch.nn.utils.get_total_norm(gradients_of(parameters))
    return norm, (~torch.isfinite(norm)).float()


def clip_divisor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Divisor, as an fp32 scalar, that brings gradients of norm `norm` to a norm of at most `max_norm`; None where
    nothing is clipped."""
    return None if max_norm is None else torch.clamp((norm + CLIP_EPSILON) / max_norm, min=1.0).float()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`; the norm before, as a scalar on
    the device."""
    gradients = gradients_of(parameters)
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0))
    return norm


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Zero the gradients in place."""
    gradients = gradients_of(parameters)
    if gradients:
        torch._foreach_zero_(gradients)
