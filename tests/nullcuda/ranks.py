"""Run ddp_train.py as one of several ranks on the null device, once or several times in a row.

    python -m tests.nullcuda.ranks 8 RUN DATASETS_DIR -f --write then RUN DATASETS_DIR

The number is that of the ranks, of which this process is rank 0, in torch's fake process group; an object that ranks
would send to each other is taken from this rank alone. After each command it prints a line of JSON: its exit status,
and what the device counted in each step, with the waits since the end of the step before. From the second step on, a
step that waits for the device raises an error.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.common.device import choose_device
from harness.distributed.world import World
from harness.training import step as steps
from tests.nullcuda import command
from tests.nullcuda.device import Numbers
from tests.nullcuda.steps import counted, exchange_nothing

run_step, build_training_step = steps.OptimizerStep.run, steps.build_training_step


def build_step(*arguments: Any, **named: Any) -> steps.OptimizerStep:
    """Return the optimizer step. If DistributedDataParallel wraps its model, gradients are not exchanged."""
    step = build_training_step(*arguments, **named)
    if step.is_wrapped:
        step.model.register_comm_hook(None, exchange_nothing)  # type: ignore[operator]
    return step


def join(ranks: int, is_stopping: object = None) -> World:
    """Return the world of rank 0 of `ranks` ranks."""
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return World(0, 0, ranks, ranks, choose_device(0, 1))


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Run ddp_train.py with these arguments. Returns its exit status, and the counts of each step."""
    found: list[dict[str, Any]] = []
    is_search = "-f" in arguments  # compiles anew for each size

    def run_and_count(self: steps.OptimizerStep, *arguments: Any, **named: Any) -> steps.StepResult:
        before, last = Numbers.now(), found[-1] if found else {"waits": 0, "event_waits": 0}
        result = counted(lambda: run_step(self, *arguments, **named), found, may_wait=not found or is_search)
        found[-1]["waits_before"] = before.waits - last["waits"] + before.event_waits - last["event_waits"]
        return result

    steps.OptimizerStep.run = run_and_count  # type: ignore[method-assign]
    sys.argv = ["ranks", *arguments]
    status: Any = 0
    try:
        command.main()
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    if dist.is_initialized():  # an error ends a command without leaving the group
        dist.destroy_process_group()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {"status": status, "steps": found}


def main() -> None:
    steps.build_training_step = build_step
    World.gather = lambda self, value: [value] * self.size  # type: ignore[method-assign]
    World.join = partial(join, int(sys.argv[1]))  # type: ignore[method-assign]
    commands: list[list[str]] = [[]]
    for word in sys.argv[2:]:
        if word == "then":
            commands.append([])
        else:
            commands[-1].append(word)
    for arguments in commands:
        print(json.dumps(run(arguments)), flush=True)


if __name__ == "__main__":
    main()
