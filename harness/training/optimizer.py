"""The protocol of an optimizer in training, and the choice of the optimizer by train.json.

An optimizer updates the weights from gradients that are equal on all ranks. It returns its state by parameter name, so
that a checkpoint depends neither on how parameters are grouped nor on which rank keeps which part of the state. To add
an optimizer, write a class with these methods, and add a line in `build_optimizer` and one in
harness/runs/optimizer_state.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from harness.common.errors import UserError
from harness.distributed.world import World
from harness.model.precision import Precision
from harness.runs.train_config import TrainConfig
from harness.training.adamw import AdamW
from harness.training.muon import Muon
from harness.training.zero1 import NamedState, StatePartition, StateShapes


class Optimizer(Protocol):
    """Interface of an optimizer in training. Every method is called on every rank."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update, for the metrics: train.json's `learning_rate` times the multiplier. Groups
        with a learning rate of their own are not considered."""
        ...

    def set_multiplier(self, multiplier: float, decay: float = 1.0) -> None:
        """Set each group's learning rate to `multiplier` times its peak, and its weight decay to `decay` times its
        value in train.json."""
        ...

    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        """Clip the gradients to a global norm and update the weights. If the norm is not finite, leave the weights and
        the state unchanged.

        Gradients are equal on all ranks by now, so that all ranks decide alike. The decision is made on the device, so
        that no thread waits for it. Collective if the state is sharded. Returns two fp32 scalars: the norm before
        clipping, and 1.0 if the step was skipped, else 0.0.
        """
        ...

    def state_shapes(self) -> StateShapes:
        """Return the shapes of the tensors that `named_state` returns after a step. A tensor of the parameter's shape
        is sharded like the parameter; a scalar is kept with every shard."""
        ...

    def named_state(self, world: World) -> NamedState:
        """Return the state by parameter name, in fp32; empty before the first step. The tensors are the optimizer's
        own, and the next step changes them: copy them to keep them. Collective, because a sharded state is gathered.
        Rank 0's result is the one to save; the others' may be empty."""
        ...

    def load_named_state(self, saved: NamedState) -> None:
        """Load a state that `named_state` returned on rank 0. Learning rates, weight decays and other settings stay as
        train.json has them now.

        Raises ValueError (see `check_state`) if it is not the state of exactly this model's parameters.
        """
        ...


def build_optimizer(
    model: nn.Module, config: TrainConfig, precision: Precision | None = None, partition: StatePartition | None = None
) -> Optimizer:
    """Return the optimizer that train.json names, for the parameters of a model that is not wrapped. `precision` is the
    one that the model is trained in (None: that of its weights). `partition` is used only with `shard_optimizer`.

    Raises UserError if the optimizer does not support this precision.
    """
    if partition is None or not config.shard_optimizer:
        partition = StatePartition()
    if config.optimizer == "adamw":
        return AdamW(model, config, partition)
    assert config.optimizer == "muon", config.optimizer
    if precision is not None and precision.name == "fp16":
        raise UserError(
            'train.json: key "optimizer": "muon" does not run in fp16, which "precision": '
            f'"{config.precision}" is on this device; use "fp32", or "optimizer": "adamw"'
        )
    return Muon(model, config, precision.update_dtype() if precision is not None else None, partition)
