"""The optimizer step of a model. The model may be compiled, and it may be wrapped in DistributedDataParallel.

To add an optimizer:

- Write a class with AdamW's attributes and methods (adamw.py). Gradients are equal on all ranks. State is saved by
  parameter name.
- Add a branch in `OptimizerStep.__init__`.
- Add its name to the key `optimizer` in harness/runs/train_config.py.
- Add its state to MOMENTS (harness/runs/optimizer_state.py) and `optimizer_state_bytes` (harness/planning/memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException  # torch.compiler has no public name for its errors
from torch.nn.parallel import DistributedDataParallel

from gpt import GPTModel
from harness.common.errors import UserError
from harness.common.memory import is_out_of_memory
from harness.common.messages import REASON_CHARACTERS
from harness.data.loader import Microbatch
from harness.distributed.watchdog import FIRST_EXCHANGE, Place
from harness.distributed.world import World, say
from harness.model.kernels import (
    NOT_COMPILED,
    explain_failed_kernel,
    is_compiled,
    run_eagerly,
    should_compile,
    use_attention,
)
from harness.model.precision import DTYPES, Precision
from harness.planning.experiment import Experiment
from harness.runs.train_config import TrainConfig
from harness.training.adamw import AdamW
from harness.training.muon import Muon
from harness.training.zero1 import StatePartition

CANNOT_BE_COMPILED = (
    'train.json: key "compile": the model cannot be compiled here: {}; remove the cause, or set compile to false'
)


@dataclass(frozen=True)
class StepResult:
    """Result of a step. Its tensors are on the device, which may not have computed their values yet."""

    losses_A: Tensor  # fp64: mean cross-entropy of each of this rank's A microbatches
    gradient_norm: Tensor  # fp32 scalar: global norm of the gradients before clipping, equal on all ranks
    skipped: Tensor  # fp32 scalar, equal on all ranks: 1 if the norm is not finite, so that nothing was updated; else 0
    expert_tokens: Tensor | None = None  # with experts only: this rank's number of tokens by block and expert


class OptimizerStep:
    """Runs optimizer steps on a model, which may be wrapped in DistributedDataParallel."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        partition: StatePartition | None = None,
        report_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the optimizer and the gradient scaler of `model`. In fp32 on CUDA, also allow TF32 in this process.

        - `model(inputs, targets)` must return a tensor of loss terms. Their sum is minimized. The first one is reported
          as the loss.
        - `partition` is used only if train.json's `shard_optimizer` is true.
        - `report_progress` is called before a backward pass that may exchange gradients, and when a backward pass has
          computed this rank's gradients.

        Raises UserError if this device or the optimizer does not support the precision that train.json demands.
        """
        self.model, self.config = model, config
        self.bare_model: Any = getattr(model, "module", model)  # unwrapped: it is saved, evaluated and sampled from
        self.is_wrapped = isinstance(model, DistributedDataParallel)
        # The gradient of the model's first parameter is the last to be computed. A rank that has computed it waits for
        # the others; a rank that has not computed it yet delays them.
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(lambda _: report_progress())
        self.report_progress = report_progress
        self.device = first.device
        self.precision = precision = Precision.for_training(config.precision, self.device)
        precision.allow_tf32()
        partition = partition if config.shard_optimizer else None
        self.optimizer: AdamW | Muon
        if config.optimizer == "adamw":
            self.optimizer = AdamW(self.bare_model, config, partition)
        elif precision.name == "fp16":
            raise UserError(
                'train.json: key "optimizer": "muon" does not run in fp16, and "precision": "auto" means fp16 on this '
                'device; use "fp32", or "optimizer": "adamw"'
            )
        else:
            self.optimizer = Muon(self.bare_model, config, precision.update_dtype(), partition)
        self.learning_rate = config.learning_rate  # the last update's; some parameters have rates of their own
        self._has_updated = False
        self.scaler = precision.scaler()
        # This optimizer is never stepped; GradScaler only unscales and checks the gradients through it. It has whole
        # gradients, not shards, so the result is the same on all ranks.
        self._unscaler = torch.optim.SGD(self.optimizer.parameters.values()) if self.scaler.is_enabled() else None

    def run(self, microbatches: Sequence[Microbatch], rate_factor: float, decay_factor: float = 1.0) -> StepResult:
        """Run one optimizer step over this rank's microbatches. `rate_factor` multiplies the peak learning rates,
        `decay_factor` the weight decays.

        If the gradients' norm is not finite, the weights and the optimizer's state stay unchanged on all ranks.
        Collective if the model is wrapped in DistributedDataParallel or the optimizer's state is sharded.
        """
        losses_A, expert_tokens = self.accumulate(microbatches)
        optimizer, max_norm, clip_divisor = self.optimizer, self.config.clipping_max_norm, None
        parameters = optimizer.parameters.values()
        if self._unscaler is not None:
            self.scaler.unscale_(self._unscaler)
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        # Computed on the device: the host does not wait.
        skipped = (~torch.isfinite(norm)).float()
        if max_norm is not None and self.scaler.is_enabled():
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        elif max_norm is not None:  # the optimizer clips in its own pass; 1e-6 as in clip_grad_norm_
            clip_divisor = torch.clamp((norm + 1e-6) / max_norm, min=1.0).float()
        optimizer.set_factors(rate_factor, decay_factor)
        self.learning_rate = self.config.learning_rate * rate_factor
        if self.device.type == "cuda" and not self._has_updated:
            # A new state would otherwise be put into blocks that activations need again in the next step. Training
            # would then need more than the search for a microbatch measures (ddp_train.py -f), whose state is older.
            torch.cuda.empty_cache()
        optimizer.update(skipped, clip_divisor)
        self._has_updated = True
        optimizer.partition.broadcast_shards(optimizer.shards, optimizer.parameters)
        self.scaler.update()
        self.forget_gradients()
        return StepResult(losses_A, norm.float(), skipped, expert_tokens)

    def accumulate(self, microbatches: Sequence[Microbatch], *, exchange: bool = True) -> tuple[Tensor, Tensor | None]:
        """Run the forward and the backward pass of each microbatch. Returns `losses_A` and `expert_tokens` of
        StepResult.

        Afterwards `.grad` of each parameter is the mean gradient over the microbatches of all ranks (with
        `exchange=False`: of this rank). In fp16, gradients are multiplied by the scaler's scale. Without
        DistributedDataParallel, call `forget_gradients` before the next call. Collective if gradients are exchanged.
        """
        # DDP's buckets still hold the gradients of the last step. (Without DDP, `forget_gradients` has freed them.)
        # For several microbatches, which are added up, set them to zero, because a gradient of None would be allocated
        # outside its bucket. For a single microbatch set them to None: DDP then copies the new gradient into the bucket
        # and divides it by the number of ranks in one pass, instead of adding it to zeros and dividing the sum.
        if self.is_wrapped and len(microbatches) == 1:
            self.bare_model.zero_grad(set_to_none=True)
        elif self.is_wrapped and (old := [each.grad for each in self.bare_model.parameters() if each.grad is not None]):
            torch._foreach_zero_(old)  # private: no public function zeroes all tensors in one kernel
        losses: list[Tensor] = []
        expert_tokens: list[Tensor] = []
        for number, microbatch in enumerate(microbatches, start=1):
            inputs_BxT, targets_BxT = microbatch.to(self.device)
            is_exchanged = exchange and number == len(microbatches)
            # `no_sync` must enclose the forward pass: in it, DDP decides if the backward pass exchanges gradients.
            with nullcontext() if is_exchanged or not self.is_wrapped else self.model.no_sync():  # type: ignore[operator]
                with self.precision.autocast():
                    terms = self.model(inputs_BxT, targets_BxT)
                if is_exchanged:
                    self.report_progress()
                self.scaler.scale(terms.sum() / len(microbatches)).backward()
            losses.append(terms.detach().flatten()[0].double())
            tokens_LxE = getattr(self.bare_model, "expert_tokens", None)
            expert_tokens += [] if tokens_LxE is None else [tokens_LxE]
        return torch.stack(losses), torch.stack(expert_tokens).sum(0) if expert_tokens else None

    def warm_up(self, microbatch: Microbatch, world: World, place: Place = FIRST_EXCHANGE) -> None:
        """Run forward and backward passes whose gradients are discarded. They compile the model, if it is to be
        compiled, and let DDP arrange its buckets. Collective.

        Must be called before states are restored, because the passes change the random state. Raises UserError on all
        ranks if `compile` is true in train.json and the model cannot be compiled.
        """
        if any(world.gather(is_compiled(self.bare_model))):
            self._compile(microbatch, world)
        # Compiling may take longer than the watchdog's timeout.
        with world.watchdog.guard(place):
            # In the forward pass after its first exchange, DDP arranges new buckets in the order in which gradients
            # were computed. Without this warm-up, a resumed run would add up the gradients of its first step in another
            # order than a run that never stopped. If that step had several microbatches, its gradients would also keep
            # the old buckets in memory beside the new ones and all activations.
            for _ in range(2 if self.is_wrapped else 1):
                self.accumulate([microbatch])
        self.forget_gradients()
        if self.device.type == "cuda":
            # The optimizer's state would otherwise be put into blocks that activations need again in each step.
            # Training would then need up to a GiB more than the search for a microbatch measures (ddp_train.py -f),
            # because the search has no warm-up.
            torch.cuda.empty_cache()

    def forget_gradients(self) -> None:
        """Free the gradients. Does nothing under DistributedDataParallel, whose buckets hold the gradients' memory."""
        if not self.is_wrapped:
            self.bare_model.zero_grad(set_to_none=True)

    def _compile(self, microbatch: Microbatch, world: World) -> None:
        """Compile the model by one forward and backward pass without an exchange of gradients. If compiling fails on
        any rank, every rank runs the model uncompiled, or raises UserError if train.json's `compile` is true.
        Collective."""
        failure = None if is_compiled(self.bare_model) else "a machine has no C compiler or no Python.h"
        try:
            self.accumulate([microbatch], exchange=False)
            self.model.zero_grad(set_to_none=True)  # None, as before: they are not views of DDP's buckets yet
        except TorchDynamoException as error:
            if is_out_of_memory(error) or explain_failed_kernel(error):
                raise
            failure = _reason(error)
        failures = [each for each in world.gather(failure) if each is not None]
        if not failures:
            return
        if self.config.compile is True:
            raise UserError(CANNOT_BE_COMPILED.format(failures[0]))
        run_eagerly(self.bare_model)
        say(world, f"note: {NOT_COMPILED}: compiling failed: {failures[0]}")


def explain_failed_compilation(error: BaseException) -> str | None:
    """Return a one-line message for an error of torch.compile, or None for any other error."""
    return CANNOT_BE_COMPILED.format(_reason(error)) if isinstance(error, TorchDynamoException) else None


def _reason(error: BaseException) -> str:
    """Return the first line of a compiler's error that gives the reason. Lines that end in "raised:" only introduce
    it."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.endswith("raised:")] or [type(error).__name__]
    return said[0][:REASON_CHARACTERS]


def build_training_step(
    experiment: Experiment,
    config: TrainConfig,
    world: World,
    *,
    partition: StatePartition | None = None,
    place: Place = FIRST_EXCHANGE,
) -> OptimizerStep:
    """Return the OptimizerStep of an experiment. Its model has new weights, drawn from torch's global generator. With
    several ranks in `world`, the model is wrapped in DistributedDataParallel.

    - `config` is the experiment's train.json with the precision resolved (not "auto"). For training, its scaling rules
      must also be applied.
    - `partition` divides the optimizer's state. None: over the ranks of `world`.
    - `place` is reported if a rank is stuck while the ranks exchange the weights.

    TF32 and the attention kernel are set for the whole process. Collective. Raises UserError if this machine cannot
    compute what train.json demands.
    """
    precision = Precision.for_training(config.precision, world.device)
    model = GPTModel(
        experiment.model,
        recompute_blocks=config.activation_checkpointing,
        residual_dtype=precision.residual_dtype(config.residual_precision),
        moe_router_loss_scale=experiment.moe_router_loss_scale,
    ).to(world.device)
    use_attention(config.attention, experiment.model, DTYPES[precision.name], world.device)
    if should_compile(config.compile, world.device):
        model.compile()  # in place: the module and its parameters keep their names
    trained: nn.Module = model
    if world.size > 1:
        devices = [world.device] if world.device.type == "cuda" else None
        with world.watchdog.guard(place):
            trained = DistributedDataParallel(
                model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=config.bucket_mb
            )
    partition = partition or StatePartition(world.rank, world.size, is_connected=world.size > 1)
    return OptimizerStep(trained, config, partition, world.watchdog.beat)
