"""Time of a step of each run of a sweep: all in one process of one thread, in turns on the same tokens.

    uv run bench/lever_costs.py sweeps/levers.json
    uv run torchrun --standalone --nproc_per_node=2 bench/lever_costs.py sweeps/levers.json

With one process the processor's time counts, which others' work disturbs least; with several the clock's. Turns let
other load on the machine slow all runs alike: ratios to the first run hold where seconds do not. Runs that differ by
their seed alone are one line. The sweep need not have been made or trained.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.common.errors import one_line_errors
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.file import load_sweep
from harness.training.step import OptimizerStep, build_training_step
from harness.training.zero1 import StatePartition

WARM_UP = 3
SEED = "-seed1"  # ends the name of the run that stands for its arm


@dataclass
class Contestant:
    """A run's optimizer step, and the seconds that its turns took."""

    name: str
    step: OptimizerStep
    microbatches: int
    batch_BxT: tuple[int, int]
    vocabulary: int
    clock: Callable[[], float]
    seconds: list[float] = field(default_factory=list)

    def take(self, number: int, *, counts: bool) -> None:
        random = np.random.default_rng(number)
        batch, context = self.batch_BxT
        tokens = random.integers(0, self.vocabulary, (self.microbatches, batch * context + 1)).astype(np.uint16)
        batches = [Microbatch(each, context) for each in tokens]
        begun = self.clock()
        self.step.run(batches, 1.0)
        if counts:
            self.seconds.append(self.clock() - begun)


def contestant(run: DerivedRun, world: World) -> Contestant:
    """Training as ddp_train.py runs it, without its data."""
    config, shape = run.train_config, run.model_config
    torch.manual_seed(config.random_seed)
    step = build_training_step(run.experiment(Path()), config, world, partition=StatePartition.for_world(world))
    batch = config.microbatch_size, shape.context_length
    clock = time.process_time if world.size == 1 else time.perf_counter
    return Contestant(run.name, step, config.accumulation_steps(world.size), batch, shape.vocab_size, clock)


def arms(runs: list[DerivedRun]) -> list[DerivedRun]:
    """The first run of each arm: of those that differ by their seed alone."""
    first: dict[str, DerivedRun] = {}
    for run in runs:
        first.setdefault(str({k: v for k, v in run.settings.items() if k != "random_seed"}), run)
    return list(first.values())


def summary(each: Contestant, first: Contestant) -> dict[str, Any]:
    """Median time of a step, and of its ratio to the first contestant's in the same turn, with quartiles."""
    low, middle, high = statistics.quantiles(
        [mine / its for mine, its in zip(each.seconds, first.seconds, strict=True)], n=4
    )
    name, milliseconds = each.name.removesuffix(SEED), statistics.median(each.seconds) * 1e3
    parameters = sum(tensor.numel() for tensor in each.step.bare_model.parameters())
    row = {"name": name, "parameters": parameters, "milliseconds": milliseconds, "ratio": middle}
    return {**row, "quartiles": [low, high]}


@click.command()
@click.argument("sweep", type=click.Path(path_type=Path))
@click.option("--turns", default=40, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def main(sweep: Path, turns: int, as_json: bool, runs_dir: Path) -> None:
    """Print parameters, milliseconds, and the ratio to the sweep's first run with its quartiles."""
    with one_line_errors():  # which ends the process of a rank: nothing stands behind it
        runs = arms(load_sweep(sweep, runs_dir).runs)
        world = World.join()  # which arranges memory
        torch.set_num_threads(1)
        everyone = [contestant(run, world) for run in runs]
        gc.disable()  # its pauses would count for whoever has the turn
        random = np.random.default_rng(0)
        for number in range(WARM_UP + turns):
            # In another order each time, the same on all ranks, since what ran before a step changes its speed.
            for place in random.permutation(len(everyone)):
                everyone[place].take(number, counts=number >= WARM_UP)
        rows = [summary(each, everyone[0]) for each in everyone]
        if not world.is_main:
            return
        if as_json:
            print(json.dumps(rows, indent=1))
            return
        for row in rows:
            times = "{milliseconds:8.1f} ms {ratio:6.3f}  [{quartiles[0]:.3f}, {quartiles[1]:.3f}]".format(**row)
            print(f"{row['name']:40} {row['parameters']:10,} {times}")


if __name__ == "__main__":
    main()
