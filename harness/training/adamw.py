"""AdamW for all parameters, or for those that another optimizer does not update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.distributed.world import World
from harness.model.tensor_names import HEAD
from harness.runs.optimizer_state import MOMENTS
from harness.runs.train_config import TrainConfig
from harness.training.zero1 import NamedState, Shard, StatePartition, StateShapes, check_state


def measure_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return three scalars on the device: the norm over all gradients; 1.0 if it is not finite, else 0.0 (fp32); and
    the divisor (fp32) that reduces the norm to at most `max_norm`, or None if `max_norm` is None. The divisor's epsilon
    is that of torch.nn.utils.clip_grad_norm_."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    divisor = None if max_norm is None else torch.clamp((norm + 1e-6) / max_norm, min=1.0).float()
    return norm, (~torch.isfinite(norm)).float(), divisor


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, each once: a head tied to the token embedding is listed under the
    embedding's name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw_groups(
    model: nn.Module, config: TrainConfig, parameters: dict[str, nn.Parameter]
) -> dict[tuple[float, float], dict[str, nn.Parameter]]:
    """Return `parameters` in groups, by peak learning rate and weight decay."""
    embeddings: set[Tensor] = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        own_rate = config.head_learning_rate if name == HEAD else None
        if parameter.dim() < 2:
            own_rate = config.vector_learning_rate
        elif parameter in embeddings:
            own_rate = config.embedding_learning_rate
        rate = config.learning_rate if own_rate is None else own_rate
        decay = config.weight_decay if config.decay_all_parameters or parameter.dim() >= 2 else 0.0
        groups.setdefault((rate, decay), {})[name] = parameter
    return groups


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with torch's fused kernel, which can skip a step on the device.

    Weight decay applies to every parameter, or with `decay_all_parameters: false` to matrices only. This rank keeps
    only the moments of its shards in `partition`. A shard is a slice of a flattened parameter, and every rank's shards
    have about the same number of elements in all.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        partition: StatePartition | None = None,
        parameters: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """Optimize `parameters`, or if None all trained parameters of the model."""
        groups = adamw_groups(model, config, trained_parameters(model) if parameters is None else parameters)
        self._partition = partition or StatePartition()
        self._peak = self.learning_rate = config.learning_rate
        self.parameters = {name: parameter for group in groups.values() for name, parameter in group.items()}
        self.shards = self._partition.cut({name: parameter.numel() for name, parameter in self.parameters.items()})
        # The tensors that torch's optimizer updates: whole parameters, or views of parts of them.
        self._own: dict[Shard, Tensor] = {}
        for shard in self.shards:
            if shard.owner == self._partition.rank:
                parameter = self.parameters[shard.name]
                self._own[shard] = parameter if self._partition.size == 1 else shard.of(parameter)
        self._has_state = False
        settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
        torch_groups: list[dict[str, Any]] = []
        for (rate, decay), group in groups.items():
            own = [tensor for shard, tensor in self._own.items() if shard.name in group]
            full = {"peak_learning_rate": rate, "full_weight_decay": decay}
            torch_groups.append({"params": own, "lr": rate, "weight_decay": decay, **full})
        self._adamw = torch.optim.AdamW(torch_groups, **settings, fused=True)
        # Never stepped. GradScaler unscales and checks the gradients through this optimizer, because they are whole
        # here and so the same on all ranks.
        self._scaled = torch.optim.SGD(list(self.parameters.values())) if self.parameters else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the torch optimizer: dicts of `params`, `lr`, `weight_decay` and so on."""
        return self._adamw.param_groups

    def set_multiplier(self, multiplier: float, decay: float = 1.0) -> None:
        self.learning_rate = self._peak * multiplier
        for group in self.param_groups:
            group["lr"] = group["peak_learning_rate"] * multiplier
            group["weight_decay"] = group["full_weight_decay"] * decay

    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        if scaler.is_enabled():
            assert self._scaled is not None
            scaler.unscale_(self._scaled)
        norm, skipped, divisor = measure_gradients(self.parameters.values(), max_norm)
        if scaler.is_enabled() and max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
            divisor = None
        self.step(skipped, divisor)
        self._partition.exchange(self.shards, self.parameters)
        scaler.update()
        return norm.float(), skipped

    def step(self, skipped: Tensor, divisor: Tensor | None) -> None:
        """Divide the gradients by `divisor` (None: do not) and update this rank's shards, or do neither if `skipped` is
        1. The fused kernel does both by its attributes `grad_scale` and `found_inf`, as GradScaler does: see
        torch.amp.GradScaler.step."""
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
        if self._partition.size > 1:  # drop references to gradients that the caller frees
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
        if not world.is_main:  # every rank has the whole state
            return {}
        return {
            shard.name: {key: value.detach() for key, value in state[tensor].items()}
            for shard, tensor in self._own.items()
            if tensor in state
        }

    def load_named_state(self, saved: NamedState) -> None:
        check_state(saved, self.state_shapes())
        # torch numbers parameters group by group.
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        index = {tensor: index for index, tensor in enumerate(tensors)}
        state = {index[tensor]: self._own_state(shard, saved[shard.name]) for shard, tensor in self._own.items()}
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state, "param_groups": groups})
        self._has_state = True

    def _own_state(self, shard: Shard, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        # Use the same string objects as torch for the keys. pickle stores an equal string that is another object
        # differently, so the bytes of the file would differ.
        whole = {key: saved[key] for key in ("step", *MOMENTS["adamw"])}
        if self._partition.size == 1:
            return whole
        # Clone: views would keep the whole tensors in memory.
        return {key: (shard.of(value) if value.dim() else value).clone() for key, value in whole.items()}
