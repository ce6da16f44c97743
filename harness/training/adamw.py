"""AdamW, of all parameters or of those that another optimizer leaves to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.distributed.world import World
from harness.model.tensor_names import HEAD
from harness.runs.optimizer_state import MOMENTS
from harness.runs.train_config import TrainConfig
from harness.training.zero1 import NamedState, Shard, StatePartition, StateShapes, check_state


@dataclass(frozen=True)
class Group:
    """Parameters by name that have one peak rate and one decay."""

    learning_rate: float
    weight_decay: float
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """The norm over all gradients, and 1.0 if it is not finite, else 0.0 (fp32): scalars on the device."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm, (~torch.isfinite(norm)).float()


def clip_divisor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Divisor, as an fp32 scalar, that brings gradients of norm `norm` to a norm of at most `max_norm`; None where
    nothing is clipped. The epsilon is that of torch.nn.utils.clip_grad_norm_."""
    return None if max_norm is None else torch.clamp((norm + 1e-6) / max_norm, min=1.0).float()


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name, each once: a head that shares the token embedding has the embedding's name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw_groups(model: nn.Module, config: TrainConfig, parameters: dict[str, nn.Parameter]) -> list[Group]:
    """Some of the model's parameters by rate and decay, in the order of each group's first."""
    embeddings: set[Tensor] = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], Group] = {}
    for name, parameter in parameters.items():
        own_rate = _own_rate(name, parameter, config, is_embedding=parameter in embeddings)
        rate = config.learning_rate if own_rate is None else own_rate
        decay = config.weight_decay if config.decay_all_parameters or parameter.dim() >= 2 else 0.0
        groups.setdefault((rate, decay), Group(rate, decay)).parameters[name] = parameter
    return list(groups.values())


def _own_rate(name: str, parameter: nn.Parameter, config: TrainConfig, *, is_embedding: bool) -> float | None:
    if parameter.dim() < 2:
        return config.vector_learning_rate
    if is_embedding:
        return config.embedding_learning_rate
    return config.head_learning_rate if name == HEAD else None


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) in torch's fused kernel, which can skip a step on the device.

    Weight decay is on every parameter, or with `decay_all_parameters: false` on matrices only. This rank keeps the
    moments of its shards in `partition`: slices of the flattened parameters, as many numbers on each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        partition: StatePartition | None = None,
        parameters: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """Optimise all parameters that are trained, or those given."""
        groups = adamw_groups(model, config, trained_parameters(model) if parameters is None else parameters)
        self._partition = partition or StatePartition()
        self._peak = self._rate = config.learning_rate
        self.parameters = {name: parameter for group in groups for name, parameter in group.parameters.items()}
        self.shards = self._partition.cut({name: parameter.numel() for name, parameter in self.parameters.items()})
        self._own = {shard: self._tensor(shard) for shard in self.shards if shard.owner == self._partition.rank}
        self._has_state = False
        settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
        self._adamw = torch.optim.AdamW([self._torch_group(group) for group in groups], **settings, fused=True)
        for group in self.param_groups:
            group["peak_learning_rate"], group["full_weight_decay"] = group["lr"], group["weight_decay"]
        # Of whole gradients, which all ranks have alike: what GradScaler decides by.
        self._scaled = torch.optim.SGD(list(self.parameters.values())) if self.parameters else None

    def _tensor(self, shard: Shard) -> Tensor:
        """The tensor that torch's optimizer updates: a parameter itself, or a view of a part of it."""
        parameter = self.parameters[shard.name]
        return parameter if self._partition.size == 1 else shard.of(parameter)

    def _torch_group(self, group: Group) -> dict[str, Any]:
        own = [tensor for shard, tensor in self._own.items() if shard.name in group.parameters]
        return {"params": own, "lr": group.learning_rate, "weight_decay": group.weight_decay}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's: dicts of `params`, `lr`, `weight_decay` and so on."""
        return self._adamw.param_groups

    @property
    def learning_rate(self) -> float:
        return self._rate

    def set_multiplier(self, multiplier: float, decay: float = 1.0) -> None:
        self._rate = self._peak * multiplier
        for group in self.param_groups:
            group["lr"] = group["peak_learning_rate"] * multiplier
            group["weight_decay"] = group["full_weight_decay"] * decay

    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        if scaler.is_enabled():
            assert self._scaled is not None
            scaler.unscale_(self._scaled)
            norm, skipped = gradient_norm(self.parameters.values())
            if max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
            self.step(skipped, None)
        else:
            norm, skipped = gradient_norm(self.parameters.values())
            self.step(skipped, clip_divisor(norm, max_norm))
        self._partition.exchange(self.shards, self.parameters)
        scaler.update()
        return norm.float(), skipped

    def step(self, skipped: Tensor, divisor: Tensor | None) -> None:
        """Divide the gradients and update this rank's own, or neither, by the fused kernels' own ways to do so, which
        GradScaler uses too: see torch.amp.GradScaler.step."""
        if self._partition.size > 1:
            for shard, tensor in self._own.items():
                gradient = self.parameters[shard.name].grad
                tensor.grad = None if gradient is None else shard.of(gradient)
        if divisor is not None:
            self._adamw.grad_scale = divisor  # type: ignore[attr-defined]
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]
        self._adamw.step()
        self._has_state = True
        del self._adamw.found_inf  # type: ignore[attr-defined]
        if divisor is not None:
            del self._adamw.grad_scale  # type: ignore[attr-defined]
        if self._partition.size > 1:  # nobody holds gradients that the step forgets
            for tensor in self._own.values():
                tensor.grad = None

    def state_shapes(self) -> StateShapes:
        return {
            name: {"step": torch.Size(), **dict.fromkeys(MOMENTS["adamw"], parameter.shape)}
            for name, parameter in self.parameters.items()
        }

    def named_state(self, world: World) -> NamedState:
        state = self._adamw.state
        if self._partition.size > 1:
            own = {shard: state[tensor] for shard, tensor in self._own.items()}
            return self._partition.gather(self.shards, own, self.state_shapes()) if self._has_state else {}
        if not world.is_main:  # every rank has all of it
            return {}
        return {
            shard.name: {key: value.detach() for key, value in state[tensor].items()}
            for shard, tensor in self._own.items()
            if tensor in state
        }

    def load_named_state(self, saved: NamedState) -> None:
        check_state(saved, self.state_shapes())
        index = {tensor: index for index, tensor in enumerate(self._tensors())}
        state = {index[tensor]: self._own_state(shard, saved[shard.name]) for shard, tensor in self._own.items()}
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state, "param_groups": groups})
        self._has_state = True

    def _own_state(self, shard: Shard, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        # By the very strings that torch uses: pickle tells a string from its equal, and so do the file's bytes.
        whole = {key: saved[key] for key in ("step", *MOMENTS["adamw"])}
        if self._partition.size == 1:
            return whole
        # Copies: views would keep all of it.
        return {key: (shard.of(value) if value.dim() else value).clone() for key, value in whole.items()}

    def _tensors(self) -> list[Tensor]:
        """All tensors in torch's order: group by group."""
        return [tensor for group in self.param_groups for tensor in group["params"]]
