"""Parameter groups, the optimizer, and one update of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.runs.train_config import TrainConfig

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) in torch's fused kernel, which can skip a step on the device.

    Weight decay is on every parameter, or with `decay_all_parameters: false` on matrices only.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.decay_all_parameters:
        groups = [{"params": parameters, "weight_decay": config.weight_decay}]
    else:
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def update_weights(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, max_norm: float | None
) -> tuple[Tensor, Tensor]:
    """Clip the gradients to a global norm and step, unless the norm is not finite: then the weights and the optimizer's
    state stay as they are.

    Gradients are alike on all ranks by now, so that all decide alike; and the decision is made on the device, so that
    nothing waits for it. Returns the norm before clipping and 1.0 or 0.0 for skipped or not, as fp32 scalars.
    """
    scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    skipped = (~torch.isfinite(norm)).float()
    if max_norm is not None:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0))
    if scaler.is_enabled():
        scaler.step(optimizer)
    else:
        # The fused kernels' own way to skip, which GradScaler uses too: see torch.amp.GradScaler.step.
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    scaler.update()
    return norm.float(), skipped


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by parameter name, on the CPU: it does not depend on how parameters are grouped, and says
    what it belongs to."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: value.detach().to("cpu", copy=True) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


def _check_state(name: str, parameter: Tensor, state: dict[str, Tensor]) -> None:
    shapes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    if state.keys() != shapes.keys():
        raise ValueError(f"{name} has {sorted(state)}")
    for key, shape in shapes.items():
        if state[key].shape != shape or state[key].dtype != torch.float32:
            raise ValueError(f"{key} of {name} is {state[key].dtype} {list(state[key].shape)}")


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, dict[str, Tensor]]
) -> None:
    """Put a saved state back; learning rate, decay and the like stay as train.json has them now.

    Raises ValueError if `saved` is not the state of just the model's parameters: fused kernels would read beyond it.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    if saved.keys() != set(names.values()):
        raise ValueError("the parameters are others than the model's")
    current = optimizer.state_dict()
    state: dict[int, Any] = {}
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state[index] = saved[names[parameter]]
            _check_state(names[parameter], parameter, state[index])
            index += 1
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})
