"""One optimizer step: accumulate gradients over microbatches, exchange them once, update the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.data.loader import Microbatch
from harness.model.precision import Precision
from harness.runs.train_config import TrainConfig
from harness.training.gradients import zero_gradients
from harness.training.optimizer import Optimizer, build_optimizer
from harness.training.zero1 import StatePartition


@dataclass(frozen=True)
class StepResult:
    """Result of a step, on the device: no thread has waited for it yet."""

    losses_A: Tensor  # this rank's cross-entropy of each microbatch, fp64
    gradient_norm: Tensor
    skipped: Tensor
    expert_tokens: Tensor | None = None  # of a mixture of experts: how many this rank's tokens each has got (LxE)


class OptimizerStep:
    """Runs optimizer steps on a model, wrapped for data-parallel training or bare."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        config: TrainConfig,
        before_exchange: Callable[[], None] = lambda: None,
    ) -> None:
        """`model(inputs, targets)` returns the terms whose sum is minimised; the first, the mean cross-entropy, is
        reported. Its parameters' device is where everything happens.

        `before_exchange` is called where this rank has done its own work of a step and goes on with the others.
        """
        self.model = model
        self.bare_model: Any = getattr(model, "module", model)  # what is saved, evaluated and sampled from
        self.optimizer = optimizer
        self.precision = precision
        self.max_norm = config.clipping_max_norm
        self.scaler = precision.scaler()
        self.device = next(model.parameters()).device
        self.before_exchange = before_exchange
        # The first parameter's gradient comes last: a rank that has it waits for the others, one without is behind.
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: before_exchange())

    def run(self, microbatches: Sequence[Microbatch], multiplier: float, decay: float = 1.0) -> StepResult:
        """One step over this rank's microbatches at `multiplier` times the peak learning rates and `decay` times the
        weight decays."""
        losses, expert_tokens = self._passes(microbatches)
        self.optimizer.set_multiplier(multiplier, decay)
        norm, skipped = self.optimizer.update(self.scaler, self.max_norm)
        self.forget_gradients()
        return StepResult(losses, norm, skipped, expert_tokens)

    def accumulate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Forward and backward over the microbatches; the mean gradient over them, and ranks, is then in `.grad`. The
        loss of each."""
        return self._passes(microbatches)[0]

    def _passes(self, microbatches: Sequence[Microbatch]) -> tuple[Tensor, Tensor | None]:
        """`accumulate`, and how many tokens each expert got, if there are any."""
        losses: list[Tensor] = []
        expert_tokens: list[Tensor] = []
        for index, microbatch in enumerate(microbatches):
            inputs_BxT, targets_BxT = microbatch.to(self.device)
            # Off before the forward: DDP decides there whether this backward exchanges gradients.
            with self._gradient_exchange(last=index == len(microbatches) - 1):
                with self.precision.autocast():
                    terms = self.model(inputs_BxT, targets_BxT)
                if index == len(microbatches) - 1:
                    self.before_exchange()
                self.scaler.scale(terms.sum() / len(microbatches)).backward()
            losses.append(terms.detach().flatten()[0].double())
            load_LxE = getattr(self.bare_model, "expert_tokens", None)
            expert_tokens += [] if load_LxE is None else [load_LxE]
        return torch.stack(losses), torch.stack(expert_tokens).sum(0) if expert_tokens else None

    def warm_up(self, microbatch: Microbatch) -> None:
        """One forward and backward pass whose gradients are thrown away, before the first step or any restored state.

        It compiles what is compiled, and lets DDP arrange its buckets in the order gradients come in, which it does
        after the first exchange: a continued run then adds up gradients in the same order as one that never stopped.
        """
        self.accumulate([microbatch])
        self.forget_gradients()

    def pass_alone(self, microbatch: Microbatch) -> None:
        """One forward and backward pass without the other ranks, which leaves no gradients."""
        inputs_BxT, targets_BxT = microbatch.to(self.device)
        with self._gradient_exchange(last=False):
            with self.precision.autocast():
                terms = self.model(inputs_BxT, targets_BxT)
            self.scaler.scale(terms.sum()).backward()
        self.model.zero_grad(set_to_none=True)  # as they were: DDP has not made them views of its buckets yet

    def forget_gradients(self) -> None:
        """Make the gradients those of no microbatch."""
        if hasattr(self.model, "no_sync"):  # they are views of DDP's buckets, which stay
            zero_gradients(self.bare_model.parameters())
        else:  # nobody's buffers: the next backward pass brings its own, and nothing has to be set to zero and added
            self.bare_model.zero_grad(set_to_none=True)

    def _gradient_exchange(self, *, last: bool) -> AbstractContextManager[object]:
        if last or not hasattr(self.model, "no_sync"):
            return nullcontext()
        return self.model.no_sync()  # type: ignore[operator]


def build_step(
    model: nn.Module,
    trained: nn.Module,
    config: TrainConfig,
    before_exchange: Callable[[], None] = lambda: None,
    partition: StatePartition | None = None,
) -> OptimizerStep:
    """The step that train.json describes for `model`; `trained` is the model as it is trained, wrapped or the same.
    `partition` is that of the optimizer's state, if train.json has it sharded. Raises UserError for what this device
    cannot do."""
    device = next(model.parameters()).device
    precision = Precision.for_training(config.precision, device)
    precision.allow_tf32()
    optimizer = build_optimizer(model, config, precision, partition)
    return OptimizerStep(trained, optimizer, precision, config, before_exchange)
