"""The optimizers: one protocol for what training asks of each, and AdamW, which is the first.

An optimizer updates the weights from gradients that are alike on all ranks, and gives its state by parameter name, so
that a checkpoint depends neither on how parameters are grouped nor on where each part of the state is kept. Another one
is a class with these methods, a line in `build_optimizer`, and one in harness/runs/optimizer_state.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.distributed.world import World
from harness.runs.optimizer_state import MOMENTS, moment_bytes
from harness.runs.train_config import TrainConfig

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it

# By parameter name, then by the optimizer's own word for it ("exp_avg"): tensors, or their shapes.
NamedState = dict[str, dict[str, Tensor]]
StateShapes = dict[str, dict[str, torch.Size]]


class Optimizer(Protocol):
    """What training asks of an optimizer; every method is called on every rank."""

    @property
    def learning_rate(self) -> float:
        """The rate of the last update, for the metrics: that of the first group, if groups have rates of their own."""
        ...

    def set_multiplier(self, multiplier: float) -> None:
        """Set each group's learning rate to `multiplier` times its peak."""
        ...

    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        """Clip the gradients to a global norm and step, unless the norm is not finite: then the weights and the state
        stay as they are.

        Gradients are alike on all ranks by now, so that all decide alike; and the decision is made on the device, so
        that nothing waits for it. Returns the norm before clipping and 1.0 or 0.0 for skipped or not, as fp32 scalars.
        """
        ...

    def zero_grad(self) -> None:
        """Zero the gradients in place: under DDP they are views into its communication buckets, which stay."""
        ...

    def state_shapes(self) -> StateShapes:
        """The shapes of what `named_state` has after a step. A tensor of a parameter's own shape is cut where the
        parameter is; one without dimensions belongs to the parameter as a whole."""
        ...

    def named_state(self, world: World) -> NamedState:
        """The state by parameter name, in fp32; empty before the first step. The tensors are the optimizer's own, which
        the next step changes: whoever keeps them copies them. Collective: whatever ranks share out is gathered here.
        Rank 0's result is the one that is saved; the others' may be empty."""
        ...

    def load_named_state(self, saved: NamedState) -> None:
        """Put back what rank 0's `named_state` has given; rates, decay and the like stay as train.json has them now.

        Raises ValueError (see `check_state`) if it is not the state of just this model's parameters.
        """
        ...

    @staticmethod
    def state_bytes(parameters: int) -> int:
        """Bytes of the state of so many parameters, over all ranks together."""
        ...


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """The optimizer that train.json names, for the parameters of a model that is not wrapped."""
    assert config.optimizer == "adamw", "train.json is refused before"
    return AdamW(model, config)


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) in torch's fused kernel, which can skip a step on the device.

    Weight decay is on every parameter, or with `decay_all_parameters: false` on matrices only.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
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
        self._adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
        for group in self.param_groups:
            group["peak_learning_rate"] = group["lr"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's: dicts of `params`, `lr`, `weight_decay` and so on."""
        return self._adamw.param_groups

    @property
    def learning_rate(self) -> float:
        return self.param_groups[0]["lr"]

    def set_multiplier(self, multiplier: float) -> None:
        for group in self.param_groups:
            group["lr"] = group["peak_learning_rate"] * multiplier

    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        scaler.unscale_(self._adamw)
        if scaler.is_enabled():
            norm = clip_gradients(self._parameters(), max_norm)
            skipped = (~torch.isfinite(norm)).float()
            scaler.step(self._adamw)
        else:
            norm = torch.nn.utils.get_total_norm(gradients_of(self._parameters()))
            skipped = (~torch.isfinite(norm)).float()
            self._step_in_one_pass(norm, skipped, max_norm)
        scaler.update()
        return norm.float(), skipped

    def _step_in_one_pass(self, norm: Tensor, skipped: Tensor, max_norm: float | None) -> None:
        """Clip and update, or neither, by the fused kernels' own ways to divide the gradients and to skip, which
        GradScaler uses too: see torch.amp.GradScaler.step."""
        if max_norm is not None:
            self._adamw.grad_scale = torch.clamp((norm + CLIP_EPSILON) / max_norm, min=1.0).float()  # type: ignore[attr-defined]
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        self._adamw.step()
        del self._adamw.found_inf  # type: ignore[attr-defined]
        if max_norm is not None:
            del self._adamw.grad_scale  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=False)

    def state_shapes(self) -> StateShapes:
        return {
            self._names[parameter]: {"step": torch.Size(), **dict.fromkeys(MOMENTS["adamw"], parameter.shape)}
            for parameter in self._parameters()
        }

    def named_state(self, world: World) -> NamedState:
        if not world.is_main:  # every rank has all of it
            return {}
        return {
            self._names[parameter]: {key: value.detach() for key, value in state.items()}
            for parameter, state in self._adamw.state.items()
        }

    def load_named_state(self, saved: NamedState) -> None:
        check_state(saved, self.state_shapes())
        state = {index: saved[self._names[parameter]] for index, parameter in enumerate(self._parameters())}
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state, "param_groups": groups})

    @staticmethod
    def state_bytes(parameters: int) -> int:
        return moment_bytes("adamw", parameters)

    def _parameters(self) -> list[nn.Parameter]:
        """In torch's order: group by group."""
        return [parameter for group in self.param_groups for parameter in group["params"]]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`; the norm before, as a scalar on
    the device."""
    gradients = gradients_of(parameters)
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0))
    return norm


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def check_state(saved: NamedState, shapes: StateShapes) -> None:
    """Raises ValueError if a state is not one of just these parameters and shapes, in fp32: fused kernels would read
    beyond it."""
    if saved.keys() != shapes.keys():
        raise ValueError("the parameters are others than the model's")
    for name, wanted in shapes.items():
        state = saved[name]
        if state.keys() != wanted.keys():
            raise ValueError(f"{name} has {sorted(state)}")
        for key, shape in wanted.items():
            if state[key].shape != shape or state[key].dtype != torch.float32:
                raise ValueError(f"{key} of {name} is {state[key].dtype} {list(state[key].shape)}")
