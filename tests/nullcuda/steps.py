"""Train some steps of a shipped run on the null device, and print a line of JSON for each.

    python -m tests.nullcuda.steps '{"folder": "runs", "run": "8xh100m80", "model": {"n_layers": 2}, "ranks": 8}'

`model` and `train` change the run's settings. With several `ranks` this process is rank 0 under
DistributedDataParallel, in torch's fake process group, which exchanges nothing. `microbatches` is the number of
microbatches of each step, such as [1, 1, 2, 1]. With `"kernels": true` a last line has the number of launches of each
kernel in the last step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.common.libraries import configure_libraries
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.model.config import load_model_config
from harness.model.kernels import compute_deterministically
from harness.planning.experiment import Experiment
from harness.runs.directory import RunDirectory
from harness.runs.train_config import load_train_config
from harness.training.loss_meter import LossMeter
from harness.training.step import OptimizerStep, build_training_step
from harness.training.zero1 import StatePartition
from tests.nullcuda.device import Numbers, launched, reset

DEVICE = torch.device("cuda", 0)


def fake_world(ranks: int) -> World:
    """Return the world of rank 0 of `ranks`. Objects that ranks send to each other come from this rank alone."""
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return World(0, 0, ranks, ranks, DEVICE)


def load_experiment(folder: Path, model: dict[str, Any], train: dict[str, Any]) -> Experiment:
    """Return the experiment of a run's folder with some settings changed."""
    changed = folder.parent.parent / "changed" / folder.name
    changed.mkdir(parents=True, exist_ok=True)
    for name, changes in (("model.json", model), ("train.json", train)):
        content = json.loads((folder / name).read_text()) | changes
        (changed / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    config = load_model_config(changed / "model.json")
    settings = load_train_config(changed / "train.json", has_experts=config.moe is not None)
    return Experiment(RunDirectory(changed), settings, config, changed)


def build(experiment: Experiment, world: World) -> OptimizerStep:
    """Return the experiment's optimizer step on the null device, as the Trainer builds it."""
    config = experiment.config
    if config.deterministic:
        compute_deterministically()
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN asks the hardware itself
    step = build_training_step(experiment, config, world, partition=StatePartition(world.rank, world.size))
    if world.size > 1:
        step.model.register_comm_hook(None, exchange_nothing)  # type: ignore[operator]
    return step


def exchange_nothing(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations by identity
    """Return the bucket's gradients as they are: DistributedDataParallel's communication hook, because the fake process
    group has no result for it."""
    done = torch.futures.Future()  # type: ignore[var-annotated]
    done.set_result(bucket.buffer())
    return done


def measure(experiment: Experiment, world: World, microbatches: Sequence[int]) -> list[dict[str, Any]]:
    """Run a step of each of these numbers of microbatches, and return what the device counted in each.

    After the first step, an operation that waits for the device raises an error.
    """
    config, context = experiment.config, experiment.model.context_length
    tokens = np.zeros(config.microbatch_size * context + 1, np.uint16)
    microbatch = Microbatch(tokens, context)
    step, meter = build(experiment, world), LossMeter(DEVICE, experiment.model)
    step.warm_up(microbatch, world)
    found = []
    for number, count in enumerate(microbatches):
        torch.cuda.reset_peak_memory_stats()
        reset()
        graphs = counters["stats"]["unique_graphs"]
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        meter.add(step.run([microbatch] * count, multiplier=1.0))
        torch.cuda.set_sync_debug_mode("default")
        found.append(
            {
                **asdict(Numbers.now()),
                "allocated": torch.cuda.memory_allocated(),
                "peak_allocated": torch.cuda.max_memory_allocated(),
                "peak_reserved": torch.cuda.max_memory_reserved(),
                "compiled": counters["stats"]["unique_graphs"] - graphs,
                "graphs": counters["stats"]["unique_graphs"],
                "breaks": sum(counters["graph_break"].values()),
            }
        )
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    configure_libraries()
    world = fake_world(asked.get("ranks", 1))
    World.gather = lambda self, value: [value] * self.size  # type: ignore[method-assign]
    experiment = load_experiment(Path(asked["folder"]) / asked["run"], asked.get("model", {}), asked.get("train", {}))
    for line in measure(experiment, world, asked.get("microbatches", [1, 1, 1])):
        print(json.dumps(line))
    if asked.get("kernels"):
        print(json.dumps(launched()))


if __name__ == "__main__":
    main()
