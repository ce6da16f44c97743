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
    parameters: int
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
    parameters = sum(each.numel() for each in step.bare_model.parameters())
    return Contestant(run.name, step, config.accumulation_steps(world.size), batch, shape.vocab_size, parameters, clock)


def arms(runs: list[DerivedRun]) -> list[DerivedRun]:
    """The first run of each arm: of those that differ by their seed alone."""
    first: dict[str, DerivedRun] = {}
    for run in runs:
        first.setdefault(str({k: v for k, v in run.settings.items() if k != "random_seed"}), run)
    return list(first.values())


def summary(each: Contestant, first: Contestant) -> dict[str, Any]:
    """Medians of what a step takes, and of its ratio to the first one's in the same turn, with quartiles."""
    ratios = [mine / its for mine, its in zip(each.seconds, first.seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    milliseconds = statistics.median(each.seconds) * 1e3
    return {
        "name": each.name.removesuffix(SEED),
        "parameters": each.parameters,
        "milliseconds": milliseconds,
        "ratio": middle,
        "quartiles": [low, high],
    }


def line(row: dict[str, Any]) -> str:
    low, high = row["quartiles"]
    times = f"{row['milliseconds']:8.1f} ms {row['ratio']:6.3f}  [{low:.3f}, {high:.3f}]"
    return f"{row['name']:40} {row['parameters']:10,} {times}"


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
        take_turns(everyone, turns)
        rows = [summary(each, everyone[0]) for each in everyone]
        if world.is_main:
            print(json.dumps(rows, indent=1) if as_json else "\n".join(line(each) for each in rows))


def take_turns(everyone: list[Contestant], turns: int) -> None:
    """Let all contestants take `turns` turns, in another order each time, since what ran before a step changes its
    speed. The order is the same on all ranks. Garbage collection is off, so that its pauses count for no contestant."""
    gc.disable()
    random = np.random.default_rng(0)
    for number in range(WARM_UP + turns):
        for place in random.permutation(len(everyone)):
            everyone[place].take(number, counts=number >= WARM_UP)


if __name__ == "__main__":
    main()
