"""Train some steps of a shipped run on the null device, and print a line of JSON for each.

    python -m tests.nullcuda.steps '{"folder": "runs", "run": "8xh100m80", "model": {"n_layers": 2}, "ranks": 8}'

`model` and `train` change the run's settings. With several `ranks` this process is rank 0 under
DistributedDataParallel, in torch's fake process group, which exchanges nothing. `microbatches` is the number of
microbatches of each step, such as [1, 1, 2, 1]. A validation follows the first and the last step. After them the state
of a checkpoint is copied as often as `saves` says, each time with a line of its own. Unless `may_wait` is true, an
operation after the first step that waits for the device raises an error.

Several requests, in a list, are measured one after another, with an empty line between their lines.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.common.json_files import parse_config, read_json_object
from harness.common.libraries import configure_libraries
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.evaluation.loss import microbatch_losses
from harness.model.config import ModelConfig
from harness.model.kernels import compute_deterministically
from harness.planning.experiment import Experiment
from harness.runs.directory import RunDirectory
from harness.runs.train_config import TrainConfig
from harness.training.loss_meter import LossMeter
from harness.training.saving import HostCopies, copy_state
from harness.training.step import OptimizerStep, build_training_step
from tests.nullcuda.device import Numbers, reset

DEVICE = torch.device("cuda", 0)
broadcasts: list[int] = []  # bytes of each message between ranks since the last step
T = TypeVar("T")
broadcast = dist.broadcast


def prepare(request: dict[str, Any]) -> tuple[Experiment, World]:
    """Return the experiment of a request, and the world of rank 0 of its ranks. An object that ranks would send to each
    other is taken from this rank alone."""
    configure_libraries()
    folder, ranks = Path(request["folder"]) / request["run"], request.get("ranks", 1)
    model = read_json_object(folder / "model.json") | request.get("model", {})
    train = read_json_object(folder / "train.json") | request.get("train", {})
    configs = parse_config(TrainConfig, train, folder), parse_config(ModelConfig, model, folder)
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    World.gather = lambda self, value: [value] * self.size  # type: ignore[method-assign]
    dist.broadcast = count_broadcast
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN asks the hardware itself
    return Experiment(RunDirectory(folder), *configs, folder), World(0, 0, ranks, ranks, DEVICE)


def build(experiment: Experiment, world: World) -> OptimizerStep:
    """Return the experiment's optimizer step on the null device, as the Trainer builds it."""
    config = experiment.config
    if config.deterministic:
        compute_deterministically()
    step = build_training_step(experiment, config, world)
    if world.size > 1:
        step.model.register_comm_hook(None, exchange_nothing)  # type: ignore[operator]
    return step


def count_broadcast(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    broadcasts.append(tensor.nbytes)
    return broadcast(tensor, *arguments, **named)


def exchange_nothing(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations by identity
    """Return the bucket's gradients as they are: DistributedDataParallel's communication hook, because the fake process
    group has no result for it."""
    done = torch.futures.Future()  # type: ignore[var-annotated]
    done.set_result(bucket.buffer())
    return done


def measure(
    experiment: Experiment, world: World, microbatches: Sequence[int], saves: int = 0, *, may_wait: bool = False
) -> list[dict[str, Any]]:
    """Run a step of each of these numbers of microbatches, with a validation after the first and the last, then copy
    the state of a checkpoint `saves` times. Returns what the device counted in each step and copy."""
    config, context = experiment.config, experiment.model.context_length
    tokens = np.zeros(config.microbatch_size * context + 1, np.uint16)
    microbatch = Microbatch.consecutive(tokens, context)
    step, meter, copies = build(experiment, world), LossMeter(DEVICE, experiment.model), HostCopies(DEVICE, keep=True)
    step.warm_up(microbatch, world)
    found: list[dict[str, Any]] = []
    for number, size in enumerate(microbatches, start=1):
        work = partial(step.run, [microbatch] * size, rate_factor=1.0)
        counted(lambda work=work: meter.add(work()), found, may_wait=may_wait or not found)  # type: ignore[misc]
        # Without compilation, a validation of experts reads numbers of tokens that this device has not computed.
        if number in (1, len(microbatches)) and experiment.model.moe is None:
            microbatch_losses(step.bare_model, [microbatch], step.precision)
            found[-1]["programs"] = counters["stats"]["unique_graphs"]
    for _ in range(saves):
        counted(lambda: copy_state(step, world, copies), found)
    return found


def counted(work: Callable[[], T], found: list[dict[str, Any]], *, may_wait: bool = False) -> T:
    """Do `work`, and append to `found` what the device and the compiler counted meanwhile. Unless `may_wait` is true,
    an operation that waits for the device raises an error."""
    torch.cuda.reset_peak_memory_stats()
    reset()
    broadcasts.clear()
    graphs = counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
    try:
        result = work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found.append(
        {
            **asdict(Numbers.now()),
            "broadcasts": len(broadcasts),
            "allocated": torch.cuda.memory_allocated(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "compiled": counters["stats"]["unique_graphs"] - graphs,
            "breaks": sum(counters["graph_break"].values()),
        }
    )
    return result


def main() -> None:
    requests = json.loads(sys.argv[1])
    for request in requests if isinstance(requests, list) else [requests]:
        experiment, world = prepare(request)
        asked = {name: request[name] for name in ("saves", "may_wait") if name in request}
        for line in measure(experiment, world, request.get("microbatches", [1, 1, 1]), **asked):
            print(json.dumps(line))
        print(flush=True)
        torch.compiler.reset()
        counters.clear()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
