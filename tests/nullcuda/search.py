"""Find the largest microbatch of a shipped run on the null device as `-f` does, and train with it as rank 0 of several.

    python -m tests.nullcuda.search '{"folder": "runs", "run": "8xh100m80-fast", "ranks": 8}'

Takes the same request as tests/nullcuda/steps.py. Prints a line of JSON: the microbatch found, the peak that the search
measured for it, the peak of training with it, and whether a microbatch 5 % larger ran out of memory in training.
"""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from harness.common.memory import limit_memory
from harness.distributed.world import World
from harness.planning.experiment import Experiment
from harness.training.batch_size_finder import MicrobatchSearcher
from tests.nullcuda.steps import DEVICE, measure, requested

CEILING = 4096


def train(experiment: Experiment, world: World, size: int) -> int:
    """Train four steps with this microbatch, and return the peak of the memory that torch reserved, in bytes."""
    config = experiment.config.model_copy(update={"microbatch_size": size})
    return max(each["peak_reserved"] for each in measure(replace(experiment, config=config), world, [1, 1, 2, 1]))


def forget() -> None:
    """Free all memory of the device."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    _, experiment, world = requested()
    dataset: Any = SimpleNamespace(split=lambda name: SimpleNamespace(read=lambda start, n: np.zeros(n, np.uint16)))
    search = MicrobatchSearcher(experiment, world, dataset, limit_memory(DEVICE, None, 1))
    found = search.find(CEILING)
    peak = search.peaks[found]
    del search
    forget()
    torch.cuda.set_per_process_memory_fraction(1.0)
    result: dict[str, Any] = {"found": found, "searched": peak, "trained": train(experiment, world, found)}
    forget()
    try:
        train(experiment, world, math.ceil(found * 1.05))
        result["larger"] = "trains"
    except torch.OutOfMemoryError:
        result["larger"] = "out of memory"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
