"""The gradient does not depend on how a global batch is divided into ranks, accumulation steps and microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.launch import Workshop, finish, rank_variables

# Builds the model and the step as training does, but in fp64. For each run it saves the gradient of the first global
# batch and the indexes of the buckets that DDP exchanged for it.
WORKER = """
import os
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gpt import GPTModel
from harness.data.loader import TokenLoader
from harness.distributed.world import World
from harness.runs.directory import RunDirectory
from harness.planning.experiment import Experiment
from harness.training.step import OptimizerStep

runs, datasets, out, *names = sys.argv[1:]
world = World.join()
results = {}
for name in names:
    experiment = Experiment.load(RunDirectory.find(Path(runs), name), Path(datasets))
    torch.manual_seed(experiment.config.random_seed)
    model = trained = GPTModel(experiment.model, moe_router_loss_scale=experiment.moe_router_loss_scale).double()
    exchanged = []
    if world.size > 1:
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.5)

        def count(group, bucket, exchanged=exchanged):
            exchanged.append(bucket.index())
            return allreduce_hook(group, bucket)

        trained.register_comm_hook(None, count)
    step = OptimizerStep(trained, experiment.config)
    data = experiment.open_data()
    order = experiment.window_order(data.lengths("train"))
    loader = TokenLoader(data.tokens("train"), order, experiment.layout(world.size))
    for _ in range(2):  # the first time, DDP has one bucket; it then arranges several
        step.forget_gradients()
        exchanged.clear()
        step.accumulate(loader.microbatches(0, world.rank))
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    results[name] = {"gradients": gradients, "exchanged": exchanged}
if world.is_main:
    torch.save(results, out)
world.leave()
os._exit(0)  # a Python hook may still wait for the interpreter lock in one of gloo's threads, which ends in an abort
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Gradients and buckets of the first optimizer step: number of ranks -> name of the run -> result. All runs but
    "experts" have the same 16 sequences."""
    shop = Workshop(tmp_path_factory.mktemp("gradients"))
    shop.add_dataset()
    return {ranks: _first_steps(shop, ranks) for ranks in (1, 4)}


def _first_steps(shop: Workshop, ranks: int) -> dict[str, Any]:
    for accumulation in (1, 2, 4):
        # Embedding and head have a mebibyte each, so that gradients need several buckets.
        model: dict[str, Any] = {"drop_rate": 0.0, "vocab_size": 2048, "emb_dim": 64}
        sequences = {"microbatch_size": 16 // ranks // accumulation, "gradient_accumulation_steps": accumulation}
        shop.add_run(f"a{accumulation}", model=model, **sequences)
    # The balancing loss depends on the microbatches, so these are the same on any number of ranks. There are more
    # experts than a microbatch's tokens can be routed to.
    model = {"drop_rate": 0.0, "moe": {"num_experts": 80, "num_active_experts": 2}}
    shop.add_run("experts", model=model, microbatch_size=1, gradient_accumulation_steps=4 // ranks)
    names = ["a1", "a2", "a4", "experts"]
    out = shop.path / f"{ranks}.pt"
    (shop.path / "worker.py").write_text(WORKER)
    command = [str(shop.path / "worker.py"), str(shop.runs), str(shop.datasets), str(out), *names]
    finish([shop.fork(command, place) for place in rank_variables(ranks)], expect=0, timeout=120)
    return dict(torch.load(out, weights_only=True))


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", ["a1", "a2", "a4", "experts"])
def test_the_gradient_does_not_depend_on_the_spread(steps: dict[int, Any], ranks: int, name: str) -> None:
    """Gradients are equal on one and on four ranks, and with different accumulation steps. They include the gradient of
    the experts' balancing loss, which is computed for each microbatch."""
    reference = steps[1]["experts" if name == "experts" else "a1"]["gradients"]
    gradients = steps[ranks][name]["gradients"]
    assert gradients.keys() == reference.keys()
    for parameter, gradient in gradients.items():
        assert gradient.dtype == torch.float64
        assert gradient.any() or ".experts." in parameter
        torch.testing.assert_close(gradient, reference[parameter], rtol=1e-12, atol=1e-12, msg=parameter)


def test_some_experts_have_no_tokens_and_all_routers_learn(steps: dict[int, Any]) -> None:
    gradients = steps[4]["experts"]["gradients"]
    assert any(not gradient.any() for name, gradient in gradients.items() if ".experts." in name)
    assert all(gradient.any() for name, gradient in gradients.items() if ".router." in name)


def test_gradients_are_exchanged_once_per_step(steps: dict[int, Any]) -> None:
    """With one accumulation step and with four, each bucket is exchanged once in an optimizer step."""
    once = steps[4]["a1"]["exchanged"]
    assert sorted(once) == list(range(len(once)))
    assert len(once) > 1
    assert sorted(steps[4]["a4"]["exchanged"]) == sorted(once)
