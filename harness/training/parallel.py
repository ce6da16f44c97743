"""A model as it is trained: with the kernels that train.json asks for, its gradients exchanged between the ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.distributed.world import World
from harness.model.kernels import choose_kernels, tune_by_coordinate_descent
from harness.model.precision import Precision
from harness.planning.experiment import Experiment


def model_options(experiment: Experiment, precision: Precision) -> dict[str, Any]:
    """GPTModel's keyword arguments that train.json decides. Raises UserError for a residual stream in another precision
    than the matrix products can have here."""
    config = experiment.config
    return {
        "recompute_blocks": config.activation_checkpointing,
        "residual_dtype": precision.residual_dtype(config.residual_precision),
        "moe_router_loss_scale": experiment.moe_router_loss_scale,
    }


def parallelise(model: nn.Module, experiment: Experiment, world: World) -> nn.Module:
    """The model wrapped for data-parallel training, or the same in a world of one; it is on its device already.

    Collective. Raises UserError if this machine cannot compute it as train.json demands.
    """
    config = experiment.config
    if config.coordinate_descent_tuning:
        tune_by_coordinate_descent()
    choose_kernels(
        *(model, experiment.model.drop_rates.attention_weights, world.device),
        compiled=config.compile,
    )
    if world.size == 1:
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=config.bucket_mb
    )
