"""The optimizers: one protocol for what training asks of each, and the choice that train.json makes.

An optimizer updates the weights from gradients that are alike on all ranks, and gives its state by parameter name, so
that a checkpoint depends neither on how parameters are grouped nor on where each part of the state is kept. To
add one: a class with these methods, a line in `build_optimizer`, and a line in harness/runs/optimizer_state.py.
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
    """The interface of an optimizer in training; every method is called on every rank."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update, for the metrics: train.json's `learning_rate` times the multiplier, without
        the rates of single groups."""
        ...

    def set_multiplier(self, multiplier: float, decay: float = 1.0) -> None:
        """Set each group's learning rate to `multiplier` times its peak, and its weight decay to `decay` times what
        train.json says."""
        ...

    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        """Clip the gradients to a global norm and step, unless the norm is not finite: then the weights and the state
        stay as they are.

        Gradients are alike on all ranks by now, so that all decide alike; and the decision is made on the device, so
        that nothing waits for it. Collective where the state is shared out. Returns the norm before clipping and 1.0 or
        0.0 for skipped or not, as fp32 scalars.
        """
        ...

    def state_shapes(self) -> StateShapes:
        """Shapes of the tensors in `named_state` after a step. Sharding cuts a tensor of the parameter's shape like the
        parameter; a scalar is kept with every shard."""
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


def build_optimizer(
    model: nn.Module, config: TrainConfig, precision: Precision | None = None, partition: StatePartition | None = None
) -> Optimizer:
    """The optimizer that train.json names, for the parameters of a model that is not wrapped. `precision` is the one
    that the model is trained in (None: its weights'); `partition` is that of `shard_optimizer`.

    Raises UserError for what cannot be trained in this precision.
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
