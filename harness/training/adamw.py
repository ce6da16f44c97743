"""AdamW for all parameters, or for the parameters that Muon does not update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.distributed.world import World
from harness.model.config import HEAD
from harness.runs.optimizer_state import MOMENTS
from harness.runs.train_config import TrainConfig
from harness.training.zero1 import NamedState, Shard, StatePartition, StateShapes, check_state


def adamw_groups(
    model: nn.Module, config: TrainConfig, parameters: dict[str, nn.Parameter]
) -> dict[tuple[float, float], dict[str, nn.Parameter]]:
    """Return `parameters` in groups, by (peak learning rate, weight decay). A tied head has the embeddings' rate."""
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


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101), computed by torch's fused kernel.

    A rank keeps the moments of its own shards of `partition`, and updates these shards only. Every rank must call
    `set_factors`, `update` and `load_named_state`.
    """

    grad_scale: Tensor | None
    found_inf: Tensor

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        partition: StatePartition | None = None,
        parameters: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """Create the optimizer of `parameters`, a dict by name (None: all parameters of the model). Without a
        `partition`, every rank keeps the whole state."""
        groups = adamw_groups(model, config, dict(model.named_parameters()) if parameters is None else parameters)
        self.parameters = {name: parameter for group in groups.values() for name, parameter in group.items()}
        self.partition = partition or StatePartition()
        self.shards = self.partition.cut({name: parameter.numel() for name, parameter in self.parameters.items()})
        # The tensors that torch's optimizer updates: whole parameters, or views of parts of them.
        self._own: dict[Shard, Tensor] = {}
        for shard in self.shards:
            if shard.owner == self.partition.rank:
                parameter = self.parameters[shard.name]
                self._own[shard] = parameter if self.partition.size == 1 else shard.of(parameter)
        self._has_state = False
        torch_groups: list[dict[str, Any]] = []
        for (rate, decay), group in groups.items():
            own = [tensor for shard, tensor in self._own.items() if shard.name in group]
            full = {"peak_learning_rate": rate, "full_weight_decay": decay}
            torch_groups.append({"params": own, "lr": rate, "weight_decay": decay, **full})
        # The fused kernel itself skips a step whose gradients are not finite, so the host need not wait to learn it.
        super().__init__(torch_groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)

    def set_factors(self, rate_factor: float, decay_factor: float = 1.0) -> None:
        """Set each group's learning rate to `rate_factor` times its peak, and its weight decay to `decay_factor` times
        its full value."""
        for group in self.param_groups:
            group["lr"] = group["peak_learning_rate"] * rate_factor
            group["weight_decay"] = group["full_weight_decay"] * decay_factor

    def update(self, skipped: Tensor, clip_divisor: Tensor | None) -> None:
        """Update this rank's shards. Gradients are first divided by `clip_divisor`, unless it is None. If `skipped` is
        1, change neither weights nor state. Both arguments are fp32 scalars on the device."""
        if self.partition.size > 1:
            for shard, tensor in self._own.items():
                gradient = self.parameters[shard.name].grad
                tensor.grad = None if gradient is None else shard.of(gradient)
        # The fused kernel reads these attributes, as in torch.amp.GradScaler.step.
        self.grad_scale, self.found_inf = clip_divisor, skipped
        self.step()
        del self.grad_scale, self.found_inf
        self._has_state = True
        if self.partition.size > 1:  # drop references to gradients that the caller frees
            for tensor in self._own.values():
                tensor.grad = None

    def state_shapes(self) -> StateShapes:
        """Return the shapes of the whole state's tensors, by parameter name and key."""
        return {
            name: {"step": torch.Size(), **dict.fromkeys(MOMENTS["adamw"], parameter.shape)}
            for name, parameter in self.parameters.items()
        }

    def named_state(self, world: World, into: NamedState) -> NamedState:
        """Copy the whole optimizer state to rank 0, into `into`, and return `into`. Before the first `update` or
        `load_named_state`, return an empty dict.

        On rank 0, `into` has fp32 tensors in host memory with the shapes of `state_shapes`. Other ranks pass an empty
        dict. Every parameter must have had a gradient or a loaded state. On a GPU, the copies may still be running when
        this method returns. Collective if the state is sharded.
        """
        if not self._has_state or (self.partition.size == 1 and not world.is_main):  # not sharded: rank 0 has it all
            return {}
        shapes, own = self.state_shapes(), {shard: self.state[tensor] for shard, tensor in self._own.items()}
        self.partition.gather(self.shards, own, shapes, next(iter(self.parameters.values())).device, into)
        return into

    def load_named_state(self, saved: NamedState) -> None:
        """Load the whole state, as `named_state` returns it on rank 0. Every rank must be given the whole state. Raises
        ValueError if the state does not fit this optimizer's parameters."""
        check_state(saved, self.state_shapes())
        for shard, tensor in self._own.items():
            # Use the same string objects as torch for the keys. For an equal string that is another object, pickle
            # writes other bytes, so that optimizer.pt would differ.
            state = {key: saved[shard.name][key] for key in ("step", *MOMENTS["adamw"])}
            if self.partition.size > 1:  # clone: views would keep the whole tensors in memory
                state = {key: (shard.of(value) if value.dim() else value).clone() for key, value in state.items()}
            self.state[tensor] = {key: value.to(tensor.device) for key, value in state.items()}
        self._has_state = True
